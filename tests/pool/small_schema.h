// A schema small enough to check every byte.
#pragma once

#include "support/narrow_model.h"

namespace kv4::test_pool {

inline ModelConfig small_config() { return test::narrow_model({LayerKind::swa, LayerKind::csa, LayerKind::hca}); }

inline CacheOptions small_options() {
  CacheOptions o = test::narrow_options();
  o.block_tokens = 16;
  o.max_context = 64;
  o.max_requests = 2;
  o.spare_slots = 1;
  o.num_blocks = 6;
  o.max_step_tokens = 32;
  return o;
}

}  // namespace kv4::test_pool
