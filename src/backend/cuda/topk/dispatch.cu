// Top-k: the table of its kernels, and the selection from it.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "backend/cuda/topk/kernels.h"

namespace kv4::cuda {
namespace {

constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

// In order of preference: the first kernel that serves a tile is the fastest.
constexpr TopkKernelInfo kTopkKernels[] = {
    // kernel, scores, max_scores, needs_group_maxima, fits, launch
    {TopkKernel::short_row, ScoreMode::exact, kShortRowNumbers, false, nullptr, select_short_rows},
    {TopkKernel::row, ScoreMode::exact, kRowNumbers, false, nullptr, select_rows},
    {TopkKernel::grouped_row, ScoreMode::exact, kAny, true, nullptr, select_grouped_rows},
    {TopkKernel::long_row, ScoreMode::exact, kAny, false, can_select_long_rows, select_long_rows},
    {TopkKernel::row_in_memory, ScoreMode::exact, kAny, false, nullptr, select_rows},
    {TopkKernel::rescored_row, ScoreMode::fast, kRowNumbers, false, nullptr, select_rescored_rows},
    {TopkKernel::rescored_grouped_row, ScoreMode::fast, kAny, true, nullptr, select_rescored_grouped_rows},
};

const TopkKernelInfo* choose_kernel(const TokenTile& tile, ScoreMode scores) {
  const std::int64_t longest = std::min(tile.score_stride, max_entries(tile.p));
  for (const TopkKernelInfo& k : kTopkKernels)
    if (k.scores == scores && longest <= k.max_scores && (!k.needs_group_maxima || tile.has_maxima) &&
        (k.fits == nullptr || k.fits()))
      return &k;
  return nullptr;
}

}  // namespace

cudaError_t select_topk_rows(const TokenTile& tile, ScoreMode scores, const DeviceFacts& device, cudaStream_t stream) {
  const TopkKernelInfo* const kernel = choose_kernel(tile, scores);
  return kernel == nullptr ? cudaErrorInvalidValue : kernel->launch(tile, device, stream);
}

}  // namespace kv4::cuda
