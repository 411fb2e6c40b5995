// Index scores of key ranges: the tables that the index kernels read, and scores laid out as other engines want them.
// Neither kernel signals dependents, so the index kernel that follows reads finished tables even before its grid
// dependency wait.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "codec/numeric.h"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

using ops::PlaceScoresParams;
using ops::RangeTablesParams;

constexpr int kThreads = 256;
constexpr std::int64_t kMaxCtas = 1 << 16;  // of a launch; each takes several rows of a longer list

__global__ void __launch_bounds__(kThreads) write_range_tables(const __grid_constant__ RangeTablesParams p) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t all = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t token = thread; token < p.ranges.num_tokens; token += all) p.tokens[token] = p.record(token);
  for (std::int64_t i = thread; i < p.table_entries(); i += all) p.block_table[i] = p.page(i);
  if (p.ones != nullptr && thread < ops::kMaxIndexHeads) p.ones[thread] = 1.0f;
}

/// A CTA per token. Bound by bytes: scores are read once, logits are written once.
__global__ void __launch_bounds__(kThreads) place_token_scores(const __grid_constant__ PlaceScoresParams p) {
  for (std::int64_t token = blockIdx.x; token < p.ranges.num_tokens; token += gridDim.x) {
    const std::int32_t first = p.ranges.begin(token), shift = p.is_compact ? first : 0;
    const std::int32_t begin = first - shift, end = p.ranges.end(token) - shift;
    const float* scores = p.scores + token * p.score_stride + shift;
    const std::int32_t count = p.in_place() ? begin : p.num_logits;
    for (std::int32_t j = static_cast<std::int32_t>(threadIdx.x); j < count; j += kThreads) {
      const float x = j >= begin && j < end ? scores[j] : -INFINITY;
      if (p.logits.dtype == DType::bf16)
        static_cast<std::uint16_t*>(p.logits.data)[token * p.logit_stride + j] = codec::bf16_bits(x);
      else
        static_cast<float*>(p.logits.data)[token * p.logit_stride + j] = x;
    }
  }
}

}  // namespace

cudaError_t make_range_tables(const RangeTablesParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch make_range_tables", true);
  const std::int64_t items = std::max<std::int64_t>({p.ranges.num_tokens, p.table_entries(), 1});
  const std::int64_t ctas = std::min<std::int64_t>((items + kThreads - 1) / kThreads, kMaxCtas);
  return launch_in_order(write_range_tables, static_cast<unsigned>(ctas), kThreads, 0, stream, p);
}

cudaError_t place_scores(const PlaceScoresParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch place_scores", true);
  if (p.ranges.num_tokens <= 0) return cudaSuccess;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>(p.ranges.num_tokens, kMaxCtas));
  return launch_in_order(place_token_scores, ctas, kThreads, 0, stream, p);
}

}  // namespace kv4::cuda
