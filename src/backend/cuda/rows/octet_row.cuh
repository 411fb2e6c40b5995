// A row of 512 channels in one warp. A lane holds two octets (8 consecutive channels each) as bf16 pairs. Loads and
// stores are 16 and 8 bytes wide, and a tile of 64 channels is 8 lanes. The bytes equal encode.cuh's.
#pragma once

#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/rows/encode.cuh"

namespace kv4::cuda {

constexpr int kOctets = 2, kOctetChannels = 8;
constexpr int kOctetStride = kWarp * kOctetChannels;  // channels between a lane's octets

struct OctetBits {
  std::uint32_t pair[4];
};

__device__ inline int octet_channel(int lane, int octet) { return octet * kOctetStride + lane * kOctetChannels; }

__device__ inline void octet_values(const OctetBits& o, float (&x)[kOctetChannels]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_value(o.pair[i]);
    x[2 * i + 1] = high_value(o.pair[i]);
  }
}

// --- norm and rotation

/// A lane's norm weights, four at a time. all: [kRowWidth].
struct LaneWeights {
  const float* all;
  int lane;

  __device__ float4 operator()(int octet, int half) const {
    return *reinterpret_cast<const float4*>(all + octet_channel(lane, octet) + 4 * half);
  }
};

/// The norm weights of a prefill, in shared memory: registers are scarce, and loads from global memory would return
/// after the rows that were requested earlier.
struct NormWeights {
  alignas(16) float all[kRowWidth];

  /// Called by each `thread` of `threads`. The weights are there after a barrier.
  __device__ void fill(const float* from, int thread, int threads) {
    for (int i = thread; i < kRowWidth; i += threads) all[i] = __ldg(from + i);
  }
};

/// Lane i has the angle of the row's i-th rotated pair.
constexpr int kMaxRotated = kWarp * kPair;

__device__ inline bool has_rotated_pair(const ops::RopeDesc& rope, int lane) { return lane * kPair < rope.rope_dim; }

__device__ inline RawAngle load_lane_angle(const ops::RopeDesc& rope, int position, int lane) {
  return has_rotated_pair(rope, lane) ? with_angle_words(rope, position, lane, LoadAngleWords{}) : RawAngle{};
}

/// Sum over the row of a sum per octet, by pairs of adjacent lanes: even lanes go on with the first octets, odd lanes
/// with the second.
__device__ inline float octet_sum(const float (&sum)[kOctets], int lane) {
  static_assert(kOctets == 2);
  const bool odd = lane % 2 != 0;
  float mine = (odd ? sum[1] : sum[0]) + __shfl_xor_sync(kAllLanes, odd ? sum[0] : sum[1], 1);
#pragma unroll
  for (int step = 2; step < kWarp; step *= 2) mine += __shfl_xor_sync(kAllLanes, mine, step);
  return mine + __shfl_xor_sync(kAllLanes, mine, 1);
}

/// RMS norm -> bf16 -> rotation -> bf16. weights: as LaneWeights. rotation: of the lane's pair (has_rotated_pair).
template <class Weights>
__device__ void norm_and_rotate(float eps, const ops::RopeDesc& rope, const Weights& weights, const Rotation& rotation,
                                int lane, OctetBits (&row)[kOctets]) {
  float x[kOctets][kOctetChannels], sum[kOctets];
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    octet_values(row[j], x[j]);
    float square[kOctetChannels];
#pragma unroll
    for (int i = 0; i < kOctetChannels; ++i) square[i] = x[j][i] * x[j][i];
    sum[j] = pair_sum<0, kOctetChannels>(square);
  }
  const float factor = norm_factor<kRowWidth>(octet_sum(sum, lane), eps);
#pragma unroll
  for (int j = 0; j < kOctets; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 w = weights(j, h);
      const float* y = x[j] + 4 * h;
      row[j].pair[2 * h] = bf16_pair(y[0] * factor * w.x, y[1] * factor * w.y);
      row[j].pair[2 * h + 1] = bf16_pair(y[2] * factor * w.z, y[3] * factor * w.w);
    }
  // The rotated channels lie in the last octets.
  const int first = octet_channel(lane, kOctets - 1) - (kRowWidth - rope.rope_dim);
#pragma unroll
  for (int i = 0; i < kOctetChannels / kPair; ++i) {
    const float cos = __shfl_sync(kAllLanes, rotation.cos, first / kPair + i);
    const float sin = __shfl_sync(kAllLanes, rotation.sin, first / kPair + i);
    std::uint32_t& pair = row[kOctets - 1].pair[i];
    const Pair y = rotated(pair_values(pair), cos, sin);
    if (first >= 0) pair = bf16_pair(y.v[0], y.v[1]);
  }
}

// --- encoding

/// Product of two bf16 pairs.
__device__ inline std::uint32_t bf16_product(std::uint32_t a, std::uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  x = __hmul2_rn(x, y);
  memcpy(&a, &x, 4);
  return a;
}

