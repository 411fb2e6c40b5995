// Index scores, top-k and attention over stored rows, each beside the plain row code in the same run.
#include <fmt/format.h>

#include <algorithm>

#include "case_cache.h"
#include "checks/touched_bytes.h"

namespace kv4::bench {
namespace {

struct ReadCase {
  LayerKind kind = LayerKind::csa;
  std::int64_t context = 8192;
  Format keys = Format::mxfp4;
  bool beside_plain = true;
};

constexpr int kHeads = 64;

std::vector<float> some_values(std::int64_t count) {
  std::vector<float> out(static_cast<std::size_t>(count));
  std::uint64_t state = 7;
  for (float& x : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;
  }
  return out;
}

/// One request of a full context and a step of one token, on the best instruction set or the plain code.
class ReadBench {
 public:
  ReadBench(const BenchSettings& settings, const ReadCase& c) : cache_(settings, options(settings, c)) {
    for (int i = 0; i < kRequests; ++i) cache_.plant(options(settings, c).max_context - 1);
  }

  /// Seconds of `read(handle)` in a step of the next request.
  template <class Read>
  double run(Read&& read) {
    const StepSpec item{cache_.requests()[static_cast<std::size_t>(next_++ % kRequests)], 1};
    const Step step = cache_.prepare({&item, 1});
    LayerCacheHandle handle = cache_.manager().acquire(layer().spec.layer);
    handle.append(cache_.next_inputs(0, 1));
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
    options.index_tile_tokens = 1;
    return options;
  }

  BenchCache cache_;
  int next_ = 0;
};

/// `read(handle)`, which is bound by arithmetic: no bytes to compare with a copy.
template <class Read>
Operation beside_plain(const BenchSettings& settings, const ReadCase& c, std::int64_t items, Read read) {
  auto fast = std::make_shared<ReadBench>(settings, c);
  std::shared_ptr<ReadBench> plain;
  if (c.beside_plain) {
    BenchSettings other = settings;
    other.plain = true;
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
  const std::int64_t keys = c.context / settings.config.csa_ratio;
  return beside_plain(settings, c, keys,
                      [q = some_values(kHeads * settings.config.index_dim), weights = some_values(kHeads),
                       scores = std::make_shared<std::vector<float>>(static_cast<std::size_t>(keys)),
                       width = settings.config.index_dim](LayerCacheHandle& handle) {
                        handle.index_scores({{q.data(), {1, kHeads, width}}, {}, {weights.data(), {1, kHeads}}},
                                            {scores->data(), {1, static_cast<std::int64_t>(scores->size())}});
                      });
}

Operation make_topk(const BenchSettings& settings, const ReadCase& c) {
  const int top = settings.config.index_topk;
  return beside_plain(settings, c, c.context / settings.config.csa_ratio,
                      [q = some_values(kHeads * settings.config.index_dim), weights = some_values(kHeads),
                       chosen = std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(top)),
                       width = settings.config.index_dim, top](LayerCacheHandle& handle) {
                        handle.index_topk({{q.data(), {1, kHeads, width}}, {}, {weights.data(), {1, kHeads}}},
                                          {chosen->data(), {1, top}});
                      });
}

/// Window and all entries, or as many spread over them as a top-k has.
Operation make_attend(const BenchSettings& settings, const ReadCase& c) {
  const int width = settings.config.head_dim;
  std::vector<std::int32_t> chosen;
  std::int64_t rows = settings.config.window;
  if (c.kind == LayerKind::csa) {
    const std::int64_t entries = c.context / settings.config.csa_ratio, top = settings.config.index_topk;
    for (std::int64_t i = 0; i < top; ++i) chosen.push_back(static_cast<std::int32_t>(i * entries / top));
    rows += top;
  } else if (c.kind == LayerKind::hca) {
    rows += c.context / settings.config.hca_ratio;
  }
  return beside_plain(
      settings, c, rows,
      [q = some_values(std::int64_t{kHeads} * width), chosen, width,
       out = std::make_shared<std::vector<float>>(static_cast<std::size_t>(kHeads * width))](LayerCacheHandle& handle) {
        AttendInputs in;
        in.q = TensorView(q.data(), {1, kHeads, width});
        if (!chosen.empty()) in.topk = TensorView(chosen.data(), {1, static_cast<std::int64_t>(chosen.size())});
        handle.attend(in, {out->data(), {1, kHeads, width}});
      });
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
}

}  // namespace kv4::bench
