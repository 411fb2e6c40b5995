// What the scorers and the selection share: a tile of tokens whose parts of the workspace fit it, and which keys a
// token sees.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kv4/params.h"

namespace kv4::cuda {

/// How many numbers of a row select_row takes, and how many keys of a longer row share one maximum.
constexpr int kRowNumbers = 8192;
constexpr int kSmallGroup = 8, kLargeGroup = 32, kSmallGroupKeys = 32768;
KV4_HD int group_size(int keys) { return keys <= kSmallGroupKeys ? kSmallGroup : kLargeGroup; }
KV4_HD int groups_of(int keys) {
  return keys <= kSmallGroupKeys ? (keys + kSmallGroup - 1) / kSmallGroup : (keys + kLargeGroup - 1) / kLargeGroup;
}

/// Of a token's keys, written by the blocks that score them, each of which has a share.
struct LargestScales {
  static constexpr int kMostShares = 256;
  std::uint32_t of_share[kMostShares];  // bits of the largest scale, kOddScale if one is out of bounds
  std::int32_t shares;                  // how many there are
};

/// Tokens first .. first + count - 1 of a step.
struct IndexTile {
  ops::IndexParams p;
  std::int32_t first = 0;
  std::int32_t count = 0;
  float* scores = nullptr;          // [count, score_stride]
  std::int64_t score_stride = 0;    // at least the keys any token sees
  std::int32_t skip = 0;            // tokens that see no more keys are not scored
  bool fill = false;                // -infinity behind what a token sees
  std::uint8_t* queries = nullptr;  // [count, query_stride]: encoded queries, maxima
  std::int64_t query_stride = 0;
  std::int64_t maxima_at = 0;  // behind the queries, where they are kept
  bool has_maxima = false;     // of rows longer than kRowNumbers
  bool is_scored = false;      // by a kernel that is followed at once by the selection

  KV4_HD const ops::KindDesc& kind() const { return p.layer.kinds[p.kind]; }
  KV4_HD float* row(std::int64_t token) const { return scores + token * score_stride; }
  /// The largest score of each group of keys.
  KV4_HD float* maxima(std::int64_t token) const {
    return reinterpret_cast<float*>(queries + token * query_stride + maxima_at);
  }
  /// Of near scores, before the maxima.
  KV4_HD LargestScales* largest_scales(std::int64_t token) const {
    return reinterpret_cast<LargestScales*>(queries + token * query_stride + maxima_at) - 1;
  }
  /// Keys a token of the tile sees, as far as there is room for scores.
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

/// Keys a block table row has room for.
inline std::int64_t max_entries(const ops::IndexParams& p) {
  return std::int64_t{p.step.blocks_per_request} * p.layer.kinds[p.kind].rows_per_block;
}

/// Any format, width, alignment and head count: two launches.
cudaError_t score_plain(const IndexTile& tile, cudaStream_t stream);

/// mxfp4 keys of 128 channels on Hopper, one launch.
bool can_score_mxfp4(const ops::IndexParams& p);
cudaError_t score_mxfp4(const IndexTile& tile, cudaStream_t stream);
/// With the best of them, in one launch: so many blocks for each token, 0 where two launches are better or have to be.
int topk_blocks(const IndexTile& tile);
cudaError_t topk_mxfp4(const IndexTile& tile, int blocks, cudaStream_t stream);

/// The best of the tile's scores.
cudaError_t select_tile(const IndexTile& tile, cudaStream_t stream);

/// fp8 keys of 128 channels on Hopper: scores up to rounding, and the best of the defined ones.
bool can_score_near(const ops::IndexParams& p);
cudaError_t score_near(const IndexTile& tile, cudaStream_t stream);
/// The same to be kept: without what a selection needs, and as defined where the bound does not hold (docs/formats.md).
cudaError_t score_near_raw(const IndexTile& tile, cudaStream_t stream);
cudaError_t select_near(const IndexTile& tile, cudaStream_t stream);
/// In one launch, so many blocks for each token; 0: by the two calls.
int near_topk_blocks(const IndexTile& tile);
cudaError_t topk_near(const IndexTile& tile, int blocks, cudaStream_t stream);

/// An encoded query: two bytes per channel at most, then its scales.
constexpr int kQueryScaleRoom = 32;
KV4_HD constexpr std::int64_t query_row_bytes(int width) { return 2 * width + kQueryScaleRoom; }

#ifdef __CUDACC__
/// Encoded queries of a token, as given or in the workspace.
struct QueryRows {
  const std::uint8_t *payload, *scale;
  std::int64_t payload_stride, scale_stride;  // from head to head
};

template <class Codec>
__device__ QueryRows query_rows(const IndexTile& tile, int token) {
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

/// -infinity behind what tokens see, by the threads of all blocks: a block takes every gridDim.x-th part of a row, a
/// row has enough parts for all.
class Rest {
 public:
  /// Before the wait, too.
  __device__ explicit Rest(const IndexTile& tile) : parts_(max(1, static_cast<int>(gridDim.x) / tile.count)) {
    token_ = static_cast<int>(blockIdx.x) / parts_;
    part_ = static_cast<int>(blockIdx.x) % parts_;
  }
  /// For grid_dependency_wait_after.
  __device__ int made() const { return token_ ^ part_ ^ parts_; }

  /// Asks for what fill needs of the record of the block's first row.
  __device__ void look(const IndexTile& tile) {
    if (token_ >= tile.count) return;
    const ops::StepRecord* const record = tile.p.step.tokens + tile.first + token_;
    row_ = record->row;
    position_ = record->position;
  }

  __device__ void fill(const IndexTile& tile, int thread, int threads) {
    for (; token_ < tile.count; token_ += static_cast<int>(gridDim.x), look(tile)) {
      ops::StepRecord record;
      record.row = row_;
      record.position = position_;
      float* const row = tile.row(token_);
      for (std::int64_t j = tile.visible(record) + part_ * threads + thread; j < tile.score_stride;
           j += parts_ * threads)
        row[j] = kNoScore;
      if (parts_ > 1) break;  // there are as many blocks as parts
    }
    token_ = part_ = parts_ = row_ = position_ = 0;  // no registers are needed any more, in a loop that goes on
  }

 private:
  int parts_, token_, part_;
  std::int32_t row_ = 0, position_ = 0;
};

__device__ inline void fill_rest(const IndexTile& tile, int thread, int threads) {
  Rest rest(tile);
  rest.look(tile);
  rest.fill(tile, thread, threads);
}
#endif

}  // namespace kv4::cuda
