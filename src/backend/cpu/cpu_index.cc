// Index scores and top-k: keys are read in place, page by page.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"
#include "ops/select_row.h"

namespace kv4::cpu {
namespace {

std::int64_t visible_keys(const ops::IndexParams& p, std::int64_t token) {
  const ops::StepRecord& at = p.step.tokens[token];
  return at.padded() ? 0 : (std::int64_t{at.position} + 1) / p.layer.kinds[p.kind].ratio;
}

// A token's part of the workspace, of ops::index_token_bytes.
class TokenSpace {
 public:
  explicit TokenSpace(const ops::IndexParams& p)
      : base_(p.workspace),
        max_entries_(std::int64_t{p.step.blocks_per_request} * p.layer.kinds[p.kind].rows_per_block),
        queries_(p.num_heads * query_bytes(p.layer.kinds[p.kind].page.shape.width)),
        bytes_(ops::index_token_bytes(max_entries_, p.num_heads, p.layer.kinds[p.kind].page.shape.width)),
        tokens_(std::max<std::int64_t>(1, p.workspace_bytes / bytes_)) {}

  std::int64_t tokens() const { return tokens_; }
  std::uint8_t* queries(std::int64_t token) const { return base_ + token % tokens_ * bytes_; }
  float* scores(std::int64_t token) const { return reinterpret_cast<float*>(queries(token) + queries_); }
  std::uint32_t* histogram(std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(scores(token) + max_entries_);
  }

 private:
  std::uint8_t* base_;
  std::int64_t max_entries_, queries_, bytes_, tokens_;
};

// Head `head` of a token's query, encoded as a key: in the input, or in `buffers`.
struct EncodedQuery {
  const std::uint8_t* payload;
  const std::uint8_t* scale;
};

EncodedQuery encode_query(const RowKernels& kernels, const ops::IndexParams& p, std::int64_t token, int head,
                          RowBuffers& buffers) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const int width = kind.page.shape.width;
  if (p.q.dtype == DType::u8)
    return {input_row(p.q, token, head * static_cast<int>(kind.page.payload.row_stride)),
            p.q_scale.data == nullptr
                ? nullptr
                : input_row(p.q_scale, token, head * static_cast<int>(kind.page.scale.row_stride))};
  float* row = buffers.row.data();
  kernels.load_as_bf16(input_row(p.q, token, head * width), p.q.dtype, width, row);
  if (kind.hadamard) kernels.hadamard(width, row);
  std::uint8_t* payload = reinterpret_cast<std::uint8_t*>(buffers.acc.data());
  std::uint8_t* scale = payload + 2 * width;
  kernels.encode(kind.page.format, kind.page.shape, row, payload, scale, kind.global_scale);
  return {payload, scale};
}

}  // namespace

void CpuBackend::score_tokens(const ops::IndexParams& p, std::int64_t first, std::int64_t count, std::int64_t min_keys,
                              const std::function<float*(std::int64_t)>& scores_of) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const int width = kind.page.shape.width;
  const TokenSpace space(p);
  pool_.run(count * p.num_heads, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = first + i / p.num_heads;
      const int head = static_cast<int>(i % p.num_heads);
      if (visible_keys(p, token) < min_keys) continue;
      const EncodedQuery q = encode_query(kernels_, p, token, head, buffers(worker));
      kernels_.prepare_query(kind.page.format, kind.page.shape, q.payload, q.scale, kind.global_scale,
                             space.queries(token) + head * query_bytes(width));
    }
  });
  const std::int64_t blocks = p.step.blocks_per_request, windows = (count + kScoreTokens - 1) / kScoreTokens;
  pool_.run(windows * blocks, 1, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t window = first + i / blocks * kScoreTokens;
      score_block(p, window, std::min(window + kScoreTokens, first + count), i % blocks, min_keys, scores_of, worker);
    }
  });
}

