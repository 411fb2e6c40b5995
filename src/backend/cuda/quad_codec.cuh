// The formats of codec/ a quad at a time: 4 channels in registers -> their bits -> memory. The same bytes as codec/*.h;
// what is shared by a tile, group or row is found with shuffles instead of loops.
//
// A codec here has
//   kShare                        lanes that share a scale; kWholeRow, or 0: no scale
//   encode(x, amax, global)       bits of 4 quantised channels; amax over those that share the scale
//   store(bits, payload, scale, channel)
// Channels of the tail of a row format are bf16: encode_row and store_quad choose. Payload rows must be aligned to 8
// bytes, scale rows to 4 where the scale is an fp32.
#pragma once

#include "backend/cuda/warp_row.cuh"
#include "codec/codec.h"

namespace kv4::cuda {

constexpr int kWholeRow = -1;

/// One quad as stored: up to 8 bytes of payload and its scale.
struct QuadBits {
  std::uint32_t low, high, scale;
};

// --- scalars, four at a time

__device__ inline std::uint32_t e4m3_quad(const Quad& x, float by) {
#if __CUDA_ARCH__ >= 890
  // The instruction rounds, saturates and turns NaN into 0x7F as codec::e4m3_bits does: compared for every float.
  std::uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x.v[1] * by), "f"(x.v[0] * by));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x.v[3] * by), "f"(x.v[2] * by));
  return low | static_cast<std::uint32_t>(high) << 16;
#else
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) bits |= static_cast<std::uint32_t>(codec::e4m3_bits(x.v[i] * by)) << (8 * i);
  return bits;
#endif
}

/// Largest magnitude; NaN is passed over.
__device__ inline float quad_amax(const Quad& x) {
  return fmaxf(fmaxf(fmaxf(0.0f, fabsf(x.v[0])), fabsf(x.v[1])), fmaxf(fmaxf(0.0f, fabsf(x.v[2])), fabsf(x.v[3])));
}

/// Exponent of the smallest power of two >= amax / (1.75 * 2^8), as Fp8Tile64::scale_exponent: amax is a bf16, whose
/// mantissa says whether it is above 1.75. Infinity counts as the largest bf16.
__device__ inline int exponent_over_448(float amax) {
  const float a = fminf(fmaxf(amax, codec::kAmaxFloor), codec::kBf16Max);
  return static_cast<int>((codec::float_bits(a) + 0x1FFFFFu) >> 23) - 127 - 8;
}

/// The same over 6 = 1.5 * 2^2, as Mxfp4::scale_exponent.
__device__ inline int exponent_over_6(float amax) {
  const float a = fminf(fmaxf(amax, 6.0f * codec::bits_float(1u << 23)), codec::kBf16Max);
  return static_cast<int>((codec::float_bits(a) + 0x3FFFFFu) >> 23) - 127 - 2;
}

/// 2^exponent, exponent from -126 on.
__device__ inline float pow2_normal(int exponent) {
  return codec::bits_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// --- memory

template <class Word>
__device__ void store_word(std::uint8_t* at, Word word) {
  *reinterpret_cast<Word*>(at) = word;
}

// --- formats

struct QuadBf16 {
  static constexpr int kShare = 0;

  __device__ static QuadBits encode(const Quad& x, float, float) {
    const auto pair = [&](int i) {
      return codec::bf16_bits(x.v[i]) | static_cast<std::uint32_t>(codec::bf16_bits(x.v[i + 1])) << 16;
    };
    return {pair(0), pair(2), 0};
  }
  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t*, int channel) {
    store_word(payload + 2 * channel, make_uint2(b.low, b.high));
  }
};

// Rows whose last channels stay bf16. The tail's lanes also write the scale plane's padding.
struct QuadFp8Tile64 {
  static constexpr int kShare = codec::Fp8Tile64::kTile / kQuad;

  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const int e = exponent_over_448(amax);
    return {e4m3_quad(x, pow2_normal(-e)), 0, static_cast<std::uint32_t>(e + 127)};
  }
  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel, b.low);
    store_scale(b.scale, scale, channel);
  }
  __device__ static void store_scale(std::uint32_t byte, std::uint8_t* scale, int channel) {
    if (channel % codec::Fp8Tile64::kTile == 0)
      scale[channel / codec::Fp8Tile64::kTile] = static_cast<std::uint8_t>(byte);
  }
};

/// One fp32 scale for the row, written with its first quad.
struct QuadRowScale {
  static constexpr int kShare = kWholeRow;

  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel, b.low);
    if (channel == 0) store_word(scale, b.scale);
  }
};

