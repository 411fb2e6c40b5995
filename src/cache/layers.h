// The owned layers as operations see them: where their rows lie, and the constants bound to them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "cache/cache_memory.h"
#include "cache/prefix_cache.h"
#include "cache/rope_tables.h"
#include "kv4/layer_cache_handle.h"
#include "kv4/params.h"

namespace kv4 {

class Layers {
 public:
  explicit Layers(CacheMemory& memory);

  std::span<const ops::LayerDesc> all() const { return descs_; }  // [owned layers]
  const ops::LayerDesc& operator[](int index) const { return descs_[index]; }
  const float* raw_norm_weight(int index) const { return raw_norm_weights_[index]; }  // null: not bound
  const std::uint16_t* key_weight(int index) const { return key_weights_[index]; }    // V4.1's owners; null: not bound
  /// V4.1: the candidates of the open step, which the candidate source writes and later rankers read.
  const ops::CandidateDesc& candidates() const { return candidates_; }

  // SWA layers rotate with one base; the other layers, and their entries, with another.
  const ops::RopeDesc& compress_rope() const { return compress_rope_; }
  const ops::RopeDesc& rope(int index) const { return descs_[index].num_kinds > 0 ? compress_rope_ : swa_rope_; }

  /// `in_step`: a step is open, and nothing can be bound.
  void bind_weights(int layer, const LayerWeights& weights, bool in_step);
  /// `prefix` (or null): its keys depend on the table, so no request may run.
  void bind_rope_table(const ConstTensorView& cos, const ConstTensorView& sin, bool in_step, PrefixCache* prefix,
                       int num_requests);

  std::int64_t memory_bytes() const;

 private:
  void bind_owner_weights(const LayerCacheSchema& schema, const LayerWeights& weights, const float* raw);

  CacheMemory& memory_;
  std::vector<ops::LayerDesc> descs_;
  std::vector<const float*> raw_norm_weights_;     // [owned layers]
  std::vector<const std::uint16_t*> key_weights_;  // [owned layers]
  ops::CandidateDesc candidates_;
  std::optional<RopeTables> swa_angles_, compress_angles_;
  ops::RopeDesc swa_rope_, compress_rope_;
};

}  // namespace kv4
