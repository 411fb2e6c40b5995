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

void CpuBackend::prepare_queries(const ops::IndexParams& p, const TokenRange& tokens) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const int width = kind.page.shape.width;
  const TokenSpace space(p);
  pool_.run(tokens.count * p.num_heads, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = tokens.first + i / p.num_heads;
      const int head = static_cast<int>(i % p.num_heads);
      if (!tokens.has(visible_keys(p, token))) continue;
      const EncodedQuery q = encode_query(kernels_, p, token, head, buffers(worker));
      kernels_.prepare_query(kind.page.format, kind.page.shape, q.payload, q.scale, kind.global_scale,
                             space.queries(token) + head * query_bytes(width));
    }
  });
}

void CpuBackend::score_tokens(const ops::IndexParams& p, const TokenRange& tokens, const ScoresOf& scores_of) {
  prepare_queries(p, tokens);
  const std::int64_t blocks = p.step.blocks_per_request, windows = (tokens.count + kScoreTokens - 1) / kScoreTokens;
  pool_.run(windows * blocks, 1, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t i = begin; i < end; ++i) {
      TokenRange window = tokens;
      window.first = tokens.first + i / blocks * kScoreTokens;
      window.count = std::min<std::int64_t>(kScoreTokens, tokens.end() - window.first);
      score_block(p, window, i % blocks, scores_of, worker);
    }
  });
}

// One block of each request that the tokens belong to. Neighbours of one request share the expanded keys.
void CpuBackend::score_block(const ops::IndexParams& p, const TokenRange& tokens, std::int64_t index,
                             const ScoresOf& scores_of, int worker) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const TokenSpace space(p);
  const std::int64_t at = index * kind.rows_per_block, end = tokens.end();
  for (std::int64_t token = tokens.first; token < end;) {
    const std::int32_t request = p.step.tokens[token].row;
    std::array<ScoreQuery, kScoreTokens> queries;
    std::array<std::int64_t, kScoreTokens> keys;
    int num_queries = 0;
    for (; token < end && p.step.tokens[token].row == request; ++token) {
      const std::int64_t visible = visible_keys(p, token);
      if (!tokens.has(visible) || at >= visible) continue;
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
    score_tokens(p, {first, std::min(tile, p.step.num_tokens - first), 1}, scores_of);
  for (std::int64_t token = 0; token < p.step.num_tokens; ++token)
    std::fill(scores_of(token) + visible_keys(p, token), scores_of(token + 1), -INFINITY);
}

namespace {

// Writes the top-k of `count` scores; entry_of(i): the entry that score i belongs to. histogram: [ops::kSelectBins]
template <class EntryOf>
void choose_of(const ops::IndexParams& p, std::int64_t token, std::int64_t count, const float* scores,
               std::uint32_t* histogram, EntryOf entry_of) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const std::int64_t k = p.top;
  std::int32_t* out = p.indices + token * k;
  std::int64_t chosen = 0;
  const auto take = [&](std::int64_t i) { out[chosen++] = static_cast<std::int32_t>(entry_of(i)); };
  if (count <= k)
    for (std::int64_t i = 0; i < count; ++i) take(i);
  else
    ops::select_best(scores, count, k, histogram, take);
  std::fill(out + chosen, out + k, -1);
  if (p.slots == nullptr) return;
  const std::int32_t* table = p.step.block_table + std::int64_t{p.step.tokens[token].row} * p.step.blocks_per_request;
  for (std::int64_t i = 0; i < k; ++i)
    p.slots[token * k + i] =
        out[i] < 0 ? -1 : table[out[i] / kind.rows_per_block] * kind.rows_per_block + out[i] % kind.rows_per_block;
}

// Selects the top-k of a token.
void choose(const ops::IndexParams& p, std::int64_t token, const float* scores, std::uint32_t* histogram) {
  choose_of(p, token, visible_keys(p, token), scores, histogram, [](std::int64_t i) { return i; });
}

// Calls f(token) for each token of the range, in parallel.
template <class F>
void for_tokens(ThreadPool& pool, std::int64_t first, std::int64_t count, F f) {
  pool.run(count, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t token = first + begin; token < first + end; ++token) f(token);
  });
}

