// Operands of wgmma in shared memory (ptx/wgmma.cuh): panels of 128 bytes (64 elements) per row whose 16-byte chunks
// are swizzled by the row, and their descriptors. Sources: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
// Instructions".
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/bulk_copy.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace kv4::cuda {

constexpr int kPanelRowBytes = 128, kPanelRows = 64, kPanelBytes = kPanelRowBytes * kPanelRows;

/// Byte offset of a 16-byte chunk of a panel's row. Panels begin at multiples of 1,024.
__device__ constexpr std::uint32_t panel_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kPanelRowBytes + ((chunk ^ (row & 7)) << 4));
}

/// The address of the first panel, as the lower half of a descriptor; `leading`: the distance between panels if columns
/// continue through several.
__device__ inline std::uint32_t panel_place(std::uint32_t address, std::uint32_t leading = 16) {
  return (address & 0x3FFFFu) >> 4 | leading >> 4 << 16;
}
/// The descriptor of 128-byte swizzled panels at `bytes` from there: 8 rows take 1,024 bytes. One addition, because
/// building a descriptor takes almost as long as a multiplication.
__device__ inline std::uint64_t panel_descriptor(std::uint32_t place, std::uint32_t bytes) {
  constexpr std::uint32_t kSwizzled = 1024 >> 4 | 1u << 30;
  return join_words(place + (bytes >> 4), kSwizzled);
}

}  // namespace kv4::cuda
