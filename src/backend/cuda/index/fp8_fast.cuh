// Fast scores of fp8 keys. The score kernels (fp8.cu, fp8_raw.cu) and the rescoring selection (topk/rescore.cuh) use
// this file: each of them encodes the queries like keys, and the order of channels and heads decides the error bound.
#pragma once

#include <cstdint>

#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/rows/encode.cuh"

namespace kv4::cuda {

/// Bits of the scales that are in range, 2^-40 to 2^30: no sum overflows, and no product of codes is a denormal.
constexpr std::uint32_t kMinScale = (127u - 40) << 23, kMaxScale = (127u + 30) << 23, kOutOfRangeScale = 0xFFFFFFFFu;

/// The index of the k-step that multiplies a channel. A product has 8 steps of 16 channels.
constexpr int kMatrixSteps = 8, kStepChannels = 16;
__host__ __device__ constexpr int matrix_step(int channel) { return channel / 64 * 4 + channel % 16 / 4; }

/// Whether a scale, given as bits, is out of range: also zero, denormal, negative, infinite or NaN.
__device__ inline bool is_out_of_range(std::uint32_t scale) { return scale - kMinScale > kMaxScale - kMinScale; }

// --- queries, eight lanes per head

constexpr int kHeadLanes = 8, kLaneChannels = kWidth / kHeadLanes;
static_assert(kLaneChannels == 16);

/// Codes of a lane's channels, and the scale and weight of the head.
struct QueryPart {
  uint4 codes;
  float scale, weight;
};

using Fp8QueryAddress = QueryAddress<kWidth, kLaneChannels>;

/// Encodes queries like keys; the lanes of a head work together. Encoded queries pass through.
template <int kCount>
__device__ void make_queries(const TokenTile& tile, const RawChannels<kLaneChannels> (&raw)[kCount],
                             QueryPart (&out)[kCount]) {
  if (tile.p.q.dtype == DType::u8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = {raw[i].words[0], codec::bits_float(raw[i].scale), raw[i].weight};
    return;
  }
  float x[kCount][kLaneChannels];
#pragma unroll
  for (int i = 0; i < kCount; ++i) channels_of(raw[i], x[i]);
  if (tile.kind().hadamard) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) transform(x[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    std::uint32_t pairs[kLaneChannels / 2];
    float amax = round_channels(x[i], pairs);
#pragma unroll
    for (int lane = 1; lane < kHeadLanes; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lane));
    const int exponent = exponent_over_448(amax);
    const float by = pow2_normal(-exponent);
    std::uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = e4m3_quad({low_value(pairs[2 * j]), high_value(pairs[2 * j]), low_value(pairs[2 * j + 1]),
                            high_value(pairs[2 * j + 1])},
                           by);
    out[i] = {{words[0], words[1], words[2], words[3]}, pow2_normal(exponent), raw[i].weight};
  }
}

__device__ inline void half_pairs(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  fp16_pairs_of_e4m3(codes, low, high);
#else
  low = high = codes;  // never run
#endif
}

// --- products of keys and heads

// A dot product of codes is less than 2^kDotShift; the weights of heads are multiplied by 2^kDotShift. If weight times
// scale of a head with nonzero codes is beyond kMaxWeight, the error bound of its token does not hold
// (topk/rescore.cuh).
constexpr int kDotShift = 25;
constexpr float kMaxWeight = 0x1p90f;
static_assert(kWidth * 448 * 448 < 1 << kDotShift);

/// relu of a dot product times 2^-kDotShift, which is less than 1. The saturating multiplication does the relu: a
/// maximum would need the pipe of the conversions.
__device__ inline float relu(float dot) { return __saturatef(dot * (1.0f / (1 << kDotShift))); }

/// Adds one chain of heads for two keys.
__device__ inline void add_heads(const float (&d)[32], const float (&weights)[ops::kChainHeads], float& first,
                                 float& second) {
  first = second = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) {
    const int at = i / 2 * 4 + i % 2;
    first = codec::fused(weights[i], relu(d[at]), first);
    second = codec::fused(weights[i], relu(d[at + 2]), second);
  }
}

/// Writes a lane's part of a token's queries to `to`: the operand in two halves of the channels, and the weights.
template <class Queries>
__device__ void put_fp16_query(Queries& to, const QueryPart& q, int head, int part) {
  const int row = operand_row(head);
  const std::uint32_t words[4] = {q.codes.x, q.codes.y, q.codes.z, q.codes.w};
  const auto put = [&](int i, std::uint32_t pair) {
    *reinterpret_cast<std::uint32_t*>(&to.q[part / 4][row * 128 + 16 * (i ^ (row % 8)) + 4 * (part % 4)]) = pair;
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t low, high;
    half_pairs(words[i], low, high);
    put(2 * i, low);
    put(2 * i + 1, high);
  }
  if (part == 0) {
    const float weight = fmaxf(fminf(q.weight * q.scale, kMaxWeight), -kMaxWeight);
    to.weights[head / ops::kChainHeads][head % ops::kChainHeads] = weight * (1 << kDotShift);
  }
}

/// Loads a lane's part of one half of a KV tile, 64 keys, as fp16.
__device__ inline void load_fp16_keys(std::uint32_t stage, std::uint32_t chunk_at, int half,
                                      std::uint32_t (&a)[kMatrixSteps][4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint4 codes = load_shared16(stage + 1024 * (2 * half + k) + (chunk_at ^ (64 * part)));
      const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) half_pairs(words[j], a[4 * part + j][k], a[4 * part + j][2 + k]);
    }
}

/// Offset of the first 16-byte chunk of a lane's row of codes. Rows of a quad are 8 apart, so whether the halves of a
/// row are swapped depends on the lane alone.
__device__ inline std::uint32_t first_chunk(int lane) {
  return static_cast<std::uint32_t>(128 * (lane / kQuad) + 16 * (lane % kQuad ^ (lane / kQuad % 2 * 4)));
}

}  // namespace kv4::cuda
