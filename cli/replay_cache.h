// A trace against a prefix cache without bytes: its hits, and the tokens they save.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kv4/prefix_cache.h"
#include "prefix/eviction.h"
#include "replay_trace.h"

namespace kv4::cli {

/// Limits a trace of unknown origin: the index takes some 120 bytes per block.
constexpr std::int64_t kMaxForeignBlocks = 1 << 22;
constexpr std::int64_t kMaxBlocks = 1 << 25;

struct ReplayOptions {
  std::int64_t capacity_tokens = 0;      // 0: nothing is ever evicted
  std::int64_t max_blocks = kMaxBlocks;  // kept at a time
  EvictionKind eviction = EvictionKind::lru;
  SnapshotPolicy snapshots;            // where hits can resume; positions are rounded to the trace's ids
  int tenants = 1;                     // each has an equal share that others cannot evict
  std::function<void()> request_done;  // for progress; may be empty
};

/// Counts of some requests.
struct ReplayCounts {
  std::int64_t requests = 0;
  std::int64_t ids = 0, hit_ids = 0;  // in the trace's own blocks, a last partial one included
  std::int64_t input_tokens = 0;
  std::int64_t hit_tokens = 0;         // multiples of 128; at least one token of each prompt remains
  std::int64_t hits = 0;               // requests that found something
  std::int64_t recomputed_tokens = 0;  // found, but behind the last snapshot
  std::int64_t evicted_ids = 0;

  double block_hit_rate() const { return share(hit_ids, ids); }
  double token_hit_rate() const { return share(hit_tokens, input_tokens); }
  double recomputed_tokens_per_hit() const { return share(recomputed_tokens, hits); }
  void add(const ReplayCounts& other);

 private:
  static double share(std::int64_t part, std::int64_t all) {
    return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
  }
};

struct ReplayResult {
  ReplayCounts total;
  std::int64_t capacity_ids = 0;
  std::int64_t share_tokens = 0;         // of each tenant
  std::vector<ReplayCounts> over_time;   // [at most kReplayIntervals]: equal numbers of requests, fewer in the last
  std::vector<ReplayCounts> tenants;     // [tenants]
  std::vector<std::int64_t> recomputed;  // [hits]: recomputed tokens of each hit
};
constexpr std::int64_t kReplayIntervals = 100;

/// Blocks of each tenant that others cannot evict: equal parts of the whole cache.
std::vector<std::int64_t> equal_shares(std::int64_t capacity_blocks, int tenants);

/// Requests that begin with the same id belong to one tenant.
TenantId tenant_of(const TraceRequest& request, int tenants);

/// Each request first finds its longest prefix, then stores all its ids. Throws Error(bad_file) where an id follows
/// different ids, because it must stand for all tokens before it.
ReplayResult replay_cache(const Trace& trace, const ReplayOptions& options);

}  // namespace kv4::cli
