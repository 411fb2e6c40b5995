// The state of a cache and its counts, as plain numbers: for metrics, logs and admission control.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kv4/prefix_cache.h"
#include "kv4/time_histogram.h"

namespace kv4 {

/// Numbers of tokens by size.
struct TokenHistogram {
  static constexpr int kBuckets = 16;
  std::array<std::int64_t, kBuckets>
      counts{};  // [i]: at most bound(i) and more than bound(i - 1); the last has no bound
  std::int64_t sum = 0;

  /// The most tokens of a bucket.
  static constexpr std::int64_t bound(int bucket) { return std::int64_t{128} << bucket; }
  /// Counts one request or prompt.
  void add(std::int64_t tokens) {
    int bucket = 0;
    while (bucket + 1 < kBuckets && tokens > bound(bucket)) ++bucket;
    ++counts[static_cast<std::size_t>(bucket)];
    sum += tokens;
  }
};

/// A tenant's part of the prefix cache.
struct TenantUse {
  std::int64_t share_blocks = 0;  // blocks that others cannot evict
  std::int64_t blocks = 0;        // kept, those of running requests included
};

/// How often a call was refused, by Shortage.
struct ShortageCounts {
  std::int64_t requests = 0, blocks = 0, slots = 0;
};

/// Calls that returned since the cache was made, including those with a shortage, without those that threw.
struct CallTimes {
  TimeHistogram admit, prepare_forward;
  TimeHistogram tier_load;        // TieredPrefix: from start_load() until the load is done
  TimeHistogram tier_save;        // TieredPrefix::save()
  TimeHistogram session_restore;  // restore_session, restore_session_file
  TimeHistogram session_save;     // save_session, save_session_file
};

/// A copy of the figures at one time.
struct CacheStatistics {
  // Now.
  std::int64_t requests = 0, max_requests = 0;
  std::int64_t blocks = 0, free_blocks = 0, held_blocks = 0, evictable_blocks = 0;
  std::int64_t slots = 0, free_slots = 0;
  std::int64_t memory_bytes = 0;
  std::vector<TenantUse> tenants;  // of the prefix cache; empty: there is none
  // Since the cache was made.
  PrefixStatistics prefix;
  TokenHistogram usable_tokens;    // of every prompt
  TokenHistogram replayed_tokens;  // of every hit
  CallTimes times;
  ShortageCounts admit_shortages, prepare_forward_shortages;
};

}  // namespace kv4
