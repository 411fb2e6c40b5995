#include "gpu_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "backend/backend.h"

namespace kv4::bench {
namespace {

template <class T>
T granted(const Expected<T>& value) {
  if (!value) throw std::runtime_error(fmt::format("the benchmark's cache ran out of {}", to_string(value.error())));
  return *value;
}

std::int64_t mark_bytes(const KVCacheManager& manager, std::int32_t slots) {
  return std::int64_t{4} * slots * static_cast<std::int64_t>(manager.schema().layers.size());
}

}  // namespace

ModelConfig layers_of(LayerKind kind, int layers) {
  ModelConfig config = model_preset("v4-flash");
  config.num_layers = layers;
  config.kinds.assign(layers, kind);
  config.draft_hint = 0;
  return config;
}

GpuCache::GpuCache(Bench& bench, const ModelConfig& config, const CacheOptions& options)
    : bench_(bench),
      manager_(std::make_unique<KVCacheManager>(config, options, bench.backend)),
      token_ids_(options.max_step_tokens, 7),
      mark_bytes_(mark_bytes(*manager_, manager_->state_pool().num_slots())),
      fold_watermarks_(bench.backend, mark_bytes_),
      undo_rows_(bench.backend, mark_bytes_) {
  for (const LayerCacheSchema& layer : schema().layers) {
    LayerWeights weights;
    weights.raw_norm_weight = bench_.inputs.f32(layer.window.row.width);
    for (std::size_t k = 0; k < layer.pages.size(); ++k) {
      const RowKind& kind = layer.pages[k].kind;
      (k == 0 ? weights.position_bias : weights.index_position_bias) =
          bench_.inputs.f32(kind.ratio, layer.pending[k].columns);
      (k == 0 ? weights.norm_weight : weights.index_norm_weight) = bench_.inputs.f32(kind.width);
    }
    manager_->bind_weights(layer.spec.layer, weights);
  }
}

std::vector<int> GpuCache::layers(LayerKind kind) const {
  std::vector<int> out;
  for (const LayerCacheSchema& layer : schema().layers)
    if (layer.spec.kind == kind && layer.spec.group == 0) out.push_back(layer.spec.layer);
  return out;
}

void GpuCache::admit(int count) {
  for (int i = 0; i < count; ++i) requests_.push_back(granted(manager_->admit()));
}

void GpuCache::fork(int count) {
  for (std::size_t i = 0; std::ssize(requests_) < count; ++i)
    requests_.push_back(granted(manager_->fork(requests_[i])));
}

Step GpuCache::prepare(int requests, int count) {
  std::vector<StepItem> items;
  for (int i = 0; i < requests; ++i)
    items.push_back({requests_[i], count, std::span(token_ids_).subspan(i * count, count), -1});
  const Step step = granted(manager_->prepare_forward(items));
  keep_marks();
  return step;
}

void GpuCache::extend(std::int64_t tokens, bool append) {
  const int requests = static_cast<int>(requests_.size());
  const std::int64_t most = std::max<std::int64_t>(1, schema().options.max_step_tokens / requests);
  while (tokens > 0) {
    const int count = static_cast<int>(std::min(tokens, most));
    const Step step = prepare(requests, count);
    if (append)
      for (const LayerCacheSchema& layer : schema().layers)
        manager_->acquire(layer.spec.layer).append(next_inputs(layer.spec.layer, step.num_tokens));
    manager_->commit(step);
    tokens -= count;
  }
  manager_->synchronize();
}

AppendInputs GpuCache::next_inputs(int layer, std::int64_t tokens, bool projection) {
  const LayerCacheSchema& s = schema().layer(layer);
  AppendInputs out;
  out.raw_kv = bench_.inputs.bf16(tokens, s.window.row.width);
  out.raw_is_projection = projection;
  if (!s.pending.empty()) {
    out.kv = bench_.inputs.f32(tokens, s.pending[0].columns);
    out.gate = bench_.inputs.f32(tokens, s.pending[0].columns);
  }
  if (s.pending.size() > 1) {
    out.index_kv = bench_.inputs.f32(tokens, s.pending[1].columns);
    out.index_gate = bench_.inputs.f32(tokens, s.pending[1].columns);
  }
  return out;
}

void GpuCache::keep_marks() {
  StateCachePool& pool = manager_->state_pool();
  bench_.backend->copy(fold_watermarks_.data(), reinterpret_cast<const std::byte*>(pool.fold_watermarks()),
                       mark_bytes_);
  bench_.backend->copy(undo_rows_.data(), reinterpret_cast<const std::byte*>(pool.undo_positions()), mark_bytes_);
}

void GpuCache::restore_marks() {
  StateCachePool& pool = manager_->state_pool();
  bench_.backend->copy(reinterpret_cast<std::byte*>(pool.fold_watermarks()), fold_watermarks_.data(), mark_bytes_);
  bench_.backend->copy(reinterpret_cast<std::byte*>(pool.undo_positions()), undo_rows_.data(), mark_bytes_);
}

}  // namespace kv4::bench
