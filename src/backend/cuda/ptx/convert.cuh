// Conversions that are one instruction.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// Two fp32 -> two bf16 bit patterns. NaN stays NaN, in an unspecified pattern; stores write the canonical one.
__device__ inline std::uint32_t bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Two fp32 -> two fp16 bit patterns.
__device__ inline std::uint32_t fp16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

#if __CUDA_ARCH__ >= 890
/// Two fp32 -> two e4m3. The instruction rounds, saturates and turns NaN into 0x7F as codec::e4m3_bits does: compared
/// for every float.
__device__ inline std::uint16_t e4m3_pair_bits(float low, float high) {
  std::uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

/// Two e4m3 -> two fp16, exact.
__device__ inline std::uint32_t fp16_pair_of_e4m3(std::uint16_t codes) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}

/// Four e4m3 -> four fp16, exact. The instruction reads the upper half of a register itself, so no shifts are needed.
__device__ inline void fp16_pairs_of_e4m3(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  asm("{ .reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
#endif

/// Two e4m3 -> two fp16, times a pair of fp16, rounded. For Hopper's kernels alone.
__device__ inline std::uint32_t scaled_fp16_pair_of_e4m3(std::uint16_t codes, std::uint32_t factors) {
  std::uint32_t pair;
  asm("{ .reg .b32 x; cvt.rn.f16x2.e4m3x2 x, %1; mul.rn.f16x2 %0, x, %2; }" : "=r"(pair) : "h"(codes), "r"(factors));
  return pair;
}

/// 2^x; 0 for -infinity.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline std::uint64_t join_words(std::uint32_t low, std::uint32_t high) {
  std::uint64_t joined;
  asm("mov.b64 %0, {%1, %2};" : "=l"(joined) : "r"(low), "r"(high));
  return joined;
}

/// Bytes of {b, a} by the selector's digits; a digit's top bit: eight times the byte's top bit. The instruction reads
/// 16 bits of its selector; __byte_perm masks them once more.
__device__ inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  std::uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

}  // namespace kv4::cuda
