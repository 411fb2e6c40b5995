// Queries on their way from the caller to an operand of wgmma: addresses, loads, the Hadamard transform, and the layout
// of the operand.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/rows/encode.cuh"

namespace kv4::cuda {

// Consecutive lanes share a head; each has kChannels of its channels.

/// A lane's channels of a head as loaded: pairs of bf16, or codes if the caller gives encoded queries.
template <int kChannels>
struct RawChannels {
  uint4 words[kChannels / 8];
  std::uint32_t scale;
  float weight;  // of the head
};

/// The addresses of a lane's part of a token's queries: kChannels channels of a head, whose codes take kCodeBytes.
template <int kCodeBytes, int kChannels>
class QueryAddress {
 public:
  __device__ QueryAddress(const TokenTile& tile, int token, int head, int part) : head_(head) {
    constexpr bool kHasOneScale = kCodeBytes == kWidth;
    const ops::IndexParams& p = tile.p;
    const std::int64_t at = tile.first + token;
    const int element = p.q.dtype == DType::f32 ? 4 : 2;
    q_ = static_cast<const std::uint8_t*>(p.q.data) +
         (p.q.dtype == DType::u8 ? at * p.q.row_stride + head * kCodeBytes + part * kPartBytes
                                 : (at * p.q.row_stride + head * kWidth + part * kChannels) * element);
    scale_ = static_cast<const std::uint8_t*>(p.q_scale.data) + at * p.q_scale.row_stride + head * kKeyScaleBytes +
             (kHasOneScale ? 0 : part * kKeyScaleBytes * kChannels / kWidth);
    weight_ = static_cast<const float*>(p.weights.data) + at * p.weights.row_stride + head;
  }

  /// Loads kCount heads, from this one on, kHeads / kCount apart. Loads are in flight when it returns, except for fp32
  /// queries. Absent heads are zero.
  template <int kCount>
  __device__ void load(const ops::IndexParams& p, RawChannels<kChannels> (&raw)[kCount]) const {
    constexpr int kApart = kHeads / kCount;
    const auto for_each = [&](auto&& load_codes) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw[i] = {};
        if (head_ + kApart * i >= p.num_heads) continue;
        load_codes(raw[i], kApart * i);
        raw[i].weight = weight_[kApart * i];
      }
    };
    if (p.q.dtype == DType::bf16)
      for_each([&](RawChannels<kChannels>& to, int head) {
        const uint4* from = reinterpret_cast<const uint4*>(q_ + head * kWidth * 2);
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) to.words[j] = from[j];
      });
    else if (p.q.dtype == DType::u8)
      for_each([&](RawChannels<kChannels>& to, int head) {
        const std::uint8_t *from = q_ + head * kCodeBytes, *scale = scale_ + head * kKeyScaleBytes;
        if constexpr (kPartBytes == 16) {
          to.words[0] = *reinterpret_cast<const uint4*>(from);
        } else {
          const uint2 half = *reinterpret_cast<const uint2*>(from);
          to.words[0].x = half.x, to.words[0].y = half.y;
        }
        to.scale = kCodeBytes == kWidth ? *reinterpret_cast<const std::uint32_t*>(scale) : *scale;
      });
    else
      for_each([&](RawChannels<kChannels>& to, int head) {
        const float4* from = reinterpret_cast<const float4*>(q_ + head * kWidth * 4);
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) {
          const float4 a = from[2 * j], b = from[2 * j + 1];
          to.words[j] = {bf16_pair(a.x, a.y), bf16_pair(a.z, a.w), bf16_pair(b.x, b.y), bf16_pair(b.z, b.w)};
        }
      });
  }

  /// Frees the registers for the loop that follows.
  __device__ void drop() {
    q_ = scale_ = nullptr;
    weight_ = nullptr;
    head_ = 0;
  }

  /// For grid_dependency_wait_after.
  __device__ int made() const {
    const auto low = [](const void* at) { return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(at)); };
    return static_cast<int>((low(q_) ^ low(scale_) ^ low(weight_)) & 0x7FFFFFFFu);
  }

 private:
  static constexpr int kPartBytes = kCodeBytes * kChannels / kWidth;
  static_assert(kPartBytes == 16 || kPartBytes == 8);
  const std::uint8_t *q_, *scale_;
  const float* weight_;
  int head_;
};

template <int kChannels>
__device__ void channels_of(const RawChannels<kChannels>& raw, float (&x)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kChannels / 8; ++i) {
    const std::uint32_t pairs[4] = {raw.words[i].x, raw.words[i].y, raw.words[i].z, raw.words[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[8 * i + 2 * j] = low_value(pairs[j]);
      x[8 * i + 2 * j + 1] = high_value(pairs[j]);
    }
  }
}

/// ops::hadamard_row over a head's 128 channels, without its last rounding.
template <int kChannels>
__device__ void transform(float (&x)[kChannels]) {
#pragma unroll
  for (int h = 1; h < kChannels; h *= 2)
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
#pragma unroll
  for (int lane = 1; lane < kWidth / kChannels; lane *= 2) {
    const float sign = (threadIdx.x & lane) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) x[i] = codec::fused(sign, x[i], __shfl_xor_sync(kAllLanes, x[i], lane));
  }
  static_assert(kWidth == 128);
  constexpr float kScale = 0x1.6a09e6p-4f;  // 1 / sqrt(128), each rounded
#pragma unroll
  for (int i = 0; i < kChannels; ++i) x[i] *= kScale;
}

/// Rounds a lane's channels to bf16; returns the largest magnitude, ignoring NaN.
template <int kChannels>
__device__ float round_channels(const float (&x)[kChannels], std::uint32_t (&pairs)[kChannels / 2]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    pairs[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
    largest = larger_bf16_pair(largest, pairs[i] & 0x7FFF7FFFu);
  }
  return fmaxf(low_value(largest), high_value(largest));
}

/// Prefetches a token's queries and weights into L2. May run before the grid dependency wait.
__device__ inline void prefetch_queries(const TokenTile& tile, int token) {
  constexpr int kLine = 64;
  const ops::IndexParams& p = tile.p;
  if (token >= tile.count) return;
  const auto fetch = [&](const ops::InputDesc& in, int bytes, int element) {
    const std::uint8_t* from =
        static_cast<const std::uint8_t*>(in.data) + (tile.first + token) * in.row_stride * element;
    for (int i = static_cast<int>(threadIdx.x) * kLine; i < bytes; i += static_cast<int>(blockDim.x) * kLine)
      prefetch_l2(from + i);
  };
  if (p.q.dtype == DType::u8) {
    fetch(p.q, p.num_heads * static_cast<int>(tile.kind().page.payload.row_stride), 1);
    fetch(p.q_scale, p.num_heads * kKeyScaleBytes, 1);
  } else {
    const int element = p.q.dtype == DType::f32 ? 4 : 2;
    fetch(p.q, p.num_heads * kWidth * element, element);
  }
  fetch(p.weights, p.num_heads * 4, 4);
}

/// The row of a head in the wgmma operand. The order makes the accumulators of a lane one chain of heads.
__device__ inline int operand_row(int head) { return 8 * (head % 16 / 2) + 2 * (head / 16) + head % 2; }

/// The wgmma descriptor of an operand in shared memory: K-major rows of 128 bytes, 128-byte swizzle, 1,024 bytes per 8
/// rows.
__device__ inline std::uint64_t operand_at(std::uint32_t address) {
  return (address >> 4 & 0x3FFFu) | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}
__device__ inline std::uint64_t operand_of(const std::uint8_t* q) { return operand_at(shared_address(q)); }

}  // namespace kv4::cuda
