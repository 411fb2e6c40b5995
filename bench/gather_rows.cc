// Gathers into dense bf16 tensors, and a plain scan of index keys, over all of V4-Flash with long contexts. A graph
// runs through the layers. Outputs rotate through a buffer larger than L2, unless the row's name says otherwise.
#include <fmt/format.h>

#include <algorithm>

#include "backend/backend.h"
#include "checks/touched_bytes.h"
#include "device_kernels.h"
#include "gpu_cache.h"

namespace kv4::bench {
namespace {

constexpr double kShare = 0.8;
constexpr int kRequests = 16, kTokensEach = 4;  // a step of 64 tokens
constexpr int kStepTokens = 32768;
constexpr int kPasses = 4;  // through the layers; makes the start of the graph negligible

/// Output buffer; its slices are used in rotation.
class OutputPool {
 public:
  explicit OutputPool(Bench& bench) : bench_(bench), memory_(bench.backend, kBytes), found_(bench.backend, 256) {}

  TensorView take(DType type, std::int64_t items, std::int64_t rows, std::int64_t width) {
    const std::int64_t bytes = items * rows * width * static_cast<std::int64_t>(element_bytes(type));
    if (next_ + bytes > kBytes) next_ = 0;
    TensorView out(memory_.data() + next_, type, {items, rows, width});
    next_ += (bytes + 255) / 256 * 256;
    return out;
  }
  /// [count] numbers besides the rows.
  TensorView lens(std::int64_t count) { return TensorView(take(DType::i32, 1, 1, count).data, DType::i32, {count}); }

  /// Runs `gather` into a poisoned bf16 tensor; returns an empty string if every number is finite afterwards.
  template <class Gather>
  std::string check(std::int64_t items, std::int64_t rows, std::int64_t width, Gather&& gather) {
    const TensorView out = take(DType::bf16, items, rows, width);
    const std::int64_t count = items * rows * width;
    bench_.backend->fill(static_cast<std::byte*>(out.data), 0xFF, 2 * count);
    bench_.backend->fill(found_.data(), 0, 4);
    gather(out);
    auto* found = reinterpret_cast<std::int32_t*>(found_.data());
    bench::check(count_bad_bf16(static_cast<const std::uint16_t*>(out.data), count, found, bench_.timer.stream()),
                 "count_bad_bf16");
    checks::HostCopy host(bench_.backend);
    const std::int32_t bad = host.array(found, 1)[0];
    return bad == 0 ? "" : fmt::format("{} of {} numbers were not written or are not finite", bad, count);
  }

