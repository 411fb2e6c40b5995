// `kv4 replay TRACE`: the hits of a prefix cache on recorded or generated requests, with or without their bytes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/check.h"
#include "cache_flags.h"
#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "device_flag.h"
#include "interrupts.h"
#include "key_flags.h"
#include "option_values.h"
#include "output.h"
#include "prefix/prefix_index.h"
#include "printable.h"
#include "progress.h"
#include "replay_cache.h"
#include "replay_data.h"
#include "replay_report.h"
#include "replay_watcher.h"
#include "tier/redis_url.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr std::int64_t kGeneratedRequests = 5000;
constexpr std::int64_t kMostGeneratedRequests = 1'000'000;
constexpr std::int64_t kDataRequests = 200;  // --generate with bytes
constexpr const char* kDataCapacity = "256K";

struct ReplayFlags {
  std::string trace;
  bool generate = false;
  std::string seed = "1";
  std::string data = "none";
  std::optional<std::string> capacity, limit;
  std::string policy = "lru";
  std::string snapshots = "checkpoint";
  std::string tenants = "1";
  std::string report, metrics, status;
  std::optional<std::string> serve;  // a port; empty: any free one
  bool json = false;
  // --data real
  ModelFlags model;
  FormatFlags formats;
  std::string layers = "4", threads = "1", device = "cpu";
  double verify = 0.05;
  std::string host, disk, disk_capacity = "16GB";
  std::string remote, remote_allow, remote_ca, remote_cert, remote_key;
  std::optional<std::string> remote_ttl;
  bool remote_optional = false;
  KeyFlags keys;
  bool authenticate = false, accept_unauthenticated = false;
  bool real() const { return data == "real"; }
};

/// Capacities with a final B are bytes, others are tokens: 40GB and 512MiB are bytes, 10M and 40G are tokens.
bool is_bytes(const std::string& capacity) { return capacity.ends_with('B') || capacity.ends_with('b'); }

/// The schema of the model, or of its first layers, in the chosen formats.
CacheSchema block_schema(const ReplayFlags& flags) {
  const ModelConfig config = read_model(flags.model);
  CacheOptions options;
  apply(flags.formats, options);
  options.max_requests = 1;
  options.num_blocks = 1;
  options.max_context = 1;
  if (flags.real()) {
    const std::int64_t layers = parse_count(flags.layers, "--layers", 1, config.num_layers);
    for (int layer = 0; layer < layers; ++layer) options.layers.push_back(layer);
  }
  return build_schema(config, options);
}

/// Largest number of whole blocks that the bytes hold.
std::int64_t tokens_in(std::int64_t bytes, const ReplayFlags& flags) {
  const CacheSchema schema = block_schema(flags);
  require(schema.block_bytes > 0, ErrorCode::bad_argument,
          "--capacity {}: these layers keep windows only, so bytes make no blocks; give tokens", *flags.capacity);
  require(bytes >= schema.block_bytes, ErrorCode::bad_argument,
          "--capacity {} holds no block; one has {} bytes and {} tokens", *flags.capacity,
          group_digits(schema.block_bytes), schema.block_tokens);
  return bytes / schema.block_bytes * schema.block_tokens;
}

std::int64_t capacity_tokens(const ReplayFlags& flags) {
  if (!flags.capacity) return parse_tokens(kDataCapacity, "--capacity");
  return is_bytes(*flags.capacity) ? tokens_in(parse_bytes(*flags.capacity, "--capacity"), flags)
                                   : parse_tokens(*flags.capacity, "--capacity");
}

