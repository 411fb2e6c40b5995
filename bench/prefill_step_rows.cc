// The cache's work in one prefill chunk of V4-Flash: append, index_topk (layers with index keys) and attend in each of
// the 43 layers, for the last 4,096 tokens of a context. The whole chunk is one graph, and so is each part.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "checks/touched_bytes.h"
#include "layer_work.h"

namespace kv4::bench {
namespace {

constexpr int kChunk = 4096;
constexpr double kFlopPerUs = 790e6, kFp8FlopPerUs = 1333e6;  // bf16 and fp8 products: H200, 2026-11-16

CacheOptions chunk_options(std::int64_t context, Format keys) {
  CacheOptions options;
  options.index_format = keys;
  options.max_requests = 1;
  options.max_context = context;
  options.num_blocks = context / 128 + 2;
  options.max_step_tokens = kChunk;
  return options;
}

/// Number of rows of `ratio` that the chunk's tokens see; at most `limit` per token.
double seen(std::int64_t start, std::int64_t ratio, std::int64_t limit) {
  double sum = 0;
  for (std::int64_t i = 0; i < kChunk; ++i) sum += static_cast<double>(std::min((start + i + 1) / ratio, limit));
  return sum;
}

/// Microseconds of a chunk after `start` tokens at the floor: bytes of append, FLOP of scores and attention.
struct Floors {
  double append = 0, index = 0, attend = 0;
};

Floors floors(const Bench& bench, const CacheSchema& schema, std::int64_t start) {
  const ModelConfig& config = schema.config;
  Floors sum;
  for (const LayerCacheSchema& layer : schema.layers) {
    sum.append += bench.copy_us(checks::append_bytes(layer, start, kChunk));
    double rows = seen(start, 1, config.window);
    if (layer.pages.size() > 1) {
      const double keys = seen(start, layer.pages[1].kind.ratio, start + kChunk);
      sum.index += 2.0 * keys * config.index_heads * config.index_dim / kFp8FlopPerUs;
      rows += seen(start, layer.pages[0].kind.ratio, config.index_topk);
    } else if (!layer.pages.empty()) {
      rows += seen(start, layer.pages[0].kind.ratio, start + kChunk);
    }
    sum.attend += 4.0 * rows * config.num_query_heads * config.head_dim / kFlopPerUs;
  }
  return sum;
}

void add_chunk(Bench& bench, std::int64_t context, Format keys, const std::string& name) {
  GpuCache cache(bench, model_preset("v4-flash"), chunk_options(context, keys));
  const std::int64_t start = context - kChunk;
  cache.admit(1);
  cache.extend(start);
  const Step step = cache.prepare(1, kChunk);
  const LayerResults results(bench, cache.schema(), kChunk);
  std::vector<LayerWork> work;
  work.reserve(cache.schema().layers.size());
  for (const LayerCacheSchema& layer : cache.schema().layers) work.emplace_back(bench, cache, layer, kChunk, results);

  const Floors floor = floors(bench, cache.schema(), start);
  const auto measure = [&](const std::string& part, double floor_us, auto&& queue) {
    Row row;
    row.name = name + part;
    bench.cell(row.name, [&] {
      row.us = bench.timer.replay_us(
          [&] {
            for (const LayerWork& w : work) queue(w);
          },
          [&] { cache.restore_marks(); });
      row.floor_us = floor_us;
      bench.add(row);
    });
  };
  measure("", floor.append + floor.index + floor.attend, [](const LayerWork& w) {
    for (const Launch& launch : w.all()) launch.queue();
  });
  measure(", append", floor.append, [](const LayerWork& w) { w.append().queue(); });
  measure(", index_topk", floor.index, [](const LayerWork& w) {
    if (w.has_index()) w.index_topk().queue();
  });
  measure(", attend", floor.attend, [](const LayerWork& w) { w.attend().queue(); });
  cache.manager().abort(step);
}

}  // namespace

void add_prefill_step_rows(Bench& bench) {
  for (const Format keys : {Format::mxfp4, Format::fp8})
    for (const int thousands : {32, 128, 512}) {
      if (bench.quick && thousands > 32) continue;
      const std::string name = fmt::format("prefill step{} of {} at {}K", keys == Format::fp8 ? ", fp8," : "", kChunk,
                                           thousands);
      bench.cell(name, [&] { add_chunk(bench, std::int64_t{thousands} << 10, keys, name); });
    }
}

}  // namespace kv4::bench
