// Options of small caches with a prefix cache.
#pragma once

#include "support/harness.h"

namespace kv4::test {

/// 64 blocks of 16 tokens, and room for contexts of ten of them.
inline CacheOptions prefix_options(const SnapshotPolicy& policy, const FormatCase& format = format_cases()[0]) {
  CacheOptions o = options_for(format);
  o.block_tokens = 16;
  o.max_context = 160;
  o.num_blocks = 64;
  o.max_step_tokens = 256;
  o.max_rewind_tokens = 3;
  o.prefix.enabled = true;
  o.prefix.weights_id = "weights";
  o.prefix.snapshots = policy;
  o.prefix.num_snapshots = 16;
  return o;
}

}  // namespace kv4::test
