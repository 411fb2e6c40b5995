// A model small enough to check every byte of its cache, and formats that fit its widths.
#pragma once

#include <utility>
#include <vector>

#include "kv4/schema.h"

namespace kv4::test {

/// Window 8, CSA 4, HCA 8.
inline ModelConfig narrow_model(std::vector<LayerKind> kinds) {
  ModelConfig c;
  c.name = "narrow";
  c.num_layers = static_cast<int>(kinds.size());
  c.kinds = std::move(kinds);
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

inline CacheOptions narrow_options() {
  CacheOptions o;
  o.row_format = Format::fp8_row;
  o.index_format = Format::nvfp4;
  return o;
}

}  // namespace kv4::test
