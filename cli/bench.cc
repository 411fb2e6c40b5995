#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>

#include "bench_cases.h"
#include "bench_copy.h"
#include "cache_flags.h"
#include "commands.h"
#include "interrupts.h"
#include "kv4/error.h"
#include "option_values.h"
#include "output.h"
#include "sizes.h"
#include "table.h"

namespace kv4::cli {
namespace {

struct BenchFlags {
  ModelFlags model;
  std::string filter;
  double min_time = 0.2;
  std::string threads = "1";
  bool json = false, list = false, rss = false;
};

struct Result {
  std::string name, item, error;
  std::int64_t bytes = 0;
  double seconds = 0, memcpy_seconds = 0, plain_seconds = 0, items = 1;
  bool interrupted = false;

  std::optional<double> memcpy_ratio() const {
    return bytes > 0 && seconds > 0 ? std::optional(memcpy_seconds / seconds) : std::nullopt;
  }
};

// How many times as fast as the plain row code.
std::optional<double> plain_ratio(const Result& r) {
  return r.plain_seconds > 0 && r.seconds > 0 ? std::optional(r.plain_seconds / r.seconds) : std::nullopt;
}

double median(std::vector<double>& values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Runs one case under Google Benchmark, which decides how often. It calls with growing iteration counts; what the case
/// made stays. Times are medians: on a shared machine a mean says more about the neighbours.
class CaseRunner {
 public:
  CaseRunner(const Case& c, CopyBaseline& copy) : case_(c), copy_(copy) {}

  void run(benchmark::State& state) {
    try {
      if (!operation_) warm_up();
      measure(state);
    } catch (const std::exception& e) {
      result_.error = e.what();
      state.SkipWithError(result_.error.c_str());
    }
  }
  Result finish() {
    operation_ = nullptr;
    result_.name = case_.name;
    result_.item = case_.item;
    return result_;
  }

 private:
  /// The first touch of memory can cost a hundred times the operation, and a case's buffers take turns: all of them
  /// first.
  void warm_up() {
    constexpr int kWarmUps = 40;
    operation_ = case_.make();
    for (int i = 0; i < kWarmUps && !interrupted(); ++i) operation_();
  }

  void measure(benchmark::State& state) {
    std::vector<double> seconds, copies, plains;
    Sample sample;
    for (auto _ : state) {
      if (interrupted()) {
        result_.interrupted = true;
        state.SkipWithError("interrupted");
        break;
      }
      sample = operation_();
      state.SetIterationTime(sample.seconds);
      seconds.push_back(sample.seconds);
      if (sample.plain_seconds > 0) plains.push_back(sample.plain_seconds);
      if (sample.bytes > 0) copies.push_back(copy_.seconds(sample.bytes));
    }
    result_.bytes = sample.bytes;
    result_.items = static_cast<double>(sample.items);
    result_.seconds = median(seconds);
    result_.memcpy_seconds = median(copies);
    result_.plain_seconds = median(plains);
  }

  const Case& case_;
  CopyBaseline& copy_;
  Operation operation_;
  Result result_;
};

/// Google Benchmark's own output is replaced by our table.
class QuietReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

Result measure_case(const Case& c, CopyBaseline& copy, double min_time) {
  CaseRunner runner(c, copy);
  benchmark::ClearRegisteredBenchmarks();
  benchmark::RegisterBenchmark(c.name.c_str(), [&](benchmark::State& state) { runner.run(state); })
      ->UseManualTime()
      ->MinTime(min_time);
  QuietReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter, ".");
  benchmark::ClearRegisteredBenchmarks();
  return runner.finish();
}

/// Of whole names and of their parts: "gathre" is near "gather".
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
  std::vector<Case> all;
  add_append_cases(all, settings);
  add_gather_cases(all, settings);
  add_read_cases(all, settings);
  add_snapshot_cases(all, settings);
  add_context_cases(all, settings);
  add_control_cases(all, settings);
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

nlohmann::ordered_json to_json(const Result& result) {
  const auto ratio = result.memcpy_ratio();
  nlohmann::ordered_json out = {{"name", result.name},
                                {"bytes", result.bytes},
                                {"seconds", result.seconds},
                                {"memcpy_ratio", ratio ? nlohmann::ordered_json(*ratio) : nlohmann::ordered_json()},
                                {"item", result.item},
                                {"items", result.items},
                                {"seconds_per_item", result.seconds / result.items}};
  if (const auto plain = plain_ratio(result)) out["plain_ratio"] = *plain;
  if (!result.error.empty()) out["error"] = result.error;
  return out;
}

constexpr const char* kLine = "{:<44} {:>10} {:>11} {:>11} {:>9}  {}\n";

void print_result(const Result& result) {
  if (!result.error.empty()) {
    fmt::print(kLine, result.name, "", "", "", "", "failed: " + result.error);
    return;
  }
  const auto ratio = result.memcpy_ratio();
  fmt::print(kLine, result.name, result.bytes > 0 ? human_bytes(static_cast<double>(result.bytes)) : "-",
             human_seconds(result.seconds),
             result.bytes > 0 ? human_bytes(static_cast<double>(result.bytes) / result.seconds) + "/s" : "-",
             ratio ? fmt::format("{:.2f}", *ratio) : "-",
             fmt::format("{} per {}{}", human_seconds(result.seconds / result.items), result.item,
                         plain_ratio(result) ? fmt::format(", {:.1f} x the plain code", *plain_ratio(result)) : ""));
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

int run_bench(const BenchFlags& flags) {
  const BenchSettings settings{read_model(flags.model),
                               static_cast<int>(parse_count(flags.threads, "--threads", 1, 1024))};
  if (flags.rss) return run_rss_check(settings, flags.json);
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
        settings.threads == 1 ? "thread" : "threads", cpu_target());
    fmt::print(kLine, "name", "bytes", "seconds", "speed", "/ memcpy", "");
  }
  MemcpyBaseline copy(settings.threads);
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  bool ok = true;
  for (const Case& c : cases) {
    if (interrupted()) break;
    const Result result = measure_case(c, copy, flags.min_time);
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
