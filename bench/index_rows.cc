// Index scores and top-k over hand-made pools of keys, as an engine with its own pools calls them (kv4/cuda.h). A graph
// goes through sets of requests whose keys together are larger than L2.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "backend/device_memory.h"
#include "device_kernels.h"
#include "gpu_bench.h"
#include "kv4/cuda.h"
#include "ops/score_row.h"

namespace kv4::bench {
namespace {

constexpr int kWidth = 128, kHeads = 64, kTop = 512, kRatio = 4, kRowsPerBlock = 32;
constexpr std::int64_t kColdBytes = std::int64_t{192} << 20;
constexpr int kFewestLaunches = 24, kMostSets = 64;
constexpr int kBatches[] = {1, 16, 64, 128};

constexpr int kScoredKeys[] = {8192, 32768, 262144}, kSelectedKeys[] = {2048, 8192, 32768, 262144};

struct IndexCase {
  Format format = Format::mxfp4;
  int keys = 0;
  int requests = 0;
  int tokens_each = 1;
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

/// Pools, steps and workspace of a case; params(i) takes turns through the sets.
class IndexSets {
 public:
  IndexSets(Bench& bench, const IndexCase& c)
      : bench_(bench),
        case_(c),
        tokens_(c.requests * c.tokens_each),
        payload_(c.format == Format::fp8 ? kWidth : kWidth / 2),
        sets_(static_cast<int>(
            std::clamp<std::int64_t>(kColdBytes / (std::int64_t{c.requests} * c.keys * row_bytes()), 2, kMostSets))),
        blocks_each_(c.keys / kRowsPerBlock),
        blocks_(std::int64_t{sets_} * c.requests * blocks_each_),
        part_bytes_(ops::index_token_bytes(c.keys, kHeads, kWidth)),
        keys_(bench.backend, align(blocks_ * kRowsPerBlock * row_bytes())),
        table_memory_(bench.backend, align(4 * blocks_)),
        record_memory_(bench.backend, align(std::int64_t{32} * sets_ * tokens_)),
        codes_(bench.backend, align(std::int64_t{sets_} * tokens_ * kHeads * payload_)),
        code_scales_(bench.backend, align(std::int64_t{4} * sets_ * tokens_ * kHeads)),
        results_(bench.backend, align(std::int64_t{4} * tokens_ * kTop)),
        workspace_(bench.backend, align(part_bytes_ * tokens_)) {
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
    params_.workspace_bytes = part_bytes_ * tokens_;
  }

  std::int64_t row_bytes() const { return payload_ + 4; }
  int launches() const { return std::max(sets_, kFewestLaunches); }

  /// With queries as bf16, or encoded.
  ops::IndexParams next(bool encoded = false) {
    ops::IndexParams p = params_;
    const std::int64_t set = turn_++ % sets_;
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
  /// Scores over the workspace, in rows as long as the keys.
  void keep_scores(ops::IndexParams& p) const {
    p.scores = reinterpret_cast<float*>(workspace_.data());
    p.score_stride = case_.keys;
  }
  /// Keys and scores once; queries.
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
  DeviceMemory keys_, table_memory_, record_memory_, codes_, code_scales_, results_, workspace_;
  const ops::StepRecord* records_ = nullptr;
  ops::IndexParams params_;
  int turn_ = 0;
};

void add_row(Bench& bench, const std::string& name, std::int64_t bytes, int launches,
             const std::function<void()>& launch) {
  Row row;
  row.name = name;
  row.us = bench.timer.replay_us([&] {
    for (int i = 0; i < launches; ++i) launch();
  }) / launches;
  row.bytes = bytes;
  row.floor_us = bench.floor_us(bytes);
  bench.add(row);
}

void add_scores(Bench& bench, IndexSets& sets, const std::string& name, ScoreMode mode = ScoreMode::exact,
                bool encoded = false) {
  const std::string what = fmt::format("{}index scores{}, {}", mode == ScoreMode::fast ? "fast " : "",
                                       encoded ? " of encoded queries" : "", name);
  add_row(bench, what, sets.bytes(), sets.launches(), [&] {
    ops::IndexParams p = sets.next(encoded);
    p.mode = mode;
    sets.keep_scores(p);
    check(cuda::index_scores(p, bench.timer.stream()), "index_scores");
  });
}

void add_both(Bench& bench, IndexSets& sets, const std::string& name) {
  add_row(bench, "index scores + top-k, " + name, sets.bytes(), sets.launches(),
          [&] { check(cuda::index_topk(sets.next(), bench.timer.stream()), "index_topk"); });
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
  int turn = 0;
  add_row(bench, fmt::format("top-{} of {}, b = {}", kTop, keys, requests), row_bytes,
          std::max(sets, kFewestLaunches), [&] {
            p.scores = reinterpret_cast<float*>(scores.data()) + std::int64_t{turn++ % sets} * requests * keys;
            check(cuda::select_topk(p, bench.timer.stream()), "select_topk");
          });
}

}  // namespace

void add_index_rows(Bench& bench) {
  const int batches = bench.quick ? 2 : 4;
  for (const int keys : kSelectedKeys)
    for (int b = 0; b < batches; ++b) add_topk(bench, keys, kBatches[b]);
  for (const Format format : {Format::mxfp4, Format::fp8})
    for (const int keys : kScoredKeys)
      for (int b = 0; b < batches; ++b) {
        IndexSets sets(bench, {format, keys, kBatches[b]});
        const bool fp8 = format == Format::fp8;
        const std::string name = fmt::format("{}{} keys, b = {}", fp8 ? "fp8, " : "", keys, kBatches[b]);
        // Exact scores of fp8 keys come from the generic kernel, which would take a second here.
        if (!fp8 || (keys <= 32768 && b < 3)) add_scores(bench, sets, name);
        if (fp8) add_scores(bench, sets, name, ScoreMode::fast);
        add_scores(bench, sets, name, fp8 ? ScoreMode::fast : ScoreMode::exact, true);
        add_both(bench, sets, name);
      }
  const std::pair<IndexCase, const char*> several[] = {
      {{Format::mxfp4, 32768, 16, 4}, "32768 keys, b = 16, 4 tokens each"},
      {{Format::mxfp4, 32768, 1, 256}, "32768 keys, prefill of 256"}};
  for (const auto& [index_case, name] : several) {
    IndexSets sets(bench, index_case);
    add_scores(bench, sets, name);
    add_both(bench, sets, name);
  }
}

}  // namespace kv4::bench
