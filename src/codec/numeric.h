// Scalar number formats and the few functions whose bits matter. Every result is defined to the bit, on host and
// device: no contraction that is not spelled out, correctly rounded division and square root, denormals kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kv4/host_device.h"

namespace kv4::codec {

KV4_HD std::uint32_t float_bits(float x) {
  std::uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}

KV4_HD float bits_float(std::uint32_t b) {
  float x;
  memcpy(&x, &b, 4);
  return x;
}

KV4_HD float fused(float a, float b, float c) {  // a * b + c, rounded once
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

KV4_HD float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

KV4_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

KV4_HD bool is_nan(float x) { return x != x; }
KV4_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }

/// NaN is stored as one pattern, whatever operation gave it.
constexpr std::uint32_t kNanBits = 0x7FC00000u;
KV4_HD float canonical_nan(float x) { return is_nan(x) ? bits_float(kNanBits) : x; }

// --- bf16: the upper half of a float, round to nearest even
// ------------------------------------------------------------
constexpr std::uint16_t kBf16Nan = 0x7FC0;
constexpr float kBf16Max = 3.38953139e38f;

KV4_HD std::uint16_t bf16_bits(float x) {
  if (is_nan(x)) return kBf16Nan;
  const std::uint32_t b = float_bits(x);
  return static_cast<std::uint16_t>((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
}

KV4_HD std::uint16_t canonical_bf16(std::uint16_t b) { return (b & 0x7FFFu) > 0x7F80u ? kBf16Nan : b; }
KV4_HD float bf16_value(std::uint16_t b) { return bits_float(static_cast<std::uint32_t>(b) << 16); }
KV4_HD float round_bf16(float x) { return bf16_value(bf16_bits(x)); }

// --- e4m3 (OCP "fn"): sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, largest 448
// --------------------------
constexpr std::uint8_t kE4m3Nan = 0x7F;

KV4_HD std::uint8_t e4m3_bits(float x) {
  if (is_nan(x)) return kE4m3Nan;
  const std::uint32_t sign = (float_bits(x) >> 24) & 0x80u;
  float a = magnitude(x);
  if (a > 448.0f) a = 448.0f;
  std::uint32_t code;
  if (a < 0.015625f) {  // below 2^-6: steps of 2^-9. Adding 2^14, whose ulp is 2^-9, rounds to them.
    code = float_bits(a + 16384.0f) - float_bits(16384.0f);
  } else {
    const std::uint32_t b = float_bits(a);
    code = ((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<std::uint8_t>(sign | code);
}

KV4_HD float e4m3_value(std::uint8_t b) {
  const std::uint32_t m = b & 0x7Fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(b & 0x80u) << 24;
  if (m == 0x7Fu) return bits_float(kNanBits);
  const float a = m < 8 ? static_cast<float>(m) * 0.001953125f : bits_float((m << 20) + (120u << 23));
  return bits_float(float_bits(a) | sign);
}

// --- e2m1: 0 .5 1 1.5 2 3 4 6, sign in bit 3; ties to the even code
// -------------------------------------------------------
constexpr std::uint8_t kE2m1Nan = 0x7;  // has none: +6, as the hardware's saturating conversion does

KV4_HD std::uint8_t e2m1_bits(float x) {
  if (is_nan(x)) return kE2m1Nan;
  const float a = magnitude(x);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return static_cast<std::uint8_t>(code | ((float_bits(x) >> 28) & 8u));
}

KV4_HD float e2m1_value(std::uint8_t code) {
  const std::uint32_t m = code & 7u;
  // 1 -> .5; else (1 + low bit / 2) * 2^(m / 2 - 1)
  const float a = m < 2 ? 0.5f * static_cast<float>(m) : bits_float(((m >> 1) + 126u) << 23 | (m & 1u) << 22);
  return code & 8u ? -a : a;
}

// --- UE8M0 and powers of two
// ----------------------------------------------------------------------------------------------
KV4_HD float pow2(int exponent) {  // 2^exponent, exponent in [-127, 127]
  return exponent < -126 ? bits_float(1u << 22) : bits_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// Exponent of the smallest power of two >= x, for normal x > 0, by the bits of the float.
KV4_HD int pow2_ceil_exponent(float x) {
  const std::uint32_t b = float_bits(x);
  return static_cast<int>((b >> 23) & 255u) - 127 + ((b & 0x7FFFFFu) != 0 ? 1 : 0);
}

KV4_HD float ue8m0_value(std::uint8_t b) { return pow2(static_cast<int>(b) - 127); }

/// Largest magnitude so far. NaN is ignored; infinity counts as the largest bf16, so that every scale stays finite.
KV4_HD float larger_magnitude(float so_far, float x) {
  float a = magnitude(x);
  if (a > kBf16Max) a = kBf16Max;
  return a > so_far ? a : so_far;
}

// --- exp(x) for x <= 0
// x log2(e) = k + r, |r| <= 1/2: a polynomial for 2^r (exactly 1 at 0) times 2^k. Relative error 1.7e-7 near 0, growing
// with the rounding of log2(e) to 1.3e-6 at -86, where weights no longer count. Below -86 the result stays at exp(-86)
// = 4.5e-38: negligible against a weight of 1, and no denormals. NaN stays NaN.
constexpr float kExpFloor = -86.0f;
constexpr float kLog2e = 1.44269504f;
// 1.5 * 2^23 + 127: adding it rounds to an integer k, and the low bits are the exponent field of 2^k.
constexpr float kRoundMagic = 12583039.0f;
constexpr float kExp1 = 0.693147f, kExp2 = 0.24022242f, kExp3 = 0.055507336f, kExp4 = 0.009671513f,
                kExp5 = 0.0013264727f;

KV4_HD float not_below(float x, float floor) {  // NaN stays NaN
#if defined(__CUDA_ARCH__)
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(floor));
  return x;
#else
  return x < floor ? floor : x;
#endif
}

KV4_HD float exp_nonpositive(float x) {
  x = not_below(x, kExpFloor);
  const float shifted = fused(x, kLog2e, kRoundMagic);
  const float k = shifted - kRoundMagic;
  const float r = fused(x, kLog2e, -k);
  float p = fused(kExp5, r, kExp4);
  p = fused(p, r, kExp3);
  p = fused(p, r, kExp2);
  p = fused(p, r, kExp1);
  p = fused(p, r, 1.0f);
  return p * bits_float(float_bits(shifted) << 23);
}

}  // namespace kv4::codec
