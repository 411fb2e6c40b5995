#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cache_flags.h"
#include "checks/run_checks.h"
#include "checks/run_scenario.h"
#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "device_flag.h"
#include "interrupts.h"
#include "kv4/error.h"
#include "output.h"
#include "progress.h"

namespace kv4::cli {

using namespace checks;

namespace {

struct RunFlags {
  ModelFlags model;
  FormatFlags formats;
  std::string tokens = "16K", requests = "4", seed = "1", threads = "1", device = "cpu";
  bool json = false;
  RunFlags() { formats.rewind = "4"; }
};

RunSettings read_settings(const RunFlags& flags) {
  RunSettings settings;
  settings.config = read_model(flags.model);
  require_v4(settings.config, "kv4 run");
  apply(flags.formats, settings.options);
  settings.requests = static_cast<int>(parse_count(flags.requests, "--requests", 1, 256));
  settings.tokens = parse_tokens(flags.tokens, "--tokens");
  settings.seed = static_cast<std::uint64_t>(parse_count(flags.seed, "--seed", 0, INT64_MAX));
  settings.threads = static_cast<int>(parse_count(flags.threads, "--threads", 1, 1024));
  settings.device = flags.device;
  const std::int64_t least = min_tokens(settings.requests);
  if (settings.tokens < least) {
    throw Error(ErrorCode::bad_argument, fmt::format("--tokens {} is too few for {} requests; use at least {}",
                                                     settings.tokens, settings.requests, least));
  }
  return settings;
}

struct Part {
  std::string name;
  std::int64_t planned = 0, held = 0;
};

struct RunResult {
  std::vector<Check> checks;
  std::vector<Part> parts;
  double wall_s = 0;

  bool ok() const {
    return !interrupted() && std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.ok; });
  }
};

/// The planned parts and the sizes that their pools report.
std::vector<Part> compare_parts(KVCacheManager& manager) {
  const CacheSchema& schema = manager.schema();
  const MemoryPlan plan = plan_memory(schema);
  const std::int64_t slots = schema.options.max_requests + schema.options.spare_slots;
  const std::int64_t positions = (slots * 4 * static_cast<std::int64_t>(schema.layers.size()) + 63) / 64 * 64;
  std::vector<Part> out{
      {"blocks", plan.blocks * plan.block_bytes, manager.kv_pool().memory_bytes()},
      {"state slots", slots * (schema.slot_bytes + schema.undo_row_bytes) + 2 * positions,
       manager.state_pool().memory_bytes()},
      {"block allocator", BlockAllocator::memory_bytes(plan.blocks), manager.allocator().memory_bytes()}};
  Part rest{"step workspace, tables, token ids", plan.total_bytes, manager.memory_bytes()};
  for (const Part& part : out) {
    rest.planned -= part.planned;
    rest.held -= part.held;
  }
  out.push_back(rest);
  out.push_back({"total", plan.total_bytes, manager.memory_bytes()});
  return out;
}

void play_and_check(Scenario& scenario, const RunSettings& settings, RunResult& result) {
  {
    Progress progress("cache at work", scenario.planned_tokens());
    scenario.play(progress);
  }
  scenario.last_step([&] { result.checks = check_gathers(scenario); });
  result.checks.insert(result.checks.begin(), check_memory(scenario));
  result.parts = compare_parts(scenario.manager());
  std::int64_t replayed = 0;
  for (const Actor* actor : scenario.live()) replayed += actor->length;
  {
    Progress progress("checks", replayed);
    for (Check& check : check_replays(scenario, settings, progress)) result.checks.push_back(std::move(check));
  }
  result.checks.push_back(check_release(scenario));
}

RunResult play(Scenario& scenario, const RunSettings& settings) {
  RunResult result;
  const Stopwatch watch;
  try {
    play_and_check(scenario, settings, result);
  } catch (const Interrupted&) {  // completed work is shown
  }
  result.wall_s = watch.seconds();
  return result;
}

struct Speed {
  double tokens_per_s = 0, bytes_per_s = 0, copy_bytes_per_s = 0, memcpy_share = 0;
};

Speed speed_of(const Scenario& scenario) {
  const StepTimes& times = scenario.times();
  Speed speed;
  if (times.steps == 0) return speed;  // interrupted before the first step
  speed.tokens_per_s =
      static_cast<double>(scenario.tokens() + scenario.rejected()) / (times.append_s + times.control_s);
  speed.bytes_per_s = static_cast<double>(times.touched_bytes) / times.append_s;
  speed.copy_bytes_per_s = static_cast<double>(times.touched_bytes) / times.copy_s;
  speed.memcpy_share = times.copy_s / times.append_s;
  return speed;
}

std::string describe_device(const RunSettings& settings) {
  if (settings.device != "cpu") return settings.device;
  return fmt::format("{} {}, {}", settings.threads, settings.threads == 1 ? "thread" : "threads", cpu_target());
}

