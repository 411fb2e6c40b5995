// The whole cache path of a V4-Flash decode step as one graph: append, index_topk (layers with index keys) and attend
// in each of the 43 layers. Above 16 requests some share the blocks of their contexts, as forks do: 64 contexts of a
// million tokens do not fit into one GPU.
#include <fmt/format.h>

#include <algorithm>

#include "backend/backend.h"
#include "checks/touched_bytes.h"
#include "gpu_cache.h"

namespace kv4::bench {
namespace {

constexpr int kDistinct = 16, kStepTokens = 32768;
constexpr double kMostLaunches = 150;
constexpr int kUpdateLaunches = 2;  // of prepare_forward

struct StepCase {
  int batch;
  std::int64_t context;
};

CacheOptions step_options(const StepCase& c) {
  const int distinct = std::min(c.batch, kDistinct);
  CacheOptions options;
  options.max_requests = c.batch;
  options.spare_slots = distinct;
  options.max_context = c.context + 128;
  options.num_blocks = (c.context / 128 + 2) * distinct + 2 * c.batch;
  options.max_step_tokens = kStepTokens;
  return options;
}

TensorView as_heads(const TensorView& t, std::int64_t heads, std::int64_t width) {
  return {t.data, t.dtype, {t.shape[0], heads, width}};
}

/// Inputs and outputs of one layer.
class LayerWork {
 public:
  LayerWork(Bench& bench, GpuCache& cache, const LayerCacheSchema& layer, int batch)
      : layer_(layer.spec.layer),
        inputs_(cache.next_inputs(layer.spec.layer, batch)),
        topk_(bench.backend, 4 * std::int64_t{batch} * cache.schema().config.index_topk),
        out_(bench.backend, 2 * std::int64_t{batch} * cache.schema().config.num_query_heads * layer.window.row.width) {
    const ModelConfig& config = cache.schema().config;
    const std::int64_t heads = config.num_query_heads, width = layer.window.row.width;
    attend_.q = as_heads(bench.inputs.bf16(batch, heads * width), heads, width);
    attend_.sink = bench.inputs.f32(heads);
    result_ = TensorView(out_.data(), DType::bf16, {batch, heads, width});
    if (layer.pages.size() < 2) return;
    const std::int64_t index_heads = config.index_heads, index_width = config.index_dim;
    index_.q = as_heads(bench.inputs.bf16(batch, index_heads * index_width), index_heads, index_width);
    index_.weights = bench.inputs.f32(batch, index_heads);
    chosen_ = TensorView(topk_.data(), DType::i32, {batch, config.index_topk});
    attend_.topk = chosen_;
  }

  void run(KVCacheManager& manager) const {
    LayerCacheHandle handle = manager.acquire(layer_);
    handle.append(inputs_);
    if (!index_.q.empty()) handle.index_topk(index_, chosen_);
    handle.attend(attend_, result_);
  }

 private:
  int layer_;
  AppendInputs inputs_;
  IndexInputs index_;
  AttendInputs attend_;
  DeviceMemory topk_, out_;
  TensorView chosen_, result_;
};

/// Bytes of one request in one layer: append, index keys, attended rows, queries and results.
std::int64_t layer_bytes(const CacheSchema& schema, const LayerCacheSchema& layer, std::int64_t context) {
  const ModelConfig& config = schema.config;
  std::int64_t rows = config.window;
  std::int64_t bytes = checks::append_bytes(layer, context, 1);
  if (layer.pages.size() > 1) {
    const std::int64_t keys = (context + 1) / layer.pages[1].kind.ratio;
    bytes += keys * layer.pages[1].row.bytes() + 2 * std::int64_t{config.index_heads} * config.index_dim;
    rows += std::min<std::int64_t>(keys, config.index_topk);
  } else if (!layer.pages.empty()) {
    rows += (context + 1) / layer.pages[0].kind.ratio;
  }
  return bytes + rows * layer.window.row.bytes() + 2 * 2 * std::int64_t{config.num_query_heads} * config.head_dim;
}

void add_step(Bench& bench, const StepCase& c) {
  GpuCache cache(bench, model_preset("v4-flash"), step_options(c));
  cache.admit(std::min(c.batch, kDistinct));
  cache.extend(c.context);
  cache.fork(c.batch);
  const Step step = cache.prepare(c.batch, 1);
  std::vector<LayerWork> work;
  std::int64_t bytes = 0;
  work.reserve(cache.schema().layers.size());
  for (const LayerCacheSchema& layer : cache.schema().layers) {
    work.emplace_back(bench, cache, layer, c.batch);
    bytes += c.batch * layer_bytes(cache.schema(), layer, c.context);
  }
  const auto run_all = [&] {
    for (const LayerWork& w : work) w.run(cache.manager());
  };
  const std::string name = fmt::format("decode step b={} at {}K", c.batch, c.context / 1024);
  Row launches;
  launches.name = name + ", launches";
  launches.count = static_cast<double>(bench.timer.count_nodes(run_all) + kUpdateLaunches);
  launches.aim = {Aim::Kind::most_count, kMostLaunches};
  bench.add(launches);
  Row row;
  row.name = name;
  row.us = bench.timer.replay_us(run_all, [&] { cache.restore_marks(); });
  row.bytes = bytes;
  row.floor_us = std::max(bench.copy_us(bytes), bench.empty_us * launches.count);
  bench.add(row);
  cache.manager().abort(step);
}

}  // namespace

void add_decode_step_rows(Bench& bench) {
  for (const std::int64_t context : {std::int64_t{8} << 10, std::int64_t{128} << 10, std::int64_t{1023} << 10})
    for (const int batch : {1, 16, 64}) {
      if (bench.quick && context > 128 << 10) continue;
      add_step(bench, {batch, context});
    }
}

}  // namespace kv4::bench
