#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

#include "bench/case_runner.h"
#include "bench/cases.h"
#include "cache_flags.h"
#include "checks/copy_baseline.h"
#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "interrupts.h"
#include "kv4/error.h"
#include "option_values.h"
#include "output.h"

namespace kv4::cli {

using namespace bench;
using namespace checks;

namespace {

struct BenchFlags {
  ModelFlags model;
  std::string filter;
  double min_time = 0.2;
  std::string threads = "1", target;
  bool json = false, list = false, rss = false;
};

/// An empty `target` selects the best kernels.
const cpu::RowKernels& kernels_of(const std::string& target) {
  if (target.empty()) return cpu::best_row_kernels();
  std::vector<std::string> names;
  for (const cpu::RowKernels* table : cpu::runnable_row_kernels()) {
    if (target == table->name) return *table;
    names.emplace_back(table->name);
  }
  throw Error(ErrorCode::bad_argument, fmt::format("--target '{}' does not run here; {} do{}", target,
                                                   fmt::join(names, ", "), did_you_mean(target, names)));
}

/// Suggests whole names and parts of names: "gathre" is near "gather".
std::string suggest_case(const std::string& filter, const std::vector<Case>& all) {
  std::vector<std::string> names;
  for (const Case& c : all) {
    names.push_back(c.name);
    for (std::size_t at = 0, end; at < c.name.size(); at = end + 1) {
      end = std::min(c.name.find('/', at), c.name.size());
      names.push_back(c.name.substr(at, end - at));
    }
  }
  return did_you_mean(filter, names);
}

std::vector<Case> select_cases(const BenchFlags& flags, const BenchSettings& settings) {
  const std::vector<Case> all = all_cases(settings);
  if (flags.filter.empty()) return all;
  std::vector<Case> chosen;
  try {
    const std::regex filter(flags.filter);
    std::copy_if(all.begin(), all.end(), std::back_inserter(chosen),
                 [&](const Case& c) { return std::regex_search(c.name, filter); });
  } catch (const std::regex_error& e) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("--filter '{}' is not a regular expression ({}); write for example 'append|gather/topk'",
                            flags.filter, e.what()));
  }
  if (chosen.empty())
    throw Error(ErrorCode::bad_argument, fmt::format("--filter '{}' matches no case; 'kv4 bench --list' shows all {}{}",
                                                     flags.filter, all.size(), suggest_case(flags.filter, all)));
  return chosen;
}

nlohmann::ordered_json to_json(const CaseResult& result) {
  const auto ratio = result.memcpy_ratio();
  nlohmann::ordered_json out = {{"name", result.name},
                                {"bytes", result.bytes},
                                {"seconds", result.seconds},
                                {"memcpy_ratio", ratio ? nlohmann::ordered_json(*ratio) : nlohmann::ordered_json()},
                                {"item", result.item},
                                {"items", result.items},
                                {"seconds_per_item", result.seconds / result.items}};
  if (const auto plain = result.plain_ratio()) out["plain_ratio"] = *plain;
  if (const auto sgemm = result.sgemm_ratio()) out["sgemm_ratio"] = *sgemm;
  if (!result.error.empty()) out["error"] = result.error;
  return out;
}

constexpr const char* kLine = "{:<44} {:>10} {:>11} {:>11} {:>9}  {}\n";

void print_result(const CaseResult& result) {
  if (!result.error.empty()) {
    fmt::print(kLine, result.name, "", "", "", "", "failed: " + result.error);
    return;
  }
  const auto ratio = result.memcpy_ratio();
  std::string beside;
  if (const auto plain = result.plain_ratio()) beside += fmt::format(", {:.1f} x the plain code", *plain);
  if (const auto sgemm = result.sgemm_ratio()) beside += fmt::format(", {:.2f} of OpenBLAS' sgemm", *sgemm);
  fmt::print(kLine, result.name, result.bytes > 0 ? human_bytes(static_cast<double>(result.bytes)) : "-",
             human_seconds(result.seconds),
             result.bytes > 0 ? human_bytes(static_cast<double>(result.bytes) / result.seconds) + "/s" : "-",
             ratio ? fmt::format("{:.2f}", *ratio) : "-",
             fmt::format("{} per {}{}", human_seconds(result.seconds / result.items), result.item, beside));
  flush_output();
}

void list_cases(const std::vector<Case>& cases, bool json) {
  nlohmann::json names = nlohmann::json::array();
  for (const Case& c : cases) names.push_back(c.name);
  if (json)
    fmt::print("{}\n", names.dump(2));
  else
    for (const Case& c : cases) fmt::print("{}\n", c.name);
}

