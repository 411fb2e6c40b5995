#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/input_file.h"
#include "cache/session_file.h"
#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "key_flags.h"
#include "printable.h"
#include "checks/session_rows.h"

namespace kv4::cli {

using namespace checks;

namespace {

using nlohmann::json;

struct SessionFlags {
  std::string path;
  KeyFlags keys;
  bool json = false;
};

void print_json(const SessionSurvey& s) {
  const json out = {{"ok", s.sound()},
                    {"tokens", s.lengths[0]},
                    {"lengths", s.lengths},
                    {"layout_id", fmt::format("{:016x}", s.layout_id)},
                    {"layout", s.layout},
                    {"weights_id", s.weights_id},
                    {"tenant", s.tenant},
                    {"protection", to_string(s.protection)},
                    {"authentic", s.authentic},
                    {"block_tokens", s.block_tokens},
                    {"full_blocks", s.full_blocks},
                    {"blocks_found", s.blocks_found},
                    {"bytes",
                     {{"file", s.file_bytes},
                      {"blocks", s.block_bytes},
                      {"open_block", s.open_block_bytes},
                      {"image", s.image_bytes},
                      {"snapshot", s.snapshot_bytes},
                      {"token_ids", s.token_bytes},
                      {"extra", s.extra_bytes}}},
                    {"problems", s.problems}};
  fmt::print("{}\n", out.dump(2, ' ', true, json::error_handler_t::replace));
}

void print_text(const SessionSurvey& s, const std::string& path) {
  fmt::print("{}: {} tokens", path, group_digits(s.lengths[0]));
  for (std::size_t i = 1; i < s.lengths.size(); ++i)
    fmt::print(", draft stage {}: {}", i - 1, group_digits(s.lengths[i]));
  fmt::print("\nweights '{}', tenant {}, layout {:016x}:\n", printable(s.weights_id), s.tenant, s.layout_id);
  for (std::size_t at = 0, end; at < s.layout.size(); at = end + 1) {
    end = std::min(s.layout.find('\n', at), s.layout.size());
    fmt::print("  {}\n", printable(std::string_view(s.layout).substr(at, end - at)));
  }
  Table table("lrr", {"part", "number", "bytes"});
  table.row({"full blocks", group_digits(s.blocks_found), group_digits(s.block_bytes)});
  table.row({"open block", s.open_block_bytes > 0 ? "1" : "0", group_digits(s.open_block_bytes)});
  table.row({"canonical image", "1", group_digits(s.image_bytes)});
  if (s.snapshot_bytes > 0) table.row({"snapshot of the last boundary", "1", group_digits(s.snapshot_bytes)});
  table.row({"token ids", group_digits(s.lengths[0]), group_digits(s.token_bytes)});
  if (s.extra_bytes > 0) table.row({"extra bytes of keys", "", group_digits(s.extra_bytes)});
  table.rule();
  table.row({"file", "", group_digits(s.file_bytes)});
  fmt::print("\n{}\n", table.str());
  for (const std::string& problem : s.problems) fmt::print("damaged: {}\n", printable(problem));
  if (s.sound()) fmt::print("Every record is sound.\n");
  fmt::print("{}\n", describe(s.protection, s.authentic));
}

SessionSurvey survey_file(tier::FileSystem& files, const std::string& path, const KeyFlags& keys) try {
  return survey_session_file(files, path, keys.of_session());
} catch (const Error& e) {
  fail(e.code(), "{}{}{}", e.what(), what_it_is(path), what_it_needs(path, !keys.path().empty()));
}

int inspect(const SessionFlags& flags) {
  require_regular_file(flags.path);
  const auto files = tier::make_posix_file_system({.direct = false});
  const SessionSurvey survey = survey_file(*files, flags.path, flags.keys);
  if (flags.json)
    print_json(survey);
  else
    print_text(survey, flags.path);
  return survey.sound() ? 0 : 1;
}

}  // namespace
}  // namespace kv4::cli

void add_session(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command = app.add_subcommand("session", "What is in a saved session, and whether it is sound");
  command->require_subcommand(1);
  CLI::App* action =
      command->add_subcommand("inspect", "Lengths, layout, bytes by part; reads and checks every record");
  auto flags = std::make_shared<SessionFlags>();
  action->add_option("FILE", flags->path, "a file of save_session_file")->required();
  add_session_flags(*action, flags->keys);
  action->add_flag("--json", flags->json, "figures as JSON");
  action->footer("Example:\n  kv4 session inspect chat.kv4s --json");
  action->callback([flags, &exit_code] { exit_code = inspect(*flags); });
  command->footer(
      "Example:\n"
      "  kv4 session inspect chat.kv4s --json   tokens, layout, weights, bytes, problems\n"
      "\n"
      "Exit codes: 0 every record is sound, 1 a record is damaged or missing, 2 there is no such file, it is no "
      "session, or its first record is damaged.\n"
      "The salt is not in the file: whether it is yours shows when it is restored.");
}
