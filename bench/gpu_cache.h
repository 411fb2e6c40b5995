// A cache on the GPU with inputs and weights from the pool of random numbers.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "gpu_bench.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::bench {

/// V4-Flash's widths in `layers` layers of one kind: enough layers to keep their data out of L2.
ModelConfig layers_of(LayerKind kind, int layers);

class GpuCache {
 public:
  GpuCache(Bench& bench, const ModelConfig& config, const CacheOptions& options);

  KVCacheManager& manager() { return *manager_; }
  const CacheSchema& schema() const { return manager_->schema(); }
  const std::vector<RequestId>& requests() const { return requests_; }
  std::vector<int> layers(LayerKind kind) const;

  void admit(int count);
  /// Forks the existing requests in turn until there are `count` requests.
  void fork(int count);
  /// Advances each request by `tokens` through every layer, in the largest steps that the cache allows. `append` false:
  /// only the lengths.
  void extend(std::int64_t tokens, bool append = true);
  /// Opens a step of `count` tokens for each of the first `requests` requests.
  Step prepare(int requests, int count);
  /// The next inputs for a layer of the open step.
  AppendInputs next_inputs(int layer, std::int64_t tokens, bool projection = false);
  /// Restores the fold watermarks and undo positions of the open step's preparation, so that the next append runs as
  /// the first.
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
