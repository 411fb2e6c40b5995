// Rows in registers. A lane holds a pair (2 adjacent channels); the 32 pairs of a warp are a chunk of 64 channels. A
// row of 512 channels is a pair in each lane of eight warps: enough warps to hide latencies behind each other's
// instructions. The arithmetic and its order are those of ops/compress_row.h: adjacent values are combined inside a
// lane, then across lanes, then across warps.
#pragma once

#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/rows/lanes.cuh"
#include "codec/numeric.h"
#include "ops/compress_row.h"
#include "schema/rope.h"

namespace kv4::cuda {

constexpr int kPair = 2;
constexpr int kChunk = kWarp * kPair;

struct Pair {
  float v[kPair];
};

/// s_i = s_2i + s_2i+1 until one sum is left; missing values are 0.
template <int kBegin, int kSpan, int kCount>
__device__ float pair_sum(const float (&x)[kCount]) {
  if constexpr (kBegin >= kCount) {
    return 0.0f;
  } else if constexpr (kSpan == 1) {
    return x[kBegin];
  } else {
    return pair_sum<kBegin, kSpan / 2>(x) + pair_sum<kBegin + kSpan / 2, kSpan / 2>(x);
  }
}

/// Shared memory of the lanes of a row.
template <int kWarps>
struct RowShared {
  float of_warps[2][kWarps];
  Pair chunks[kWarps * kWarp];
};

/// The lanes that hold one row: kWarps adjacent warps of a CTA of kCtaWarps.
template <int kWarps_, int kCtaWarps>
class RowLanes {
 public:
  static constexpr int kWarps = kWarps_;
  static constexpr int kWidth = kWarps * kChunk;
  static constexpr int kRows = kCtaWarps / kWarps;  // of a CTA
  static_assert(kWarps <= 8 && kCtaWarps % kWarps == 0);
  using Shared = RowShared<kWarps>;

  /// shared: [kRows]
  __device__ explicit RowLanes(Shared* shared)
      : lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp % kWarps),
        row_(kRows == 1 ? 0 : threadIdx.x / (kWarp * kWarps)),
        shared_(shared[row_]) {}

  __device__ int row() const { return row_; }  // of the CTA
  __device__ bool leader() const { return lane_ == 0 && warp_ == 0; }
  __device__ int channel() const { return warp_ * kChunk + lane_ * kPair; }

  __device__ void sync() const { named_barrier_sync(1 + row_, kWarps * kWarp); }

  __device__ float square_sum(const Pair& x) {
    float sum = x.v[0] * x.v[0] + x.v[1] * x.v[1];
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    float all[kWarps];
    exchange(sum, all);
    return pair_sum<0, 8>(all);
  }

  __device__ float max(float x) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    float all[kWarps];
    exchange(x, all);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x = fmaxf(x, all[w]);
    return x;
  }

  /// Normalised Walsh-Hadamard transform: stride 1 inside the lane, 2 to 32 across lanes, from 64 across warps.
  __device__ void hadamard(Pair& x) {
    x = {{x.v[0] + x.v[1], x.v[0] - x.v[1]}};
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2)
      x = butterfly(x, {{__shfl_xor_sync(kAllLanes, x.v[0], step), __shfl_xor_sync(kAllLanes, x.v[1], step)}},
                    (lane_ & step) != 0);
    static_assert(kWarps == 2 || kRows == 1, "one exchange: no transform for rows of more than two warps");
    if constexpr (kWarps == 2) {  // chunks is read before the next row's norm, written after it
      shared_.chunks[warp_ * kWarp + lane_] = x;
      sync();
      x = butterfly(x, shared_.chunks[(warp_ ^ 1) * kWarp + lane_], warp_ != 0);
    }
    const float scale = codec::quotient(1.0f, codec::square_root(static_cast<float>(kWidth)));
    x = {{x.v[0] * scale, x.v[1] * scale}};
  }

 private:
  __device__ static Pair butterfly(const Pair& mine, const Pair& other, bool upper) {
    Pair y;
#pragma unroll
    for (int i = 0; i < kPair; ++i) y.v[i] = upper ? other.v[i] - mine.v[i] : mine.v[i] + other.v[i];
    return y;
  }

  // Gives every warp's value to all warps. The two halves of `of_warps` alternate, so one barrier is enough: a warp
  // that writes a half again has passed the barrier after which no warp reads it.
  __device__ void exchange(float mine, float (&all)[kWarps]) {
    float(&values)[kWarps] = shared_.of_warps[half_];
    half_ ^= 1;
    if (lane_ == 0) values[warp_] = mine;
    sync();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all[w] = values[w];
  }

  int lane_, warp_, row_;
  Shared& shared_;
  int half_ = 0;
};

