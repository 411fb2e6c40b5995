// A token tile: tokens of a step whose scores and queries fit the workspace together. Score kernels and
// selection both take one, and both ask it which keys a token sees.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kv4/params.h"

namespace kv4::cuda {

/// select_row takes up to kRowNumbers numbers of a row. In a longer row, this many keys form a group with one maximum.
/// Chosen on an H200, 2026-11-15; `kv4_gpu_bench --only index` shows a change.
constexpr int kRowNumbers = 8192;
constexpr int kSmallGroup = 8, kLargeGroup = 32, kSmallGroupKeys = 32768;
KV4_HD int group_size(int keys) { return keys <= kSmallGroupKeys ? kSmallGroup : kLargeGroup; }
KV4_HD int groups_of(int keys) {
  return keys <= kSmallGroupKeys ? (keys + kSmallGroup - 1) / kSmallGroup : (keys + kLargeGroup - 1) / kLargeGroup;
}

/// The largest key scales of one token. The token's keys are split over CTAs, and each CTA writes the maximum of its
/// split.
struct LargestScales {
  static constexpr int kMaxSplits = 256;
  std::uint32_t of_split[kMaxSplits];  // bits of the largest scale; kOutOfRangeScale if a scale is out of range
  std::int32_t splits;                 // how many splits there are
};

/// Tokens first .. first + count - 1 of a step.
struct TokenTile {
  ops::IndexParams p;
  std::int32_t first = 0;
  std::int32_t count = 0;
  float* scores = nullptr;          // [count, score_stride]
  std::int64_t score_stride = 0;    // at least the keys any token sees
  std::int32_t skip = 0;            // tokens that see no more keys are not scored
  bool fill = false;                // write -infinity behind the keys that a token sees
  std::uint8_t* queries = nullptr;  // [count, query_stride]: encoded queries, maxima
  std::int64_t query_stride = 0;
  std::int64_t maxima_at = 0;  // offset of the group maxima behind the kept queries
  bool has_maxima = false;     // of rows longer than kRowNumbers: group maxima are written
  bool is_scored = false;      // the scoring kernel is followed at once by the selection

  KV4_HD const ops::KindDesc& kind() const { return p.layer.kinds[p.kind]; }
  KV4_HD float* row(std::int64_t token) const { return scores + token * score_stride; }
  /// The largest score of each group of keys.
  KV4_HD float* maxima(std::int64_t token) const {
    return reinterpret_cast<float*>(queries + token * query_stride + maxima_at);
  }
  /// Beside fast scores; they lie before the maxima.
  KV4_HD LargestScales* largest_scales(std::int64_t token) const {
    return reinterpret_cast<LargestScales*>(queries + token * query_stride + maxima_at) - 1;
  }
  /// Keys that a token of the tile sees, limited by the room for scores.
  KV4_HD std::int32_t visible(const ops::StepRecord& token) const {
    if (token.padded()) return 0;
    const std::int32_t entries = (token.position + 1) / kind().ratio;
    return entries < score_stride ? entries : static_cast<std::int32_t>(score_stride);
  }
  /// Keys to score.
  KV4_HD std::int32_t scored(const ops::StepRecord& token) const {
    const std::int32_t entries = visible(token);
    return entries > skip ? entries : 0;
  }
};

/// The number of keys that a row of the block table has room for.
inline std::int64_t max_entries(const ops::IndexParams& p) {
  return std::int64_t{p.step.blocks_per_request} * p.layer.kinds[p.kind].rows_per_block;
}

/// An encoded query has at most two bytes per channel, then its scales.
constexpr int kQueryScaleRoom = 32;
KV4_HD constexpr std::int64_t query_row_bytes(int width) { return 2 * width + kQueryScaleRoom; }

#ifdef __CUDACC__
/// Encoded queries of a token, either given by the caller or in the workspace.
struct QueryRows {
  const std::uint8_t *payload, *scale;
  std::int64_t payload_stride, scale_stride;  // from head to head
};

template <class Codec>
__device__ QueryRows query_rows(const TokenTile& tile, int token) {
  const ops::IndexParams& p = tile.p;
  const RowShape shape = tile.kind().page.shape;
  if (p.q.dtype == DType::u8) {
    const std::int64_t at = tile.first + token;
    return {static_cast<const std::uint8_t*>(p.q.data) + at * p.q.row_stride,
            static_cast<const std::uint8_t*>(p.q_scale.data) + at * p.q_scale.row_stride, Codec::payload_bytes(shape),
            Codec::scale_bytes(shape)};
  }
  const std::int64_t stride = query_row_bytes(shape.width);
  const std::uint8_t* base = tile.queries + token * tile.query_stride;
  return {base, base + 2 * shape.width, stride, stride};
}

constexpr float kNoScore = -__builtin_huge_valf();

/// The tail of each row, behind the keys that the token sees, is filled with -infinity by all threads of the grid. If
/// there are more CTAs than tokens, several CTAs split a row.
class RowTail {
 public:
  /// May run before the grid dependency wait.
  __device__ explicit RowTail(const TokenTile& tile) : splits_(max(1, static_cast<int>(gridDim.x) / tile.count)) {
    token_ = static_cast<int>(blockIdx.x) / splits_;
    split_ = static_cast<int>(blockIdx.x) % splits_;
  }
  /// For grid_dependency_wait_after.
  __device__ int made() const { return token_ ^ split_ ^ splits_; }

  /// Issues the loads of the record of the CTA's first row, which fill needs.
  __device__ void load_record(const TokenTile& tile) {
    if (token_ >= tile.count) return;
    const ops::StepRecord* const record = tile.p.step.tokens + tile.first + token_;
    row_ = record->row;
    position_ = record->position;
  }

  __device__ void fill(const TokenTile& tile, int thread, int threads) {
    for (; token_ < tile.count; token_ += static_cast<int>(gridDim.x), load_record(tile)) {
      ops::StepRecord record;
      record.row = row_;
      record.position = position_;
      float* const row = tile.row(token_);
      for (std::int64_t j = tile.visible(record) + split_ * threads + thread; j < tile.score_stride;
           j += splits_ * threads)
        row[j] = kNoScore;
      if (splits_ > 1) break;  // there are as many CTAs as splits
    }
    token_ = split_ = splits_ = row_ = position_ = 0;  // frees the registers for the loop that follows
  }

 private:
  int splits_, token_, split_;
  std::int32_t row_ = 0, position_ = 0;
};

__device__ inline void fill_tail(const TokenTile& tile, int thread, int threads) {
  RowTail tail(tile);
  tail.load_record(tile);
  tail.fill(tile, thread, threads);
}
#endif

}  // namespace kv4::cuda
