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
#include "prefix/prefix_index.h"
#include "progress.h"
#include "replay_cache.h"
#include "replay_report.h"
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
  std::string snapshots = "checkpoint";
  std::string tenants = "1";
  std::string report;
  bool json = false;
};

/// full, none, checkpoint or checkpoint:TOKENS.
SnapshotPolicy parse_snapshots(const std::string& text) {
  constexpr std::int64_t kWindow = 128, kFlashLayers = 43;
  SnapshotPolicy out;
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  require((name == "full" || name == "checkpoint" || name == "none") &&
              (colon == std::string::npos || name == "checkpoint"),
          ErrorCode::bad_argument,
          "--snapshots '{}' is not known; it may be full, checkpoint, checkpoint:TOKENS or none", text);
  if (name == "full") out.kind = SnapshotPolicy::Kind::full;
  if (name == "none") out = {SnapshotPolicy::Kind::none, 0, kWindow * kFlashLayers};
  if (colon != std::string::npos) out.period_tokens = parse_tokens(text.substr(colon + 1), "--snapshots checkpoint");
  require(out.kind != SnapshotPolicy::Kind::checkpoint || (out.period_tokens > 0 && out.period_tokens % 512 == 0),
          ErrorCode::bad_argument, "--snapshots checkpoint:{}: the period is a multiple of 512 tokens",
          out.period_tokens);
  return out;
}

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
  const ReplayCounts& total = result.total;
  Table table("lr", {"quantity", "value"});
  table.row({"requests", group_digits(total.requests)});
  table.row({fmt::format("blocks asked for ({} tokens each)", trace.id_tokens), group_digits(total.ids)});
  table.row({"blocks found", group_digits(total.hit_ids)});
  table.row({"block hit rate", fmt::format("{:.4f}", total.block_hit_rate())});
  table.row({"token hit rate", fmt::format("{:.4f}", total.token_hit_rate())});
  table.row({"requests that found something", group_digits(total.hits)});
  table.row({fmt::format("tokens computed again per hit (snapshots {})", flags.snapshots),
             fmt::format("{:.0f}", total.recomputed_tokens_per_hit())});
  table.row({"blocks evicted", group_digits(total.evicted_ids)});
  if (result.tenants.size() > 1) {
    table.rule();
    for (std::size_t i = 0; i < result.tenants.size(); ++i)
      table.row({fmt::format("tenant {}: {} requests, block hit rate", i, group_digits(result.tenants[i].requests)),
                 fmt::format("{:.4f}", result.tenants[i].block_hit_rate())});
  }
  fmt::print("{}: policy {}, capacity {}, {}\n{}", flags.generate ? "generated, seed " + flags.seed : flags.trace,
             flags.policy,
             flags.capacity ? group_digits(result.capacity_ids * trace.id_tokens) + " tokens" : "without limit",
             human_seconds(seconds), table.str());
}

void print_json(const ReplayResult& result, const Trace& trace, const ReplayFlags& flags, double seconds) {
  const ReplayCounts& total = result.total;
  nlohmann::ordered_json out = {{"requests", total.requests},
                                {"block_hit_rate", total.block_hit_rate()},
                                {"token_hit_rate", total.token_hit_rate()},
                                {"recomputed_tokens_per_hit", total.recomputed_tokens_per_hit()},
                                {"blocks", total.ids},
                                {"hit_blocks", total.hit_ids},
                                {"hit_requests", total.hits},
                                {"evicted_blocks", total.evicted_ids},
                                {"block_tokens", trace.id_tokens},
                                {"input_tokens", total.input_tokens},
                                {"hit_tokens", total.hit_tokens},
                                {"capacity_tokens", nullptr},
                                {"policy", flags.policy},
                                {"snapshots", flags.snapshots},
                                {"seconds", seconds}};
  for (const ReplayCounts& tenant : result.tenants)
    out["tenants"].push_back({{"requests", tenant.requests}, {"block_hit_rate", tenant.block_hit_rate()}});
  if (flags.capacity) out["capacity_tokens"] = result.capacity_ids * trace.id_tokens;
  fmt::print("{}\n", out.dump(2));
}

void run_replay(const ReplayFlags& flags) {
  require(flags.generate != !flags.trace.empty(), ErrorCode::bad_argument,
          "give a trace or --generate, and not both; see 'kv4 replay --help'");
  require(flags.data == "none", ErrorCode::bad_argument, "--data '{}' is not known; it may be none", flags.data);
  ReplayOptions options;
  options.eviction = parse_eviction(flags.policy);
  options.snapshots = parse_snapshots(flags.snapshots);
  options.tenants = static_cast<int>(parse_count(flags.tenants, "--tenants", 1, PrefixIndex::kMaxTenants));
  if (flags.capacity) {
    options.capacity_tokens = parse_tokens(*flags.capacity, "--capacity");
    require(options.capacity_tokens > 0, ErrorCode::bad_argument,
            "--capacity 0 holds nothing; leave it out for a cache without limit");
  }
  const auto start = std::chrono::steady_clock::now();
  const Trace trace = load(flags);
  const auto requests = static_cast<std::int64_t>(trace.requests.size());
  Progress progress("replay", requests * (flags.report.empty() ? 1 : 1 + kReportReplays));
  options.request_done = [&] { progress.advance(1); };
  const ReplayResult result = replay_cache(trace, options);
  if (!flags.report.empty())
    write_report(flags.report, flags.generate ? "generated, seed " + flags.seed : flags.trace, trace, options, result);
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
      ->add_option("--snapshots", flags->snapshots,
                   "where a hit can resume: full (every block), checkpoint[:TOKENS] (ends of prompts, and every 8192 "
                   "tokens) or none (exact replay in V4-Flash)")
      ->capture_default_str()
      ->type_name("POLICY");
  command
      ->add_option("--tenants", flags->tenants,
                   "that share the cache, each with an equal share of its own; who begins alike is one tenant")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--report", flags->report, "write a page with plots; takes a dozen more replays")
      ->type_name("FILE.html");
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
      "  kv4 replay --generate --seed 7 --capacity 1M --report replay.html");
  command->callback([flags, &exit_code] {
    run_replay(*flags);
    exit_code = 0;
  });
}