/// full, none, checkpoint or checkpoint:TOKENS.
SnapshotPolicy parse_snapshots(const std::string& text) {
  constexpr std::int64_t kWindow = 128, kFlashLayers = 43;
  SnapshotPolicy out;
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::vector<std::string> words = words_of<SnapshotPolicy::Kind>();
  require(std::find(words.begin(), words.end(), name) != words.end() &&
              (colon == std::string::npos || name == to_string(SnapshotPolicy::Kind::checkpoint)),
          ErrorCode::bad_argument,
          "--snapshots '{}' is not known; it may be full, checkpoint, checkpoint:TOKENS or none{}", text,
          did_you_mean(name, words));
  out.kind = kv4::parse_snapshots(name);
  if (out.kind == SnapshotPolicy::Kind::none) out = {out.kind, 0, kWindow * kFlashLayers};
  if (colon != std::string::npos) out.period_tokens = parse_tokens(text.substr(colon + 1), "--snapshots checkpoint");
  require(out.kind != SnapshotPolicy::Kind::checkpoint || (out.period_tokens > 0 && out.period_tokens % 512 == 0),
          ErrorCode::bad_argument, "--snapshots checkpoint:{}: the period is a multiple of 512 tokens",
          out.period_tokens);
  return out;
}

/// Splits a list at its commas; `check` throws on a wrong entry.
template <class Check>
std::vector<std::string> parse_list(const std::string& text, const char* flag, Check&& check) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at <= text.size(); at += out.back().size() + 1) {
    out.push_back(text.substr(at, text.find(',', at) - at));
    try {
      check(out.back());
    } catch (const Error& e) {
      fail(e.code(), "{}: {}", flag, e.what());
    }
  }
  return out;
}

void set_remote(const ReplayFlags& flags, TiersOptions& tiers) {
  const bool more = !flags.remote_allow.empty() || !flags.remote_ca.empty() || !flags.remote_cert.empty() ||
                    !flags.remote_key.empty() || flags.remote_ttl || flags.remote_optional;
  require(!flags.remote.empty() || !more, ErrorCode::bad_argument, "--remote-...: there is no --remote to go with it");
  if (flags.remote.empty()) return;
  tiers.servers = parse_list(flags.remote, "--remote", tier::parse_server);
  if (!flags.remote_allow.empty())
    tiers.allowed_servers = parse_list(flags.remote_allow, "--remote-allow", tier::parse_rule);
  tiers.tls_ca_file = flags.remote_ca;
  tiers.tls_certificate_file = flags.remote_cert;
  tiers.tls_key_file = flags.remote_key;
  const std::int64_t most = std::chrono::floor<std::chrono::seconds>(tier::kMaxTtl).count();
  if (flags.remote_ttl)
    tiers.remote_ttl = std::chrono::seconds(parse_count(*flags.remote_ttl, "--remote-ttl", 1, most));
  // The password comes from the environment, because everybody on the machine sees arguments.
  if (const char* password = std::getenv("KV4_REMOTE_PASSWORD")) tiers.password = password;
}

/// False: a tier does not work. Failures that are over are reported, too.
bool tell_failures(const std::vector<TierReport>& tiers, bool optional) {
  bool good = true;
  for (const TierReport& tier : tiers) {
    std::string counts;
    for (const auto& [reason, count] : tier.failures) counts += fmt::format(", {} {} times", reason, count);
    if (counts.empty()) continue;
    const bool failing = !tier.failure.empty();
    fmt::print(stderr, "{}: the {} tier {}{}\n", failing && !optional ? "error" : "warning", tier.name,
               failing ? fmt::format("fails: {} ({})", tier.failure_detail, tier.failure) : "failed and works again",
               counts);
    good = good && (!failing || optional);
  }
  return good;
}

/// The unit of hit rates: with bytes, the cache's own blocks.
int block_tokens(const Trace& trace, const ReplayFlags& flags) { return flags.real() ? 128 : trace.id_tokens; }

