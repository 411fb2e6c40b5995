// The last step of a score: the sum of a key's chains of heads, and the group maxima of long rows.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"

namespace kv4::cuda {

/// Adds the chains of heads, (c0 + c1) + (c2 + c3), for the four keys of a quad. Lane c gets the score of key c.
__device__ inline float add_chains(const float (&sum)[kKeysPerQuad], int c) {
  const bool odd = c % 2 != 0, upper = c >= 2;
  const float low = (odd ? sum[1] : sum[0]) + __shfl_xor_sync(kAllLanes, odd ? sum[0] : sum[1], 1);
  const float high = (odd ? sum[3] : sum[2]) + __shfl_xor_sync(kAllLanes, odd ? sum[2] : sum[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
}

/// The group maxima of a token, or null if its row is too short to need them.
__device__ inline float* maxima_of(const TokenTile& tile, int token, int scored) {
  return tile.has_maxima && scored > kRowNumbers ? tile.maxima(token) : nullptr;
}

/// Writes the group maxima of a warp's 32 keys; each lane has one score. NaN is ignored.
__device__ inline void write_maxima(float* maxima, int first_key, int group, float score) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  static_assert(kSmallGroup == 8 && kLargeGroup == kWarpKeys);
  if (group == kLargeGroup) {
    const int bits = __float_as_int(fmaxf(score, kNoScore));  // ordered like integers after the xor
    const int largest = __reduce_max_sync(kAllLanes, bits ^ (bits >> 31 & 0x7FFFFFFF));
    if (lane == 0)
      maxima[static_cast<unsigned>(first_key) / kLargeGroup] = __int_as_float(largest ^ (largest >> 31 & 0x7FFFFFFF));
    return;
  }
#pragma unroll
  for (int step = kQuad; step < 32; step *= 2) score = fmaxf(score, __shfl_xor_sync(kAllLanes, score, step));
  if (lane < kQuad) maxima[static_cast<unsigned>(first_key) / kSmallGroup + lane] = score;
}

}  // namespace kv4::cuda
