// The whole cache path of a V4-Flash decode step as one graph: append, index_topk (layers with index keys) and attend
// in each of the 43 layers. Above 16 requests some share the blocks of their contexts, as forks do, because 64 contexts
// of a million tokens exceed one GPU.
#include <fmt/format.h>

#include <algorithm>

#include "backend/backend.h"
#include "checks/touched_bytes.h"
#include "layer_work.h"

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
  const LayerResults results(bench, cache.schema(), c.batch);
  std::vector<LayerWork> work;
  std::int64_t bytes = 0;
  work.reserve(cache.schema().layers.size());
  for (const LayerCacheSchema& layer : cache.schema().layers) {
    work.emplace_back(bench, cache, layer, c.batch, results);
    bytes += c.batch * layer_bytes(cache.schema(), layer, c.context);
  }
  std::vector<Launch> operations;
  for (const LayerWork& w : work)
    for (Launch& launch : w.all()) operations.push_back(std::move(launch));
  const auto run_all = [&] {
    for (const Launch& launch : operations) launch.queue();
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
  bench.cell(name + kAfterOrdinary, [&] {  // one ordinary kernel before each operation of each layer
    const int count = static_cast<int>(operations.size());
    bench.add_after_ordinary(
        row, count, [&](int i) { return operations[static_cast<std::size_t>(i)]; }, [&] { cache.restore_marks(); },
        count);
  });
  cache.manager().abort(step);
}

}  // namespace

void add_decode_step_rows(Bench& bench) {
  for (const std::int64_t context : {std::int64_t{8} << 10, std::int64_t{128} << 10, std::int64_t{1023} << 10})
    for (const int batch : {1, 16, 64}) {
      if (bench.quick && context > 128 << 10) continue;
      bench.cell(fmt::format("decode step b={} at {}K", batch, context / 1024),
                 [&] { add_step(bench, {batch, context}); });
    }
}

}  // namespace kv4::bench
