// Near scores of fp8 keys: what their scorers (fp8.cu, fp8_raw.cu) and the selection that corrects them
// (topk/rescore.cuh) agree on: queries encoded as keys are, which all of them make, and sums over heads.
#pragma once

#include <cstdint>

#include "backend/cuda/index/key_pipeline.cuh"

namespace kv4::cuda {

/// Bits of the scales that a key may have, 2^-40 to 2^30: nothing overflows, and no product of codes is a denormal.
constexpr std::uint32_t kLeastScale = (127u - 40) << 23, kMostScale = (127u + 30) << 23, kOddScale = 0xFFFFFFFFu;

/// Which of the 8 steps of a matrix product, each adding 16 channels, takes a channel.
constexpr int kMatrixSteps = 8, kStepChannels = 16;
__host__ __device__ constexpr int matrix_step(int channel) { return channel / 64 * 4 + channel % 16 / 4; }

/// No normal number of ordinary size.
__device__ inline bool is_odd(std::uint32_t scale) { return scale - kLeastScale > kMostScale - kLeastScale; }

// --- queries, eight lanes per head

constexpr int kHeadLanes = 8, kLaneChannels = kWidth / kHeadLanes;
static_assert(kLaneChannels == 16);

/// Codes of a lane's channels and their head's scale and weight.
struct QueryPart {
  uint4 codes;
  float scale, weight;
};

using NearPlace = QueryPlace<kWidth, kLaneChannels>;

/// Encoded as keys are, by their heads' lanes, unless they are already.
template <int kCount>
__device__ void make_queries(const IndexTile& tile, const RawChannels<kLaneChannels> (&raw)[kCount],
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

/// Four e4m3 as fp16, exactly. Written so that the conversion itself takes the upper half of a register: no shifts.
__device__ inline void half_pairs(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = high = codes;  // never run
#endif
}

// --- products of a tile's keys and heads

// Dots of codes are less than 2^kDotShift; heads' weights are multiplied by it. A head of other codes than zeros whose
// weight times scale is beyond kMostWeight makes its token's margin one that does not hold (topk/rescore.cuh).
constexpr int kDotShift = 25;
constexpr float kMostWeight = 0x1p90f;
static_assert(kWidth * 448 * 448 < 1 << kDotShift);

/// relu of a dot times 2^-kDotShift, which is less than 1, by a saturating product: a maximum would need the pipe of
/// the conversions.
__device__ inline float relu(float dot) { return __saturatef(dot * (1.0f / (1 << kDotShift))); }

/// One chain of heads of two keys.
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

/// Of a lane's row of codes. Rows of a quad are 8 apart: whether their halves have changed places is the lane's own.
__device__ inline std::uint32_t first_chunk(int lane) {
  return static_cast<std::uint32_t>(128 * (lane / kQuad) + 16 * (lane % kQuad ^ (lane / kQuad % 2 * 4)));
}

}  // namespace kv4::cuda
