// The cache's work in one layer of a step, through the manager: append, index_topk where there are index keys, attend.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_cache.h"

namespace kv4::bench {

/// Results that the layers of a step write one after the other.
class LayerResults {
 public:
  /// For `tokens` tokens of a step.
  LayerResults(Bench& bench, const CacheSchema& schema, std::int64_t tokens);

  TensorView chosen(const CacheSchema& schema, std::int64_t tokens) const;
  TensorView out(const CacheSchema& schema, std::int64_t tokens) const;

 private:
  DeviceMemory topk_, out_;
};

/// Inputs of one layer of the open step. `results` must outlive it; layers that share them run one after the other.
class LayerWork {
 public:
  LayerWork(Bench& bench, GpuCache& cache, const LayerCacheSchema& layer, std::int64_t tokens,
            const LayerResults& results);

  bool has_index() const { return !index_.q.empty(); }
  /// Each queues one operation; its input, window rows or queries, is written by an engine's preceding kernel.
  Launch append() const;
  Launch index_topk() const;
  Launch attend() const;
  /// The layer's operations in order.
  std::vector<Launch> all() const;

 private:
  LayerCacheHandle handle() const { return cache_->manager().acquire(layer_); }

  GpuCache* cache_;
  int layer_;
  AppendInputs inputs_;
  IndexInputs index_;
  AttendInputs attend_;
  TensorView chosen_, result_;
};

}  // namespace kv4::bench
