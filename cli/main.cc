#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "commands.h"
#include "help_format.h"
#include "kv4/backend.h"
#include "kv4/error.h"
#include "kv4/log.h"
#include "kv4/version.h"
#include "option_values.h"
#include "output.h"
#include "printable.h"

namespace {

enum ExitCode : int { kFine = 0, kCheckFailed = 1, kBadUsage = 2, kUnexpected = 3 };

int fail(ExitCode code, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", kv4::cli::printable(message).c_str());
  return code;
}

/// The deepest chosen command, and the number of words that name it.
std::pair<const CLI::App*, int> chosen_command(const CLI::App& app) {
  const CLI::App* command = &app;
  int depth = 0;
  for (; !command->get_subcommands().empty(); ++depth) command = command->get_subcommands().front();
  return {command, depth};
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> out;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) out.push_back("--" + name);
  return out;
}

/// CLI11 only reports a missing command, or unexpected arguments with the last one first.
std::string describe(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  const auto [command, depth] = chosen_command(app);
  std::vector<std::string> commands, options = option_names(*command);
  for (const CLI::App* each : command->get_subcommands({})) commands.push_back(each->get_name());
  int words = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    if (word == "--") break;
    if (!word.starts_with('-')) {
      if (words++ == depth && !commands.empty())
        return fmt::format("there is no command '{}'; there are {}{}", word, fmt::join(commands, ", "),
                           kv4::cli::did_you_mean(word, commands));
    } else if (word.starts_with("--") && std::find(options.begin(), options.end(), name) == options.end()) {
      return fmt::format("there is no option '{}'{}", name, kv4::cli::did_you_mean(name, options));
    }
  }
  return error.what();
}

std::string hint(const CLI::App& app) {
  std::string command = "kv4";
  for (const CLI::App* each = &app; !each->get_subcommands().empty();) {
    each = each->get_subcommands().front();
    command += " " + each->get_name();
  }
  return "see '" + command + " --help'";
}

/// Names no reason where stdio met the error in the middle of the output and has lost it.
std::string lost_output(const std::system_error& error) {
  return "the output could not be written" + (error.code().value() == 0 ? "" : ": " + error.code().message());
}

int show_help(const CLI::App& app, const CLI::ParseError& help) {
  std::ostringstream text;
  app.exit(help, text, text);
  try {
    fmt::print("{}", text.str());
    kv4::cli::flush_output();
  } catch (const std::system_error& e) {
    return fail(kUnexpected, lost_output(e));
  }
  return kFine;
}

/// Adds the flag to every command, so that it works anywhere in the line.
void add_verbose(CLI::App& app, bool& verbose) {
  app.add_flag("-v,--verbose", verbose, "show what the library logs, on stderr");
  for (CLI::App* command : app.get_subcommands({})) add_verbose(*command, verbose);
}

/// Warnings and errors of the library are always shown; all other messages only with -v.
void attach_log(const bool& verbose) {
  kv4::set_log_sink([&verbose](const kv4::LogRecord& record) {
    if (record.level == kv4::LogLevel::info && !verbose) return;
    std::string line = fmt::format("{}: {}: {}", to_string(record.level), record.event, record.message);
    for (std::size_t i = 0; i < record.fields.size(); ++i)
      line += fmt::format("{}{} {}", i == 0 ? " (" : ", ", record.fields[i].name, record.fields[i].value);
    if (!record.fields.empty()) line += ")";
    std::fprintf(stderr, "%s\n", kv4::cli::printable(line).c_str());
  });
}

int run(int argc, char** argv) {
  CLI::App app{
      "kv4: the KV cache of DeepSeek-V4 - plan it, run it, measure it, compare it with recordings, try it on traces.",
      "kv4"};
  app.formatter(std::make_shared<kv4::cli::HelpFormat>());
  app.set_version_flag("--version", std::string("kv4 ") + KV4_VERSION + " (" + kv4::cpu_target() + ")");
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  kv4 plan --model v4-flash --context 1M --requests 8     what a cache of that size costs\n"
      "  kv4 plan --model v4-pro --memory 141GB --context 128K   how many requests fit\n"
      "  kv4 run                                                 a whole model's cache at work, with checks\n"
      "  kv4 bench --filter gather                               speed beside memcpy in the same run\n"
      "  kv4 golden DIR                                          replay recorded vectors\n"
      "  kv4 store verify DIR                                    is every record of a disk store sound\n"
      "  kv4 session inspect chat.kv4s                           what a saved request holds, and is it sound\n"
      "  kv4 inspect chat.kv4s --svg chat.svg                    its rows, decoded, as figures and a picture\n"
      "  kv4 replay TRACE --capacity 10M                         what a prefix cache finds on a trace\n"
      "  kv4 serve-metrics /run/kv4/gpu0                         metrics and a live page of a running cache\n"
      "  kv4 run --device cuda                                   the same on a GPU; golden takes --device too\n"
      "\n"
      "'kv4 COMMAND --help' explains a command. Exit codes: 0 fine, 1 a check failed, 2 bad usage or input or no such "
      "GPU, 3 unexpected or the output is lost, 130 interrupted. -v before or after a command shows what the library "
      "logs; warnings are always shown.");

  static bool verbose = false;  // the sink outlives this call
  attach_log(verbose);
  int exit_code = kFine;
  add_plan(app, exit_code);
  add_run(app, exit_code);
  add_bench(app, exit_code);
  add_golden(app, exit_code);
  add_store(app, exit_code);
  add_session(app, exit_code);
  add_inspect(app, exit_code);
  add_replay(app, exit_code);
  add_serve_metrics(app, exit_code);
  add_completion(app, exit_code);

  add_verbose(app, verbose);
  try {
    app.parse(argc, argv);
    kv4::cli::flush_output();
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return show_help(app, e);
    return fail(kBadUsage, describe(app, e, argc, argv) + "; " + hint(app));
  } catch (const kv4::Error& e) {
    return fail(e.code() == kv4::ErrorCode::device_failure ? kUnexpected : kBadUsage, e.what());
  } catch (const std::bad_alloc&) {
    return fail(kUnexpected, "the machine has not enough memory for this");
  } catch (const kv4::cli::LostOutput& e) {
    return fail(kUnexpected, e.what());
  } catch (const std::system_error& e) {
    return fail(kUnexpected, std::ferror(stdout) != 0 ? lost_output(e) : std::string("unexpected: ") + e.what());
  } catch (const std::exception& e) {
    return fail(kUnexpected, std::string("unexpected: ") + e.what());
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = kUnexpected;
  try {
    exit_code = run(argc, argv);
  } catch (const std::bad_alloc&) {  // for the options, or for a message
    std::fputs("error: the machine has not enough memory for this\n", stderr);
  }
  kv4::set_log_sink({});
  return exit_code;
}
