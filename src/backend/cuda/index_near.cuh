// Near scores of fp8 keys: what their scorer (index_fp8.cu) and the selection that corrects them (topk_near.cuh) agree
// on, and queries encoded as keys are, which both of them make.
#pragma once

#include <cstdint>

#include "backend/cuda/index_units.cuh"

namespace kv4::cuda {

/// Bits of the scales that a key may have, 2^-40 to 2^30: nothing overflows, and no product of codes is a denormal.
constexpr std::uint32_t kLeastScale = (127u - 40) << 23, kMostScale = (127u + 30) << 23, kOddScale = 0xFFFFFFFFu;

/// Which of the 8 steps of a matrix product, each adding 16 channels, takes a channel.
constexpr int kMatrixSteps = 8, kStepChannels = 16;
__host__ __device__ constexpr int matrix_step(int channel) { return channel / 64 * 4 + channel % 16 / 4; }

// --- queries, eight lanes per head

constexpr int kHeadLanes = 8, kLaneChannels = kWidth / kHeadLanes;
static_assert(kScoreThreads == kHeads * kHeadLanes && kLaneChannels == 16);

/// Codes of a lane's channels and their head's scale and weight.
struct QueryPart {
  uint4 codes;
  float scale, weight;
};

/// As keys are encoded, by the head's lanes.
__device__ inline QueryPart encode_query(const IndexTile& tile, const RawChannels<kLaneChannels>& raw) {
  float x[kLaneChannels];
  channels_of(raw, x);
  if (tile.kind().hadamard) transform(x);
  std::uint32_t pairs[kLaneChannels / 2];
  float amax = round_channels(x, pairs);
#pragma unroll
  for (int lane = 1; lane < kHeadLanes; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lane));
  const int exponent = exponent_over_448(amax);
  const float by = pow2_normal(-exponent);
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = e4m3_quad(
        {low_value(pairs[2 * i]), high_value(pairs[2 * i]), low_value(pairs[2 * i + 1]), high_value(pairs[2 * i + 1])},
        by);
  return {{words[0], words[1], words[2], words[3]}, pow2_normal(exponent), raw.weight};
}

/// Loads of queries that are to be encoded are under way when it returns; encoded ones are in `words`.
__device__ inline RawChannels<kLaneChannels> load_query(const IndexTile& tile, int token, int head, int part) {
  RawChannels<kLaneChannels> raw = load_channels<kLaneChannels>(tile.p, tile.first + token, head, part);
  if (tile.p.q.dtype != DType::u8 || head >= tile.p.num_heads) return raw;
  const QueryRows from = query_rows<codec::Fp8Key>(tile, token);
  raw.words[0] = *reinterpret_cast<const uint4*>(from.payload + head * from.payload_stride + kLaneChannels * part);
  raw.scale = *reinterpret_cast<const std::uint32_t*>(from.scale + head * from.scale_stride);
  return raw;
}

/// From what load_query gave.
__device__ inline QueryPart make_query(const IndexTile& tile, const RawChannels<kLaneChannels>& raw) {
  if (tile.p.q.dtype == DType::u8) return {raw.words[0], codec::bits_float(raw.scale), raw.weight};
  return encode_query(tile, raw);
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

}  // namespace kv4::cuda
