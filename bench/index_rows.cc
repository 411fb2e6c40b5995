// Index scores and top-k over pools of keys built here, as an engine with its own pools calls them (kv4/cuda.h). Each
// launch of a graph has its own set of requests, or the sets together have several times the bytes of L2.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/device_memory.h"
#include "device_kernels.h"
#include "gpu_bench.h"
#include "kv4/cuda.h"
#include "kv4/options.h"
#include "ops/score_row.h"

namespace kv4::bench {
namespace {

constexpr int kWidth = 128, kHeads = 64, kTop = 512, kRatio = 4, kRowsPerBlock = 32;
constexpr std::int64_t kColdBytes = std::int64_t{192} << 20;
constexpr int kFewestLaunches = 24, kMostSets = 512;
constexpr double kFp8FlopPerUs = 1333e6;  // fp8 products of 8192^3, measured on an H200, 2026-11-16
constexpr double kGraphUs = 1000;         // least duration of a prefill's graph at the floor
constexpr int kMostPrefillLaunches = 24;
constexpr int kBatches[] = {1, 16, 64, 128};

constexpr int kScoredKeys[] = {8192, 32768, 262144}, kSelectedKeys[] = {2048, 8192, 32768, 262144};

struct IndexCase {
  Format format = Format::mxfp4;
  int keys = 0;
  int requests = 0;
  int tokens_each = 1;
  int tile_tokens = 0;  // capacity of the workspace; 0: all
  int most_sets = kMostSets;
  bool is_prefill() const { return tile_tokens > 0; }
};

std::int64_t align(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

template <class T>
T* upload(Bench& bench, const DeviceMemory& memory, const std::vector<T>& host) {
  const std::int64_t bytes = static_cast<std::int64_t>(host.size() * sizeof(T));
  check(cudaMemcpyAsync(memory.data(), host.data(), bytes, cudaMemcpyHostToDevice, bench.timer.stream()),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(bench.timer.stream()), "an upload");
  return reinterpret_cast<T*>(memory.data());
}

/// Pools, steps and workspace of a case; params(i) rotates through the sets.
class IndexSets {
 public:
  IndexSets(Bench& bench, const IndexCase& c)
      : bench_(bench),
        case_(c),
        tokens_(c.requests * c.tokens_each),
        payload_(c.format == Format::fp8 ? kWidth : kWidth / 2),
        sets_(static_cast<int>(
            std::clamp<std::int64_t>(kColdBytes / (std::int64_t{c.requests} * c.keys * row_bytes()), 2, c.most_sets))),
        blocks_each_(c.keys / kRowsPerBlock),
        blocks_(std::int64_t{sets_} * c.requests * blocks_each_),
        part_bytes_(ops::index_token_bytes(c.keys, kHeads, kWidth)),
        keys_(bench.backend, align(blocks_ * kRowsPerBlock * row_bytes())),
        table_memory_(bench.backend, align(4 * blocks_)),
        record_memory_(bench.backend, align(std::int64_t{32} * sets_ * tokens_)),
        codes_(bench.backend, align(std::int64_t{sets_} * tokens_ * kHeads * payload_)),
        code_scales_(bench.backend, align(std::int64_t{4} * sets_ * tokens_ * kHeads)),
        results_(bench.backend, align(std::int64_t{4} * tokens_ * kTop)),
        scores_(bench.backend, align(std::int64_t{4} * tokens_ * c.keys)),
        workspace_(bench.backend, align(part_bytes_ * (c.is_prefill() ? std::min(c.tile_tokens, tokens_) : tokens_))) {
    const cudaStream_t stream = bench.timer.stream();
    std::uint8_t* keys = reinterpret_cast<std::uint8_t*>(keys_.data());
    // A page: payloads, then scales of about 1, as UE8M0 or fp32. No payload byte is NaN.
    const bool fp8 = c.format == Format::fp8;
    const std::int64_t page_bytes = row_bytes() * kRowsPerBlock, scale_at = payload_ * kRowsPerBlock;
    check(fill_bytes({keys, blocks_, page_bytes, scale_at}, 0, fp8 ? 0x7F : 256, 5, stream), "fill_bytes");
    check(fill_bytes({keys + scale_at, blocks_, page_bytes, page_bytes - scale_at}, fp8 ? 0x3F : 126, fp8 ? 0x40 : 129,
                     6, stream),
          "fill_bytes");
    const std::int64_t heads = std::int64_t{sets_} * tokens_ * kHeads;  // encoded, as keys are
    check(fill_bytes({codes(), heads, payload_, payload_}, 0, fp8 ? 0x7F : 256, 7, stream), "fill_bytes");
    check(fill_bytes({code_scales(), heads, 4, 4}, fp8 ? 0x3F : 126, fp8 ? 0x40 : 129, 8, stream), "fill_bytes");
    std::vector<std::int32_t> table(blocks_);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(9));
    std::vector<ops::StepRecord> records;
    for (int request = 0; request < sets_ * c.requests; ++request)
      for (int i = 0; i < c.tokens_each; ++i) {
        ops::StepRecord record;
        record.row = request;
        record.count = c.tokens_each;
        record.length = kRatio * c.keys - c.tokens_each;
        record.first_token = request % c.requests * c.tokens_each;
        record.position = record.length + i;
        records.push_back(record);
      }
    records_ = upload(bench, record_memory_, records);

    ops::KindDesc& kind = params_.layer.kinds[1];
    kind.page.format = c.format;
    kind.page.shape = {kWidth, 0};
    kind.page.payload = {keys, page_bytes, payload_};
    kind.page.scale = {keys + scale_at, page_bytes, row_bytes() - payload_};
    kind.ratio = kRatio;
    kind.rows_per_block = kRowsPerBlock;
    kind.hadamard = true;
    params_.layer.num_kinds = 2;
    params_.step.num_tokens = tokens_;
    params_.step.num_items = c.requests;
    params_.step.block_tokens = kRatio * kRowsPerBlock;
    params_.step.blocks_per_request = blocks_each_;
    params_.step.block_table = upload(bench, table_memory_, table);
    params_.num_heads = kHeads;
    params_.top = kTop;
    params_.indices = reinterpret_cast<std::int32_t*>(results_.data());
    params_.workspace = reinterpret_cast<std::uint8_t*>(workspace_.data());
    params_.workspace_bytes = workspace_.bytes();
    if (c.is_prefill())  // a top-k of scores that nothing has computed takes other paths than one of numbers
      check(fill_normal_f32(reinterpret_cast<float*>(scores_.data()), std::int64_t{tokens_} * c.keys, 8, stream),
            "fill_normal");
  }

  std::int64_t row_bytes() const { return payload_ + 4; }
  int launches() const { return std::max(sets_, kFewestLaunches); }

  std::int64_t score_bytes() const { return std::int64_t{4} * tokens_ * case_.keys; }
  /// FLOP of scoring the visible keys.
  double flop() const {
    double sum = 0;
    for (int i = 0; i < case_.tokens_each; ++i)
      sum += static_cast<double>((kRatio * case_.keys - case_.tokens_each + i + 1) / kRatio);
    return 2.0 * sum * case_.requests * kHeads * kWidth;
  }
  int prefill_launches() const {
    return std::clamp(static_cast<int>(kGraphUs * kFp8FlopPerUs / flop()), 1, kMostPrefillLaunches);
  }

  /// Params of launch i, with bf16 or encoded queries.
  ops::IndexParams params(int i, bool encoded = false) {
    ops::IndexParams p = params_;
    const std::int64_t set = i % sets_;
    p.step.tokens = records_ + set * tokens_;
    if (encoded) {
      p.q = {codes() + set * tokens_ * kHeads * payload_, DType::u8, kHeads * payload_};
      p.q_scale = {code_scales() + set * tokens_ * kHeads * 4, DType::u8, kHeads * 4};
    } else {
      p.q = {bench_.inputs.bf16(tokens_, kHeads * kWidth).data, DType::bf16, kHeads * kWidth};
    }
    p.weights = {bench_.inputs.f32(tokens_, kHeads).data, DType::f32, kHeads};
    return p;
  }
  /// Stores the scores outside of the workspace, in rows as long as the keys.
  void keep_scores(ops::IndexParams& p) const {
    p.scores = reinterpret_cast<float*>(scores_.data());
    p.score_stride = case_.keys;
  }
  /// Bytes of keys, scores and queries, each counted once.
  std::int64_t bytes() const {
    return std::int64_t{case_.requests} * case_.keys * row_bytes() + std::int64_t{4} * tokens_ * case_.keys +
           std::int64_t{tokens_} * kHeads * (2 * kWidth + 4);
  }

 private:
  std::uint8_t* codes() const { return reinterpret_cast<std::uint8_t*>(codes_.data()); }
  std::uint8_t* code_scales() const { return reinterpret_cast<std::uint8_t*>(code_scales_.data()); }

  Bench& bench_;
  IndexCase case_;
  int tokens_;
  std::int64_t payload_;
  int sets_;
  std::int32_t blocks_each_;
  std::int64_t blocks_, part_bytes_;
  DeviceMemory keys_, table_memory_, record_memory_, codes_, code_scales_, results_, scores_, workspace_;
  const ops::StepRecord* records_ = nullptr;
  ops::IndexParams params_;
};

using Queue = cudaError_t (*)(const ops::IndexParams&, cudaStream_t);

/// A launch after the kernel that writes its queries. `other` has the queries of another launch.
Launch launch_of(Bench& bench, const ops::IndexParams& p, const ops::IndexParams& other, const char* what,
                 Queue queue) {
  const std::int64_t bytes = p.step.num_tokens * p.q.row_stride * (p.q.dtype == DType::u8 ? 1 : 2);
  return {const_cast<void*>(p.q.data), bytes, [=, &bench] { check(queue(p, bench.timer.stream()), what); },
          other.q.data};
}

void add_decode(Bench& bench, IndexSets& sets, const std::string& name, const char* what, Queue queue,
                const std::function<ops::IndexParams(int)>& params) {
  Row row;
  row.name = name;
  row.bytes = sets.bytes();
  row.floor_us = bench.floor_us(row.bytes);
  bench.cell(name, [&] {
    bench.add_launches(row, sets.launches(), [&](int i) {
      return launch_of(bench, params(i), params(i + 1), what, queue);
    });
  });
}

void add_scores(Bench& bench, IndexSets& sets, const std::string& name, ScoreMode mode = ScoreMode::exact,
                bool encoded = false) {
  const std::string what = fmt::format("{}index scores{}, {}", mode == ScoreMode::fast ? "fast " : "",
                                       encoded ? " of encoded queries" : "", name);
  add_decode(bench, sets, what, "index_scores", cuda::index_scores, [&](int i) {
    ops::IndexParams p = sets.params(i, encoded);
    p.mode = mode;
    sets.keep_scores(p);
    return p;
  });
}

void add_both(Bench& bench, IndexSets& sets, const std::string& name, ScoreMode mode = ScoreMode::exact) {
  const std::string what =
      fmt::format("{}index scores + top-k, {}", mode == ScoreMode::fast ? "fast " : "", name);
  add_decode(bench, sets, what, "index_topk", cuda::index_topk, [&](int i) {
    ops::IndexParams p = sets.params(i);
    p.mode = mode;
    return p;
  });
}

void add_topk(Bench& bench, int keys, int requests) {
  const std::int64_t row_bytes = std::int64_t{4} * requests * keys;
  const int sets = static_cast<int>(std::clamp<std::int64_t>(kColdBytes / row_bytes, 2, kMostSets));
  const DeviceMemory scores(bench.backend, align(sets * row_bytes));
  const DeviceMemory results(bench.backend, align(std::int64_t{4} * requests * kTop));
  const DeviceMemory record_memory(bench.backend, align(std::int64_t{32} * requests));
  check(fill_normal_f32(reinterpret_cast<float*>(scores.data()), sets * row_bytes / 4, 8, bench.timer.stream()),
        "fill_normal");
  std::vector<ops::StepRecord> records(requests);
  for (ops::StepRecord& r : records) r.row = 0, r.position = kRatio * keys - 1;
  ops::IndexParams p;
  p.layer.kinds[1].ratio = kRatio;
  p.layer.kinds[1].rows_per_block = kRowsPerBlock;
  p.step.num_tokens = requests;
  p.step.blocks_per_request = keys / kRowsPerBlock;
  p.step.tokens = upload(bench, record_memory, records);
  p.score_stride = keys;
  p.top = kTop;
  p.indices = reinterpret_cast<std::int32_t*>(results.data());
  // The kernel before writes as many bytes as queries have: rewriting the scores would take longer than the selection.
  const std::int64_t written = std::int64_t{2} * requests * kHeads * kWidth;
  const DeviceMemory other(bench.backend, written);
  Row row;
  row.name = fmt::format("top-{} of {}, b = {}", kTop, keys, requests);
  row.bytes = row_bytes;
  row.floor_us = bench.floor_us(row_bytes);
  bench.add_launches(row, std::max(sets, kFewestLaunches), [&](int i) {
    p.scores = reinterpret_cast<float*>(scores.data()) + std::int64_t{i % sets} * requests * keys;
    return Launch{other.data(), written,
                  [&bench, p] { check(cuda::select_topk(p, bench.timer.stream()), "select_topk"); }};
  });
}

struct PrefillCase {
  Format format;
  int tokens, keys;
  std::string name() const {
    return fmt::format("{}{} tokens x {} keys", format == Format::fp8 ? "fp8, " : "", tokens, keys);
  }
};

/// Adds one row of a chunk. `queue` is the operation; `change` adds to its params.
void add_prefill(Bench& bench, IndexSets& sets, const std::string& name, Queue queue,
                 const std::function<void(ops::IndexParams&)>& change = {}) {
  Row row;
  row.name = name;
  const int launches = sets.prefill_launches();
  row.us = bench.timer.replay_us([&] {
    for (int i = 0; i < launches; ++i) {
      ops::IndexParams p = sets.params(i);
      if (change) change(p);
      check(queue(p, bench.timer.stream()), name.c_str());
    }
  }) / launches;
  const bool scored = queue != static_cast<Queue>(cuda::select_topk);
  row.floor_us = scored ? sets.flop() / kFp8FlopPerUs : bench.floor_us(sets.score_bytes());
  if (scored) row.note = fmt::format("{:.0f} TFLOP/s", sets.flop() / row.us * 1e-6);
  bench.add(row);
}

/// The workspace has the size that a cache plans, so that the tokens are cut as in a cache.
void add_prefill_case(Bench& bench, const PrefillCase& c) {
  const int planned =
      static_cast<int>(ops::default_index_tile_tokens(ops::index_token_bytes(c.keys, kHeads, kWidth)));
  IndexSets sets(bench, {c.format, c.keys, 1, c.tokens, planned, kMostPrefillLaunches});
  const ScoreMode mode = c.format == Format::fp8 ? ScoreMode::fast : ScoreMode::exact;
  // The top-k comes first, while its scores are still random numbers, as in a decode's rows.
  const std::string topk = "index prefill, top-k, " + c.name(), both = "index prefill, both, " + c.name(),
                    kind = mode == ScoreMode::fast ? "fast scores" : "scores",
                    scores = fmt::format("index prefill, {}, {}", kind, c.name());
  bench.cell(topk, [&] {
    add_prefill(bench, sets, topk, cuda::select_topk, [&](ops::IndexParams& p) { sets.keep_scores(p); });
  });
  bench.cell(scores, [&] {
    add_prefill(bench, sets, scores, cuda::index_scores, [&](ops::IndexParams& p) {
      p.mode = mode;
      sets.keep_scores(p);
    });
  });
  bench.cell(both, [&] { add_prefill(bench, sets, both, cuda::index_topk); });
  if (mode == ScoreMode::fast) {
    const std::string fast = fmt::format("index prefill, both, {}, {}", kind, c.name());
    bench.cell(fast, [&] {
      add_prefill(bench, sets, fast, cuda::index_topk, [&](ops::IndexParams& p) { p.mode = mode; });
    });
  }
}

/// The same with room for all tokens at once; the difference is the cost of cutting them.
void add_uncut(Bench& bench, const PrefillCase& c) {
  const std::string name = "index prefill, both, not cut, " + c.name();
  bench.cell(name, [&] {
    IndexSets sets(bench, {c.format, c.keys, 1, c.tokens, c.tokens, kMostPrefillLaunches});
    add_prefill(bench, sets, name, cuda::index_topk);
  });
}

}  // namespace

void add_index_rows(Bench& bench) {
  const int batches = bench.quick ? 2 : 4;
  for (const int keys : kSelectedKeys)
    for (int b = 0; b < batches; ++b)
      bench.cell(fmt::format("top-{} of {}, b = {}", kTop, keys, kBatches[b]),
                 [&] { add_topk(bench, keys, kBatches[b]); });
  for (const Format format : {Format::mxfp4, Format::fp8})
    for (const int keys : kScoredKeys)
      for (int b = 0; b < batches; ++b) {
        const bool fp8 = format == Format::fp8;
        const std::string name = fmt::format("{}{} keys, b = {}", fp8 ? "fp8, " : "", keys, kBatches[b]);
        bench.cell("index scores, " + name, [&] {
          IndexSets sets(bench, {format, keys, kBatches[b]});
          // Exact scores of fp8 keys come from the generic kernel, which would take a second here.
          if (!fp8 || (keys <= 32768 && b < 3)) add_scores(bench, sets, name);
          if (fp8) add_scores(bench, sets, name, ScoreMode::fast);
          add_scores(bench, sets, name, fp8 ? ScoreMode::fast : ScoreMode::exact, true);
          add_both(bench, sets, name);
          if (fp8) add_both(bench, sets, name, ScoreMode::fast);
        });
      }
  for (const Format format : {Format::mxfp4, Format::fp8})
    for (const int tokens : {2, 4, 6}) {  // drafts
      const std::string name =
          fmt::format("{}32768 keys, b = 16, {} tokens each", format == Format::fp8 ? "fp8, " : "", tokens);
      bench.cell("index scores, " + name, [&] {
        IndexSets sets(bench, {format, 32768, 16, tokens});
        add_scores(bench, sets, name, format == Format::fp8 ? ScoreMode::fast : ScoreMode::exact);
        add_both(bench, sets, name);
        if (format == Format::fp8) add_both(bench, sets, name, ScoreMode::fast);
      });
    }
}

void add_index_prefill_rows(Bench& bench) {
  for (const Format format : {Format::mxfp4, Format::fp8})
    for (const int keys : {8192, 32768, 131072, 262144})
      for (const int tokens : {256, 1024, 4096}) {
        if (bench.quick && (keys > 32768 || tokens > 1024)) continue;
        const PrefillCase c{format, tokens, keys};
        bench.cell("index prefill, " + c.name(), [&] { add_prefill_case(bench, c); });
        if (tokens == 4096) add_uncut(bench, c);
      }
}

}  // namespace kv4::bench