__device__ inline float low_value(std::uint32_t pair) { return codec::bits_float(pair << 16); }
__device__ inline float high_value(std::uint32_t pair) { return codec::bits_float(pair & 0xFFFF0000u); }

__device__ inline Pair pair_values(std::uint32_t pair) { return {{low_value(pair), high_value(pair)}}; }
__device__ inline Pair round_bf16(const Pair& x) { return pair_values(bf16_pair(x.v[0], x.v[1])); }

/// ops::norm_factor. Division by a power of two is a multiplication, and 1 / x a reciprocal; both round correctly.
template <int kWidth>
__device__ float norm_factor(float sum, float eps) {
  static_assert((kWidth & (kWidth - 1)) == 0);
  return __frcp_rn(__fsqrt_rn(sum * (1.0f / kWidth) + eps));
}

/// Weights are the same for all rows, so they may stay in L1.
__device__ inline Pair load_weight(const float* at) {
  const float2 w = __ldg(reinterpret_cast<const float2*>(at));
  return {{w.x, w.y}};
}

template <class Lanes>
__device__ Pair norm_row(Lanes& lanes, const Pair& weight, float eps, const Pair& x) {
  const float factor = norm_factor<Lanes::kWidth>(lanes.square_sum(x), eps);
  return round_bf16({{x.v[0] * factor * weight.v[0], x.v[1] * factor * weight.v[1]}});
}

/// Cos and sin of a pair's RoPE angle; not active: the pair is not rotated.
struct Rotation {
  bool active;
  float cos, sin;
};

/// A pair's angle as the RoPE tables hold it: 16 bytes of each of the two tables; or cos and sin, in the first word of
/// each.
struct RawAngle {
  uint4 high, low;
};

/// Calls f with the two addresses that a RawAngle is loaded from; their type is the tables' element.
template <class F>
__device__ auto with_angle_words(const ops::RopeDesc& rope, int position, int pair, F&& f) {
  if (rope.cos != nullptr) {
    const std::int64_t at = std::int64_t{position} * (rope.rope_dim / kPair) + pair;
    return f(rope.cos + at, rope.sin + at);
  }
  const auto angle = [&](const double* table, int row) {
    return reinterpret_cast<const double2*>(table) + row * rope.angles.pairs + pair;
  };
  return f(angle(rope.angles.high, position >> RopeAngles::kLowBits),
           angle(rope.angles.low, position & ((1 << RopeAngles::kLowBits) - 1)));
}

struct LoadAngleWords {
  __device__ static uint4 word(const float* at) { return make_uint4(__float_as_uint(__ldg(at)), 0, 0, 0); }
  __device__ static uint4 word(const double2* at) { return __ldg(reinterpret_cast<const uint4*>(at)); }
  template <class T>
  __device__ RawAngle operator()(const T* high, const T* low) const {
    return {word(high), word(low)};
  }
};

/// As rope_angle.
__device__ inline Rotation rotation_of(const ops::RopeDesc& rope, const RawAngle& raw) {
  if (rope.cos != nullptr) return {true, codec::bits_float(raw.high.x), codec::bits_float(raw.low.x)};
  const auto number = [](std::uint32_t low, std::uint32_t high) {
    return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
  };
  const double ax = number(raw.high.x, raw.high.y), ay = number(raw.high.z, raw.high.w);
  const double bx = number(raw.low.x, raw.low.y), by = number(raw.low.z, raw.low.w);
  return {true, static_cast<float>(__fma_rn(ax, bx, -__dmul_rn(ay, by))),
          static_cast<float>(__fma_rn(ay, bx, __dmul_rn(ax, by)))};
}

__device__ inline Rotation load_rotation(const ops::RopeDesc& rope, int position, int channel, int width) {
  const int first = channel - (width - rope.rope_dim);
  if (first < 0) return {};
  return rotation_of(rope, with_angle_words(rope, position, first / kPair, LoadAngleWords{}));
}

__device__ inline Pair rotated(const Pair& x, float cos, float sin) {
  return {{codec::fused(x.v[0], cos, -(x.v[1] * sin)), codec::fused(x.v[1], cos, x.v[0] * sin)}};
}

/// x: bf16 values.
__device__ inline Pair rotate(const Rotation& rotation, const Pair& x) {
  return rotation.active ? round_bf16(rotated(x, rotation.cos, rotation.sin)) : x;
}

}  // namespace kv4::cuda
