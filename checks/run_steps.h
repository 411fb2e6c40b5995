// Runs steps of generated tokens through all backbone layers of a cache and measures their time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "copy_baseline.h"
#include "device_tensors.h"
#include "inputs.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::checks {

/// Tokens of one request in a step; kNoRequest: padding.
struct StepTokens {
  RequestId request = kNoRequest;
  std::vector<TokenRef> tokens;
};

struct StepTimes {
  std::int64_t steps = 0;
  std::int64_t touched_bytes = 0;  // minimum that the appends read and write
  double append_s = 0;             // inside append, until its work is done
  double control_s = 0;            // prepare_forward and commit
  double copy_s = 0;               // a copy of touched_bytes
};

class StepDriver {
 public:
  /// Without `copy`, layers share buffers that are filled just before an append reads them. With `copy`, the baseline,
  /// each layer's own buffer is filled before the step, so that inputs come from memory, as an engine's do.
  StepDriver(KVCacheManager& manager, std::shared_ptr<Backend> backend, const InputGenerator& generator,
             CopyBaseline* copy = nullptr);

  /// `inspect` runs after the last layer, before commit. Where the cache has no room, returns the shortage and does
  /// nothing else.
  Shortage try_step(std::span<const StepTokens> items, const std::function<void()>& inspect = {});
  /// The same for a cache of sufficient size: throws std::runtime_error on a shortage.
  void step(std::span<const StepTokens> items, const std::function<void()>& inspect = {});
  const StepTimes& times() const { return times_; }

 private:
  LayerInputs& inputs_of(std::size_t layer);
  Expected<Step> prepare(std::span<const StepTokens> items);
  void wait();  // until the appends are done
  void count_bytes(std::span<const StepTokens> items);

  KVCacheManager& manager_;
  DeviceTensors tensors_;  // of the step
  const InputGenerator& generator_;
  CopyBaseline* copy_;
  std::vector<std::size_t> layers_;   // owned backbone layers
  std::vector<LayerInputs> buffers_;  // one per layer, or one per kind of layer
  std::vector<TokenRef> tokens_;
  std::vector<std::int32_t> token_ids_;
  StepTimes times_;
};

}  // namespace kv4::checks
