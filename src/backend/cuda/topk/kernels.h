// The top-k kernels: the cases, the limits and the launch of each. dispatch.cu holds the table and selects from it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/index/device_facts.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "kv4/options.h"

namespace kv4::cuda {

constexpr int kShortRowNumbers = 2048;

enum class TopkKernel {
  short_row,             // select.cu: one CTA per row, all scores in registers
  row,                   // the same with more registers
  grouped_row,           // select.cu: one CTA per row, which reads the groups whose maxima reach the bound
  long_row,              // select.cu: a cluster per row
  row_in_memory,         // the kernel of `row`; radix selection goes over rows that do not fit its registers
  rescored_row,          // rescore.cu: one CTA per row of fast scores, all in registers
  rescored_grouped_row,  // rescore.cu: the same for long rows, by their group maxima
};

struct TopkKernelInfo {
  TopkKernel kernel;
  ScoreMode scores;         // exact: it selects by the scores as they are; fast: it rescores fast ones
  std::int64_t max_scores;  // of a row
  bool needs_group_maxima;
  bool (*fits)();  // further limits; null: none
  cudaError_t (*launch)(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
};

cudaError_t select_short_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t select_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t select_grouped_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
/// Whether a CTA of the current device may have the shared memory that select_long_rows needs.
bool can_select_long_rows();
cudaError_t select_long_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t select_rescored_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t select_rescored_grouped_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);

/// Selects the `top` best of each row of a tile, by the kernel that the table gives. scores: exact selects by the
/// scores as they are; fast rescores the ambiguous candidates, for which the tile has the largest key scales.
cudaError_t select_topk_rows(const TokenTile& tile, ScoreMode scores, const DeviceFacts& device, cudaStream_t stream);

}  // namespace kv4::cuda
