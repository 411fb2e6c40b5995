// Gathers of any format, width and alignment: the codecs unchanged, a warp per row. They serve rows that no reader of
// rows/decode.cuh supports.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "codec/codec.h"

namespace kv4::cuda {

struct WarpLanes {
  __device__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ int size() const { return 32; }
};

/// Bound by conversions and by byte-wide loads.
template <class Find>
__global__ void gather_generic_rows(const __grid_constant__ ops::GatherParams p, std::int64_t tiles) {
  extern __shared__ float shared[];  // [warps, width]
  const ops::RowPlanes& rows = Find::rows(p);
  const int warp = static_cast<int>(threadIdx.x / 32), width = rows.shape.width;
  const std::int64_t outer = blockIdx.x / tiles, row = blockIdx.x % tiles * (blockDim.x / 32) + warp;
  const ops::StepRecord record = Find::records(p)[outer];
  if (blockIdx.x % tiles == 0 && threadIdx.x == 0) Find::write_lengths(p, record, outer);
  if (row >= p.rows_per_item) return;

  float* x = shared + warp * width;
  const WarpLanes g;
  const RowPointers place = Find::find(p, record, outer, row);
  if (place.payload == nullptr) {
    for (int c = g.lane(); c < width; c += g.size()) x[c] = 0.0f;
  } else {
    float global = 1.0f;
    if (place.global != nullptr) memcpy(&global, place.global, 4);
    codec::with_codec(rows.format,
                      [&](auto codec) { codec.decode(g, rows.shape, place.payload, place.scale, global, x); });
  }
  __syncwarp();
  const std::int64_t at = (outer * p.rows_per_item + row) * width;
  for (int c = g.lane(); c < width; c += g.size()) {
    if (p.out.dtype == DType::bf16) {
      static_cast<std::uint16_t*>(p.out.data)[at + c] = codec::bf16_bits(x[c]);
    } else {  // NaN of a product has all mantissa bits here; NaN that was stored as bf16 has a zero lower half and
              // stays
      const bool product = (codec::float_bits(x[c]) & 0xFFFFu) != 0;
      static_cast<float*>(p.out.data)[at + c] = product ? codec::canonical_nan(x[c]) : x[c];
    }
  }
}

template <class Find>
cudaError_t gather_generic(const ops::GatherParams& p, std::int64_t outer, cudaStream_t stream) {
  constexpr std::int64_t kSharedBytes = 48 << 10;
  const std::int64_t row_bytes = Find::rows(p).shape.width * std::int64_t{4};
  const std::int64_t warps = std::clamp<std::int64_t>(kSharedBytes / row_bytes, 1, 4);
  const std::int64_t tiles = std::max<std::int64_t>((p.rows_per_item + warps - 1) / warps, 1);
  return launch_in_order(gather_generic_rows<Find>, static_cast<unsigned>(outer * tiles),
                         static_cast<unsigned>(32 * warps), static_cast<std::size_t>(warps * row_bytes), stream, p,
                         tiles);
}

}  // namespace kv4::cuda