// One block of each request that the tokens [begin, end) belong to. Neighbours of one request share the expanded keys.
void CpuBackend::score_block(const ops::IndexParams& p, std::int64_t begin, std::int64_t end, std::int64_t index,
                             std::int64_t min_keys, const std::function<float*(std::int64_t)>& scores_of, int worker) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const TokenSpace space(p);
  const std::int64_t at = index * kind.rows_per_block;
  for (std::int64_t token = begin; token < end;) {
    const std::int32_t request = p.step.tokens[token].row;
    std::array<ScoreQuery, kScoreTokens> queries;
    std::array<std::int64_t, kScoreTokens> keys;
    int num_queries = 0;
    for (; token < end && p.step.tokens[token].row == request; ++token) {
      const std::int64_t visible = visible_keys(p, token);
      if (visible < min_keys || at >= visible) continue;
      keys[num_queries] = std::min<std::int64_t>(kind.rows_per_block, visible - at);
      queries[num_queries++] = {space.queries(token),
                                static_cast<const float*>(p.weights.data) + token * p.weights.row_stride, 0,
                                scores_of(token) + at};
    }
    if (num_queries == 0) continue;
    const std::int64_t block = p.step.block_table[request * p.step.blocks_per_request + index];
    const std::int64_t most = *std::max_element(keys.begin(), keys.begin() + num_queries);
    for (std::int64_t row = 0; row < most; row += kScoreKeys) {
      for (int i = 0; i < num_queries; ++i)
        queries[i].count = static_cast<int>(std::clamp<std::int64_t>(keys[i] - row, 0, kScoreKeys));
      kernels_.score({p.num_heads, queries.data(), num_queries, kind.page, block, row,
                      static_cast<int>(std::min<std::int64_t>(kScoreKeys, most - row)),
                      buffers(worker).keys.data()});
      for (int i = 0; i < num_queries; ++i) queries[i].out += kScoreKeys;
    }
  }
}

void CpuBackend::index_scores(const ops::IndexParams& p) {
  fit_buffers(p.layer.kinds[p.kind].page.shape.width);
  const auto scores_of = [&](std::int64_t token) { return p.scores + token * p.score_stride; };
  const std::int64_t tile = TokenSpace(p).tokens();
  for (std::int64_t first = 0; first < p.step.num_tokens; first += tile)
    score_tokens(p, first, std::min(tile, p.step.num_tokens - first), 1, scores_of);
  for (std::int64_t token = 0; token < p.step.num_tokens; ++token)
    std::fill(scores_of(token) + visible_keys(p, token), scores_of(token + 1), -INFINITY);
}

namespace {

// Selects the top-k of a token. histogram: [ops::kSelectBins]
void choose(const ops::IndexParams& p, std::int64_t token, const float* scores, std::uint32_t* histogram) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const std::int64_t visible = visible_keys(p, token), k = p.top;
  std::int32_t* out = p.indices + token * k;
  std::int64_t chosen = 0;
  const auto take = [&](std::int64_t j) { out[chosen++] = static_cast<std::int32_t>(j); };
  if (visible <= k)
    for (std::int64_t j = 0; j < visible; ++j) take(j);
  else
    ops::select_best(scores, visible, k, histogram, take);
  std::fill(out + chosen, out + k, -1);
  if (p.slots == nullptr) return;
  const std::int32_t* table = p.step.block_table + std::int64_t{p.step.tokens[token].row} * p.step.blocks_per_request;
  for (std::int64_t i = 0; i < k; ++i)
    p.slots[token * k + i] =
        out[i] < 0 ? -1 : table[out[i] / kind.rows_per_block] * kind.rows_per_block + out[i] % kind.rows_per_block;
}

}  // namespace

void CpuBackend::select_topk(const ops::IndexParams& p) {
  const TokenSpace space(p);
  for (std::int64_t first = 0; first < p.step.num_tokens; first += space.tokens())
    pool_.run(std::min(space.tokens(), p.step.num_tokens - first), 1, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t token = first + begin; token < first + end; ++token)
        choose(p, token, p.scores + token * p.score_stride, space.histogram(token));
    });
}

void CpuBackend::index_topk(const ops::IndexParams& p) {
  fit_buffers(p.layer.kinds[p.kind].page.shape.width);
  const TokenSpace space(p);
  for (std::int64_t first = 0; first < p.step.num_tokens; first += space.tokens()) {
    const std::int64_t count = std::min(space.tokens(), p.step.num_tokens - first);
    score_tokens(p, first, count, p.top + std::int64_t{1}, [&](std::int64_t token) { return space.scores(token); });
    pool_.run(count, 1, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t token = first + begin; token < first + end; ++token)
        choose(p, token, space.scores(token), space.histogram(token));
    });
  }
}

}  // namespace kv4::cpu
