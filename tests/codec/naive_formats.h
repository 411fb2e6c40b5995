// The number formats by slow search: every code's value in double, and the nearest of them. Shares no code with
// src/codec.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kv4/options.h"

namespace kv4::naive {

inline std::uint32_t bits_of(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

inline float float_of(std::uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

// --- scalars: values of codes

inline double e4m3_value(int code) {
  if ((code & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double a = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 128 ? -a : a;
}

inline double e2m1_value(int code) {
  constexpr double kValues[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

inline double bf16_value(int code) {
  const int exponent = (code >> 7) & 255, mantissa = code & 127;
  double a = exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
  if (exponent == 255)
    a = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  return code & 0x8000 ? -a : a;
}

inline double ue8m0_value(int code) { return std::ldexp(1.0, code - 127); }

// --- scalars: nearest code, ties to the even one

/// values: ascending, by code. Values beyond the last one give the last one.
inline int nearest_code(const std::vector<double>& values, double magnitude) {
  const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
  if (above == values.begin()) return 0;
  if (above == values.end()) return static_cast<int>(values.size()) - 1;
  const int high = static_cast<int>(above - values.begin()), low = high - 1;
  const double up = *above - magnitude, down = magnitude - values[static_cast<std::size_t>(low)];
  if (up != down) return up < down ? high : low;
  return high % 2 == 0 ? high : low;
}

template <class Value>
std::vector<double> ascending(int count, Value value) {
  std::vector<double> out;
  for (int code = 0; code < count; ++code) out.push_back(value(code));
  return out;
}

inline std::uint8_t e4m3_bits(float x) {
  static const std::vector<double> kValues = ascending(127, e4m3_value);
  if (std::isnan(x)) return 0x7F;
  return static_cast<std::uint8_t>(nearest_code(kValues, std::fabs(static_cast<double>(x))) |
                                   (std::signbit(x) ? 0x80 : 0));
}

inline std::uint8_t e2m1_bits(float x) {
  static const std::vector<double> kValues = ascending(8, e2m1_value);
  if (std::isnan(x)) return 0x7;
  return static_cast<std::uint8_t>(nearest_code(kValues, std::fabs(static_cast<double>(x))) |
                                   (std::signbit(x) ? 8 : 0));
}

inline std::uint16_t bf16_bits(float x) {
  // In rounding, infinity's code stands for the next value, 2^128.
  static const std::vector<double> kValues =
      ascending(0x7F81, [](int code) { return code == 0x7F80 ? std::ldexp(1.0, 128) : bf16_value(code); });
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<std::uint16_t>(nearest_code(kValues, std::fabs(static_cast<double>(x))) |
                                    (std::signbit(x) ? 0x8000 : 0));
}

inline float round_bf16(float x) { return static_cast<float>(bf16_value(bf16_bits(x))); }

/// Exponent of the smallest power of two >= x.
inline int pow2_ceil_exponent(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);  // x = fraction * 2^exponent, fraction in [.5, 1)
  return fraction == 0.5 ? exponent - 1 : exponent;
}

// --- rows

struct Row {
  std::vector<std::uint8_t> payload, scale;
  bool operator==(const Row&) const = default;
};

/// Largest magnitude; NaN is skipped, infinity counts as the largest bf16.
inline float largest(const float* x, int count) {
  const float limit = static_cast<float>(bf16_value(0x7F7F));
  float out = 0.0f;
  for (int c = 0; c < count; ++c)
    if (!std::isnan(x[c])) out = std::max(out, std::min(std::fabs(x[c]), limit));
  return out;
}

inline void push_fp32(std::vector<std::uint8_t>& out, float x) {
  const std::uint32_t b = bits_of(x);
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<std::uint8_t>(b >> (8 * i)));
}

inline float read_fp32(const std::uint8_t* at) {
  std::uint32_t b = 0;
  for (int i = 3; i >= 0; --i) b = b << 8 | at[i];
  return float_of(b);
}

inline void push_bf16(std::vector<std::uint8_t>& out, const float* x, int count) {
  for (int c = 0; c < count; ++c) {
    const std::uint16_t b = bf16_bits(x[c]);
    out.push_back(static_cast<std::uint8_t>(b & 255));
    out.push_back(static_cast<std::uint8_t>(b >> 8));
  }
}

inline float read_bf16(const std::uint8_t* at) { return static_cast<float>(bf16_value(at[0] | at[1] << 8)); }

/// x / 2^exponent, exactly (a power of two in float range times a float).
inline float scaled_down(float x, int exponent) {
  return static_cast<float>(static_cast<double>(x) / std::ldexp(1.0, exponent));
}

inline void push_nibbles(std::vector<std::uint8_t>& out, const std::vector<std::uint8_t>& codes) {
  for (std::size_t i = 0; i < codes.size(); i += 2)
    out.push_back(static_cast<std::uint8_t>(codes[i] | codes[i + 1] << 4));
}

inline Row encode(Format format, int width, int tail, const float* x, float global = 1.0f) {
  Row out;
  const int body = width - tail;
  std::vector<std::uint8_t> codes;
  switch (format) {
    case Format::fp8_tile64:
      for (int t = 0; t < body; t += 64) {
        const int e =
            pow2_ceil_exponent(std::max(static_cast<double>(largest(x + t, 64)), static_cast<double>(1e-4f)) / 448.0);
        out.scale.push_back(static_cast<std::uint8_t>(e + 127));
        for (int c = t; c < t + 64; ++c) out.payload.push_back(e4m3_bits(scaled_down(x[c], e)));
      }
      while (out.scale.size() % 8 != 0) out.scale.push_back(0);
      push_bf16(out.payload, x + body, tail);
      break;
    case Format::fp8_tile32:  // all channels: no bf16 tail
      for (int t = 0; t < width; t += 32) {
        const int e =
            pow2_ceil_exponent(std::max(static_cast<double>(largest(x + t, 32)), static_cast<double>(1e-4f)) / 448.0);
        out.scale.push_back(static_cast<std::uint8_t>(e + 127));
        for (int c = t; c < t + 32; ++c) out.payload.push_back(e4m3_bits(scaled_down(x[c], e)));
      }
      break;
    case Format::nvfp4_row:
      for (int t = 0; t < width; t += 16) {
        const bool nan = std::any_of(x + t, x + t + 16, [](float v) { return std::isnan(v); });
        const double amax = std::max(static_cast<double>(largest(x + t, 16)), 6 * 0x1p-9);
        const std::uint8_t scale = nan ? 0x7F : e4m3_bits(static_cast<float>(amax / 6.0));
        out.scale.push_back(scale);
        for (int c = t; c < t + 16; ++c)
          codes.push_back(nan ? std::uint8_t{0} : e2m1_bits(x[c] / static_cast<float>(e4m3_value(scale))));
      }
      push_nibbles(out.payload, codes);
      break;
    case Format::fp8_row: {
      const float amax = largest(x, body);
      const float inverse = amax / 448.0f > 0.0f ? amax / 448.0f : 1.0f;
      for (int c = 0; c < body; ++c) out.payload.push_back(e4m3_bits(x[c] / inverse));
      push_fp32(out.scale, inverse);
      push_bf16(out.payload, x + body, tail);
      break;
    }
    case Format::bf16: push_bf16(out.payload, x, width); break;
    case Format::mxfp4:
      for (int t = 0; t < width; t += 32) {
        const int e =
            pow2_ceil_exponent(std::max(static_cast<double>(largest(x + t, 32)), 6 * std::ldexp(1.0, -126)) / 6.0);
        out.scale.push_back(static_cast<std::uint8_t>(e + 127));
        for (int c = t; c < t + 32; ++c) codes.push_back(e2m1_bits(scaled_down(x[c], e)));
      }
      push_nibbles(out.payload, codes);
      break;
    case Format::nvfp4:
      for (int t = 0; t < width; t += 16) {
        const std::uint8_t scale = e4m3_bits(largest(x + t, 16) / 6.0f / global);
        const float step = static_cast<float>(e4m3_value(scale)) * global;
        out.scale.push_back(scale);
        for (int c = t; c < t + 16; ++c) codes.push_back(step == 0.0f ? std::uint8_t{0} : e2m1_bits(x[c] / step));
      }
      push_nibbles(out.payload, codes);
      break;
    case Format::fp8: {
      const int e =
          pow2_ceil_exponent(std::max(static_cast<double>(largest(x, width)), static_cast<double>(1e-4f)) / 448.0);
      for (int c = 0; c < width; ++c) out.payload.push_back(e4m3_bits(scaled_down(x[c], e)));
      push_fp32(out.scale, static_cast<float>(std::ldexp(1.0, e)));
      break;
    }
  }
  return out;
}

inline std::vector<float> decode(Format format, int width, int tail, const std::uint8_t* payload,
                                 const std::uint8_t* scale, float global = 1.0f) {
  std::vector<float> out;
  const bool tailed = format == Format::fp8_tile64 || format == Format::fp8_row;
  const int body = tailed ? width - tail : width;
  for (int c = 0; c < body; ++c) {
    double value = 0;
    const int nibble = c % 2 == 0 ? payload[c / 2] & 15 : payload[c / 2] >> 4;
    switch (format) {
      case Format::fp8_tile64: value = e4m3_value(payload[c]) * ue8m0_value(scale[c / 64]); break;
      case Format::fp8_tile32: value = e4m3_value(payload[c]) * ue8m0_value(scale[c / 32]); break;
      case Format::nvfp4_row: value = e2m1_value(nibble) * e4m3_value(scale[c / 16]); break;
      case Format::fp8_row:
      case Format::fp8: value = e4m3_value(payload[c]) * read_fp32(scale); break;
      case Format::bf16: value = read_bf16(payload + 2 * c); break;
      case Format::mxfp4: value = e2m1_value(nibble) * ue8m0_value(scale[c / 32]); break;
      case Format::nvfp4: value = e2m1_value(nibble) * (static_cast<float>(e4m3_value(scale[c / 16])) * global); break;
    }
    out.push_back(static_cast<float>(value));
  }
  for (int c = body; c < width; ++c) out.push_back(read_bf16(payload + body + 2 * (c - body)));
  return out;
}

}  // namespace kv4::naive
