// Arithmetic that is one instruction, but not one that the compiler chooses.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// The larger of each pair of 16-bit halves, as unsigned integers.
__device__ inline std::uint32_t larger_halves(std::uint32_t x, std::uint32_t y) {
  asm("max.u16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}

/// The same as bf16. NaN is ignored.
__device__ inline std::uint32_t larger_bf16_pair(std::uint32_t x, std::uint32_t y) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}

/// The larger magnitudes of two bf16 pairs; their signs have no meaning. NaN is ignored.
__device__ inline std::uint32_t larger_bf16_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
#if __CUDA_ARCH__ >= 890
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
#else
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
#endif
  return larger;
}

/// The product of two bf16 pairs, rounded to bf16.
__device__ inline std::uint32_t multiply_bf16_pair(std::uint32_t x, std::uint32_t y) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}

/// a * b + c on a pipe that byte permutes do not use.
__device__ inline std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t out;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

/// x limited to 0 to 1.
__device__ inline float saturate(float x) {
  float out;
  asm("add.rn.sat.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace kv4::cuda