// Calls f(first, count) for the tokens of a step, as many at a time as the workspace holds.
template <class F>
void for_tiles(const ops::IndexParams& p, const TokenSpace& space, F f) {
  for (std::int64_t first = 0; first < p.step.num_tokens; first += space.tokens())
    f(first, std::min(space.tokens(), p.step.num_tokens - first));
}

}  // namespace

void CpuBackend::select_topk(const ops::IndexParams& p) {
  const TokenSpace space(p);
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    for_tokens(pool_, first, count, [&](std::int64_t token) {
      choose(p, token, p.scores + token * p.score_stride, space.histogram(token));
    });
  });
}

void CpuBackend::index_topk(const ops::IndexParams& p) {
  fit_buffers(p.layer.kinds[p.kind].page.shape.width);
  const TokenSpace space(p);
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    score_tokens(p, {first, count, p.top + std::int64_t{1}}, [&](std::int64_t token) { return space.scores(token); });
    for_tokens(pool_, first, count,
               [&](std::int64_t token) { choose(p, token, space.scores(token), space.histogram(token)); });
  });
}

// --- candidates

namespace {

// A token whose candidates are not all of its blocks.
bool is_masked(const ops::CandidateDesc& c, std::int64_t visible) { return visible > c.unmasked_entries(); }

// Keeps the best blocks of a token. best: the blocks' scores; may be `scores` itself.
void keep_candidates(const ops::IndexParams& p, const ops::CandidateDesc& c, std::int64_t token, const float* scores,
                     float* best, std::uint32_t* histogram) {
  const std::int64_t visible = visible_keys(p, token), blocks = c.blocks_of(visible);
  std::int32_t* out = c.blocks + token * c.stride;
  std::int32_t kept = 0;
  const auto keep = [&](std::int64_t block) { out[kept++] = static_cast<std::int32_t>(block); };
  if (!is_masked(c, visible)) {
    for (std::int64_t block = 0; block < blocks; ++block) keep(block);
  } else {
    for (std::int64_t block = 0; block < blocks - 1; ++block) {
      const float* of = scores + block * c.block_entries;
      best[block] = *std::max_element(of, of + c.block_entries, [](float a, float b) {
        return ops::score_order(a) < ops::score_order(b);
      });
    }
    best[blocks - 1] = INFINITY;
    ops::select_best(best, blocks, c.most, histogram, keep);
  }
  c.counts[token] = kept;
}

// Selects the top-k of a token within its candidates. scores: of their entries, or of all where nothing is masked.
void choose_within(const ops::IndexParams& p, const ops::CandidateDesc& c, std::int64_t token, const float* scores,
                   std::uint32_t* histogram) {
  const std::int64_t visible = visible_keys(p, token);
  if (!is_masked(c, visible)) return choose(p, token, scores, histogram);
  choose_of(p, token, c.entries_of(token, visible), scores, histogram,
            [&](std::int64_t i) { return c.entry(token, i); });
}

}  // namespace

// Consecutive blocks are scored together as far as they lie in one page.
void CpuBackend::score_candidates(const ops::IndexParams& p, const ops::CandidateDesc& c, const TokenRange& tokens) {
  constexpr std::int64_t kPart = 64;  // blocks of a work item
  prepare_queries(p, tokens);
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const TokenSpace space(p);
  const std::int64_t parts = (c.stride + kPart - 1) / kPart;
  pool_.run(tokens.count * parts, 1, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t token = tokens.first + item / parts, visible = visible_keys(p, token);
      if (!tokens.has(visible)) continue;
      const std::int64_t first = item % parts * kPart * c.block_entries;
      const std::int64_t last = std::min(first + kPart * c.block_entries, c.entries_of(token, visible));
      const std::int32_t* table =
          p.step.block_table + std::int64_t{p.step.tokens[token].row} * p.step.blocks_per_request;
      const float* weights = static_cast<const float*>(p.weights.data) + token * p.weights.row_stride;
      for (std::int64_t i = first; i < last;) {
        const std::int64_t entry = c.entry(token, i), row = entry % kind.rows_per_block;
        const std::int64_t most = std::min({last - i, kind.rows_per_block - row, std::int64_t{kScoreKeys}});
        std::int64_t count = 1;
        while (count < most && c.entry(token, i + count) == entry + count) ++count;
        const int keys = static_cast<int>(count);
        const ScoreQuery query{space.queries(token), weights, keys, space.scores(token) + i};
        kernels_.score({p.num_heads, &query, 1, kind.page, table[entry / kind.rows_per_block], row, keys,
                        buffers(worker).keys.data()});
        i += count;
      }
    }
  });
}

