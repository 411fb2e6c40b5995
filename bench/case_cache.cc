#include "case_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "backend/cpu/cpu_backend.h"
#include "checks/touched_bytes.h"

namespace kv4::bench {
namespace {

constexpr std::int64_t kInputBytes = std::int64_t{96} << 20;  // all sets of a layer: more than an L3 cache holds
constexpr std::size_t kMostSets = 16384;

template <class T>
T granted(const Expected<T>& value) {
  if (!value) throw std::runtime_error(fmt::format("the benchmark's cache ran out of {}", to_string(value.error())));
  return *value;
}

}  // namespace

std::optional<int> first_layer(const ModelConfig& config, LayerKind kind) {
  const auto found = std::find(config.kinds.begin(), config.kinds.end(), kind);
  if (found == config.kinds.end()) return std::nullopt;
  return static_cast<int>(found - config.kinds.begin());
}

const char* kind_name(LayerKind kind) {
  return kind == LayerKind::swa ? "swa" : kind == LayerKind::csa ? "csa" : "hca";
}

BenchCache::BenchCache(const BenchSettings& settings, const CacheOptions& options)
    : generator_(std::make_unique<checks::InputGenerator>(1)) {
  manager_ = std::make_unique<KVCacheManager>(settings.config, options,
                                              cpu::make_cpu_backend_on(settings.threads, *settings.kernels));
  weights_ = std::make_unique<checks::SeededWeights>(manager_->schema(), *generator_);
  weights_->bind(*manager_);
  inputs_.resize(manager_->schema().layers.size());
  token_ids_.resize(manager_->schema().options.max_step_tokens, 7);
}

RequestId BenchCache::admit() {
  requests_.push_back(granted(manager_->admit()));
  return requests_.back();
}

void BenchCache::release_all() {
  for (const RequestId request : requests_) manager_->release(request);
  requests_.clear();
}

Step BenchCache::prepare(std::span<const StepSpec> items) {
  std::vector<StepItem> step_items;
  std::size_t at = 0;
  for (const StepSpec& item : items) {
    const std::size_t count = item.count;
    step_items.push_back({item.request, item.count, std::span(token_ids_).subspan(at, count), -1});
    at += count;
  }
  return granted(manager_->prepare_forward(step_items));
}

void BenchCache::prefill(RequestId request, std::int64_t length) {
  while (manager_->length(request) < length) {
    const std::int64_t left = length - manager_->length(request);
    const StepSpec item{request, static_cast<int>(std::min<std::int64_t>(left, schema().options.max_step_tokens))};
    const Step step = prepare(std::span(&item, 1));
    for (std::size_t i = 0; i < schema().layers.size(); ++i) {
      manager_->acquire(schema().layers[i].spec.layer).append(next_inputs(i, item.count));
    }
    manager_->commit(step);
  }
}

void BenchCache::make_inputs(std::size_t layer) {
  const LayerCacheSchema& layer_schema = schema().layers[layer];
  const int tokens = schema().options.max_step_tokens;
  // The data of many layers exceeds the caches with fewer sets.
  const std::int64_t wanted = kInputBytes / static_cast<std::int64_t>(schema().layers.size());
  const std::int64_t sets = wanted / (checks::LayerInputs::token_bytes(layer_schema) * tokens) + 1;
  std::vector<checks::TokenRef> refs(tokens);
  for (std::uint64_t s = 0; s < std::min<std::uint64_t>(static_cast<std::uint64_t>(sets), kMostSets); ++s) {
    for (std::size_t t = 0; t < refs.size(); ++t) refs[t] = {s, static_cast<std::int64_t>(t)};
    inputs_[layer].sets.emplace_back(layer_schema, tokens).fill(*generator_, layer_schema.spec.layer, refs);
  }
}

/// Exports two full blocks and an open one. Windows are full from the first block on, so the image has the size of any
/// longer request's image.
const BenchCache::Donor& BenchCache::donor(std::int64_t length) {
  const std::int64_t block = schema().block_tokens, open = length % block;
  const std::int64_t shortest = (schema().config.window + block - 1) / block * block + block;
  const auto [found, made] = donors_.try_emplace(open);
  if (!made) return found->second;
  const RequestId request = granted(manager_->admit());
  prefill(request, shortest + open);
  found->second.image = manager_->export_image(request);
  const std::vector<std::byte> blocks = manager_->export_blocks(request);
  found->second.block.assign(blocks.begin(), blocks.begin() + schema().block_image_bytes);
  manager_->release(request);
  return found->second;
}

RequestId BenchCache::plant(std::int64_t length) {
  const Donor& from = donor(length);
  CanonicalImage image = from.image;
  image.lengths[0] = length;
  const std::int64_t blocks = (length + schema().block_tokens - 1) / schema().block_tokens;
  std::vector<std::byte> bytes;
  bytes.reserve(blocks * from.block.size());
  for (std::int64_t b = 0; b < blocks; ++b) bytes.insert(bytes.end(), from.block.begin(), from.block.end());
  const std::vector<std::int32_t> token_ids(length, 7);
  requests_.push_back(granted(manager_->import_image(image, token_ids, bytes)));
  return requests_.back();
}

Sample timed_step(BenchCache& cache, std::span<const StepSpec> items, bool with_control) {
  KVCacheManager& manager = cache.manager();
  const LayerCacheSchema& layer = cache.schema().layers[0];
  Sample sample{0, 0, 0};
  for (const StepSpec& item : items) {
    const std::int64_t length = manager.length(item.request);
    sample.bytes += checks::append_bytes(layer, length, item.count) +
                    checks::undo_row_bytes(cache.schema(), layer, length, item.count);
    sample.items += item.count;
  }
  const AppendInputs inputs = cache.next_inputs(0, static_cast<int>(sample.items));
  const checks::Stopwatch all;
  const Step step = cache.prepare(items);
  LayerCacheHandle handle = manager.acquire(layer.spec.layer);
  const checks::Stopwatch append;
  handle.append(inputs);
  sample.seconds = append.seconds();
  manager.commit(step);
  if (with_control) sample.seconds = all.seconds();
  return sample;
}

AppendInputs BenchCache::next_inputs(std::size_t layer, int tokens) {
  InputSets& inputs = inputs_[layer];
  if (inputs.sets.empty()) make_inputs(layer);
  inputs.next = (inputs.next + 1) % inputs.sets.size();
  return inputs.sets[inputs.next].view(tokens);
}

}  // namespace kv4::bench