/// Eight channels times 2^exponent as e4m3. A product that is not exact in bf16 is zero in e4m3, too.
__device__ inline uint2 e4m3_octet(const OctetBits& o, int exponent) {
  const std::uint32_t by = (static_cast<std::uint32_t>(exponent + 127) << 7) * 0x10001u;
  std::uint32_t codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t low = bf16_product(o.pair[2 * i], by), high = bf16_product(o.pair[2 * i + 1], by);
    codes[i] = e4m3_pair(low_value(low), high_value(low)) |
               static_cast<std::uint32_t>(e4m3_pair(low_value(high), high_value(high))) << 16;
  }
  return make_uint2(codes[0], codes[1]);
}

/// Largest magnitudes of both octets; the first octet's in the lower half.
__device__ inline std::uint32_t octet_amaxes(const OctetBits (&row)[kOctets]) {
  static_assert(kOctets == 2);
  std::uint32_t largest[kOctets];
#pragma unroll
  for (int j = 0; j < kOctets; ++j)
    largest[j] = larger_bf16_magnitudes(larger_bf16_magnitudes(row[j].pair[0], row[j].pair[1]),
                                        larger_bf16_magnitudes(row[j].pair[2], row[j].pair[3]));
  const std::uint32_t low = __byte_perm(largest[0], largest[1], 0x5410);
  const std::uint32_t high = __byte_perm(largest[0], largest[1], 0x7632);
  return larger_bf16_magnitudes(larger_bf16_magnitudes(low, high), 0) & 0x7FFF7FFFu;  // 0 where all channels are NaN
}

__device__ inline uint4 bf16_octet(OctetBits o) {
  if (has_nan_bf16(o.pair)) fix_nan(o.pair);
  return make_uint4(o.pair[0], o.pair[1], o.pair[2], o.pair[3]);
}

// `format` below: a Format, a constant, or a type that converts to Format where it is read.

/// A lane's part of a stored row.
struct RowBits {
  uint4 payload[kOctets];  // 8 bytes of codes or 16 of bf16
  std::uint32_t scale[kOctets];
};

template <int kSteps>
__device__ float max_over_lanes(float x) {
#pragma unroll
  for (int step = 1; step < kSteps; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

template <class F>
__device__ RowBits encode_octets(F format, int lane, const OctetBits (&row)[kOctets]) {
  constexpr int body = kRowWidth - kRowTail;
  RowBits out;
  if (format == Format::bf16) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) out.payload[j] = bf16_octet(row[j]);
    return out;
  }
  if (format == Format::fp8_tile64) {
    std::uint32_t amax =
        octet_amaxes(row);  // of both octets' tiles at once: bf16 without sign have the order of integers
#pragma unroll
    for (int step = 1; step < codec::Fp8Tile64::kTile / kOctetChannels; step *= 2)
      amax = __vmaxu2(amax, __shfl_xor_sync(kAllLanes, amax, step));
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const int e = exponent_over_448(j == 0 ? low_value(amax) : high_value(amax));
      const bool quantised = octet_channel(lane, j) < body;
      const uint2 codes = e4m3_octet(row[j], -e);
      out.payload[j] = quantised ? make_uint4(codes.x, codes.y, 0, 0) : bf16_octet(row[j]);
      out.scale[j] = quantised ? static_cast<std::uint32_t>(e + 127) : 0;
    }
    return out;
  }
  const std::uint32_t amaxes = octet_amaxes(row);  // fp8_row
  const float amax = fmaxf(low_value(amaxes), octet_channel(lane, 1) < body ? high_value(amaxes) : 0.0f);
  const float inverse = codec::Fp8Row::inverse_scale(fminf(max_over_lanes<kWarp>(amax), codec::kBf16Max));
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    std::uint32_t codes[2] = {};
#pragma unroll
    for (int i = 0; i < kOctetChannels / kPair; ++i) {
      const Pair x = pair_values(row[j].pair[i]);
      const std::uint32_t code = e4m3_pair(codec::quotient(x.v[0], inverse), codec::quotient(x.v[1], inverse));
      codes[i / 2] |= code << (16 * (i % 2));
    }
    out.payload[j] = octet_channel(lane, j) < body ? make_uint4(codes[0], codes[1], 0, 0) : bf16_octet(row[j]);
    out.scale[j] = codec::float_bits(inverse);
  }
  return out;
}

template <class F>
__device__ void store_octets(F format, int lane, const RowBits& bits, std::uint8_t* payload, std::uint8_t* scale) {
  const int body = format == Format::bf16 ? 0 : kRowWidth - kRowTail;
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const int channel = octet_channel(lane, j);
    const uint4 p = bits.payload[j];
    if (channel < body) {
      store8(payload + channel, p.x, p.y);
    } else {
      store16(payload + 2 * channel - body, p.x, p.y, p.z, p.w);
    }
    if (format == Format::fp8_tile64 && channel % codec::Fp8Tile64::kTile == 0)
      scale[channel / codec::Fp8Tile64::kTile] = static_cast<std::uint8_t>(bits.scale[j]);
  }
  if (format == Format::fp8_row && lane == 0) store_word(scale, bits.scale[0]);
}

}  // namespace kv4::cuda