void CpuBackend::index_topk_and_candidates(const ops::IndexParams& p, const ops::CandidateDesc& c) {
  fit_buffers(p.layer.kinds[p.kind].page.shape.width);
  const TokenSpace space(p);
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    const std::int64_t unscored = std::min<std::int64_t>(p.top, c.unmasked_entries());
    score_tokens(p, {first, count, unscored + 1}, [&](std::int64_t token) { return space.scores(token); });
    for_tokens(pool_, first, count, [&](std::int64_t token) {
      float* scores = space.scores(token);
      choose(p, token, scores, space.histogram(token));
      keep_candidates(p, c, token, scores, scores, space.histogram(token));
    });
  });
}

void CpuBackend::select_topk_and_candidates(const ops::IndexParams& p, const ops::CandidateDesc& c) {
  const TokenSpace space(p);
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    for_tokens(pool_, first, count, [&](std::int64_t token) {
      const float* scores = p.scores + token * p.score_stride;
      choose(p, token, scores, space.histogram(token));
      keep_candidates(p, c, token, scores, space.scores(token), space.histogram(token));
    });
  });
}

void CpuBackend::index_scores_within(const ops::IndexParams& p, const ops::CandidateDesc& c) {
  fit_buffers(p.layer.kinds[p.kind].page.shape.width);
  const TokenSpace space(p);
  const auto scores_of = [&](std::int64_t token) { return p.scores + token * p.score_stride; };
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    score_tokens(p, {first, count, 1, c.unmasked_entries()}, scores_of);
    score_candidates(p, c, {first, count, c.unmasked_entries() + 1});
    for_tokens(pool_, first, count, [&](std::int64_t token) {
      const std::int64_t visible = visible_keys(p, token);
      std::fill(scores_of(token) + (is_masked(c, visible) ? 0 : visible), scores_of(token + 1), -INFINITY);
      if (!is_masked(c, visible)) return;
      const std::int64_t entries = c.entries_of(token, visible);
      for (std::int64_t i = 0; i < entries; ++i) scores_of(token)[c.entry(token, i)] = space.scores(token)[i];
    });
  });
}

void CpuBackend::index_topk_within(const ops::IndexParams& p, const ops::CandidateDesc& c) {
  fit_buffers(p.layer.kinds[p.kind].page.shape.width);
  const TokenSpace space(p);
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    score_tokens(p, {first, count, p.top + std::int64_t{1}, c.unmasked_entries()},
                 [&](std::int64_t token) { return space.scores(token); });
    score_candidates(p, c, {first, count, c.unmasked_entries() + 1});
    for_tokens(pool_, first, count,
               [&](std::int64_t token) { choose_within(p, c, token, space.scores(token), space.histogram(token)); });
  });
}

void CpuBackend::select_topk_within(const ops::IndexParams& p, const ops::CandidateDesc& c) {
  const TokenSpace space(p);
  for_tiles(p, space, [&](std::int64_t first, std::int64_t count) {
    for_tokens(pool_, first, count, [&](std::int64_t token) {
      const float* scores = p.scores + token * p.score_stride;
      const std::int64_t visible = visible_keys(p, token);
      if (!is_masked(c, visible)) return choose(p, token, scores, space.histogram(token));
      const std::int64_t entries = c.entries_of(token, visible);
      for (std::int64_t i = 0; i < entries; ++i) space.scores(token)[i] = scores[c.entry(token, i)];
      choose_within(p, c, token, space.scores(token), space.histogram(token));
    });
  });
}

}  // namespace kv4::cpu
