// Index scores and top-k: the table of the index kernels, the selection from it, and the loop over token tiles that fit
// the workspace.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "backend/cuda/index/grid.cuh"
#include "backend/cuda/index/kernels.h"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/token_groups.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/topk/kernels.h"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"
#include "ops/score_row.h"

namespace kv4::cuda {
namespace {

using ops::IndexParams;

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

/// Whether requests have several tokens, which read the same keys.
bool shares_keys(const ops::StepDesc& step) {
  constexpr int kFewest = 3;  // of a request; groups of two leave half of the products empty
  return step.num_items > 0 && step.num_tokens >= kFewest * step.num_items;
}

/// Whether tokens can be scored in groups, and there is room for what is prepared for them.
bool fits_groups(const TokenTile& tile, const DeviceFacts& device) {
  return shares_keys(tile.p.step) && tile.queries != nullptr && is_aligned(tile.queries, tile.query_stride, 16) &&
         tile.query_stride >= kPreparedTokenBytes && device.num_sms <= kMaxGroupCtas &&
         total_kv_tiles(tile) < kMaxGroupTiles && TwoWarpgroups::kStep % tile.kind().rows_per_block == 0;
}

/// The tile with room for the largest scales, behind what token groups prepare, and for the group maxima behind them.
TokenTile with_rescoring(TokenTile tile, std::int64_t prepared_bytes = 0) {
  constexpr std::int64_t kLine = 256;
  tile.maxima_at = (prepared_bytes + std::int64_t{sizeof(LargestScales)} + kLine - 1) / kLine * kLine;
  tile.has_maxima = true;
  return tile;
}

// --- the table

constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

bool fits_clusters(const TokenTile& tile, const DeviceFacts& device) { return cluster_ctas(tile, device) > 0; }

bool fits_fp8(const TokenTile& tile, const DeviceFacts&) {
  const IndexParams& p = tile.p;
  return is_aligned(p.workspace, 0, 16) &&
         (p.q.dtype != DType::u8 || is_aligned(p.q_scale.data, p.q_scale.row_stride, 4));
}

bool fits_fp8_groups(const TokenTile& tile, const DeviceFacts& device) {
  return fits_fp8(tile, device) && fits_groups(tile, device);
}

bool fits_fp8_rescoring(const TokenTile& tile, const DeviceFacts& device) {
  return fits_fp8(tile, device) && can_hold_maxima(with_rescoring(tile));
}

bool fits_fp8_candidate_groups(const TokenTile& tile, const DeviceFacts& device) {
  return fits_fp8_groups(tile, device) && can_hold_maxima(with_rescoring(tile, kPreparedCandidateBytes));
}

bool fits_fp8_clusters(const TokenTile& tile, const DeviceFacts& device) {
  return fits_fp8_rescoring(tile, device) && fits_clusters(tile, device);
}

// In order of preference: the first kernel with a wanted result that serves a tile is the fastest.
constexpr IndexKernelInfo kIndexKernels[] = {
    // kernel, result, format, key_bytes, max_keys, has_group_maxima, fits, launch
    {IndexKernel::mxfp4_groups, IndexResult::exact_scores, Format::mxfp4, kWidth / 2, kAny, true, fits_groups,
     score_mxfp4_groups},
    {IndexKernel::fp8_groups, IndexResult::fast_scores, Format::fp8, kWidth, kAny, true, fits_fp8_groups,
     score_fp8_groups},
    {IndexKernel::fp8_candidate_groups, IndexResult::candidates, Format::fp8, kWidth, kAny, true,
     fits_fp8_candidate_groups, score_fp8_candidate_groups},
    {IndexKernel::mxfp4_topk, IndexResult::topk, Format::mxfp4, kWidth / 2, kRowNumbers, false, fits_clusters,
     topk_mxfp4},
    {IndexKernel::fp8_topk, IndexResult::topk, Format::fp8, kWidth, kRowNumbers, false, fits_fp8_clusters, topk_fp8},
    {IndexKernel::fp8_candidates, IndexResult::candidates, Format::fp8, kWidth, kAny, true, fits_fp8_rescoring,
     score_fp8},
    {IndexKernel::fp8_raw, IndexResult::fast_scores, Format::fp8, kWidth, kAny, false, fits_fp8, score_fp8_raw},
    {IndexKernel::mxfp4, IndexResult::exact_scores, Format::mxfp4, kWidth / 2, kAny, true, nullptr, score_mxfp4},
    {IndexKernel::generic, IndexResult::exact_scores, {}, 0, kAny, false, nullptr, score_generic},
};

bool serves(const IndexKernelInfo& k, const TokenTile& tile, const DeviceFacts& device) {
  return (!k.format || *k.format == tile.kind().page.format) && max_entries(tile.p) <= k.max_keys &&
         (k.key_bytes == 0 || can_stream_keys(tile.p, k.key_bytes, device)) &&
         (k.fits == nullptr || k.fits(tile, device));
}

// --- token tiles

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
  std::int64_t room = p.workspace_bytes / part.bytes;
  if (p.step.num_tokens > 0 && room < 1) return cudaErrorInvalidValue;
  if (room > kMaxGroupTokens) room -= room % kMaxGroupTokens;  // whole groups: the last would else be nearly empty
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

/// All tokens in one tile, with given scores.
TokenTile whole_step(const IndexParams& p) {
  TokenTile tile;
  tile.p = p;
  tile.count = p.step.num_tokens;
  tile.scores = p.scores;
  tile.score_stride = p.score_stride;
  return tile;
}

/// The kernel before a selection. Where the caller keeps the scores, they are those of index_scores.
const IndexKernelInfo& select_before_topk(const TokenTile& tile, const DeviceFacts& device) {
  if (tile.p.mode == ScoreMode::fast) {
    const IndexKernelInfo& kernel = select_index({IndexResult::fast_scores, IndexResult::exact_scores}, tile, device);
    if (kernel.result == IndexResult::fast_scores) return kernel;
  }
  return tile.p.scores != nullptr
             ? select_index({IndexResult::exact_scores}, tile, device)
             : select_index({IndexResult::topk, IndexResult::candidates, IndexResult::exact_scores}, tile, device);
}

/// The tile as `kernel` takes it if a top-k is wanted.
TokenTile prepare_topk(TokenTile tile, const IndexKernelInfo& kernel) {
  switch (kernel.kernel) {
    case IndexKernel::mxfp4_groups:
    case IndexKernel::fp8_groups: tile.maxima_at = kPreparedTokenBytes; break;
    case IndexKernel::fp8_candidate_groups: tile = with_rescoring(tile, kPreparedCandidateBytes); break;
    case IndexKernel::fp8_candidates: tile = with_rescoring(tile); break;
    default: break;
  }
  tile.has_maxima = kernel.has_group_maxima && can_hold_maxima(tile);
  tile.is_scored = kernel.result != IndexResult::topk;
  return tile;
}

}  // namespace

const IndexKernelInfo& select_index(std::initializer_list<IndexResult> wanted, const TokenTile& tile,
                                    const DeviceFacts& device) {
  return *std::find_if(std::begin(kIndexKernels), std::end(kIndexKernels) - 1, [&](const IndexKernelInfo& k) {
    return std::find(wanted.begin(), wanted.end(), k.result) != wanted.end() && serves(k, tile, device);
  });
}

cudaError_t index_scores(const IndexParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch index_scores", true);
  if (params.step.num_tokens == 0) return cudaSuccess;
  const DeviceFacts device = device_facts();
  const bool is_fast = params.mode == ScoreMode::fast;
  if (is_fast && !shares_keys(params.step)) {
    TokenTile tile = whole_step(params);
    tile.fill = true;
    const IndexKernelInfo& kernel = select_index({IndexResult::fast_scores, IndexResult::exact_scores}, tile, device);
    if (kernel.result == IndexResult::fast_scores) return kernel.launch(tile, device, stream);  // without a workspace
  }
  return for_each_tile(params, params.scores, [&](const TokenTile& tile) {
    const IndexKernelInfo& kernel =
        is_fast ? select_index({IndexResult::fast_scores, IndexResult::exact_scores}, tile, device)
                : select_index({IndexResult::exact_scores}, tile, device);
    return kernel.launch(tile, device, stream);
  });
}

cudaError_t select_topk(const IndexParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch select_topk", true);
  if (params.step.num_tokens == 0) return cudaSuccess;
  return select_topk_rows(whole_step(params), ScoreMode::exact, device_facts(), stream);
}

cudaError_t index_topk(const IndexParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch index_topk", true);
  if (params.step.num_tokens == 0) return cudaSuccess;
  const DeviceFacts device = device_facts();
  return for_each_tile(params, params.scores, [&](TokenTile& tile) {
    if (params.scores == nullptr) tile.skip = params.top;  // shorter rows are taken whole
    const IndexKernelInfo& kernel = select_before_topk(tile, device);
    const TokenTile prepared = prepare_topk(tile, kernel);
    const cudaError_t status = kernel.launch(prepared, device, stream);
    if (status != cudaSuccess || kernel.result == IndexResult::topk) return status;
    const ScoreMode scores = kernel.result == IndexResult::candidates ? ScoreMode::fast : ScoreMode::exact;
    return select_topk_rows(prepared, scores, device, stream);
  });
}

}  // namespace kv4::cuda
