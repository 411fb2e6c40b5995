#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "commands.h"
#include "kv4/backend.h"
#include "kv4/error.h"
#include "kv4/version.h"
#include "printable.h"

namespace {

enum ExitCode : int { kFine = 0, kCheckFailed = 1, kBadUsage = 2, kUnexpected = 3 };

int fail(ExitCode code, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", kv4::cli::printable(message).c_str());
  return code;
}

/// CLI11 only says that a command is missing.
std::string describe(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  if (!app.get_subcommands().empty() || argc < 2 || argv[1][0] == '-') return error.what();
  std::string commands;
  for (const CLI::App* command : app.get_subcommands({}))
    commands += (commands.empty() ? "" : ", ") + command->get_name();
  return std::string("there is no command '") + argv[1] + "'; there are " + commands;
}

std::string hint(const CLI::App& app) {
  std::string command = "kv4";
  for (const CLI::App* chosen : app.get_subcommands()) command += " " + chosen->get_name();
  return "see '" + command + " --help'";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "kv4: the KV cache of DeepSeek-V4 - plan it, run it, measure it, compare it with recordings, try it on traces.",
      "kv4"};
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
      "GPU, 3 unexpected.");

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

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(e);
    return fail(kBadUsage, describe(app, e, argc, argv) + "; " + hint(app));
  } catch (const kv4::Error& e) {
    return fail(e.code() == kv4::ErrorCode::device_failure ? kUnexpected : kBadUsage, e.what());
  } catch (const std::bad_alloc&) {
    return fail(kUnexpected, "the machine has not enough memory for this");
  } catch (const std::exception& e) {
    return fail(kUnexpected, std::string("unexpected: ") + e.what());
  }
  return exit_code;
}
