// Rows in registers. A lane holds quads, 4 consecutive channels each; a warp's 32 quads are a chunk of 128 channels. A
// row of 512 is one quad in each lane of four warps, or four quads in each lane of one. The arithmetic and its order
// are those of ops/compress_row.h: neighbour pairs meet inside a lane, then across lanes, then across chunks.
#pragma once

#include "codec/numeric.h"
#include "ops/compress_row.h"
#include "schema/rope.h"

namespace kv4::cuda {

constexpr int kWarp = 32;
constexpr int kQuad = 4;
constexpr int kChunk = kWarp * kQuad;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Quad {
  float v[kQuad];
};

/// s_i = s_2i + s_2i+1 until one is left; missing ones are 0.
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

/// The lanes that hold one row.
template <int kWarps_, int kQuads_>
class RowLanes {
 public:
  static constexpr int kWarps = kWarps_, kQuads = kQuads_;
  static constexpr int kWidth = kWarps * kQuads * kChunk;
  static_assert(kWarps <= 8 && kQuads <= 8 && kWidth <= 1024);
  static_assert(kWarps == 1 || (kQuads & (kQuads - 1)) == 0, "a warp's chunks must be a subtree");

  /// parts: shared [2, kWarps], null with one warp. More than one warp: they are the whole thread block.
  __device__ explicit RowLanes(float* parts)
      : lane_(threadIdx.x % kWarp), warp_(kWarps == 1 ? 0 : threadIdx.x / kWarp), parts_(parts) {}

  __device__ int lane() const { return lane_; }
  __device__ bool leader() const { return lane_ == 0 && warp_ == 0; }
  __device__ int channel(int q) const { return (warp_ * kQuads + q) * kChunk + lane_ * kQuad; }

  __device__ void sync() const {
    if constexpr (kWarps > 1) __syncthreads();
  }

  __device__ float square_sum(const Quad (&x)[kQuads]) {
    float chunk[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float(&v)[kQuad] = x[q].v;
      chunk[q] = (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) chunk[q] += __shfl_xor_sync(kAllLanes, chunk[q], step);
    }
    const float mine = pair_sum<0, 8>(chunk);
    if constexpr (kWarps == 1) {
      return mine;
    } else {
      float all[kWarps];
      exchange(mine, all);
      return pair_sum<0, 8>(all);
    }
  }

  __device__ float max(float x) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    if constexpr (kWarps > 1) {
      float all[kWarps];
      exchange(x, all);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x = fmaxf(x, all[w]);
    }
    return x;
  }

 private:
  // Every warp's value to all. The two halves of `parts` alternate, so one barrier is enough: who writes a half again
  // has passed the barrier after which nobody reads it.
  __device__ void exchange(float mine, float (&all)[kWarps]) {
    float* part = parts_ + half_ * kWarps;
    half_ ^= 1;
    if (lane_ == 0) part[warp_] = mine;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all[w] = part[w];
  }

  int lane_, warp_;
  float* parts_;
  int half_ = 0;
};

/// Two bf16 bit patterns. NaN stays NaN, in some pattern: it becomes the one pattern where it is stored.
__device__ inline std::uint32_t bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline float low_value(std::uint32_t pair) { return codec::bits_float(pair << 16); }
__device__ inline float high_value(std::uint32_t pair) { return codec::bits_float(pair & 0xFFFF0000u); }

__device__ inline Quad round_bf16(const Quad& x) {
  const std::uint32_t a = bf16_pair(x.v[0], x.v[1]), b = bf16_pair(x.v[2], x.v[3]);
  return {{low_value(a), high_value(a), low_value(b), high_value(b)}};
}

/// ops::norm_factor: a division by a power of two is a multiplication, one of 1 a reciprocal, both rounded correctly.
template <int kWidth>
__device__ float norm_factor(float sum, float eps) {
  static_assert((kWidth & (kWidth - 1)) == 0);
  return __frcp_rn(__fsqrt_rn(sum * (1.0f / kWidth) + eps));
}

/// Weights: the same for all rows, so they may stay in the first-level cache.
__device__ inline Quad load_weight(const float* at) {
  const float4 w = __ldg(reinterpret_cast<const float4*>(at));
  return {{w.x, w.y, w.z, w.w}};
}

/// The same, but not before the program comes to it: such a load would else be moved out of a loop and hold registers.
__device__ inline Quad load_weight_late(const float* at) {
  Quad w;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(w.v[0]), "=f"(w.v[1]), "=f"(w.v[2]), "=f"(w.v[3])
               : "l"(at));
  return w;
}

template <class Lanes>
__device__ void norm_row(Lanes& lanes, const Quad (&weight)[Lanes::kQuads], float eps, Quad (&x)[Lanes::kQuads]) {
  const float factor = norm_factor<Lanes::kWidth>(lanes.square_sum(x), eps);
#pragma unroll
  for (int q = 0; q < Lanes::kQuads; ++q) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) x[q].v[i] = x[q].v[i] * factor * weight[q].v[i];
    x[q] = round_bf16(x[q]);
  }
}

/// Cos and sin of the two pairs in a lane's last quad.
struct Turn {
  bool active;
  float cos[2], sin[2];
};

__device__ inline Turn load_turn(const ops::RopeDesc& rope, std::int64_t position, int channel, int width) {
  const int first = channel - (width - rope.rope_dim), pairs = rope.rope_dim / 2;
  Turn turn{first >= 0, {}, {}};
  if (!turn.active) return turn;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (rope.cos != nullptr) {
      turn.cos[i] = rope.cos[position * pairs + first / 2 + i];
      turn.sin[i] = rope.sin[position * pairs + first / 2 + i];
    } else {
      rope_angle(rope.angles, position, first / 2 + i, &turn.cos[i], &turn.sin[i]);
    }
  }
  return turn;
}

__device__ inline void rotate(const Turn& turn, Quad& x) {
  if (!turn.active) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = x.v[2 * i], b = x.v[2 * i + 1];
    x.v[2 * i] = codec::fused(a, turn.cos[i], -(b * turn.sin[i]));
    x.v[2 * i + 1] = codec::fused(b, turn.cos[i], a * turn.sin[i]);
  }
  x = round_bf16(x);
}

/// Of the 128 channels of a warp: strides 1 and 2 inside the lane, 4 to 64 across lanes.
__device__ inline void hadamard_chunk(int lane, Quad& x) {
  const float a = x.v[0] + x.v[1], b = x.v[0] - x.v[1], c = x.v[2] + x.v[3], d = x.v[2] - x.v[3];
  x = {{a + c, b + d, a - c, b - d}};
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2)
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x.v[i], step);
      x.v[i] = (lane & step) != 0 ? other - x.v[i] : x.v[i] + other;
    }
  const float scale = codec::quotient(1.0f, codec::square_root(static_cast<float>(kChunk)));
#pragma unroll
  for (int i = 0; i < kQuad; ++i) x.v[i] = x.v[i] * scale;
  x = round_bf16(x);
}

}  // namespace kv4::cuda
