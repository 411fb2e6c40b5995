// A trace against a prefix cache without bytes: what is found, and what that saves.
#pragma once

#include <cstdint>
#include <functional>

#include "prefix/eviction.h"
#include "replay_trace.h"

namespace kv4::cli {

struct ReplayOptions {
  std::int64_t capacity_tokens = 0;  // 0: nothing is ever evicted
  EvictionKind eviction = EvictionKind::lru;
  std::function<void()> request_done;  // for progress; may be empty
};

struct ReplayResult {
  std::int64_t requests = 0;
  std::int64_t ids = 0, hit_ids = 0;  // in the trace's own blocks, a last partial one included
  std::int64_t input_tokens = 0;
  std::int64_t hit_tokens = 0;  // multiples of 128, and at least one token of each prompt remains
  std::int64_t capacity_ids = 0;
  std::int64_t evicted_ids = 0;
  double block_hit_rate() const { return ids == 0 ? 0 : static_cast<double>(hit_ids) / static_cast<double>(ids); }
  double token_hit_rate() const {
    return input_tokens == 0 ? 0 : static_cast<double>(hit_tokens) / static_cast<double>(input_tokens);
  }
};

/// Each request first finds its longest prefix, then stores all its ids. Throws Error(bad_file) where an id follows
/// different ids: then it does not stand for all tokens before it.
ReplayResult replay_cache(const Trace& trace, const ReplayOptions& options);

}  // namespace kv4::cli
