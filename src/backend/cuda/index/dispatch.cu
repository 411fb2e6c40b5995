// Index scores and top-k: selection of the kernels, and the loop over token tiles that fit the workspace.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/index/token_tile.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"
#include "ops/score_row.h"

namespace kv4::cuda {
namespace {

using ops::IndexParams;

/// A token has ops::index_token_bytes of the workspace: its scores, then its encoded queries.
struct TokenPart {
  explicit TokenPart(const IndexParams& p)
      : bytes(ops::index_token_bytes(max_entries(p), p.num_heads, p.layer.kinds[p.kind].page.shape.width)),
        score_stride((max_entries(p) + 63) / 64 * 64) {}
  std::int64_t bytes, score_stride;
};

/// Calls f with each token tile. Scores lie in `scores` if it is set, else in the workspace.
template <class F>
cudaError_t for_each_tile(const IndexParams& p, float* scores, F&& f) {
  const TokenPart part(p);
  const std::int64_t room = p.workspace_bytes / part.bytes;
  if (p.step.num_tokens > 0 && room < 1) return cudaErrorInvalidValue;
  for (std::int64_t first = 0; first < p.step.num_tokens; first += room) {
    TokenTile tile;
    tile.p = p;
    tile.first = static_cast<std::int32_t>(first);
    tile.count = static_cast<std::int32_t>(std::min(room, p.step.num_tokens - first));
    tile.scores = scores != nullptr ? scores + first * p.score_stride : reinterpret_cast<float*>(p.workspace);
    tile.score_stride = scores != nullptr ? p.score_stride : part.score_stride;
    tile.fill = scores != nullptr;
    tile.queries = p.workspace + tile.count * part.score_stride * std::int64_t{4};
    tile.query_stride = part.bytes - part.score_stride * std::int64_t{4};
    if (const cudaError_t status = f(tile); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

/// Whether the group maxima of the longest possible row fit the registers of a selecting CTA and the workspace. The
/// selection then reads scores as float4.
bool can_hold_maxima(const TokenTile& tile) {
  const std::int64_t longest = max_entries(tile.p);
  const std::int64_t groups = std::max(std::min<std::int64_t>(longest, kSmallGroupKeys) / kSmallGroup,
                                       (longest + kLargeGroup - 1) / kLargeGroup);
  const bool in_fours = reinterpret_cast<std::intptr_t>(tile.scores) % 16 == 0 && tile.score_stride % 4 == 0;
  return in_fours && groups <= kRowNumbers &&
         tile.maxima_at + groups * std::int64_t{sizeof(float)} <= tile.query_stride;
}

/// The tile with room for the largest scales and, behind them, the group maxima.
TokenTile with_rescoring(TokenTile tile) {
  constexpr std::int64_t kLine = 256;
  tile.maxima_at = (std::int64_t{sizeof(LargestScales)} + kLine - 1) / kLine * kLine;
  tile.has_maxima = true;
  return tile;
}

/// All tokens in one tile, with given scores.
TokenTile whole_step(const IndexParams& p) {
  TokenTile tile;
  tile.p = p;
  tile.count = p.step.num_tokens;
  tile.scores = p.scores;
  tile.score_stride = p.score_stride;
  return tile;
}

cudaError_t score(const TokenTile& tile, cudaStream_t stream) {
  return can_score_mxfp4(tile.p) ? score_mxfp4(tile, stream) : score_generic(tile, stream);
}

}  // namespace

cudaError_t index_scores(const IndexParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch index_scores", true);
  if (params.mode == ScoreMode::fast && can_score_fast(params)) {  // needs no workspace
    if (params.step.num_tokens == 0) return cudaSuccess;
    TokenTile tile = whole_step(params);
    tile.fill = true;
    return score_fast_raw(tile, stream);
  }
  return for_each_tile(params, params.scores, [&](const TokenTile& tile) { return score(tile, stream); });
}

cudaError_t select_topk(const IndexParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch select_topk", true);
  if (params.step.num_tokens == 0) return cudaSuccess;
  return select_tile(whole_step(params), stream);
}

cudaError_t index_topk(const IndexParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch index_topk", true);
  return for_each_tile(params, params.scores, [&](TokenTile& tile) {
    if (params.scores == nullptr) tile.skip = params.top;  // shorter rows are taken whole
    if (const int ctas = params.scores == nullptr ? mxfp4_topk_ctas(tile) : 0; ctas > 0)
      return topk_mxfp4(tile, ctas, stream);
    tile.is_scored = true;
    if (const TokenTile rescored = with_rescoring(tile);
        params.scores == nullptr && can_score_fast(params) && can_hold_maxima(rescored)) {
      if (const int ctas = fast_topk_ctas(rescored); ctas > 0) return topk_fast(rescored, ctas, stream);
      const cudaError_t status = score_fast(rescored, stream);
      return status == cudaSuccess ? select_rescored(rescored, stream) : status;
    }
    tile.has_maxima = can_score_mxfp4(params) && can_hold_maxima(tile);
    const cudaError_t status = score(tile, stream);
    return status == cudaSuccess ? select_tile(tile, stream) : status;
  });
}

}  // namespace kv4::cuda
