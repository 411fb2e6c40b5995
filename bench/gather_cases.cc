// Gathers: stored rows decoded into a dense tensor. Sources and outputs exceed any cache.
#include <fmt/format.h>

#include <algorithm>

#include "case_cache.h"
#include "checks/touched_bytes.h"

namespace kv4::bench {
namespace {

struct GatherCase {
  LayerKind kind = LayerKind::csa;
  int requests = 1;  // per step
  int groups = 32;   // that run in turn
  std::int64_t context = 8192;
  DType out = DType::bf16;
  CacheOptions formats = {};
};

/// A call covers a few requests and takes about a millisecond, so that most calls fit between the time slices of other
/// processes.
class GatherBench {
 public:
  GatherBench(const BenchSettings& settings, const GatherCase& c) : case_(c), cache_(settings, options(settings, c)) {
    for (int i = 0; i < c.requests * c.groups; ++i) cache_.plant(length() - 1);
    lens_.resize(c.requests);
    first_.resize(lens_.size());
    outs_.resize(c.groups);
  }

  /// Runs `gather(handle, out)` into [requests, rows, width]; every group has its own output.
  template <class Gather>
  Sample run(std::int64_t rows, const RowSchema& row, Gather&& gather) {
    const int group = next_++ % case_.groups;
    std::vector<StepSpec> items;
    for (int i = 0; i < case_.requests; ++i) items.push_back({cache_.requests()[group * case_.requests + i], 1});
    const Step step = cache_.prepare(items);
    LayerCacheHandle handle = cache_.manager().acquire(cache_.schema().layers[0].spec.layer);
    handle.append(cache_.next_inputs(0, case_.requests));
    const auto element = static_cast<std::int64_t>(element_bytes(case_.out));
    AlignedVector<std::byte>& out = outs_[group];
    out.resize(case_.requests * rows * row.width * element, std::byte{1});
    const TensorView view(out.data(), case_.out, {case_.requests, rows, row.width});
    const checks::Stopwatch watch;
    gather(handle, view);
    const double seconds = watch.seconds();
    cache_.manager().abort(step);
    return {seconds, checks::gather_bytes(row, case_.requests * rows, element), case_.requests * rows};
  }

  std::int64_t length() const { return cache_.schema().options.max_context; }
  const LayerCacheSchema& layer() const { return cache_.schema().layers[0]; }
  TensorView lens() { return TensorView(lens_.data(), {case_.requests}); }
  TensorView first() { return TensorView(first_.data(), {case_.requests}); }

 private:
  static CacheOptions options(const BenchSettings& settings, const GatherCase& c) {
    CacheOptions options = c.formats;
    options.layers = {*first_layer(settings.config, c.kind)};
    options.max_requests = c.requests * c.groups + 1;
    options.max_context = std::min(c.context, settings.config.max_positions);
    options.max_step_tokens = 128;
    return options;
  }

  GatherCase case_;
  BenchCache cache_;
  std::vector<AlignedVector<std::byte>> outs_;
  std::vector<std::int32_t> lens_, first_;
  int next_ = 0;
};

/// Gathers `index_topk` random visible entries per token.
Operation make_topk(const BenchSettings& settings, const GatherCase& c) {
  auto bench = std::make_shared<GatherBench>(settings, c);
  const int topk = settings.config.index_topk;
  const std::int64_t visible = bench->length() / bench->layer().pages[0].kind.ratio;
  std::vector<std::int32_t> indices;
  std::uint64_t state = 1;
  for (int i = 0; i < c.requests * topk; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    indices.push_back(static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(visible)));
  }
  return [bench, topk, indices, requests = c.requests] {
    const ConstTensorView chosen(indices.data(), {requests, topk});
    return bench->run(topk, bench->layer().pages[0].row, [&](LayerCacheHandle& handle, const TensorView& out) {
      handle.gather_compressed_kv(chosen, out);
    });
  };
}

Operation make_entries(const BenchSettings& settings, const GatherCase& c) {
  auto bench = std::make_shared<GatherBench>(settings, c);
  return [bench] {
    const PageSchema& page = bench->layer().pages[0];
    return bench->run(
        bench->length() / page.kind.ratio, page.row,
        [&](LayerCacheHandle& handle, const TensorView& out) { handle.gather_all_compressed_kv(out, bench->lens()); });
  };
}

Operation make_keys(const BenchSettings& settings, const GatherCase& c) {
  auto bench = std::make_shared<GatherBench>(settings, c);
  return [bench] {
    const PageSchema& page = bench->layer().pages[1];
    return bench->run(
        bench->length() / page.kind.ratio, page.row,
        [&](LayerCacheHandle& handle, const TensorView& out) { handle.gather_all_index_keys(out, bench->lens()); });
  };
}

Operation make_window(const BenchSettings& settings, const GatherCase& c) {
  auto bench = std::make_shared<GatherBench>(settings, c);
  return [bench, window = settings.config.window] {
    return bench->run(window, bench->layer().window.row, [&](LayerCacheHandle& handle, const TensorView& out) {
      handle.gather_swa_kv(out, bench->lens(), bench->first());
    });
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
  const auto add = [&](const std::string& name, const GatherCase& c,
                       Operation (*make)(const BenchSettings&, const GatherCase&)) {
    if (first_layer(settings.config, c.kind))
      cases.push_back({"gather/" + name, "row", [=] { return make(settings, c); }});
  };
  struct Variant {
    Format rows;
    DType out;
    const char* suffix;
  };
  for (const Variant& v :
       {Variant{Format::fp8_tile64, DType::bf16, "fp8_tile64"},
        Variant{Format::fp8_tile64, DType::f32, "fp8_tile64_to_fp32"}, Variant{Format::fp8_row, DType::bf16, "fp8_row"},
        Variant{Format::bf16, DType::bf16, "bf16"}}) {
    const CacheOptions formats = with_formats(v.rows);
    add(fmt::format("topk{}/csa/{}", settings.config.index_topk, v.suffix),
        {LayerKind::csa, 4, 16, 4096, v.out, formats}, make_topk);
    add(fmt::format("all/csa/{}", v.suffix), {LayerKind::csa, 1, 32, 8192, v.out, formats}, make_entries);
    add(fmt::format("all/hca/{}", v.suffix), {LayerKind::hca, 1, 32, 1 << 18, v.out, formats}, make_entries);
    add(fmt::format("window16/csa/{}", v.suffix), {LayerKind::csa, 16, 16, 1024, v.out, formats}, make_window);
  }
  for (const Format format : {Format::mxfp4, Format::nvfp4, Format::fp8, Format::bf16}) {
    add(fmt::format("index_keys/csa/{}", to_string(format)),
        {LayerKind::csa, 1, 24, 32768, DType::bf16, with_formats(Format::fp8_tile64, format)}, make_keys);
  }
}

}  // namespace kv4::bench
