// ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers. Lane l gives
// the address of row l % 8 of matrix l / 8. In registers, lane 4 g + q has of row g the elements 2q and 2q + 1.
#pragma once

#include <cstdint>

namespace kv4::cuda {

__device__ inline void load_matrices(std::uint32_t (&words)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

__device__ inline void store_matrices(std::uint32_t row, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                      std::uint32_t d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
#endif
}

}  // namespace kv4::cuda
