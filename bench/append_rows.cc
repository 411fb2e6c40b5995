// Append: decodes with and without entries due, prefill of a long chunk. One graph runs every layer of a cache once;
// each layer has its own inputs, state and weights. The layers together touch more bytes than L2 holds.
#include <fmt/format.h>

#include <algorithm>

#include "checks/touched_bytes.h"
#include "gpu_cache.h"

namespace kv4::bench {
namespace {

constexpr int kShort =
    253;  // tokens before a decode in which no entry is due; two tokens later both kinds close an entry
constexpr std::int64_t kColdBytes = std::int64_t{150}
                                    << 20;           // touched by a graph, where a cache can have that many layers
constexpr int kMinLayers = 96;                       // makes the start of the graph negligible
constexpr int kMaxLayers = 4096, kMaxSlots = 32768;  // layers x requests: limits memory
constexpr int kPrefill = 32768;

const char* kind_label(LayerKind kind) {
  return kind == LayerKind::swa ? "SWA" : kind == LayerKind::csa ? "CSA" : "HCA";
}

struct DecodeCase {
  LayerKind kind;
  int batch;
};

CacheOptions decode_options(int batch) {
  CacheOptions options;
  options.max_requests = options.spare_slots = batch;
  options.max_context = 2 * kShort;
  options.num_blocks = std::int64_t{3} * batch;
  options.max_step_tokens = batch * kShort;
  return options;
}

/// The open step's appends in all layers.
class Appends {
 public:
  Appends(GpuCache& cache, const Step& step, bool projection) : cache_(cache) {
    for (const LayerCacheSchema& layer : cache.schema().layers)
      inputs_.push_back(cache.next_inputs(layer.spec.layer, step.num_tokens, projection));
  }

  int count() const { return static_cast<int>(inputs_.size()); }
  void queue(int i) const {
    const AppendInputs& inputs = inputs_[static_cast<std::size_t>(i)];
    cache_.manager().acquire(cache_.schema().layers[static_cast<std::size_t>(i)].spec.layer).append(inputs);
  }
  /// In an engine the kernel before writes the window rows or their inputs.
  Launch launch(int i) const {
    const ConstTensorView& rows = inputs_[static_cast<std::size_t>(i)].raw_kv;
    return {const_cast<void*>(rows.data), 2 * rows.shape[0] * rows.shape[1], [this, i] { queue(i); }};
  }

 private:
  GpuCache& cache_;
  std::vector<AppendInputs> inputs_;
};

int cold_layers(const DecodeCase& c) {
  const CacheSchema one = build_schema(layers_of(c.kind, 1), decode_options(c.batch));
  const std::int64_t bytes = c.batch * checks::append_bytes(one.layers[0], kShort, 1);
  return static_cast<int>(
      std::clamp<std::int64_t>(kColdBytes / bytes, kMinLayers, std::min(kMaxLayers, kMaxSlots / c.batch)));
}

void add_decode(Bench& bench, const DecodeCase& c) {
  const int layers = cold_layers(c);
  GpuCache cache(bench, layers_of(c.kind, bench.quick ? layers / 4 : layers), decode_options(c.batch));
  cache.admit(c.batch);
  cache.extend(kShort);
  const auto measure = [&](const std::string& name, bool projection) {
    const LayerCacheSchema& layer = cache.schema().layers[0];
    const std::int64_t length = cache.manager().length(cache.requests()[0]);
    const std::int64_t bytes =
        c.batch * (checks::append_bytes(layer, length, 1) + checks::undo_row_bytes(cache.schema(), layer, length, 1));
    const Step step = cache.prepare(c.batch, 1);
    Row row;
    row.name = fmt::format("decode {} b={}, {}", kind_label(c.kind), c.batch, name);
    row.bytes = bytes;
    row.floor_us = bench.floor_us(bytes);
    const Appends appends(cache, step, projection);
    bench.add_launches(
        row, appends.count(), [&](int i) { return appends.launch(i); }, [&] { cache.restore_marks(); });
    cache.manager().commit(step);
  };
  if (c.kind == LayerKind::swa) {
    measure("rows ready", false);
    measure("from projection", true);
    return;
  }
  measure("none due", false);
  cache.extend(1);
  measure("all due", false);
  cache.extend(cache.schema().layers[0].pages[0].kind.ratio - 1);
  measure("all due, from projection", true);
}

void add_prefill(Bench& bench, LayerKind kind, bool projection) {
  constexpr int kLayers = 16;
  const int tokens = bench.quick ? kPrefill / 4 : kPrefill;
  CacheOptions options;
  options.max_requests = 1;
  options.max_context = options.max_step_tokens = tokens;
  options.num_blocks = tokens / 128 + 1;
  GpuCache cache(bench, layers_of(kind, kLayers), options);
  cache.admit(1);
  const Step step = cache.prepare(1, tokens);
  Row row;
  row.name = fmt::format("prefill {} of {}{}", kind_label(kind), tokens, projection ? ", from projection" : "");
  const Appends appends(cache, step, projection);
  row.us = bench.timer.replay_us(
               [&] {
                 for (int i = 0; i < appends.count(); ++i) appends.queue(i);
               },
               [&] { cache.restore_marks(); }) /
           appends.count();
  row.bytes = checks::append_bytes(cache.schema().layers[0], 0, tokens);
  row.floor_us = bench.floor_us(row.bytes);
  row.aim = {Aim::Kind::most_ratio, 1.15};
  bench.add(row);
  cache.manager().abort(step);
}

}  // namespace

void add_append_rows(Bench& bench) {
  std::vector<DecodeCase> cases = {
      {LayerKind::csa, 1},  {LayerKind::csa, 16}, {LayerKind::csa, 64}, {LayerKind::csa, 128}, {LayerKind::hca, 1},
      {LayerKind::hca, 16}, {LayerKind::hca, 64}, {LayerKind::hca, 128}, {LayerKind::swa, 1},  {LayerKind::swa, 128},
  };
  if (bench.quick) std::erase_if(cases, [](const DecodeCase& c) { return c.batch == 16 || c.batch == 64; });
  for (const DecodeCase& c : cases)
    bench.cell(fmt::format("decode {} b={}", kind_label(c.kind), c.batch), [&] { add_decode(bench, c); });
}

void add_prefill_rows(Bench& bench) {
  for (const bool projection : {false, true})
    for (const LayerKind kind : {LayerKind::csa, LayerKind::hca, LayerKind::swa})
      bench.cell(fmt::format("prefill {}", kind_label(kind)), [&] { add_prefill(bench, kind, projection); });
}

}  // namespace kv4::bench
