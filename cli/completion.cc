#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/check.h"
#include "commands.h"
#include "option_values.h"

namespace kv4::cli {
namespace {

/// A command and the words that may follow it: "store verify" and its flags, say.
struct Command {
  struct Flag {
    std::string name;  // with its dashes
    bool takes_value = false;
    std::vector<std::string> values;  // the known ones
  };
  std::string path;  // below kv4; empty: kv4 itself
  std::vector<std::string> words;
  std::vector<Flag> flags;  // those of the words that begin with dashes
};

void collect(const CLI::App& app, const std::string& path, std::vector<Command>& out) {
  Command command{path, {}, {}};
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    command.words.push_back(sub->get_name());
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string>& values = values_of(*option);
    if (option->get_positional()) command.words.insert(command.words.end(), values.begin(), values.end());
    for (const std::string& name : option->get_lnames()) {
      command.words.push_back("--" + name);
      command.flags.push_back({"--" + name, option->get_items_expected_min() > 0, values});
    }
  }
  out.push_back(command);
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    collect(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name(), out);
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

/// For bash and zsh: finds the longest chain of words so far that is a command, and the words that may follow it. If
/// the word before is an option, finds its values instead.
std::string find_words(const std::vector<Command>& commands, const char* words_so_far, const char* word_before) {
  std::string out = fmt::format(
      "  local command='' word known='' before={1}\n"
      "  for word in {0}; do\n"
      "    case \"${{command:+$command }}$word\" in\n",
      words_so_far, word_before);
  for (const Command& command : commands)
    if (!command.path.empty()) out += fmt::format("      '{0}') command='{0}' ;;\n", command.path);
  out += "    esac\n  done\n  case \"$command\" in\n";
  for (const Command& command : commands)
    out += fmt::format("    '{}') known='{}' ;;\n", command.path, joined(command.words));
  out += "  esac\n  case \"$command $before\" in\n";
  for (const Command& command : commands)
    for (const Command::Flag& flag : command.flags)
      if (flag.takes_value)
        out += fmt::format("    '{} {}') known='{}' ;;\n", command.path, flag.name, joined(flag.values));
  return out + "  esac\n";
}

// Completes files where no word fits. bash splits --rows=bf16 into three words.
std::string bash_script(const std::vector<Command>& commands) {
  return "# bash completion of kv4: source this, or put it into /etc/bash_completion.d\n"
         "_kv4() {\n" +
         find_words(commands, "\"${COMP_WORDS[@]:1:COMP_CWORD-1}\"",
                    "\"${COMP_WORDS[COMP_CWORD-1]/#=/${COMP_WORDS[COMP_CWORD-2]}}\"") +
         "  mapfile -t COMPREPLY < <(compgen -W \"$known\" -- \"${COMP_WORDS[COMP_CWORD]}\")\n"
         "}\n"
         "complete -o default -F _kv4 kv4\n";
}

// In a file of $fpath this is the body of its own function at the first call. zsh takes --rows=bf16 as one word.
std::string zsh_script(const std::vector<Command>& commands) {
  return "#compdef kv4\n"
         "# zsh completion of kv4: source this, or put it as _kv4 into a folder of $fpath\n"
         "_kv4() {\n"
         "  local last=\"${words[CURRENT-1]}\"\n"
         "  if [[ \"${words[CURRENT]}\" == --*=* ]]; then\n"
         "    last=\"${words[CURRENT]%%=*}\"\n"
         "    compset -P '*='\n"
         "  fi\n" +
         find_words(commands, "\"${(@)words[2,CURRENT-1]}\"", "\"$last\"") +
         "  compadd -- ${=known}\n"
         "  _files\n"
         "}\n"
         "if [[ \"${funcstack[1]}\" == _kv4 ]]; then _kv4; else compdef _kv4 kv4; fi\n";
}

/// True at this command: its words were seen, and no command that has a subcommand of the same name was.
std::string fish_condition(const std::vector<Command>& commands, const std::string& path) {
  if (path.empty()) return "__fish_use_subcommand";
  std::string out;
  for (std::size_t at = 0, end; at < path.size(); at = end + 1) {
    end = std::min(path.find(' ', at), path.size());
    out += fmt::format("{}__fish_seen_subcommand_from {}", out.empty() ? "" : "; and ", path.substr(at, end - at));
  }
  for (const Command& other : commands)
    if (other.path.ends_with(" " + path))
      out += "; and not __fish_seen_subcommand_from " + other.path.substr(0, other.path.size() - path.size() - 1);
  return out;
}

std::string fish_script(const std::vector<Command>& commands) {
  std::string out = "# fish completion of kv4: put this into ~/.config/fish/completions/kv4.fish\n";
  for (const Command& command : commands) {
    const std::string condition = fish_condition(commands, command.path);
    for (const std::string& word : command.words)
      if (!word.starts_with("--")) out += fmt::format("complete -c kv4 -n '{}' -a {}\n", condition, word);
    for (const Command::Flag& flag : command.flags)
      out += fmt::format("complete -c kv4 -n '{}' -l {}{}\n", condition, flag.name.substr(2),
                         !flag.values.empty() ? fmt::format(" -x -a '{}'", joined(flag.values))
                         : flag.takes_value   ? " -r"
                                              : "");
  }
  return out;
}

std::string json_of(const std::vector<Command>& commands) {
  nlohmann::ordered_json out;
  for (const Command& command : commands) out["kv4" + (command.path.empty() ? "" : " " + command.path)] = command.words;
  return out.dump(2) + "\n";
}

std::string script(const CLI::App& app, const std::string& shell, bool json) {
  std::vector<Command> commands;
  collect(app, "", commands);
  if (json) return json_of(commands);
  if (shell == "bash") return bash_script(commands);
  if (shell == "zsh") return zsh_script(commands);
  if (shell == "fish") return fish_script(commands);
  fail(ErrorCode::bad_argument, "there is no completion for '{}'; bash, zsh or fish{}", shell,
       did_you_mean(shell, {"bash", "zsh", "fish"}));
}

}  // namespace
}  // namespace kv4::cli

void add_completion(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("completion", "Commands and flags for a shell's completion");
  struct Flags {
    std::string shell = "bash";
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  kv4::cli::offer_values(*command->add_option("SHELL", flags->shell, "bash, zsh or fish")->capture_default_str(),
                         {"bash", "zsh", "fish"});
  command->add_flag("--json", flags->json, "commands and what may follow them, as JSON");
  command->footer(
      "Examples:\n"
      "  source <(kv4 completion bash)                                    or zsh\n"
      "  kv4 completion fish > ~/.config/fish/completions/kv4.fish");
  command->callback([flags, &app, &exit_code] {
    fmt::print("{}", kv4::cli::script(app, flags->shell, flags->json));
    exit_code = 0;
  });
}
