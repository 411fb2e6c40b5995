// The formats of codec/, a pair at a time: 2 channels in registers -> their bits -> memory. The bytes equal those of
// codec/*.h. Shuffles instead of loops find the maxima of a tile, group or row.
//
// A codec here has
//   kLanesPerScale                lanes that share a scale; kWholeRow, or 0: no scale
//   encode(x, amax, global)       bits of 2 quantised channels; amax: over the channels that share the scale
//   store(bits, payload, scale, channel)
// The tail channels of a row format are bf16: encode_row and store_pair choose. Payload rows are aligned to 4 bytes,
// and so are scale rows where the scale is an fp32.
#pragma once

#include "backend/cuda/rows/warp_row.cuh"
#include "codec/codec.h"

namespace kv4::cuda {

constexpr int kWholeRow = -1;

/// The two row shapes that these functions serve.
constexpr int kRowWidth = 512, kRowTail = 64, kKeyWidth = 128;

/// One pair as stored: up to 4 bytes of payload and its scale.
struct PairBits {
  std::uint32_t payload, scale;
};

struct Quad {
  float v[4];
};

// --- scalars

__device__ inline std::uint16_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return e4m3_pair_bits(low, high);
#else
  return static_cast<std::uint16_t>(codec::e4m3_bits(low) | codec::e4m3_bits(high) << 8);
#endif
}

__device__ inline std::uint32_t e4m3_quad(const Quad& x, float by) {
  return e4m3_pair(x.v[0] * by, x.v[1] * by) | static_cast<std::uint32_t>(e4m3_pair(x.v[2] * by, x.v[3] * by)) << 16;
}

/// Largest magnitude; NaN is ignored.
__device__ inline float pair_amax(const Pair& x) { return fmaxf(fmaxf(0.0f, fabsf(x.v[0])), fabsf(x.v[1])); }

/// Exponent of the smallest power of two >= amax / (1.75 * 2^8), as Fp8Tile64::scale_exponent: amax is a bf16, whose
/// mantissa tells whether it is above 1.75. Infinity counts as the largest bf16.
__device__ inline int exponent_over_448(float amax) {
  const float a = fminf(fmaxf(amax, codec::kAmaxFloor), codec::kBf16Max);
  return static_cast<int>((codec::float_bits(a) + 0x1FFFFFu) >> 23) - 127 - 8;
}

/// The same over 6 = 1.5 * 2^2, as Mxfp4::scale_exponent.
__device__ inline int exponent_over_6(float amax) {
  const float a = fminf(fmaxf(amax, 6.0f * codec::bits_float(1u << 23)), codec::kBf16Max);
  return static_cast<int>((codec::float_bits(a) + 0x3FFFFFu) >> 23) - 127 - 2;
}

/// 2^exponent; exponent >= -126.
__device__ inline float pow2_normal(int exponent) {
  return codec::bits_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// --- memory

template <class Word>
__device__ void store_word(std::uint8_t* at, Word word) {
  *reinterpret_cast<Word*>(at) = word;
}

// --- formats

struct PairBf16 {
  static constexpr int kLanesPerScale = 0;

  __device__ static PairBits encode(const Pair& x, float, float) {
    return {codec::bf16_bits(x.v[0]) | static_cast<std::uint32_t>(codec::bf16_bits(x.v[1])) << 16, 0};
  }
  __device__ static void store(const PairBits& b, std::uint8_t* payload, std::uint8_t*, int channel) {
    store_word(payload + 2 * channel, b.payload);
  }
};

// Rows whose last channels stay bf16. The lanes of the tail also write the padding of the scale plane.
struct PairFp8Tile64 {
  static constexpr int kLanesPerScale = codec::Fp8Tile64::kTile / kPair;

  __device__ static PairBits encode(const Pair& x, float amax, float) {
    const int e = exponent_over_448(amax);
    const float by = pow2_normal(-e);
    return {e4m3_pair(x.v[0] * by, x.v[1] * by), static_cast<std::uint32_t>(e + 127)};
  }
  __device__ static void store(const PairBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel, static_cast<std::uint16_t>(b.payload));
    store_scale(b.scale, scale, channel);
  }
  __device__ static void store_scale(std::uint32_t byte, std::uint8_t* scale, int channel) {
    if (channel % codec::Fp8Tile64::kTile == 0)
      scale[channel / codec::Fp8Tile64::kTile] = static_cast<std::uint8_t>(byte);
  }
};

/// One fp32 scale per row, written with its first pair.
struct PairRowScale {
  static constexpr int kLanesPerScale = kWholeRow;

  __device__ static void store(const PairBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    store_word(payload + channel, static_cast<std::uint16_t>(b.payload));
    if (channel == 0) store_word(scale, b.scale);
  }
};

