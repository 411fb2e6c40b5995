// Index scores, top-k and attention over stored rows, each beside the plain row code in the same run.
#include <fmt/format.h>

#include <algorithm>

#include "case_cache.h"
#include "checks/touched_bytes.h"
#include "sgemm.h"

namespace kv4::bench {
namespace {

struct ReadCase {
  LayerKind kind = LayerKind::csa;
  std::int64_t context = 8192;
  Format keys = Format::mxfp4;
  bool beside_plain = true;
  int tokens = 1;  // of the step: one token, or a chunk of one request
};

constexpr int kHeads = 64;

std::vector<float> some_values(std::int64_t count) {
  std::vector<float> out(count);
  std::uint64_t state = 7;
  for (float& x : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;
  }
  return out;
}

/// A request with a full context, and a step of its last tokens on an instruction set or the plain code.
class ReadBench {
 public:
  ReadBench(const BenchSettings& settings, const ReadCase& c)
      : cache_(settings, options(settings, c)), tokens_(c.tokens) {
    for (int i = 0; i < kRequests; ++i) cache_.plant(options(settings, c).max_context - tokens_);
  }

  /// Seconds of `read(handle)` in a step of the next request.
  template <class Read>
  double run(Read&& read) {
    const StepSpec item{cache_.requests()[next_++ % kRequests], tokens_};
    const Step step = cache_.prepare({&item, 1});
    LayerCacheHandle handle = cache_.manager().acquire(layer().spec.layer);
    handle.append(cache_.next_inputs(0, tokens_));
    const checks::Stopwatch watch;
    read(handle);
    const double seconds = watch.seconds();
    cache_.manager().abort(step);
    return seconds;
  }

  const LayerCacheSchema& layer() const { return cache_.schema().layers[0]; }
  std::int64_t entries() const {
    return layer().pages.empty() ? 0 : cache_.schema().options.max_context / layer().pages[0].kind.ratio;
  }

 private:
  static constexpr int kRequests = 8;

  static CacheOptions options(const BenchSettings& settings, const ReadCase& c) {
    CacheOptions options;
    options.index_format = c.keys;
    options.layers = {*first_layer(settings.config, c.kind)};
    options.max_requests = kRequests + 1;
    options.max_context = std::min(c.context, settings.config.max_positions);
    options.max_step_tokens = 128;
    options.index_tile_tokens = c.tokens;
    return options;
  }

