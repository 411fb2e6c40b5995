// A trace through a real cache: every request's bytes are made and kept, several requests run at once, and what a hit
// gives is compared with the same request computed cold.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kv4/block_allocator.h"
#include "kv4/model_config.h"
#include "kv4/options.h"
#include "kv4/statistics.h"
#include "replay_cache.h"
#include "tier/redis_slots.h"
#include "tier/tier_chain.h"

namespace kv4::cli {

/// How things stand; during the call only.
struct ReplayMoment {
  const ReplayCounts& counts;  // so far
  const CacheStatistics& cache;
  const BlockAllocator& blocks;
  std::span<const tier::ChainStats> tiers;
};

struct DataReplayOptions {
  ModelConfig config;
  CacheOptions cache;  // formats, layers and prefix policies; sizes are filled in
  std::int64_t capacity_tokens = 0;
  int tenants = 1;
  std::int64_t host_bytes = 0;  // of a tier in host memory; 0: none
  std::string disk;             // directory of a tier on disk; empty: none
  std::int64_t disk_bytes = std::int64_t{16} << 30;
  std::vector<tier::RedisAddress> remote;  // of a tier in a Redis cluster, some of its servers; empty: none
  double verify = 0;                       // share of the requests that are also computed cold
  std::uint64_t seed = 1;
  std::string device = "cpu";
  int threads = 1;
  std::function<void()> request_done;              // for progress; may be empty
  std::function<void(const ReplayMoment&)> watch;  // after every request, and at the end; may be empty
};

/// What a tier did.
struct TierUse {
  std::string name;
  std::int64_t hits = 0, misses = 0, hit_bytes = 0;
  std::int64_t stored = 0, stored_bytes = 0, refused = 0;
  std::int64_t records = 0, bytes = 0;  // kept at the end
};

struct DataReplayResult {
  ReplayResult cache;
  std::int64_t skipped_requests = 0;  // longer than the cache
  std::int64_t verified_requests = 0, verified_blocks = 0;
  std::int64_t wrong_bytes = 0;
  std::int64_t computed_tokens = 0;        // through all layers, replayed and generated ones included
  std::vector<double> admit_s, prefill_s;  // [requests that were not skipped]
  std::int64_t stored_bytes = 0;           // of blocks and snapshots that are kept at the end
  std::int64_t loaded_blocks = 0;          // came from tiers
  std::vector<TierUse> tiers;
};

/// Token ids and inputs of a block follow from the trace's id, so two requests agree exactly as far as their ids do.
DataReplayResult replay_data(const Trace& trace, const DataReplayOptions& options);

}  // namespace kv4::cli