struct PairFp8Row : PairRowScale {
  __device__ static PairBits encode(const Pair& x, float amax, float) {
    const float inverse = codec::Fp8Row::inverse_scale(fminf(amax, codec::kBf16Max));
    return {e4m3_pair(codec::quotient(x.v[0], inverse), codec::quotient(x.v[1], inverse)), codec::float_bits(inverse)};
  }
};

struct PairFp8Key : PairRowScale {
  __device__ static PairBits encode(const Pair& x, float amax, float) {
    const int e = exponent_over_448(amax);
    const float by = pow2_normal(-e);
    return {e4m3_pair(x.v[0] * by, x.v[1] * by), codec::float_bits(pow2_normal(e))};
  }
};

/// Two e2m1 per byte, one scale byte per group.
template <int kGroup>
struct PairFp4 {
  static constexpr int kLanesPerScale = kGroup / kPair;

  __device__ static std::uint32_t byte(float low, float high) {
    return codec::e2m1_bits(low) | static_cast<std::uint32_t>(codec::e2m1_bits(high)) << 4;
  }
  __device__ static void store(const PairBits& b, std::uint8_t* payload, std::uint8_t* scale, int channel) {
    payload[channel / 2] = static_cast<std::uint8_t>(b.payload);
    if (channel % kGroup == 0) scale[channel / kGroup] = static_cast<std::uint8_t>(b.scale);
  }
};

struct PairMxfp4 : PairFp4<codec::Mxfp4::kGroup> {
  __device__ static PairBits encode(const Pair& x, float amax, float) {
    const int e = exponent_over_6(amax);
    const float inverse = pow2_normal(-e);
    return {byte(x.v[0] * inverse, x.v[1] * inverse), static_cast<std::uint32_t>(e + 127)};
  }
};

struct PairNvfp4 : PairFp4<codec::Nvfp4::kGroup> {
  __device__ static PairBits encode(const Pair& x, float amax, float global) {
    const std::uint8_t scale = codec::Nvfp4::scale_byte(fminf(amax, codec::kBf16Max), global);
    const float step = codec::e4m3_value(scale) * global;
    if (step == 0.0f) return {0, scale};
    return {byte(codec::quotient(x.v[0], step), codec::quotient(x.v[1], step)), scale};
  }
};

/// Calls f with the pair codec of a row or key format.
template <class F>
__device__ void with_row_pairs(Format format, F&& f) {
  if (format == Format::fp8_tile64) return f(PairFp8Tile64{});
  if (format == Format::fp8_row) return f(PairFp8Row{});
  f(PairBf16{});
}

template <class F>
__device__ void with_key_pairs(Format format, F&& f) {
  if (format == Format::mxfp4) return f(PairMxfp4{});
  if (format == Format::nvfp4) return f(PairNvfp4{});
  if (format == Format::fp8) return f(PairFp8Key{});
  f(PairBf16{});
}

// --- rows

/// Channels from here on are bf16, behind the quantised channels. Formats without scales have no separate tail.
template <class Codec, class Lanes>
__device__ constexpr int tail_begin() {
  return Lanes::kWidth - (Codec::kLanesPerScale != 0 && Lanes::kWidth == kRowWidth ? kRowTail : 0);
}

// The tail's bf16 channel c lies at body + 2 (c - body): as channel c of a bf16 row that began `body` bytes earlier.
template <class Codec, class Lanes>
__device__ void store_pair(const PairBits& bits, std::uint8_t* payload, std::uint8_t* scale, int channel) {
  constexpr int kBody = tail_begin<Codec, Lanes>();
  if (channel < kBody) return Codec::store(bits, payload, scale, channel);
  PairBf16::store(bits, payload - kBody, scale, channel);
  if constexpr (std::is_same_v<Codec, PairFp8Tile64>) Codec::store_scale(0, scale, channel);
}

/// Called by all lanes of the row. x: bf16 values.
template <class Codec, class Lanes>
__device__ PairBits encode_row(Lanes& lanes, const Pair& x, float global) {
  const bool body = lanes.channel() < tail_begin<Codec, Lanes>();
  float amax = 0.0f;
  if constexpr (Codec::kLanesPerScale != 0) {
    if (body) amax = pair_amax(x);
    if constexpr (Codec::kLanesPerScale == kWholeRow) {
      amax = lanes.max(amax);
    } else {
#pragma unroll
      for (int step = 1; step < Codec::kLanesPerScale; step *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
    }
  }
  return body ? Codec::encode(x, amax, global) : PairBf16::encode(x, 0.0f, global);
}

}  // namespace kv4::cuda
