// fp8 keys and queries as e4m3 operands, for the kernels of raw fast scores: the order of channels, and exact scores of
// what is out of range. fp8_raw.cu explains the arithmetic.
#pragma once

#include <cstdint>

#include "backend/cuda/index/fp8_fast.cuh"
#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "ops/score_row.h"

namespace kv4::cuda::fp8 {

constexpr int kKeyBytes = kWidth, kSteps = kWidth / 32;

/// The largest weight times scale of a head that is in range. No sum overflows: with the largest code, 64 heads and the
/// largest key scale it is 2^121.
constexpr float kMaxRawWeight = 0x1p60f;

/// The offset of a word of a query's codes: four channels from 4 * word on.
__device__ inline int word_at(int head, int word) {
  const int row = operand_row(head);
  return row * kWidth + 16 * ((word / 16 * 4 + word % 4) ^ (row % 8)) + 4 * (word % 16 / 4);
}

using Operand = std::uint32_t[kSteps][4];

/// Loads a lane's part of one half of a KV tile, 64 keys.
__device__ inline void load_tile(std::uint32_t stage, std::uint32_t chunk_at, int tile, Operand& a) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint4 codes = load_shared16(stage + 1024 * (2 * tile + k) + (chunk_at ^ (64 * part)));
      const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) a[2 * part + j / 2][j % 2 * 2 + k] = words[j];
    }
}

/// The exact score of one key, in every lane. Each lane multiplies two heads, then adds a chain of heads.
template <class Shared>
__device__ float exact_score(const Shared& s, const std::uint8_t* codes, float scale) {
  const int lane = static_cast<int>(threadIdx.x % 32), chain = lane % ops::kChains;
  float dots[2] = {};
#pragma unroll 1
  for (int channel = 0; channel < kWidth; ++channel) {
    const float k = codec::e4m3_value(codes[channel]) * scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = lane + 32 * i;
      const float q = codec::e4m3_value(s.q[word_at(head, channel / 4) + channel % 4]) * s.scales[head];
      dots[i] = codec::fused(q, k, dots[i]);
    }
  }
  float sum = 0.0f;
#pragma unroll 1
  for (int i = 0; i < ops::kChainHeads; ++i) {
    const int head = chain * ops::kChainHeads + i;
    const float low = __shfl_sync(kAllLanes, dots[0], head % 32), high = __shfl_sync(kAllLanes, dots[1], head % 32);
    sum = codec::fused(s.plain_weights[head], ops::relu(head < 32 ? low : high), sum);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  return codec::canonical_nan(sum + __shfl_xor_sync(kAllLanes, sum, 2));
}

}  // namespace kv4::cuda::fp8
