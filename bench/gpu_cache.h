// A cache on the GPU with inputs and weights from the pool of random numbers.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "gpu_bench.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::bench {

/// V4-Flash's widths, `layers` layers of one kind: as many as it takes to be cold.
ModelConfig layers_of(LayerKind kind, int layers);

class GpuCache {
 public:
  GpuCache(Bench& bench, const ModelConfig& config, const CacheOptions& options);

  KVCacheManager& manager() { return *manager_; }
  const CacheSchema& schema() const { return manager_->schema(); }
  const std::vector<RequestId>& requests() const { return requests_; }
  std::vector<int> layers(LayerKind kind) const;

  void admit(int count);
  /// Until there are `count` requests: forks of those there are, in turn.
  void fork(int count);
  /// All requests by `tokens` each, through every layer, in steps as large as the cache takes; `append` false: lengths
  /// only.
  void extend(std::int64_t tokens, bool append = true);
  /// Opens a step of `count` tokens for each of the first `requests` requests.
  Step prepare(int requests, int count);
  /// The next inputs for a layer of the open step.
  AppendInputs next_inputs(int layer, std::int64_t tokens, bool projection = false);
  /// Frontiers and undo positions as they were when the open step was prepared: the next append is a first one.
  void restore_marks();

 private:
  void keep_marks();

  Bench& bench_;
  std::unique_ptr<KVCacheManager> manager_;
  std::vector<RequestId> requests_;
  std::vector<std::int32_t> token_ids_;
  std::int64_t mark_bytes_ = 0;
  DeviceMemory fold_watermarks_, undo_rows_;
};

}  // namespace kv4::bench