Trace load(const ReplayFlags& flags) {
  if (flags.generate) {
    const auto seed =
        static_cast<std::uint64_t>(parse_count(flags.seed, "--seed", 0, std::numeric_limits<std::int64_t>::max()));
    const std::int64_t requests = flags.real() ? kDataRequests : kGeneratedRequests;
    return generate_trace(seed,
                          flags.limit ? parse_count(*flags.limit, "--limit", 1, kMostGeneratedRequests) : requests);
  }
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  return read_trace(flags.trace, flags.limit ? parse_count(*flags.limit, "--limit", 1, kAny) : 0);
}

double percentile(std::vector<double> values, int percent) {
  if (values.empty()) return 0;
  const std::size_t at = (values.size() - 1) * percent / 100;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

/// Null: unknown, because others put and remove, too.
nlohmann::ordered_json known(std::int64_t value) {
  return value == tier::TierStats::kUnknown ? nlohmann::ordered_json() : nlohmann::ordered_json(value);
}

std::int64_t not_found(const TierReport& tier) { return tier.misses + tier.failed_gets; }  // damaged ones are misses

void add_data_rows(Table& table, const DataReplayResult& data) {
  table.rule();
  table.row({"tokens computed", group_digits(data.computed_tokens)});
  table.row({"requests skipped, longer than the cache", group_digits(data.skipped_requests)});
  table.row({"admit, 50 % / 99 %",
             human_seconds(percentile(data.admit_s, 50)) + " / " + human_seconds(percentile(data.admit_s, 99))});
  table.row({"prefill, 50 % / 99 %",
             human_seconds(percentile(data.prefill_s, 50)) + " / " + human_seconds(percentile(data.prefill_s, 99))});
  for (const TierReport& tier : data.tiers) {
    table.row({tier.name + ": records found / not", group_digits(tier.hits) + " / " + group_digits(not_found(tier))});
    table.row({tier.name + ": bytes found / stored", human_bytes(static_cast<double>(tier.hit_bytes)) + " / " +
                                                         human_bytes(static_cast<double>(tier.stored_bytes))});
  }
  table.row({"bytes kept on the device at the end", human_bytes(static_cast<double>(data.stored_bytes))});
  table.row({"requests computed cold to compare", group_digits(data.verified_requests)});
  table.row({"blocks compared", group_digits(data.verified_blocks)});
  table.row({"wrong bytes", group_digits(data.wrong_bytes)});
}

/// How a replay ended.
struct ReplayEnd {
  double seconds;
  bool interrupted;
};

void print_table(const DataReplayResult& data, const Trace& trace, const ReplayFlags& flags, const ReplayEnd& end) {
  const ReplayResult& result = data.cache;
  const ReplayCounts& total = result.total;
  Table table("lr", {"quantity", "value"});
  table.row({"requests", group_digits(total.requests)});
  table.row({fmt::format("blocks asked for ({} tokens each)", block_tokens(trace, flags)), group_digits(total.ids)});
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
  if (flags.real()) add_data_rows(table, data);
  std::string capacity = "without limit";
  if (flags.capacity || flags.real()) capacity = group_digits(result.capacity_ids * trace.id_tokens) + " tokens";
  if (flags.capacity && is_bytes(*flags.capacity)) capacity += " (" + *flags.capacity + ")";
  fmt::print("{}: policy {}, capacity {}, {}\n{}",
             flags.generate ? "generated, seed " + flags.seed : printable(flags.trace), flags.policy, capacity,
             human_seconds(end.seconds), table.str());
}

void print_json(const DataReplayResult& data, const Trace& trace, const ReplayFlags& flags, const ReplayEnd& end) {
  const ReplayResult& result = data.cache;
  const ReplayCounts& total = result.total;
  nlohmann::ordered_json out = {{"requests", total.requests},
                                {"interrupted", end.interrupted},
                                {"block_hit_rate", total.block_hit_rate()},
                                {"token_hit_rate", total.token_hit_rate()},
                                {"recomputed_tokens_per_hit", total.recomputed_tokens_per_hit()},
                                {"blocks", total.ids},
                                {"hit_blocks", total.hit_ids},
                                {"hit_requests", total.hits},
                                {"evicted_blocks", total.evicted_ids},
                                {"verified_blocks", data.verified_blocks},
                                {"wrong_bytes", data.wrong_bytes},
                                {"block_tokens", block_tokens(trace, flags)},
                                {"input_tokens", total.input_tokens},
                                {"hit_tokens", total.hit_tokens},
                                {"capacity_tokens", nullptr},
                                {"tenant_share_tokens", result.share_tokens},
                                {"policy", flags.policy},
                                {"snapshots", flags.snapshots},
                                {"seconds", end.seconds}};
  for (const ReplayCounts& tenant : result.tenants)
    out["tenants"].push_back({{"requests", tenant.requests}, {"block_hit_rate", tenant.block_hit_rate()}});
  if (flags.real()) {
    out["verified_requests"] = data.verified_requests;
    out["skipped_requests"] = data.skipped_requests;
    out["computed_tokens"] = data.computed_tokens;
    out["stored_bytes"] = data.stored_bytes;
    out["loaded_blocks"] = data.loaded_blocks;
    for (const TierReport& tier : data.tiers)
      out["tiers"].push_back({{"name", tier.name},
                              {"hits", tier.hits},
                              {"misses", not_found(tier)},
                              {"hit_bytes", tier.hit_bytes},
                              {"stored", tier.stored},
                              {"stored_bytes", tier.stored_bytes},
                              {"refused", tier.refused_puts},
                              {"records", known(tier.tier.records)},
                              {"bytes", known(tier.tier.payload_bytes)},
                              {"failure", tier.failure},
                              {"failure_detail", tier.failure_detail},
                              {"failures", tier.failures}});
    for (const int percent : {50, 90, 99}) {
      out[fmt::format("admit_p{}_seconds", percent)] = percentile(data.admit_s, percent);
      out[fmt::format("prefill_p{}_seconds", percent)] = percentile(data.prefill_s, percent);
    }
  }
  if (flags.capacity || flags.real()) out["capacity_tokens"] = result.capacity_ids * trace.id_tokens;
  if (flags.capacity && is_bytes(*flags.capacity)) out["capacity_bytes"] = parse_bytes(*flags.capacity, "--capacity");
  fmt::print("{}\n", out.dump(2));
}

DataReplayOptions data_options(const ReplayFlags& flags, const ReplayOptions& options) {
  DataReplayOptions out;
  out.config = read_model(flags.model);
  apply(flags.formats, out.cache);
  require(out.cache.block_tokens == 0 || out.cache.block_tokens == 128, ErrorCode::bad_argument,
          "--block-tokens {}: a replay counts blocks of 128 tokens; leave it out", out.cache.block_tokens);
  const int layers = static_cast<int>(parse_count(flags.layers, "--layers", 1, out.config.num_layers));
  for (int layer = 0; layer < layers; ++layer) out.cache.layers.push_back(layer);
  const std::vector<LayerSpec> schedule = layer_schedule(out.config);
  const bool has_rows = std::any_of(schedule.begin(), schedule.begin() + layers,
                                    [](const LayerSpec& layer) { return !layer.rows.empty(); });
  require(has_rows || (flags.host.empty() && flags.disk.empty() && flags.remote.empty()), ErrorCode::bad_argument,
          "--layers {}: these layers keep windows only, so there are no blocks for tiers; take more", layers);
  out.cache.prefix.eviction = options.eviction;
  out.cache.prefix.snapshots = options.snapshots;
  out.cache.prefix.snapshots.replay_tokens = 0;
  out.capacity_tokens = options.capacity_tokens / 128 * 128;
  require(out.capacity_tokens >= 1024, ErrorCode::bad_argument,
          "--capacity {} is too small for bytes; a cache of at least 1024 tokens can be replayed",
          options.capacity_tokens);
  out.tenants = options.tenants;
  require(flags.verify >= 0 && flags.verify <= 1, ErrorCode::bad_argument, "--verify {} is no share; it may be 0 to 1",
          flags.verify);
  out.verify = flags.verify;
  if (!flags.host.empty()) out.tiers.host_bytes = parse_bytes(flags.host, "--host");
  out.tiers.directory = flags.disk;
  out.tiers.keys = flags.keys.read();
  out.tiers.protection = flags.authenticate ? Protection::authenticated : Protection::sealed;
  out.tiers.accept_unauthenticated = flags.accept_unauthenticated;
  require(!out.tiers.keys.empty() || (!flags.authenticate && !flags.accept_unauthenticated), ErrorCode::bad_argument,
          "--authenticate and --accept-unauthenticated are for a replay with keys; give --key-file");
  set_remote(flags, out.tiers);
  out.remote_optional = flags.remote_optional;
  out.tiers.disk_bytes = parse_bytes(flags.disk_capacity, "--disk-capacity");
  out.status = flags.status;
  out.seed = static_cast<std::uint64_t>(parse_count(flags.seed, "--seed", 0, std::numeric_limits<std::int64_t>::max()));
  out.device = flags.device;
  out.threads = static_cast<int>(parse_count(flags.threads, "--threads", 1, 1024));
  out.request_done = options.request_done;
  return out;
}

/// Nullopt: no page.
std::optional<std::string> serve_port(const ReplayFlags& flags) {
  if (!flags.serve || flags.serve->empty()) return flags.serve ? std::optional<std::string>("0") : std::nullopt;
  return std::to_string(parse_count(*flags.serve, "--serve", 0, 65535));
}

/// Options that only a cache with bytes can serve. Only the key's flag counts: KV4_KEY_FILE may be set for other
/// commands.
constexpr const char* kOfBytes[] = {
    "--metrics",       "--status",      "--serve",      "--verify",       "--host",         "--disk",
    "--disk-capacity", "--remote",      "--key-file",   "--authenticate", "--remote-allow", "--accept-unauthenticated",
    "--remote-ca",     "--remote-cert", "--remote-key", "--remote-ttl",   "--layers",       "--remote-optional",
    "--threads",       "--device"};

/// Without bytes these options would have no effect and no check.
void refuse_without_bytes(const CLI::App& command) {
  for (const char* const flag : kOfBytes)
    require(command.count(flag) == 0, ErrorCode::bad_argument, "{} is of a cache with bytes; give --data real with it",
            flag);
}

/// Exit code: 1 where a byte was wrong or the remote tier fails.
int run_replay(const ReplayFlags& flags, const CLI::App& command) {
  require(flags.generate != !flags.trace.empty(), ErrorCode::bad_argument,
          "give a trace or --generate, and not both; see 'kv4 replay --help'");
  require(flags.data == "none" || flags.real(), ErrorCode::bad_argument,
          "--data '{}' is not known; it may be none or real", flags.data);
  if (!flags.real()) refuse_without_bytes(command);
  ReplayOptions options;
  options.eviction = parse_eviction(flags.policy);
  if (!flags.generate) options.max_blocks = kMaxForeignBlocks;
  options.snapshots = parse_snapshots(flags.snapshots);
  options.tenants = static_cast<int>(parse_count(flags.tenants, "--tenants", 1, PrefixIndex::kMaxTenants));
  if (flags.capacity || flags.real()) {
    options.capacity_tokens = capacity_tokens(flags);
    require(options.capacity_tokens > 0, ErrorCode::bad_argument,
            "--capacity 0 holds nothing; leave it out for a cache without limit");
  }
  catch_interrupts();
  const auto start = std::chrono::steady_clock::now();
  const Trace trace = load(flags);
  const auto requests = static_cast<std::int64_t>(trace.requests.size());
  Progress progress("replay", requests * (flags.report.empty() ? 1 : 1 + kReportReplays));
  options.request_done = [&] { progress.advance(1); };
  std::optional<ReplayWatcher> watcher;
  if (!flags.metrics.empty() || flags.serve) watcher.emplace(flags.metrics, serve_port(flags), requests);
  DataReplayResult result;
  if (flags.real()) {
    DataReplayOptions data = data_options(flags, options);
    if (watcher) data.watch = [&](const ReplayMoment& moment) { watcher->see(moment); };
    result = replay_data(trace, data);
  } else {
    result.cache = replay_cache(trace, options);
  }
  if (!flags.report.empty() && !interrupted()) {
    const CacheSchema schema = block_schema(flags);
    write_report(flags.report, {.name = flags.generate ? "generated, seed " + flags.seed : flags.trace,
                                .trace = trace,
                                .options = options,
                                .data = result,
                                .model = (schema.config.name.empty() ? "the model" : schema.config.name) +
                                         (flags.real() ? fmt::format(" ({} layers)", schema.layers.size()) : ""),
                                .bytes_per_token = static_cast<double>(schema.block_bytes) / schema.block_tokens});
  }
  // With a live page, a reader of the result may end the process during the printing: that is no interruption.
  const ReplayEnd end{std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), interrupted()};
  (flags.json ? print_json : print_table)(result, trace, flags, end);
  flush_output();
  const bool tiers_work = tell_failures(result.tiers, flags.remote_optional);
  if (end.interrupted) {
    fmt::print(stderr, "interrupted: {} of {} requests were replayed{}\n", group_digits(result.cache.total.requests),
               group_digits(requests), flags.report.empty() ? "" : ", and there is no report");
    if (watcher) watcher->linger();
    return interrupted_exit_code();
  }
  if (watcher) {
    watcher->stay();
    watcher->linger();
  }
  return result.wrong_bytes == 0 && tiers_work ? 0 : 1;
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
  take_one_of(
      *command->add_option("--data", flags->data, "none: all decisions, no bytes; real: through a cache of some layers")
           ->capture_default_str()
           ->type_name("MODE"),
      {"none", "real"});
  command
      ->add_option(
          "--capacity", flags->capacity,
          "tokens that the cache holds, for example 10000000 or 10M (K, M and G are binary); or bytes, which end with "
          "B: 40GB, 512MiB hold as many blocks of --model in the formats below; default: all, with --data real " +
              std::string(kDataCapacity))
      ->type_name("TOKENS|BYTES");
  take_one_of(
      *command->add_option("--policy", flags->policy, "who is evicted: " + list_words(words_of<kv4::EvictionKind>()))
           ->capture_default_str()
           ->type_name("NAME"),
      words_of<kv4::EvictionKind>());
  offer_values(*command
                    ->add_option("--snapshots", flags->snapshots,
                                 "where a hit can resume: full (every block), checkpoint[:TOKENS] (ends of prompts, "
                                 "and every 8192 tokens) or none (exact replay in V4-Flash)")
                    ->capture_default_str()
                    ->type_name("POLICY"),
               words_of<kv4::SnapshotPolicy::Kind>());
  command
      ->add_option("--tenants", flags->tenants,
                   "that share the cache, each with an equal share of its own; who begins alike is one tenant")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--report", flags->report, "write a page with plots; takes twenty more replays")
      ->type_name("FILE.html");
  command->add_option("--metrics", flags->metrics, "with bytes: write the cache's figures, in Prometheus' text format")
      ->type_name("FILE");
  command
      ->add_option("--status", flags->status,
                   "with bytes: a folder where the cache says how it stands, for 'kv4 serve-metrics' and 'kv4 inspect'")
      ->type_name("DIR");
  command
      ->add_option(
          "--serve", flags->serve,
          "with bytes: a live page and /metrics on 127.0.0.1, until interrupted; without a port any that is free")
      ->type_name("PORT")
      ->expected(0, 1);
  command
      ->add_option("--limit", flags->limit,
                   fmt::format("only the first N requests; --generate makes {} without it, {} with bytes",
                               kGeneratedRequests, kDataRequests))
      ->type_name("N");
  command
      ->add_option("--verify", flags->verify,
                   "with bytes: share of the requests that are computed cold, too, to compare")
      ->capture_default_str()
      ->type_name("SHARE");
  command->add_option("--host", flags->host, "with bytes: a tier in host memory, so many bytes; for example 1GB")
      ->type_name("BYTES");
  command->add_option("--disk", flags->disk, "with bytes: a tier on disk; a later replay finds what is there")
      ->type_name("DIR");
  command
      ->add_option("--remote", flags->remote,
                   "with bytes: a tier in a Redis cluster, or a single server; some of its servers are enough: "
                   "HOST:PORT, redis://USER:PASSWORD@HOST:PORT, or rediss://... with TLS. A password may be in "
                   "KV4_REMOTE_PASSWORD instead. A server that does not work ends the replay with an error")
      ->type_name("SERVER[,...]");
  command->add_flag("--remote-optional", flags->remote_optional,
                    "servers of --remote that do not work are misses and a warning");
  command
      ->add_option("--remote-allow", flags->remote_allow,
                   "other servers that the cluster may name, where there is a password or TLS: host, host:port or "
                   "10.0.0.0/8")
      ->type_name("HOST[,...]");
  command->add_option("--remote-ca", flags->remote_ca, "authorities for rediss://, PEM; default: the system's")
      ->type_name("FILE");
  command->add_option("--remote-cert", flags->remote_cert, "a certificate for rediss:// servers that ask for one, PEM")
      ->type_name("FILE");
  command->add_option("--remote-key", flags->remote_key, "the key of --remote-cert, PEM")->type_name("FILE");
  command->add_option("--remote-ttl", flags->remote_ttl, "after which servers forget a record; default: never")
      ->type_name("SECONDS");
  add_flags(*command, flags->keys);
  command->add_flag("--authenticate", flags->authenticate, "with keys: records stay readable, and cannot be forged");
  command->add_flag("--accept-unauthenticated", flags->accept_unauthenticated,
                    "with keys: records from before there were keys count");
  command->add_option("--disk-capacity", flags->disk_capacity, "of the tier on disk")
      ->capture_default_str()
      ->type_name("BYTES");
  command->add_option("--layers", flags->layers, "with bytes: the first N of the model")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--threads", flags->threads, "with bytes: that an operation uses on the CPU")
      ->capture_default_str()
      ->type_name("N");
  add_device_flag(*command, flags->device);
  add_flags(*command, flags->model);
  add_flags(*command, flags->formats);
  command->add_flag("--json", flags->json, "figures as JSON: requests, block_hit_rate, token_hit_rate, ...");
  command->footer(
      "The block hit rate counts the trace's own ids, a last partial one included. The token hit rate counts what a\n"
      "request can use: multiples of 128 tokens, and at least one token of the prompt is left to compute.\n"
      "\n"
      "Examples:\n"
      "  kv4 replay conversation_trace.jsonl                      what a cache without limit finds\n"
      "  kv4 replay trace.jsonl.gz --capacity 10000000 --policy s3fifo --json\n"
      "  kv4 replay --generate --data real --capacity 64K --host 256MB --disk store   with tiers below\n"
      "  kv4 replay --generate --data real --verify 0.2           real bytes; every fifth request also computed cold\n"
      "  kv4 replay trace.jsonl --capacity 40GB                   what 40 GB of V4-Flash's blocks find\n"
      "  kv4 replay --generate --seed 7 --capacity 1M --report replay.html\n"
      "\n"
      "Ctrl-C ends it early with what was replayed so far and exit code 130.");
  command->callback([flags, command, &exit_code] { exit_code = run_replay(*flags, *command); });
}
