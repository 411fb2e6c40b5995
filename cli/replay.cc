// `kv4 replay TRACE`: what a prefix cache would have found on recorded or generated requests.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/check.h"
#include "commands.h"
#include "progress.h"
#include "replay_cache.h"
#include "sizes.h"
#include "table.h"

namespace kv4::cli {
namespace {

constexpr std::int64_t kGeneratedRequests = 5000;
constexpr std::int64_t kMostGeneratedRequests = 1'000'000;

struct ReplayFlags {
  std::string trace;
  bool generate = false;
  std::string seed = "1";
  std::string data = "none";
  std::optional<std::string> capacity, limit;
  std::string policy = "lru";
  bool json = false;
};

Trace load(const ReplayFlags& flags) {
  if (flags.generate) {
    const auto seed =
        static_cast<std::uint64_t>(parse_count(flags.seed, "--seed", 0, std::numeric_limits<std::int64_t>::max()));
    return generate_trace(
        seed, flags.limit ? parse_count(*flags.limit, "--limit", 1, kMostGeneratedRequests) : kGeneratedRequests);
  }
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  return read_trace(flags.trace, flags.limit ? parse_count(*flags.limit, "--limit", 1, kAny) : 0);
}

void print_table(const ReplayResult& result, const Trace& trace, const ReplayFlags& flags, double seconds) {
  Table table("lr", {"quantity", "value"});
  table.row({"requests", group_digits(result.requests)});
  table.row({fmt::format("blocks asked for ({} tokens each)", trace.id_tokens), group_digits(result.ids)});
  table.row({"blocks found", group_digits(result.hit_ids)});
  table.row({"block hit rate", fmt::format("{:.4f}", result.block_hit_rate())});
  table.row({"token hit rate", fmt::format("{:.4f}", result.token_hit_rate())});
  table.row({"blocks evicted", group_digits(result.evicted_ids)});
  fmt::print("{}: policy {}, capacity {}, {}\n{}", flags.generate ? "generated, seed " + flags.seed : flags.trace,
             flags.policy,
             flags.capacity ? group_digits(result.capacity_ids * trace.id_tokens) + " tokens" : "without limit",
             human_seconds(seconds), table.str());
}

void print_json(const ReplayResult& result, const Trace& trace, const ReplayFlags& flags, double seconds) {
  nlohmann::ordered_json out = {{"requests", result.requests},
                                {"block_hit_rate", result.block_hit_rate()},
                                {"token_hit_rate", result.token_hit_rate()},
                                {"blocks", result.ids},
                                {"hit_blocks", result.hit_ids},
                                {"evicted_blocks", result.evicted_ids},
                                {"block_tokens", trace.id_tokens},
                                {"input_tokens", result.input_tokens},
                                {"hit_tokens", result.hit_tokens},
                                {"capacity_tokens", nullptr},
                                {"policy", flags.policy},
                                {"seconds", seconds}};
  if (flags.capacity) out["capacity_tokens"] = result.capacity_ids * trace.id_tokens;
  fmt::print("{}\n", out.dump(2));
}

void run_replay(const ReplayFlags& flags) {
  require(flags.generate != !flags.trace.empty(), ErrorCode::bad_argument,
          "give a trace or --generate, and not both; see 'kv4 replay --help'");
  require(flags.data == "none", ErrorCode::bad_argument, "--data '{}' is not known; it may be none", flags.data);
  ReplayOptions options;
  options.eviction = parse_eviction(flags.policy);
  if (flags.capacity) {
    options.capacity_tokens = parse_tokens(*flags.capacity, "--capacity");
    require(options.capacity_tokens > 0, ErrorCode::bad_argument,
            "--capacity 0 holds nothing; leave it out for a cache without limit");
  }
  const auto start = std::chrono::steady_clock::now();
  const Trace trace = load(flags);
  Progress progress("replay", static_cast<std::int64_t>(trace.requests.size()));
  options.request_done = [&] { progress.advance(1); };
  const ReplayResult result = replay_cache(trace, options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  (flags.json ? print_json : print_table)(result, trace, flags, seconds);
}

}  // namespace
}  // namespace kv4::cli

void add_replay(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command = app.add_subcommand("replay", "What a prefix cache finds on a trace of requests");
  auto flags = std::make_shared<ReplayFlags>();
  command->add_option("TRACE", flags->trace,
                      "Mooncake JSONL (timestamp, input_length, output_length, hash_ids of 512 tokens) or weka128_rle, "
                      "plain or .gz");
  command->add_flag("--generate", flags->generate, "conversations and agent sessions instead of a trace");
  command->add_option("--seed", flags->seed, "of --generate")->capture_default_str()->type_name("N");
  command->add_option("--data", flags->data, "none: all decisions, no bytes")->capture_default_str()->type_name("MODE");
  command
      ->add_option("--capacity", flags->capacity,
                   "tokens that the cache holds, for example 10000000 or 10M (K and M are binary); default: all")
      ->type_name("TOKENS");
  command->add_option("--policy", flags->policy, "who is evicted: lru or s3fifo")
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--limit", flags->limit,
                   fmt::format("only the first N requests; --generate makes {} without it", kGeneratedRequests))
      ->type_name("N");
  command->add_flag("--json", flags->json, "figures as JSON: requests, block_hit_rate, token_hit_rate, ...");
  command->footer(
      "The block hit rate counts the trace's own ids, a last partial one included. The token hit rate counts what a\n"
      "request can use: multiples of 128 tokens, and at least one token of the prompt is left to compute.\n"
      "\n"
      "Examples:\n"
      "  kv4 replay conversation_trace.jsonl                      what a cache without limit finds\n"
      "  kv4 replay trace.jsonl.gz --capacity 10000000 --policy s3fifo --json\n"
      "  kv4 replay --generate --seed 7 --capacity 1M");
  command->callback([flags, &exit_code] {
    run_replay(*flags);
    exit_code = 0;
  });
}