  BenchCache cache_;
  int tokens_, next_ = 0;
};

/// Times `read(handle)`. It is bound by arithmetic, so no copy is its baseline.
template <class Read>
Operation beside_plain(const BenchSettings& settings, const ReadCase& c, std::int64_t items, Read read) {
  auto fast = std::make_shared<ReadBench>(settings, c);
  std::shared_ptr<ReadBench> plain;
  if (c.beside_plain) {
    BenchSettings other = settings;
    other.kernels = &cpu::plain_row_kernels();
    plain = std::make_shared<ReadBench>(other, c);
  }
  return [=] {
    Sample sample;
    sample.items = items;
    sample.seconds = fast->run(read);
    if (plain != nullptr) sample.plain_seconds = plain->run(read);
    return sample;
  };
}

Operation make_scores(const BenchSettings& settings, const ReadCase& c) {
  const std::int64_t keys = c.context / settings.config.csa_ratio, n = c.tokens;
  return beside_plain(settings, c, n * keys,
                      [q = some_values(n * kHeads * settings.config.index_dim), weights = some_values(n * kHeads),
                       scores = std::make_shared<std::vector<float>>(n * keys),
                       width = settings.config.index_dim, keys, n](LayerCacheHandle& handle) {
                        handle.index_scores({{q.data(), {n, kHeads, width}}, {}, {weights.data(), {n, kHeads}}},
                                            {scores->data(), {n, keys}});
                      });
}

Operation make_topk(const BenchSettings& settings, const ReadCase& c) {
  const int top = settings.config.index_topk;
  return beside_plain(settings, c, c.context / settings.config.csa_ratio,
                      [q = some_values(kHeads * settings.config.index_dim), weights = some_values(kHeads),
                       chosen = std::make_shared<std::vector<std::int32_t>>(top),
                       width = settings.config.index_dim, top](LayerCacheHandle& handle) {
                        handle.index_topk({{q.data(), {1, kHeads, width}}, {}, {weights.data(), {1, kHeads}}},
                                          {chosen->data(), {1, top}});
                      });
}

/// Seconds of the matrix products that make up attention of `tokens` tokens to `rows` rows each.
double sgemm_seconds(const Sgemm& sgemm, std::int64_t tokens, int rows, int width) {
  static thread_local std::vector<float> q, kv, p, out;
  q.resize(kHeads * width, 0.5f);
  kv.resize(rows * width, 0.5f);
  p.resize(kHeads * rows);
  out.resize(kHeads * width);
  const checks::Stopwatch watch;
  for (std::int64_t i = 0; i < tokens; ++i) {
    sgemm.multiply(kHeads, rows, width, q.data(), kv.data(), true, p.data());
    sgemm.multiply(kHeads, width, rows, p.data(), kv.data(), false, out.data());
  }
  return watch.seconds();
}

/// Attends to the window and all entries, or to as many spread entries as a top-k has.
Operation make_attend(const BenchSettings& settings, const ReadCase& c) {
  const int width = settings.config.head_dim;
  const std::int64_t n = c.tokens;
  std::vector<std::int32_t> chosen;
  std::int64_t rows = settings.config.window;
  if (c.kind == LayerKind::csa) {
    const std::int64_t entries = (c.context - n) / settings.config.csa_ratio, top = settings.config.index_topk;
    for (std::int64_t i = 0; i < n * top; ++i) chosen.push_back(static_cast<std::int32_t>(i % top * entries / top));
    rows += top;
  } else if (c.kind == LayerKind::hca) {
    rows += c.context / settings.config.hca_ratio;
  }
  const Operation attend = beside_plain(
      settings, c, n * rows,
      [q = some_values(n * kHeads * width), chosen, width, n,
       out = std::make_shared<std::vector<float>>(n * kHeads * width)](
          LayerCacheHandle& handle) {
        AttendInputs in;
        in.q = ConstTensorView(q.data(), {n, kHeads, width});
        if (!chosen.empty()) in.topk = ConstTensorView(chosen.data(), {n, std::ssize(chosen) / n});
        handle.attend(in, {out->data(), {n, kHeads, width}});
      });
  const std::shared_ptr<const Sgemm> sgemm = settings.threads == 1 ? Sgemm::load() : nullptr;
  if (sgemm == nullptr) return attend;
  return [=] {
    Sample sample = attend();
    sample.sgemm_seconds = sgemm_seconds(*sgemm, n, static_cast<int>(rows), width);
    return sample;
  };
}

}  // namespace

void add_read_cases(std::vector<Case>& cases, const BenchSettings& settings) {
  const auto add = [&](const std::string& name, const ReadCase& c,
                       Operation (*make)(const BenchSettings&, const ReadCase&), const char* item) {
    if (first_layer(settings.config, c.kind))
      cases.push_back({"read/" + name, item, [=] { return make(settings, c); }});
  };
  const int ratio = settings.config.csa_ratio;
  for (const Format format : {Format::mxfp4, Format::nvfp4, Format::fp8, Format::bf16})
    add(fmt::format("scores1024/{}", to_string(format)), {LayerKind::csa, 1024 * ratio, format}, make_scores, "key");
  for (const std::int64_t keys : {4096, 16384, 65536})
    add(fmt::format("scores{}/mxfp4", keys), {LayerKind::csa, keys * ratio, Format::mxfp4, false}, make_scores, "key");
  add("topk1024/mxfp4", {LayerKind::csa, 1024 * ratio}, make_topk, "key");
  add("topk65536/mxfp4", {LayerKind::csa, 65536 * ratio, Format::mxfp4, false}, make_topk, "key");
  add("attend/swa", {LayerKind::swa}, make_attend, "row");
  add("attend/csa", {LayerKind::csa}, make_attend, "row");
  add("attend/hca", {LayerKind::hca, 65536}, make_attend, "row");
  // A chunk's tokens share expanded keys, but not yet rows.
  constexpr int kChunk = 32;
  for (const Format format : {Format::mxfp4, Format::fp8})
    add(fmt::format("scores16384x{}/{}", kChunk, to_string(format)),
        {LayerKind::csa, 16384 * ratio, format, false, kChunk}, make_scores, "key");
  add(fmt::format("attend{}/swa", kChunk), {LayerKind::swa, 8192, Format::mxfp4, false, kChunk}, make_attend, "row");
  add(fmt::format("attend{}/csa", kChunk), {LayerKind::csa, 8192, Format::mxfp4, false, kChunk}, make_attend, "row");
  add(fmt::format("attend{}/hca", kChunk), {LayerKind::hca, 65536, Format::mxfp4, false, kChunk}, make_attend, "row");
}

}  // namespace kv4::bench
