#include "layer_work.h"

namespace kv4::bench {
namespace {

TensorView as_heads(const TensorView& t, std::int64_t heads, std::int64_t width) {
  return {t.data, t.dtype, {t.shape[0], heads, width}};
}

Launch launch_of(const ConstTensorView& input, std::function<void()> queue) {
  std::int64_t values = 1;
  for (int i = 0; i < input.ndim; ++i) values *= input.shape[i];
  return {const_cast<void*>(input.data), 2 * values, std::move(queue)};
}

}  // namespace

LayerResults::LayerResults(Bench& bench, const CacheSchema& schema, std::int64_t tokens)
    : topk_(bench.backend, 4 * tokens * schema.config.index_topk),
      out_(bench.backend, 2 * tokens * schema.config.num_query_heads * schema.config.head_dim) {}

TensorView LayerResults::chosen(const CacheSchema& schema, std::int64_t tokens) const {
  return TensorView(topk_.data(), DType::i32, {tokens, schema.config.index_topk});
}

TensorView LayerResults::out(const CacheSchema& schema, std::int64_t tokens) const {
  return TensorView(out_.data(), DType::bf16, {tokens, schema.config.num_query_heads, schema.config.head_dim});
}

LayerWork::LayerWork(Bench& bench, GpuCache& cache, const LayerCacheSchema& layer, std::int64_t tokens,
                     const LayerResults& results)
    : cache_(&cache), layer_(layer.spec.layer), inputs_(cache.next_inputs(layer.spec.layer, tokens)) {
  const ModelConfig& config = cache.schema().config;
  const std::int64_t heads = config.num_query_heads, width = layer.window.row.width;
  attend_.q = as_heads(bench.inputs.bf16(tokens, heads * width), heads, width);
  attend_.sink = bench.inputs.f32(heads);
  result_ = results.out(cache.schema(), tokens);
  if (layer.pages.size() < 2) return;
  const std::int64_t index_heads = config.index_heads, index_width = config.index_dim;
  index_.q = as_heads(bench.inputs.bf16(tokens, index_heads * index_width), index_heads, index_width);
  index_.weights = bench.inputs.f32(tokens, index_heads);
  chosen_ = results.chosen(cache.schema(), tokens);
  attend_.topk = chosen_;
}

Launch LayerWork::append() const {
  return launch_of(inputs_.raw_kv, [this] { handle().append(inputs_); });
}

Launch LayerWork::index_topk() const {
  return launch_of(index_.q, [this] { handle().index_topk(index_, chosen_); });
}

Launch LayerWork::attend() const {
  return launch_of(attend_.q, [this] { handle().attend(attend_, result_); });
}

std::vector<Launch> LayerWork::all() const {
  std::vector<Launch> out = {append()};
  if (has_index()) out.push_back(index_topk());
  out.push_back(attend());
  return out;
}

}  // namespace kv4::bench
