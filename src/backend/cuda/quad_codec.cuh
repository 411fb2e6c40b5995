// The formats of codec/ a quad at a time: 4 channels in registers <-> their bits <-> memory. The same bytes as
// codec/*.h; what is shared by a tile, group or row is found with shuffles instead of loops.
//
// A codec here has
//   kShare                        lanes that share a scale; kWholeRow, or 0: no scale
//   encode(x, amax, global)       bits of 4 quantised channels; amax over those that share the scale
//   decode(bits, global)          the values back
//   store / load(bits, payload, scale, channel)
// Channels of the tail of a row format are bf16: encode_row, store_quad, load_quad and decode_quad choose.
// Payload rows must be aligned to 8 bytes, scale rows to 4 where the scale is an fp32.
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
  // Clamped first, so that only rounding in range is left to the instruction: nearest even, subnormals included. The
  // minimum turns NaN into 448, 0x7E, and the last bit makes that 0x7F.
  std::uint16_t pair[2];
  std::uint32_t nan = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float a = x.v[2 * h] * by, b = x.v[2 * h + 1] * by;
    const float low = fmaxf(fminf(a, 448.0f), -448.0f), high = fmaxf(fminf(b, 448.0f), -448.0f);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair[h]) : "f"(high), "f"(low));
    nan |= (codec::is_nan(a) ? 1u << (16 * h) : 0u) | (codec::is_nan(b) ? 256u << (16 * h) : 0u);
  }
  return (pair[0] | static_cast<std::uint32_t>(pair[1]) << 16) | nan;
#else
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) bits |= static_cast<std::uint32_t>(codec::e4m3_bits(x.v[i] * by)) << (8 * i);
  return bits;
#endif
}

/// Values times `scale`; NaN in its one pattern, which a multiplication on the device does not keep.
__device__ inline Quad e4m3_values(std::uint32_t bits, float scale) {
  Quad out;
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // every e4m3 is an fp16
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(bits >> (16 * h))));
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(out.v[2 * h]), "=f"(out.v[2 * h + 1])
        : "r"(halves));
  }
#else
#pragma unroll
  for (int i = 0; i < kQuad; ++i) out.v[i] = codec::e4m3_value(static_cast<std::uint8_t>(bits >> (8 * i)));
#endif
#pragma unroll
  for (int i = 0; i < kQuad; ++i) out.v[i] = codec::canonical_nan(out.v[i] * scale);
  return out;
}

__device__ inline Quad e2m1_values(std::uint32_t bits, float scale) {
  Quad out;
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    out.v[i] = codec::e2m1_value(static_cast<std::uint8_t>((bits >> (4 * i)) & 15u)) * scale;
  return out;
}

__device__ inline float quad_amax(const Quad& x) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) amax = codec::larger_magnitude(amax, x.v[i]);
  return amax;
}

// --- memory

template <class Word>
__device__ Word load_word(const std::uint8_t* at) {
  return __ldg(reinterpret_cast<const Word*>(at));
}

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
  __device__ static Quad decode(const QuadBits& b, float) {
    return {{codec::bits_float(b.low << 16), codec::bits_float(b.low & 0xFFFF0000u), codec::bits_float(b.high << 16),
             codec::bits_float(b.high & 0xFFFF0000u)}};
  }
  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t*, int channel) {
    store_word(payload + 2 * channel, make_uint2(b.low, b.high));
  }
  __device__ static QuadBits load(const std::uint8_t* payload, const std::uint8_t*, int channel) {
    const uint2 word = load_word<uint2>(payload + 2 * channel);
    return {word.x, word.y, 0};
  }
};

