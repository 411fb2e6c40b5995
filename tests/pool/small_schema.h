// A schema small enough to look at every byte.
#pragma once

#include "kv4/schema.h"

namespace kv4::test_pool {

inline ModelConfig small_config() {
  ModelConfig c;
  c.name = "small";
  c.kinds = {LayerKind::swa, LayerKind::csa, LayerKind::hca};
  c.num_layers = 3;
  c.num_query_heads = 2;
  c.head_dim = 32;
  c.rope_dim = 8;
  c.window = 8;
  c.index_heads = 2;
  c.index_dim = 16;
  c.index_topk = 2;
  c.hca_ratio = 8;
  c.max_positions = 4096;
  return c;
}

inline CacheOptions small_options() {
  CacheOptions o;
  o.row_format = Format::fp8_row;
  o.index_format = Format::nvfp4;
  o.block_tokens = 16;
  o.max_context = 64;
  o.max_requests = 2;
  o.spare_slots = 1;
  o.num_blocks = 6;
  o.max_step_tokens = 32;
  return o;
}

}  // namespace kv4::test_pool
