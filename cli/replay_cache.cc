#include "replay_cache.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "interrupts.h"
#include "prefix/prefix_index.h"

namespace kv4::cli {
namespace {

constexpr std::int64_t kBlockTokens = 128;

/// Stands for a SHA-256: its first bytes are as uniform, and it is as unique.
BlockKey make_key(std::int64_t id) {
  std::uint64_t mixed = static_cast<std::uint64_t>(id) + 0x9E3779B97F4A7C15u;  // splitmix64
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  mixed ^= mixed >> 31;
  BlockKey key{};
  std::memcpy(key.data(), &mixed, sizeof mixed);
  std::memcpy(key.data() + sizeof mixed, &id, sizeof id);
  return key;
}

void list_keys(const TraceRequest& request, std::vector<BlockKey>& keys) {
  keys.clear();
  for (const IdRun& run : request.ids)
    for (std::int64_t i = 0; i < run.count; ++i) keys.push_back(make_key(run.first + i));
}

// Looks up the prefix of one request after the other, then stores the request.
class CacheReplay {
 public:
  CacheReplay(const Trace& trace, const ReplayOptions& options, std::int64_t capacity_ids)
      : id_tokens_(trace.id_tokens), options_(options), index_(index_options(trace, options, capacity_ids)) {}

  ReplayCounts serve(const TraceRequest& request, std::int64_t number) {
    list_keys(request, keys_);
    const auto ids = static_cast<std::int64_t>(keys_.size());
    const PrefixMatch match = index_.match(keys_, ids * id_tokens_);
    ReplayCounts out{.requests = 1, .ids = ids, .hit_ids = match.matched_blocks, .input_tokens = request.input_tokens};
    out.hit_tokens = std::max<std::int64_t>(0, std::min(match.matched_blocks * id_tokens_, request.input_tokens - 1)) /
                     kBlockTokens * kBlockTokens;
    out.hits = out.hit_tokens > 0;
    out.recomputed_tokens = recompute(match, out.hit_tokens);
    try {
      out.evicted_ids =
          static_cast<std::int64_t>(index_.insert(tenant_of(request, options_.tenants), keys_).evicted.size());
    } catch (const Error& e) {
      fail(ErrorCode::bad_file, "request {} in order of time: its ids are not chained: {}", number, e.what());
    }
    keep_snapshots(request.input_tokens);
    return out;
  }

 private:
  static PrefixIndexOptions index_options(const Trace& trace, const ReplayOptions& options, std::int64_t capacity) {
    PrefixIndexOptions out;
    out.capacity_blocks = capacity;
    out.block_tokens = trace.id_tokens;
    out.eviction = options.eviction;
    out.snapshots.kind = SnapshotPolicy::Kind::full;  // this class tracks their positions
    out.max_events = 1;
    out.tenant_shares = equal_shares(capacity, options.tenants);
    return out;
  }

  std::int64_t recompute(const PrefixMatch& match, std::int64_t hit_tokens) const {
    switch (options_.snapshots.kind) {
      case SnapshotPolicy::Kind::full: return 0;
      case SnapshotPolicy::Kind::none: return std::min(hit_tokens, options_.snapshots.replay_tokens);
      case SnapshotPolicy::Kind::checkpoint: break;
    }
    return std::max<std::int64_t>(0, hit_tokens - match.resume_at);
  }

  // Snapshots stand at ends of ids: the prompt's last full one, and the periodic ones.
  void keep_snapshots(std::int64_t input_tokens) {
    const SnapshotPolicy& policy = options_.snapshots;
    if (policy.kind != SnapshotPolicy::Kind::checkpoint) return;
    const std::int64_t full = std::min(input_tokens / id_tokens_, static_cast<std::int64_t>(keys_.size()));
    const std::int64_t period = std::max<std::int64_t>(1, policy.period_tokens / id_tokens_);
    for (std::int64_t end = period; end < full; end += period) keep_snapshot(end);
    if (full > 0) keep_snapshot(full);
  }
  void keep_snapshot(std::int64_t ids) {
    const NodeId id = index_.find(keys_[ids - 1]);
    if (id != kNoNode && index_.snapshot(id) == kNoSnapshot) index_.attach_snapshot(id, 0);
  }

  std::int64_t id_tokens_;
  const ReplayOptions& options_;
  PrefixIndex index_;
  std::vector<BlockKey> keys_;
};

}  // namespace

std::vector<std::int64_t> equal_shares(std::int64_t capacity_blocks, int tenants) {
  return std::vector<std::int64_t>(tenants, capacity_blocks / tenants);
}

TenantId tenant_of(const TraceRequest& request, int tenants) {
  if (request.ids.empty()) return 0;
  return static_cast<TenantId>(key_fingerprint(make_key(request.ids[0].first)) % static_cast<std::uint64_t>(tenants));
}

void ReplayCounts::add(const ReplayCounts& other) {
  requests += other.requests;
  ids += other.ids;
  hit_ids += other.hit_ids;
  input_tokens += other.input_tokens;
  hit_tokens += other.hit_tokens;
  hits += other.hits;
  recomputed_tokens += other.recomputed_tokens;
  evicted_ids += other.evicted_ids;
}

ReplayResult replay_cache(const Trace& trace, const ReplayOptions& options) {
  const std::int64_t most = std::max<std::int64_t>(1, bound_distinct_ids(trace));
  ReplayResult result;
  result.capacity_ids = options.capacity_tokens == 0 ? most : options.capacity_tokens / trace.id_tokens;
  require(result.capacity_ids >= 1, ErrorCode::bad_argument,
          "a capacity of {} tokens holds no block; an id of this trace is {} tokens", options.capacity_tokens,
          trace.id_tokens);
  const std::int64_t blocks = std::min(result.capacity_ids, most);
  require(blocks <= options.max_blocks, ErrorCode::bad_argument,
          "the trace has up to {} different blocks, and a replay keeps at most {}; give --capacity {} or less", most,
          options.max_blocks, options.max_blocks * trace.id_tokens);
  result.share_tokens = equal_shares(blocks, options.tenants)[0] * trace.id_tokens;
  CacheReplay replay(trace, options, blocks);
  result.tenants.resize(options.tenants);
  const auto requests = static_cast<std::int64_t>(trace.requests.size());
  const std::int64_t interval = std::max<std::int64_t>(1, (requests + kReplayIntervals - 1) / kReplayIntervals);
  for (const TraceRequest& request : trace.requests) {
    if (interrupted()) break;
    if (result.total.requests % interval == 0) result.over_time.emplace_back();
    const ReplayCounts counts = replay.serve(request, result.total.requests + 1);
    result.total.add(counts);
    result.over_time.back().add(counts);
    result.tenants[tenant_of(request, options.tenants)].add(counts);
    if (counts.hits > 0) result.recomputed.push_back(counts.recomputed_tokens);
    if (options.request_done) options.request_done();
  }
  return result;
}

}  // namespace kv4::cli
