// A cache for benchmarks: some layers, some requests, and inputs that come from memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cases.h"
#include "checks/copy_baseline.h"
#include "checks/inputs.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::bench {

/// The first layer of a kind; nullopt where the model has none.
std::optional<int> first_layer(const ModelConfig& config, LayerKind kind);

const char* kind_name(LayerKind kind);  // "csa", as in the names of cases

struct StepSpec {
  RequestId request = kNoRequest;
  int count = 1;
};

class BenchCache {
 public:
  BenchCache(const BenchSettings& settings, const CacheOptions& options);

  KVCacheManager& manager() { return *manager_; }
  const CacheSchema& schema() const { return manager_->schema(); }
  RequestId admit();
  /// Brings a request to `length` through every layer, in the longest steps that the cache takes.
  void prefill(RequestId request, std::int64_t length);
  /// Prepares a step with the tokens of its items in order.
  Step prepare(std::span<const StepSpec> items);
  /// Makes a request of `length` tokens quickly: imports the image and the blocks of a short request as its own.
  RequestId plant(std::int64_t length);
  void release_all();
  const std::vector<RequestId>& requests() const { return requests_; }

  /// Inputs of `tokens` tokens for an owned layer. Calls rotate through sets that together exceed any cache.
  AppendInputs next_inputs(std::size_t layer, int tokens);

 private:
  struct InputSets {
    std::vector<checks::LayerInputs> sets;
    std::size_t next = 0;
  };
  struct Donor {
    CanonicalImage image;
    std::vector<std::byte> block;
  };
  void make_inputs(std::size_t layer);
  const Donor& donor(std::int64_t length);

  std::unique_ptr<checks::InputGenerator> generator_;
  std::unique_ptr<checks::SeededWeights> weights_;
  std::unique_ptr<KVCacheManager> manager_;
  std::vector<InputSets> inputs_;  // per owned layer, each set of max_step_tokens
  std::vector<std::int32_t> token_ids_;
  std::vector<RequestId> requests_;
  std::map<std::int64_t, Donor> donors_;  // by tokens in the open block
};

/// A step through the cache's first layer. Times the append alone, or `with_control` prepare_forward and commit too.
Sample timed_step(BenchCache& cache, std::span<const StepSpec> items, bool with_control);

}  // namespace kv4::bench
