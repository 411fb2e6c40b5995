// What a cache has and what it has done, as plain numbers: for metrics, logs and whoever decides about admission.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kv4/prefix_cache.h"

namespace kv4 {

/// Numbers of tokens by size.
struct TokenHistogram {
  static constexpr int kBuckets = 16;
  std::array<std::int64_t, kBuckets>
      counts{};  // [i]: at most bound(i) and more than bound(i - 1); the last has no bound
  std::int64_t sum = 0;

  static constexpr std::int64_t bound(int bucket) { return std::int64_t{128} << bucket; }
  void add(std::int64_t tokens) {
    int bucket = 0;
    while (bucket + 1 < kBuckets && tokens > bound(bucket)) ++bucket;
    ++counts[static_cast<std::size_t>(bucket)];
    sum += tokens;
  }
};

struct TenantUse {
  std::int64_t share_blocks = 0;  // that others cannot evict
  std::int64_t blocks = 0;        // kept, those of running requests included
};

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
};

}  // namespace kv4
