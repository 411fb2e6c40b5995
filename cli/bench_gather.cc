// Gathers: stored rows decoded into a dense tensor. Outputs and what they are read from exceed any cache.
#include <fmt/format.h>

#include <algorithm>

#include "bench_bytes.h"
#include "bench_cache.h"

namespace kv4::cli {
namespace {

struct GatherCase {
  LayerKind kind = LayerKind::csa;
  int requests = 8;
  std::int64_t context = 16384;
  DType out = DType::bf16;
  CacheOptions formats = {};
};

/// A cache whose step stays open: gathers only read, so they can be repeated.
struct OpenStep {
  BenchCache cache;
  std::int64_t longest;
  std::vector<std::byte> out;
  std::vector<std::int32_t> lens, first;
  std::vector<std::int32_t> indices;

  LayerCacheHandle handle() { return cache.manager().acquire(cache.schema().layers[0].spec.layer); }
  int requests() const { return static_cast<int>(cache.requests().size()); }
};

std::shared_ptr<OpenStep> open_step(const BenchSettings& settings, const GatherCase& c) {
  CacheOptions options = c.formats;
  options.layers = {*first_layer(settings.config, c.kind)};
  options.max_requests = c.requests + 1;
  options.max_context = std::min(c.context, settings.config.max_positions);
  options.max_step_tokens = std::max(c.requests, 128);
  auto open = std::make_shared<OpenStep>(OpenStep{BenchCache(settings, options), options.max_context, {}, {}, {}, {}});
  std::vector<StepSpec> items;
  for (int i = 0; i < c.requests; ++i) items.push_back({open->cache.plant(options.max_context - 1), 1});
  open->cache.prepare(items);
  open->handle().append(open->cache.next_inputs(0, c.requests));
  open->lens.resize(static_cast<std::size_t>(c.requests));
  open->first.resize(open->lens.size());
  return open;
}

void size_output(OpenStep& open, DType dtype, std::int64_t rows, int width) {
  open.out.resize(static_cast<std::size_t>(rows * width) * element_bytes(dtype), std::byte{1});
}

std::int64_t out_bytes(DType dtype) { return static_cast<std::int64_t>(element_bytes(dtype)); }

/// `index_topk` random visible entries for each token.
Operation make_topk(const BenchSettings& settings, const GatherCase& c) {
  const auto open = open_step(settings, c);
  const PageSchema& page = open->cache.schema().layers[0].pages[0];
  const int topk = settings.config.index_topk, width = page.row.width;
  const std::int64_t visible = open->longest / page.kind.ratio;
  std::uint64_t state = 1;
  for (std::int64_t i = 0; i < std::int64_t{c.requests} * topk; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    open->indices.push_back(static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(visible)));
  }
  size_output(*open, c.out, std::int64_t{c.requests} * topk, width);
  return [open, topk, width, dtype = c.out]() -> Sample {
    const TensorView indices(open->indices.data(), {open->requests(), topk});
    const TensorView out(open->out.data(), dtype, {open->requests(), topk, width});
    LayerCacheHandle handle = open->handle();
    const Stopwatch watch;
    handle.gather_compressed_kv(indices, out);
    const double seconds = watch.seconds();
    const std::int64_t rows = std::int64_t{open->requests()} * topk;
    return {seconds, gather_bytes(handle.schema().pages[0].row, rows, out_bytes(dtype)), rows};
  };
}

Operation make_all(const BenchSettings& settings, const GatherCase& c, RowRole role) {
  const auto open = open_step(settings, c);
  const std::size_t kind = role == RowRole::entry ? 0 : 1;
  const PageSchema& page = open->cache.schema().layers[0].pages[kind];
  const std::int64_t rows = open->longest / page.kind.ratio;
  size_output(*open, c.out, c.requests * rows, page.row.width);
  return [open, kind, rows, width = page.row.width, dtype = c.out]() -> Sample {
    const TensorView out(open->out.data(), dtype, {open->requests(), rows, width});
    const TensorView lens(open->lens.data(), {open->requests()});
    LayerCacheHandle handle = open->handle();
    const Stopwatch watch;
    if (kind == 0) handle.gather_all_compressed_kv(out, lens);
    else handle.gather_all_index_keys(out, lens);
    const double seconds = watch.seconds();
    return {seconds, gather_bytes(handle.schema().pages[kind].row, open->requests() * rows, out_bytes(dtype)), open->requests() * rows};
  };
}

Operation make_window(const BenchSettings& settings, const GatherCase& c) {
  const auto open = open_step(settings, c);
  const int window = settings.config.window, width = settings.config.head_dim;
  size_output(*open, c.out, std::int64_t{c.requests} * window, width);
  return [open, window, width, dtype = c.out]() -> Sample {
    const TensorView out(open->out.data(), dtype, {open->requests(), window, width});
    const TensorView lens(open->lens.data(), {open->requests()}), first(open->first.data(), {open->requests()});
    LayerCacheHandle handle = open->handle();
    const Stopwatch watch;
    handle.gather_swa_kv(out, lens, first);
    const double seconds = watch.seconds();
    const std::int64_t rows = std::int64_t{open->requests()} * window;
    return {seconds, gather_bytes(handle.schema().window.row, rows, out_bytes(dtype)), rows};
  };
}

CacheOptions with_formats(Format rows, Format keys = Format::mxfp4) {
  CacheOptions options;
  options.row_format = rows;
  options.index_format = keys;
  return options;
}

}  // namespace

void add_gather_cases(std::vector<Case>& cases, const BenchSettings& settings) {
  const auto add = [&](const std::string& name, const GatherCase& c, auto make) {
    if (first_layer(settings.config, c.kind)) cases.push_back({"gather/" + name, "row", [=] { return make(settings, c); }});
  };
  const auto entries = [](const BenchSettings& s, const GatherCase& c) { return make_all(s, c, RowRole::entry); };
  const auto keys = [](const BenchSettings& s, const GatherCase& c) { return make_all(s, c, RowRole::index_key); };
  struct Variant {
    Format rows;
    DType out;
    const char* suffix;
  };
  for (const Variant& v : {Variant{Format::fp8_tile64, DType::bf16, "fp8_tile64"}, Variant{Format::fp8_tile64, DType::f32, "fp8_tile64_to_fp32"},
                           Variant{Format::fp8_row, DType::bf16, "fp8_row"}, Variant{Format::bf16, DType::bf16, "bf16"}}) {
    const CacheOptions formats = with_formats(v.rows);
    add(fmt::format("topk{}/csa/{}", settings.config.index_topk, v.suffix), {LayerKind::csa, 64, 4096, v.out, formats}, make_topk);
    add(fmt::format("all/csa/{}", v.suffix), {LayerKind::csa, 8, 32768, v.out, formats}, entries);
    add(fmt::format("all/hca/{}", v.suffix), {LayerKind::hca, 8, 1 << 20, v.out, formats}, entries);
    add(fmt::format("window256/csa/{}", v.suffix), {LayerKind::csa, 256, 1024, v.out, formats}, make_window);
  }
  for (const Format format : {Format::mxfp4, Format::nvfp4, Format::fp8, Format::bf16}) {
    add(fmt::format("index_keys/csa/{}", to_string(format)), {LayerKind::csa, 8, 131072, DType::bf16, with_formats(Format::fp8_tile64, format)}, keys);
  }
}

}  // namespace kv4::cli