/// Exit code 0: resident memory is within 2 % of the plan, else 1.
int check_resident_memory(const BenchSettings& settings, bool json) {
  constexpr double kAllowed = 0.02;
  const ResidentMemory memory = measure_resident_memory(settings);
  const double difference = memory.difference();
  const bool ok = std::abs(difference) <= kAllowed;
  if (json) {
    const nlohmann::ordered_json out = {{"ok", ok},
                                        {"planned_bytes", memory.planned_bytes},
                                        {"resident_bytes", memory.grown_bytes},
                                        {"difference", difference}};
    fmt::print("{}\n", out.dump(2));
  } else {
    Table table("lr", {"resident memory", "bytes"});
    table.row({"planned", group_digits(memory.planned_bytes)});
    table.row({"grown by", group_digits(memory.grown_bytes)});
    table.row({"difference", fmt::format("{:+.2f} %", difference * 100)});
    fmt::print("{}", table.str());
  }
  if (!ok)
    fmt::print(stderr, "failed: resident memory differs from the plan by {:+.2f} %, allowed are 2 %\n",
               difference * 100);
  return ok ? 0 : 1;
}

int run_bench(const BenchFlags& flags) {
  require_v4(read_model(flags.model), "kv4 bench");
  const BenchSettings settings{read_model(flags.model),
                               static_cast<int>(parse_count(flags.threads, "--threads", 1, 1024)),
                               &kernels_of(flags.target)};
  if (flags.rss) return check_resident_memory(settings, flags.json);
  if (!(flags.min_time > 0 && flags.min_time <= 3600)) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("--min-time {} is outside 0 to 3600 seconds; write for example 0.5", flags.min_time));
  }
  const std::vector<Case> cases = select_cases(flags, settings);
  if (flags.list) {
    list_cases(cases, flags.json);
    return 0;
  }
  catch_interrupts();
  if (!flags.json) {
    fmt::print(
        "{}, {} {}, {}. Bytes: read and written, each once. Ratio: seconds of a memcpy of as many bytes, in turn with "
        "it, over seconds.\n\n",
        settings.config.name.empty() ? "model" : settings.config.name, settings.threads,
        settings.threads == 1 ? "thread" : "threads", settings.kernels->name);
    fmt::print(kLine, "name", "bytes", "seconds", "speed", "/ memcpy", "");
  }
  MemcpyBaseline copy(settings.threads);
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  bool ok = true;
  for (const Case& c : cases) {
    if (interrupted()) break;
    const CaseResult result = measure_case(c, copy, flags.min_time, interrupted);
    if (result.interrupted) break;
    if (flags.json)
      out.push_back(to_json(result));
    else
      print_result(result);
    if (!result.error.empty()) {
      fmt::print(stderr, "failed: {}: {}\n", result.name, result.error);
      ok = false;
    }
  }
  if (interrupted()) out.push_back({{"interrupted", true}});
  if (flags.json) fmt::print("{}\n", out.dump(2));
  if (!interrupted()) return ok ? 0 : 1;
  fmt::print(stderr, "interrupted: the other cases were not measured\n");
  return interrupted_exit_code();
}

}  // namespace
}  // namespace kv4::cli

void add_bench(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command =
      app.add_subcommand("bench", "Speed of every operation beside memcpy of the same bytes in the same run");
  auto flags = std::make_shared<BenchFlags>();
  add_flags(*command, flags->model);
  command->add_option("--filter", flags->filter, "only cases whose name matches this regular expression")
      ->type_name("REGEX");
  command->add_option("--min-time", flags->min_time, "seconds to spend inside each operation, at least")
      ->capture_default_str()
      ->type_name("SECONDS");
  command->add_option("--threads", flags->threads, "that an operation, and memcpy beside it, uses")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--target", flags->target, "an instruction set, as AVX2; not given: the best of this machine")
      ->type_name("NAME");
  command->add_flag("--list", flags->list, "names only; with --json as a list");
  command->add_flag("--rss", flags->rss, "instead: fill pools of a gigabyte and compare resident memory with the plan");
  command->add_flag("--json", flags->json,
                    "a list of {name, bytes, seconds, memcpy_ratio, ...}; the ratio is null where there are no bytes; "
                    "after Ctrl-C the last is {interrupted}");
  command->footer(
      "Examples:\n"
      "  kv4 bench                                    all cases, a few minutes\n"
      "  kv4 bench --filter 'append/prefill512'       one group\n"
      "  kv4 bench --filter context                   is a token's cost flat from 1K to 1M tokens of context?\n"
      "  kv4 bench --filter 'gather/topk' --json --min-time 1\n"
      "  kv4 bench --rss                              exit code 1 if memory is not what the plan says");
  command->callback([flags, &exit_code] { exit_code = run_bench(*flags); });
}