struct QuadFp8Row : QuadRowScale {
  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const float inverse = codec::Fp8Row::inverse_scale(fminf(amax, codec::kBf16Max));
    Quad y;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) y.v[i] = codec::quotient(x.v[i], inverse);
    return {e4m3_quad(y, 1.0f), 0, codec::float_bits(inverse)};
  }
};

struct QuadFp8Key : QuadRowScale {
  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const int e = exponent_over_448(amax);
    return {e4m3_quad(x, pow2_normal(-e)), 0, codec::float_bits(pow2_normal(e))};
  }
};

/// Two e2m1 per byte, a scale byte per group.
template <int kGroup>
struct QuadFp4 {
  static constexpr int kShare = kGroup / kQuad;

  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel / 2, static_cast<std::uint16_t>(b.low));
    if (channel % kGroup == 0) scale[channel / kGroup] = static_cast<std::uint8_t>(b.scale);
  }
};

struct QuadMxfp4 : QuadFp4<codec::Mxfp4::kGroup> {
  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const int e = exponent_over_6(amax);
    const float inverse = pow2_normal(-e);
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) bits |= static_cast<std::uint32_t>(codec::e2m1_bits(x.v[i] * inverse)) << (4 * i);
    return {bits, 0, static_cast<std::uint32_t>(e + 127)};
  }
};

struct QuadNvfp4 : QuadFp4<codec::Nvfp4::kGroup> {
  __device__ static QuadBits encode(const Quad& x, float amax, float global) {
    const std::uint8_t scale = codec::Nvfp4::scale_byte(fminf(amax, codec::kBf16Max), global);
    const float step = codec::e4m3_value(scale) * global;
    std::uint32_t bits = 0;
    if (step != 0.0f) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        bits |= static_cast<std::uint32_t>(codec::e2m1_bits(codec::quotient(x.v[i], step))) << (4 * i);
    }
    return {bits, 0, scale};
  }
};

/// Calls f with the quad codec of a row or key format.
template <class F>
__device__ void with_row_quads(Format format, F&& f) {
  if (format == Format::fp8_tile64) return f(QuadFp8Tile64{});
  if (format == Format::fp8_row) return f(QuadFp8Row{});
  f(QuadBf16{});
}

template <class F>
__device__ void with_key_quads(Format format, F&& f) {
  if (format == Format::mxfp4) return f(QuadMxfp4{});
  if (format == Format::nvfp4) return f(QuadNvfp4{});
  if (format == Format::fp8) return f(QuadFp8Key{});
  f(QuadBf16{});
}

// --- rows

/// Channels from here on are bf16 behind the quantised ones. Formats without scales have no tail of their own.
template <class Codec>
__device__ int tail_begin(RowShape shape) {
  return Codec::kShare == 0 ? shape.width : shape.width - shape.tail;
}

// The tail's bf16 channel c lies at body + 2 (c - body): as if it were channel c of a bf16 row that began body earlier.
template <class Codec>
__device__ void store_quad(const QuadBits& bits, RowShape shape, std::uint8_t* payload, std::uint8_t* scale,
                           int channel) {
  const int body = tail_begin<Codec>(shape);
  if (channel < body) return Codec::store(bits, payload, scale, channel);
  QuadBf16::store(bits, payload - body, scale, channel);
  if constexpr (std::is_same_v<Codec, QuadFp8Tile64>) Codec::store_scale(0, scale, channel);
}

/// All lanes of the row take part. x: bf16 values.
template <class Codec, class Lanes>
__device__ void encode_row(Lanes& lanes, RowShape shape, const Quad (&x)[Lanes::kQuads], float global,
                           QuadBits (&bits)[Lanes::kQuads]) {
  const int body = tail_begin<Codec>(shape);
  float amax[Lanes::kQuads] = {};
  if constexpr (Codec::kShare != 0) {
    float most = 0.0f;
#pragma unroll
    for (int q = 0; q < Lanes::kQuads; ++q) {
      amax[q] = lanes.channel(q) < body ? quad_amax(x[q]) : 0.0f;
      most = fmaxf(most, amax[q]);
      if constexpr (Codec::kShare != kWholeRow) {
#pragma unroll
        for (int step = 1; step < Codec::kShare; step *= 2)
          amax[q] = fmaxf(amax[q], __shfl_xor_sync(kAllLanes, amax[q], step));
      }
    }
    if constexpr (Codec::kShare == kWholeRow) {
      most = lanes.max(most);
#pragma unroll
      for (int q = 0; q < Lanes::kQuads; ++q) amax[q] = most;
    }
  }
#pragma unroll
  for (int q = 0; q < Lanes::kQuads; ++q)
    bits[q] = lanes.channel(q) < body ? Codec::encode(x[q], amax[q], global) : QuadBf16::encode(x[q], 0.0f, global);
}

}  // namespace kv4::cuda
