#include "run_steps.h"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "touched_bytes.h"

namespace kv4::checks {

StepDriver::StepDriver(KVCacheManager& manager, std::shared_ptr<Backend> backend, const InputGenerator& generator,
                       CopyBaseline* copy)
    : manager_(manager), tensors_(std::move(backend)), generator_(generator), copy_(copy) {
  const CacheSchema& schema = manager.schema();
  for (std::size_t i = 0; i < schema.layers.size(); ++i) {
    if (schema.layers[i].spec.group != 0) continue;
    layers_.push_back(i);
    if (copy_) buffers_.emplace_back(schema.layers[i], schema.options.max_step_tokens);
  }
  if (copy_) return;
  for (const LayerKind kind : {LayerKind::swa, LayerKind::csa, LayerKind::hca}) {
    const LayerCacheSchema* example = &schema.layers.front();
    for (const LayerCacheSchema& layer : schema.layers) {
      if (layer.spec.kind == kind) example = &layer;
    }
    buffers_.emplace_back(*example, example->spec.kind == kind ? schema.options.max_step_tokens : 0);
  }
}

LayerInputs& StepDriver::inputs_of(std::size_t layer) {
  const LayerKind kind = manager_.schema().layers[layers_[layer]].spec.kind;
  return buffers_[copy_ ? layer : static_cast<std::size_t>(kind)];
}

Expected<Step> StepDriver::prepare(std::span<const StepTokens> items) {
  token_ids_.clear();
  for (const TokenRef& token : tokens_) token_ids_.push_back(generator_.token_id(token));
  std::vector<StepItem> step_items;
  std::size_t at = 0;
  for (const StepTokens& item : items) {
    StepItem& out = step_items.emplace_back();
    out.request = item.request;
    out.count = static_cast<std::int32_t>(item.tokens.size());
    if (item.request != kNoRequest) {
      out.token_ids = std::span(token_ids_).subspan(at, item.tokens.size());
      out.position = item.tokens.front().position;
    }
    at += item.tokens.size();
  }
  const Stopwatch watch;
  Expected<Step> step = manager_.prepare_forward(step_items);
  times_.control_s += watch.seconds();
  return step;
}

void StepDriver::count_bytes(std::span<const StepTokens> items) {
  std::int64_t bytes = 0;
  for (const std::size_t layer : layers_) {
    for (const StepTokens& item : items) {
      if (item.request == kNoRequest) continue;
      const LayerCacheSchema& schema = manager_.schema().layers[layer];
      const std::int64_t start = item.tokens.front().position, count = static_cast<std::int64_t>(item.tokens.size());
      bytes += append_bytes(schema, start, count) + undo_row_bytes(manager_.schema(), schema, start, count);
    }
  }
  times_.touched_bytes += bytes;
  if (copy_) times_.copy_s += copy_->seconds(bytes);
}

void StepDriver::wait() {
  const Stopwatch watch;
  manager_.synchronize();
  times_.append_s += watch.seconds();
}

void StepDriver::step(std::span<const StepTokens> items, const std::function<void()>& inspect) {
  const Shortage shortage = try_step(items, inspect);
  if (shortage != Shortage::none) throw std::runtime_error(fmt::format("the cache ran out of {}", to_string(shortage)));
}

Shortage StepDriver::try_step(std::span<const StepTokens> items, const std::function<void()>& inspect) {
  tokens_.clear();
  for (const StepTokens& item : items) tokens_.insert(tokens_.end(), item.tokens.begin(), item.tokens.end());
  const auto fill = [&](std::size_t i) {
    inputs_of(i).fill(generator_, manager_.schema().layers[layers_[i]].spec.layer, tokens_);
    return tensors_.in(inputs_of(i).view(static_cast<int>(tokens_.size())));
  };
  std::vector<AppendInputs> ready;
  for (std::size_t i = 0; copy_ && i < layers_.size(); ++i) ready.push_back(fill(i));
  const Expected<Step> step = prepare(items);
  if (!step) {
    tensors_.clear();
    return step.error();
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const AppendInputs inputs = copy_ ? ready[i] : fill(i);
    LayerCacheHandle handle = manager_.acquire(manager_.schema().layers[layers_[i]].spec.layer);
    const Stopwatch watch;
    handle.append(inputs);
    times_.append_s += watch.seconds();
    if (!copy_) tensors_.clear();
  }
  wait();
  tensors_.clear();
  if (inspect) inspect();
  const Stopwatch watch;
  manager_.commit(*step);
  times_.control_s += watch.seconds();
  ++times_.steps;
  count_bytes(items);
  return Shortage::none;
}

}  // namespace kv4::checks