void print_text(Scenario& scenario, const RunSettings& settings, const RunResult& result) {
  const StepTimes& times = scenario.times();
  const Speed speed = speed_of(scenario);
  const CacheSchema& schema = scenario.manager().schema();
  fmt::print("{}: {} layers, {}\n{} requests and a fork, seed {}, {}\n\n",
             settings.config.name.empty() ? "model" : settings.config.name, schema.layers.size(),
             describe_formats(schema), settings.requests + 1, settings.seed, describe_device(settings));
  Table memory("lrr", {"bytes", "planned", "held"});
  for (const Part& part : result.parts) {
    if (part.name == "total") memory.rule();
    memory.row({part.name, group_digits(part.planned), group_digits(part.held)});
  }
  if (!result.parts.empty()) fmt::print("{}\n", memory.str());  // empty if interrupted earlier

  Table table("lrl", {"work", "", ""});
  table.row({"tokens", group_digits(scenario.tokens()),
             fmt::format("and {} rewound, {} padded, in {} steps", group_digits(scenario.rejected()), scenario.padded(),
                         times.steps)});
  table.row({"tokens/s", fmt::format("{}", group_digits(static_cast<std::int64_t>(speed.tokens_per_s))),
             "through all layers, inside the cache"});
  table.row({"append", human_seconds(times.append_s),
             fmt::format("{} that must be touched: {}/s", human_bytes(static_cast<double>(times.touched_bytes)),
                         human_bytes(speed.bytes_per_s))});
  const bool on_host = settings.device == "cpu";
  table.row({on_host ? "memcpy of as much" : "copy of as much", human_seconds(times.copy_s),
             fmt::format("{}/s, in the same run {}", human_bytes(speed.copy_bytes_per_s),
                         on_host ? "on as many threads" : "within the device, step by step, until it is done")});
  table.row({on_host ? "share of memcpy speed" : "share of copy speed",
             fmt::format("{:.0f} %", speed.memcpy_share * 100), ""});
  table.row({"prepare and commit", human_seconds(times.control_s),
             fmt::format("{} per step", human_seconds(times.control_s /
                                                      static_cast<double>(std::max<std::int64_t>(times.steps, 1))))});
  table.row({"all of it", human_seconds(result.wall_s), "with making inputs and checking"});
  fmt::print("{}", table.str());

  if (result.checks.empty()) return;
  Table checks("lll", {"check", "", ""});
  for (const Check& check : result.checks) checks.row({check.name, check.ok ? "ok" : "FAILED", check.detail});
  fmt::print("\n{}", checks.str());
}

nlohmann::ordered_json to_json(Scenario& scenario, const RunSettings& settings, const RunResult& result) {
  const Speed speed = speed_of(scenario);
  const StepTimes& times = scenario.times();
  nlohmann::ordered_json checks = nlohmann::ordered_json::array(), parts = checks;
  for (const Check& check : result.checks)
    checks.push_back({{"name", check.name}, {"ok", check.ok}, {"detail", check.detail}});
  for (const Part& part : result.parts)
    parts.push_back({{"name", part.name}, {"planned_bytes", part.planned}, {"bytes", part.held}});
  nlohmann::ordered_json out = {{"ok", result.ok()},
                                {"interrupted", interrupted()},
                                {"model", settings.config.name},
                                {"layers", scenario.manager().schema().layers.size()},
                                {"formats", describe_formats(scenario.manager().schema())},
                                {"seed", settings.seed},
                                {"device", settings.device},
                                {"threads", settings.threads},
                                {"target", cpu_target()},
                                {"tokens", scenario.tokens()},
                                {"rewound_tokens", scenario.rejected()},
                                {"steps", times.steps},
                                {"tokens_per_s", speed.tokens_per_s},
                                {"memcpy_share", speed.memcpy_share},
                                {"touched_bytes", times.touched_bytes},
                                {"append_seconds", times.append_s},
                                {"memcpy_seconds", times.copy_s},
                                {"control_seconds", times.control_s},
                                {"wall_seconds", result.wall_s}};
  out["parts"] = parts;
  out["checks"] = checks;
  return out;
}

int run(const RunFlags& flags) {
  const RunSettings settings = read_settings(flags);
  catch_interrupts();
  Scenario scenario(settings);
  const RunResult result = play(scenario, settings);
  if (flags.json)
    fmt::print("{}\n", to_json(scenario, settings, result).dump(2));
  else
    print_text(scenario, settings, result);
  flush_output();
  for (const Check& check : result.checks) {
    if (!check.ok) fmt::print(stderr, "failed: {}: {}\n", check.name, check.detail);
  }
  if (interrupted()) {
    fmt::print(stderr, "interrupted: {} of {} tokens were appended, the other checks were not made\n",
               group_digits(scenario.tokens()), group_digits(scenario.planned_tokens()));
    return interrupted_exit_code();
  }
  return result.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kv4::cli

void add_run(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command =
      app.add_subcommand("run", "Works a whole model's cache with generated inputs, checks every byte, measures");
  auto flags = std::make_shared<RunFlags>();
  add_flags(*command, flags->model);
  command->add_option("--tokens", flags->tokens, "tokens of all requests together, for example 16K")
      ->capture_default_str()
      ->type_name("TOKENS")
      ->group("Work");
  command->add_option("--requests", flags->requests, "requests beside the one that is released and the fork")
      ->capture_default_str()
      ->type_name("N")
      ->group("Work");
  command->add_option("--seed", flags->seed, "of the inputs")->capture_default_str()->type_name("N")->group("Work");
  command->add_option("--threads", flags->threads, "that an operation uses on the CPU; results do not depend on it")
      ->capture_default_str()
      ->type_name("N")
      ->group("Work");
  add_device_flag(*command, flags->device);
  add_flags(*command, flags->formats);
  command->add_flag("--json", flags->json, "result as JSON: ok, tokens, tokens_per_s, memcpy_share, checks and more");
  command->footer(
      "Requests of different lengths are prefilled in chunks and decoded in mixed steps; one is drafted and rewound, "
      "one is forked, one\n"
      "released and replaced. Then the checks: the same bytes in any split, what was rewound leaves no trace, gathers "
      "match a plain decoder.\n"
      "Exit code 1 if a check fails.\n"
      "Examples:\n"
      "  kv4 run\n"
      "  kv4 run --model v4-pro --tokens 8K --threads 2\n"
      "  kv4 run --device cuda                          the same checks on GPU 0\n"
      "  kv4 run --rows bf16 --keys fp8 --requests 8 --seed 7 --json");
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}
