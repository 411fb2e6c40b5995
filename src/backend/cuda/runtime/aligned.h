// Alignment checks for wide loads. For the host.
#pragma once

#include <cstdint>

#include "kv4/params.h"

namespace kv4::cuda {

/// Whether `data`, and every address `stride` bytes on, is a multiple of `to`.
inline bool is_aligned(const void* data, std::int64_t stride, std::int64_t to) {
  return (reinterpret_cast<std::intptr_t>(data) | stride) % to == 0;
}
inline bool is_aligned(const void* data, std::int64_t to) { return is_aligned(data, 0, to); }
inline bool is_aligned(const ops::Plane& plane, std::int64_t to) {
  return is_aligned(plane.data, plane.block_stride | plane.row_stride, to);
}

}  // namespace kv4::cuda