// Rows whose last channels stay bf16. The tail's lanes also write the scale plane's padding.
struct QuadFp8Tile64 {
  static constexpr int kShare = codec::Fp8Tile64::kTile / kQuad;

  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const int e = codec::Fp8Tile64::scale_exponent(amax);
    return {e4m3_quad(x, codec::pow2(-e)), 0, static_cast<std::uint32_t>(e + 127)};
  }
  __device__ static Quad decode(const QuadBits& b, float) {
    return e4m3_values(b.low, codec::ue8m0_value(static_cast<std::uint8_t>(b.scale)));
  }
  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel, b.low);
    store_scale(b.scale, scale, channel);
  }
  __device__ static void store_scale(std::uint32_t byte, std::uint8_t* scale, int channel) {
    if (channel % codec::Fp8Tile64::kTile == 0)
      scale[channel / codec::Fp8Tile64::kTile] = static_cast<std::uint8_t>(byte);
  }
  __device__ static QuadBits load(const std::uint8_t* payload, const std::uint8_t* scale, int channel) {
    return {load_word<std::uint32_t>(payload + channel), 0, __ldg(scale + channel / codec::Fp8Tile64::kTile)};
  }
};

/// One fp32 scale for the row, written with its first quad.
struct QuadRowScale {
  static constexpr int kShare = kWholeRow;

  __device__ static Quad decode(const QuadBits& b, float) { return e4m3_values(b.low, codec::bits_float(b.scale)); }
  __device__ static void store(const QuadBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel, b.low);
    if (channel == 0) store_word(scale, b.scale);
  }
  __device__ static QuadBits load(const std::uint8_t* payload, const std::uint8_t* scale, int channel) {
    return {load_word<std::uint32_t>(payload + channel), 0, load_word<std::uint32_t>(scale)};
  }
};

struct QuadFp8Row : QuadRowScale {
  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const float inverse = codec::Fp8Row::inverse_scale(amax);
    Quad y;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) y.v[i] = codec::quotient(x.v[i], inverse);
    return {e4m3_quad(y, 1.0f), 0, codec::float_bits(inverse)};
  }
};

struct QuadFp8Key : QuadRowScale {
  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const int e = codec::Fp8Tile64::scale_exponent(amax);
    return {e4m3_quad(x, codec::pow2(-e)), 0, codec::float_bits(codec::pow2(e))};
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
  __device__ static QuadBits load(const std::uint8_t* payload, const std::uint8_t* scale, int channel) {
    return {load_word<std::uint16_t>(payload + channel / 2), 0, __ldg(scale + channel / kGroup)};
  }
};

struct QuadMxfp4 : QuadFp4<codec::Mxfp4::kGroup> {
  __device__ static QuadBits encode(const Quad& x, float amax, float) {
    const int e = codec::Mxfp4::scale_exponent(amax);
    const float inverse = codec::pow2(-e);
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) bits |= static_cast<std::uint32_t>(codec::e2m1_bits(x.v[i] * inverse)) << (4 * i);
    return {bits, 0, static_cast<std::uint32_t>(e + 127)};
  }
  __device__ static Quad decode(const QuadBits& b, float) {
    return e2m1_values(b.low, codec::ue8m0_value(static_cast<std::uint8_t>(b.scale)));
  }
};

struct QuadNvfp4 : QuadFp4<codec::Nvfp4::kGroup> {
  __device__ static QuadBits encode(const Quad& x, float amax, float global) {
    const std::uint8_t scale = codec::Nvfp4::scale_byte(amax, global);
    const float step = codec::e4m3_value(scale) * global;
    std::uint32_t bits = 0;
    if (step != 0.0f) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        bits |= static_cast<std::uint32_t>(codec::e2m1_bits(codec::quotient(x.v[i], step))) << (4 * i);
    }
    return {bits, 0, scale};
  }
  __device__ static Quad decode(const QuadBits& b, float global) {
    return e2m1_values(b.low, codec::e4m3_value(static_cast<std::uint8_t>(b.scale)) * global);
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

template <class Codec>
__device__ QuadBits load_quad(RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale, int channel) {
  const int body = tail_begin<Codec>(shape);
  return channel < body ? Codec::load(payload, scale, channel) : QuadBf16::load(payload - body, scale, channel);
}

template <class Codec>
__device__ Quad decode_quad(const QuadBits& bits, RowShape shape, int channel, float global) {
  return channel < tail_begin<Codec>(shape) ? Codec::decode(bits, global) : QuadBf16::decode(bits, global);
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