 private:
  static constexpr std::int64_t kBytes = std::int64_t{640} << 20;
  Bench& bench_;
  DeviceMemory memory_, found_;
  std::int64_t next_ = 0;
};

// `gather(handle, out)` of [items, rows, width] in each of `layers`.
struct GatherCase {
  std::string name;
  std::vector<int> layers;
  std::int64_t items = 0, rows = 0, width = 0;
  std::int64_t bytes = 0;  // of one gather
  std::function<void(LayerCacheHandle&, const TensorView&)> gather;
  bool one_output = false;  // every launch writes the same tensor, as in an engine; L2 keeps part of it
};

void add_case(Bench& bench, GpuCache& cache, OutputPool& outputs, const GatherCase& c) {
  Row row;
  row.name = c.name;
  row.failure = outputs.check(c.items, c.rows, c.width, [&](const TensorView& out) {
    LayerCacheHandle handle = cache.manager().acquire(c.layers[0]);
    c.gather(handle, out);
  });
  const auto take = [&] { return outputs.take(DType::bf16, c.items, c.rows, c.width); };
  const TensorView one = take();
  row.us = bench.timer.replay_us([&] {
    for (int pass = 0; pass < kPasses; ++pass)
      for (const int layer : c.layers) {
        LayerCacheHandle handle = cache.manager().acquire(layer);
        c.gather(handle, c.one_output ? one : take());
      }
  });
  row.us /= static_cast<double>(kPasses * c.layers.size());
  row.bytes = c.bytes;
  row.floor_us = bench.copy_us(c.bytes);
  row.aim = {Aim::Kind::least_share, kShare};
  bench.add(row);
}

void add_chosen(Bench& bench, GpuCache& cache, OutputPool& outputs, const std::string& suffix) {
  const std::vector<int> layers = cache.layers(LayerKind::csa);
  const PageSchema& page = cache.schema().layer(layers[0]).pages[0];
  const std::int64_t topk = cache.schema().config.index_topk, tokens = kRequests * kTokensEach;
  const std::int64_t visible = cache.manager().length(cache.requests()[0]) / page.kind.ratio;
  const std::int64_t count = tokens * topk * static_cast<std::int64_t>(layers.size());
  const DeviceMemory indices(bench.backend, 4 * count);
  auto* const first = reinterpret_cast<std::int32_t*>(indices.data());
  check(fill_indices(first, count, static_cast<std::int32_t>(visible), 11, bench.timer.stream()), "fill_indices");
  const Step step = cache.prepare(kRequests, kTokensEach);
  std::int64_t turn = 0;
  GatherCase c{fmt::format("gather {} chosen x {} tokens{}", topk, tokens, suffix),
               layers,
               tokens,
               topk,
               page.row.width,
               checks::gather_bytes(page.row, tokens * topk, 2) + 4 * tokens * topk,
               [&](LayerCacheHandle& handle, const TensorView& out) {
                 const std::int64_t at = turn++ % static_cast<std::int64_t>(layers.size()) * tokens * topk;
                 handle.gather_compressed_kv(TensorView(first + at, {tokens, topk}), out);
               }};
  add_case(bench, cache, outputs, c);
  c.name += ", into one tensor";
  c.one_output = true;
  add_case(bench, cache, outputs, c);
  cache.manager().abort(step);
}

void add_all(Bench& bench, GpuCache& cache, OutputPool& outputs, LayerKind kind, int items, const std::string& suffix) {
  const std::vector<int> layers = cache.layers(kind);
  const PageSchema& page = cache.schema().layer(layers[0]).pages[0];
  const Step step = cache.prepare(items, 1);
  const std::int64_t rows = (cache.manager().length(cache.requests()[0]) + 1) / page.kind.ratio;
  add_case(
      bench, cache, outputs,
      {fmt::format("gather all {} entries, {} x {}{}", kind == LayerKind::csa ? "CSA" : "HCA", items, rows, suffix),
       layers, items, rows, page.row.width, checks::gather_bytes(page.row, items * rows, 2),
       [&](LayerCacheHandle& handle, const TensorView& out) {
         handle.gather_all_compressed_kv(out, outputs.lens(items));
       }});
  cache.manager().abort(step);
}

void add_keys(Bench& bench, GpuCache& cache, OutputPool& outputs, int items, const std::string& suffix) {
  const std::vector<int> layers = cache.layers(LayerKind::csa);
  const PageSchema& page = cache.schema().layer(layers[0]).pages[1];
  const Step step = cache.prepare(items, 1);
  const std::int64_t rows = (cache.manager().length(cache.requests()[0]) + 1) / page.kind.ratio;
  add_case(bench, cache, outputs,
           {fmt::format("gather all index keys, {} x {}{}", items, rows, suffix), layers, items, rows, page.row.width,
            checks::gather_bytes(page.row, items * rows, 2), [&](LayerCacheHandle& handle, const TensorView& out) {
              handle.gather_all_index_keys(out, outputs.lens(items));
            }});
  cache.manager().abort(step);
}

// Reads only; its floor is the bytes read at the copy speed, as in every other row.
void add_scan(Bench& bench, GpuCache& cache, OutputPool& outputs, int items, const std::string& suffix) {
  const std::vector<int> layers = cache.layers(LayerKind::csa);
  const PageSchema& page = cache.schema().layer(layers[0]).pages[1];
  const Step step = cache.prepare(items, 1);
  const std::int64_t pages = (cache.manager().length(cache.requests()[0]) + 1) / cache.schema().block_tokens;
  auto* const sink = static_cast<std::uint32_t*>(outputs.lens(1).data);
  Row row;
  row.name = fmt::format("scan of index keys, {} x {}{}", items, pages * page.rows_per_block, suffix);
  row.us = bench.timer.replay_us([&] {
    for (std::size_t i = 0; i < kPasses * layers.size(); ++i) {
      const int layer = layers[i % layers.size()];
      const IndexerView view = cache.manager().acquire(layer).read_indexer_view();
      ScanParams params{};
      params.keys = reinterpret_cast<const std::uint8_t*>(view.keys.data);
      params.scales = reinterpret_cast<const std::uint8_t*>(view.scales.data);
      params.key_stride = view.keys.block_stride;
      params.scale_stride = view.scales.block_stride;
      params.key_bytes = static_cast<std::int32_t>(view.rows_per_block * view.keys.row_stride);
      params.scale_bytes = static_cast<std::int32_t>(view.rows_per_block * view.scales.row_stride);
      params.block_table = view.block_table;
      params.request_rows = view.request_rows;
      params.blocks_per_request = view.blocks_per_request;
      params.items = items;
      params.pages = static_cast<std::int32_t>(pages);
      params.sink = sink;
      check(scan_pages(params, bench.timer.stream()), "scan_pages");
    }
  });
  row.us /= static_cast<double>(kPasses * layers.size());
  row.bytes = items * pages * page.rows_per_block * page.row.bytes();
  row.floor_us = bench.copy_us(row.bytes);
  row.note = "our own kernel: the cost of the arrangement for a score kernel";
  bench.add(row);
  cache.manager().abort(step);
}

void add_long_contexts(Bench& bench, OutputPool& outputs, Arrangement arrangement) {
  const std::int64_t context = bench.quick ? 1 << 14 : 1 << 17;
  CacheOptions options;
  options.arrangement = arrangement;
  options.max_requests = options.spare_slots = kRequests;
  options.max_context = context + kTokensEach;
  options.num_blocks = kRequests * (context / 128 + 1);
  options.max_step_tokens = kStepTokens;
  GpuCache cache(bench, model_preset("v4-flash"), options);
  cache.admit(kRequests);
  cache.extend(context - 1);
  const std::string suffix = arrangement == Arrangement::block_major ? "" : ", layer-major";
  add_chosen(bench, cache, outputs, suffix);
  add_all(bench, cache, outputs, LayerKind::csa, 1, suffix);
  if (arrangement == Arrangement::block_major) add_all(bench, cache, outputs, LayerKind::hca, kRequests, suffix);
  add_keys(bench, cache, outputs, 1, suffix);
  add_keys(bench, cache, outputs, kRequests, suffix);
  add_scan(bench, cache, outputs, 1, suffix);
  add_scan(bench, cache, outputs, kRequests, suffix);
}

void add_windows(Bench& bench, OutputPool& outputs) {
  constexpr int kWindows = 64, kLayers = 48, kLength = 199;
  CacheOptions options;
  options.max_requests = options.spare_slots = kWindows;
  options.max_context = 256;
  options.num_blocks = 2 * kWindows;
  options.max_step_tokens = kWindows * kLength;
  GpuCache cache(bench, layers_of(LayerKind::csa, kLayers), options);
  cache.admit(kWindows);
  cache.extend(kLength);
  const Step step = cache.prepare(kWindows, 1);
  const RowSchema& row = cache.schema().layers[0].window.row;
  const std::int64_t rows = cache.schema().config.window;
  for (const LayerCacheSchema& layer : cache.schema().layers)
    cache.manager().acquire(layer.spec.layer).append(cache.next_inputs(layer.spec.layer, kWindows));
  add_case(bench, cache, outputs,
           {fmt::format("gather window x {}", kWindows), cache.layers(LayerKind::csa), kWindows, rows, row.width,
            checks::gather_bytes(row, kWindows * rows, 2), [&](LayerCacheHandle& handle, const TensorView& out) {
              handle.gather_swa_kv(out, outputs.lens(kWindows), outputs.lens(kWindows));
            }});
  cache.manager().abort(step);
}

}  // namespace

void add_gather_rows(Bench& bench) {
  OutputPool outputs(bench);
  add_windows(bench, outputs);
  for (const Arrangement arrangement : {Arrangement::block_major, Arrangement::layer_major})
    add_long_contexts(bench, outputs, arrangement);
}

}  // namespace kv4::bench
