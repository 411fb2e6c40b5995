// Append: prefill chunks, decode batches, batches in which every request closes an entry, imported entries. Also tests
// whether a token's cost depends on the context before it.
#include <fmt/format.h>

#include <algorithm>

#include "base/aligned_vector.h"
#include "case_cache.h"
#include "checks/sizes.h"
#include "checks/touched_bytes.h"

namespace kv4::bench {
namespace {

constexpr std::int64_t kContext = 8192;
constexpr int kPhases = 128;  // tokens of a decode sample, so that each sample has its share of closing entries

struct LayerCase {
  LayerKind kind = LayerKind::csa;
  int tokens = 512;  // of the chunk, or requests in the batch
  CacheOptions formats = {};
  std::string suffix = "fp8_tile64";
};

CacheOptions layer_options(const BenchSettings& settings, const LayerCase& c, int requests) {
  CacheOptions options = c.formats;
  options.layers = {*first_layer(settings.config, c.kind)};
  options.max_context = kContext;
  options.max_requests = requests;
  options.max_step_tokens = c.tokens;
  return options;
}

Operation make_prefill(const BenchSettings& settings, const LayerCase& c) {
  auto cache = std::make_shared<BenchCache>(settings, layer_options(settings, c, 1));
  cache->admit();
  return [cache, chunk = c.tokens] {
    if (cache->manager().length(cache->requests()[0]) + chunk > kContext) {
      cache->release_all();
      cache->admit();
    }
    const StepSpec item{cache->requests()[0], chunk};
    return timed_step(*cache, std::span(&item, 1), false);
  };
}

/// One token per request; the requests' lengths are spread over the spans of both ratios.
Operation make_decode(const BenchSettings& settings, const LayerCase& c) {
  auto cache = std::make_shared<BenchCache>(settings, layer_options(settings, c, c.tokens + 1));
  const auto start = [cache, batch = c.tokens] {
    cache->release_all();
    for (int i = 0; i < batch; ++i) cache->plant(2 * kPhases + i * std::max(1, kPhases / batch) % kPhases);
  };
  start();
  return [cache, start, batch = c.tokens] {
    const int repeats = std::max(1, kPhases / batch);
    if (cache->manager().length(cache->requests().back()) + repeats > kContext) start();
    std::vector<StepSpec> items;
    for (const RequestId request : cache->requests()) items.push_back({request, 1});
    Sample sum{0, 0, 0};
    for (int i = 0; i < repeats; ++i) {
      const Sample sample = timed_step(*cache, items, false);
      sum = {sum.seconds + sample.seconds, sum.bytes + sample.bytes, sum.items + sample.items};
    }
    return sum;
  };
}

/// Every request closes an entry; the step is aborted and repeated.
Operation make_closing(const BenchSettings& settings, const LayerCase& c) {
  auto cache = std::make_shared<BenchCache>(settings, layer_options(settings, c, c.tokens + 1));
  const std::int64_t length = 2 * cache->schema().block_tokens - 1;
  for (int i = 0; i < c.tokens; ++i) cache->plant(length);
  return [cache, length, batch = c.tokens]() -> Sample {
    std::vector<StepSpec> items;
    for (const RequestId request : cache->requests()) items.push_back({request, 1});
    const LayerCacheSchema& layer = cache->schema().layers[0];
    const AppendInputs inputs = cache->next_inputs(0, batch);
    const Step step = cache->prepare(items);
    LayerCacheHandle handle = cache->manager().acquire(layer.spec.layer);
    const checks::Stopwatch watch;
    handle.append(inputs);
    const double seconds = watch.seconds();
    cache->manager().abort(step);
    return {seconds, batch * checks::append_bytes(layer, length, 1), batch};
  };
}

/// flush_compression: reads and stores only the rows of tokens that close an entry.
Operation make_flush(const BenchSettings& settings, const LayerCase& c) {
  auto cache = std::make_shared<BenchCache>(settings, layer_options(settings, c, 1));
  const StepSpec item{cache->admit(), c.tokens};
  cache->prepare(std::span(&item, 1));
  const LayerCacheSchema& layer = cache->schema().layers[0];
  struct Rows {
    AlignedVector<std::uint16_t> entries, keys;
  };
  auto sets = std::make_shared<std::vector<Rows>>(8);
  std::int64_t bytes = 0, rows = 0;
  for (const PageSchema& page : layer.pages) {
    bytes += c.tokens / page.kind.ratio * (2 * page.row.width + page.row.bytes());
    rows += c.tokens / page.kind.ratio;
    for (Rows& set : *sets)
      (page.kind.role == RowRole::entry ? set.entries : set.keys)
          .assign(c.tokens * page.row.width, checks::to_bf16(0.7f));
  }
  return [cache, sets, bytes, rows, tokens = c.tokens, next = std::size_t{0}]() mutable -> Sample {
    Rows& set = (*sets)[next++ % sets->size()];
    const LayerCacheSchema& schema = cache->schema().layers[0];
    FlushInputs inputs;
    inputs.entries = TensorView(set.entries.data(), DType::bf16, {tokens, schema.pages[0].row.width});
    if (schema.pages.size() > 1)
      inputs.index_keys = TensorView(set.keys.data(), DType::bf16, {tokens, schema.pages[1].row.width});
    LayerCacheHandle handle = cache->manager().acquire(schema.spec.layer);
    const checks::Stopwatch watch;
    handle.flush_compression(inputs);
    return {watch.seconds(), bytes, rows};
  };
}

/// Appends tokens after a `context`, prepare_forward and commit included, to a fork of the planted request.
Operation make_context(const BenchSettings& settings, const LayerCase& c, std::int64_t context) {
  constexpr std::int64_t kRoom = 2048;
  const std::int64_t start = std::min(context, settings.config.max_positions - kRoom);
  CacheOptions options = layer_options(settings, c, 3);
  options.max_context = start + kRoom;
  options.num_blocks = 0;
  const std::int64_t block = build_schema(settings.config, options).block_tokens;
  options.num_blocks = start / block + 2 * (kRoom / block) + 8;
  auto cache = std::make_shared<BenchCache>(settings, options);
  const RequestId base = cache->plant(start);
  auto work = std::make_shared<RequestId>(cache->manager().fork(base).value());
  return [cache, base, work, start, chunk = c.tokens] {
    KVCacheManager& manager = cache->manager();
    const int repeats = std::max(1, kPhases / chunk);
    if (manager.length(*work) + repeats * chunk > start + kRoom) {
      manager.release(*work);
      *work = manager.fork(base).value();
    }
    Sample sum{0, 0, 0};
    for (int i = 0; i < repeats; ++i) {
      const StepSpec item{*work, chunk};
      const Sample sample = timed_step(*cache, std::span(&item, 1), true);
      sum = {sum.seconds + sample.seconds, sum.bytes + sample.bytes, sum.items + sample.items};
    }
    return sum;
  };
}

using Maker = Operation (*)(const BenchSettings&, const LayerCase&);

void add(std::vector<Case>& cases, const BenchSettings& settings, const std::string& group, Maker maker,
         const LayerCase& c) {
  if (!first_layer(settings.config, c.kind)) return;
  const char* item = maker == make_flush ? "row" : "token";
  cases.push_back(
      {fmt::format("{}/{}/{}", group, kind_name(c.kind), c.suffix), item, [=] { return maker(settings, c); }});
}

CacheOptions with_rows(Format format) {
  CacheOptions options;
  options.row_format = format;
  return options;
}

CacheOptions with_keys(Format format) {
  CacheOptions options;
  options.index_format = format;
  return options;
}

}  // namespace

void add_append_cases(std::vector<Case>& cases, const BenchSettings& settings) {
  constexpr LayerKind kKinds[] = {LayerKind::swa, LayerKind::csa, LayerKind::hca};
  for (const LayerKind kind : kKinds) {
    for (const Format rows : {Format::fp8_tile64, Format::fp8_row, Format::bf16}) {
      add(cases, settings, "append/prefill512", make_prefill, {kind, 512, with_rows(rows), to_string(rows)});
    }
  }
  for (const Format keys : {Format::nvfp4, Format::fp8, Format::bf16}) {
    add(cases, settings, "append/prefill512", make_prefill,
        {LayerKind::csa, 512, with_keys(keys), fmt::format("keys_{}", to_string(keys))});
  }
  for (const LayerKind kind : kKinds) add(cases, settings, "append/prefill2048", make_prefill, {kind, 2048});
  for (const int batch : {1, 64, 256}) {
    for (const LayerKind kind : kKinds)
      add(cases, settings, fmt::format("append/decode{}", batch), make_decode, {kind, batch});
  }
  for (const Format rows : {Format::fp8_row, Format::bf16}) {
    add(cases, settings, "append/decode64", make_decode, {LayerKind::csa, 64, with_rows(rows), to_string(rows)});
  }
  CacheOptions raw, half;
  raw.hca_mode = HcaMode::raw;
  half.pending_dtype = DType::bf16;
  add(cases, settings, "append/decode64", make_decode, {LayerKind::hca, 64, raw, "raw"});
  add(cases, settings, "append/decode64", make_decode, {LayerKind::csa, 64, half, "pending_bf16"});
  for (const LayerKind kind : {LayerKind::csa, LayerKind::hca}) {
    add(cases, settings, "compress/all_close256", make_closing, {kind, 256});
    add(cases, settings, "compress/flush4096", make_flush, {kind, 4096});
  }
  for (const Format rows : {Format::fp8_row, Format::bf16}) {
    add(cases, settings, "compress/all_close256", make_closing,
        {LayerKind::csa, 256, with_rows(rows), to_string(rows)});
  }
}

void add_context_cases(std::vector<Case>& cases, const BenchSettings& settings) {
  for (const LayerKind kind : {LayerKind::swa, LayerKind::csa, LayerKind::hca}) {
    if (!first_layer(settings.config, kind)) continue;
    for (const int chunk : {1, 512}) {
      for (const std::int64_t context :
           {std::int64_t{1} << 10, std::int64_t{1} << 14, std::int64_t{1} << 17, std::int64_t{1} << 20}) {
        if (context > settings.config.max_positions) continue;
        const LayerCase c{kind, chunk};
        cases.push_back({fmt::format("context/{}/{}/{}", chunk == 1 ? "decode" : "prefill512", kind_name(kind),
                                     checks::human_tokens(context)),
                         "token", [=] { return make_context(settings, c, context); }});
      }
    }
  }
}

}  // namespace kv4::bench
