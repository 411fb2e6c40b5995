// The index kernels: the cases, the limits and the launch of each. dispatch.cu holds the table and selects from it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "backend/cuda/index/device_facts.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "kv4/params.h"

namespace kv4::cuda {

enum class IndexKernel {
  mxfp4_topk,      // mxfp4.cu: scores and selection, a cluster per token
  fp8_topk,        // fp8.cu: scores and rescoring selection, a cluster per token
  fp8_candidates,  // fp8.cu: scores for a rescoring selection
  fp8_raw,         // fp8_raw.cu: fast scores for the caller or a selection
  mxfp4,           // mxfp4.cu: scores
  mxfp4_groups,    // grouped.cu: scores, several tokens at a time
  fp8_groups,      // grouped.cu: fast scores, several tokens at a time
  // grouped.cu: scores for a rescoring selection, several tokens at a time
  fp8_candidate_groups,
  generic,         // generic.cu: scores, two launches
};

enum class IndexResult {
  topk,          // the best keys; scores stay inside the kernel or the workspace
  candidates,    // fast scores with the largest key scales, for a rescoring selection
  fast_scores,   // fast scores, exact where the error bound does not hold (docs/formats.md)
  exact_scores,  // exact scores for the caller or a selection
};

struct IndexKernelInfo {
  IndexKernel kernel;
  IndexResult result;
  std::optional<Format> format;  // of the keys; none: any
  int key_bytes;                 // keys lie as can_stream_keys checks, on Hopper; 0: any layout, any GPU
  std::int64_t max_keys;         // of a token
  bool has_group_maxima;         // it writes the group maxima of long rows
  bool (*fits)(const TokenTile& tile, const DeviceFacts& device);  // further limits; null: none
  cudaError_t (*launch)(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
};

/// The fastest kernel of the table with one of the `wanted` results for this tile. They contain exact_scores, which the
/// generic kernel, the last of the table, gives for every tile. A pure function of its arguments: it calls no CUDA
/// function and reads no memory that the params point to.
const IndexKernelInfo& select_index(std::initializer_list<IndexResult> wanted, const TokenTile& tile,
                                    const DeviceFacts& device);

cudaError_t topk_mxfp4(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t topk_fp8(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_fp8(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_fp8_raw(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_mxfp4(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_mxfp4_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_fp8_candidate_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_fp8_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);
cudaError_t score_generic(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream);

}  // namespace kv4::cuda
