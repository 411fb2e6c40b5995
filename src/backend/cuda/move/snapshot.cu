// Snapshots at boundaries inside a long step: one layer's window rows and pending rows per boundary, as the layer's
// append has left them in the scratch, in the state slot that the step reads, and in the inputs.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "codec/numeric.h"
#include "kv4/cuda.h"
#include "ops/compress_row.h"

namespace kv4::cuda {
namespace {

using ops::Boundary;
using ops::BoundaryParams;

constexpr int kThreads = 128;
constexpr int kMaxBoundaries = 32;  // in the kernel's parameters
constexpr int kTileRows = 4;        // window rows of a tile, which one CTA copies

struct Boundaries {
  Boundary list[kMaxBoundaries];
};
static_assert(sizeof(Boundaries) + sizeof(BoundaryParams) <= 4000, "a kernel's parameters");

template <class T>
__device__ void copy_as(const std::uint8_t* from, std::uint8_t* to, std::int64_t bytes) {
  for (std::int64_t i = threadIdx.x; i < bytes / static_cast<std::int64_t>(sizeof(T)); i += kThreads)
    reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
}

__device__ void copy_row(const std::uint8_t* from, std::uint8_t* to, std::int64_t bytes) {
  const auto alignment = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                         static_cast<std::uintptr_t>(bytes);
  if (alignment % 16 == 0)
    copy_as<uint4>(from, to, bytes);
  else if (alignment % 4 == 0)
    copy_as<std::uint32_t>(from, to, bytes);
  else
    copy_as<std::uint8_t>(from, to, bytes);
}

__device__ void copy_window(const BoundaryParams& p, const Boundary& b, int tile) {
  const ops::WindowDesc& w = p.layer.window;
  const std::int32_t first = max(0, b.position - p.layer.window_tokens);
  const std::int32_t begin = first + tile * kTileRows, end = min(begin + kTileRows, b.position);
  for (std::int32_t at = begin; at < end; ++at) {
    const bool in_step = at >= b.item.length;
    const ops::RowPlanes& rows = in_step ? w.scratch : w.ring;
    const std::int64_t block = in_step ? 0 : b.item.read_slot, row = in_step ? b.item.token_of(at) : at % w.rows;
    const std::int64_t payload = rows.payload.row_stride, scale = rows.scale.row_stride;
    copy_row(rows.payload.at(block, row), b.image + p.payload_at + (at - first) * payload, payload);
    copy_row(rows.scale.at(block, row), b.image + p.scale_at + (at - first) * scale, scale);
  }
}

// Copies `count` channels of an input row, rounded to the pending dtype.
__device__ void convert(const ops::InputDesc& in, std::int64_t token, int count, std::uint8_t* to, DType to_type) {
  const std::uint8_t* from = static_cast<const std::uint8_t*>(in.data) +
                             token * in.row_stride * static_cast<std::int64_t>(element_bytes(in.dtype));
  const ops::RowType type = in.dtype == DType::bf16 ? ops::RowType::bf16 : ops::RowType::f32;
  for (int c = static_cast<int>(threadIdx.x); c < count; c += kThreads) {
    const float x = ops::load_element(from, type, c);
    if (to_type == DType::f32)
      reinterpret_cast<float*>(to)[c] = codec::canonical_nan(x);
    else
      reinterpret_cast<std::uint16_t*>(to)[c] = codec::bf16_bits(x);
  }
}

// Saves the first halves of kv and gate of row `i` of the span that ends at the boundary.
__device__ void save_pending(const BoundaryParams& p, const Boundary& b, int k, int i) {
  const ops::KindDesc& kind = p.layer.kinds[k];
  const int width = kind.page.shape.width;
  const std::int64_t half = width * static_cast<std::int64_t>(element_bytes(kind.pending.dtype));
  const std::int32_t at = b.position - kind.ratio + i;
  std::uint8_t* out = b.image + p.pending_at[k] + i * 2 * half;
  if (at >= b.item.length) {
    convert(p.kv[k], b.item.token_of(at), width, out, kind.pending.dtype);
    convert(p.gate[k], b.item.token_of(at), width, out + half, kind.pending.dtype);
  } else {
    const std::uint8_t* kv = kind.pending.ring.at(b.item.read_slot, at % kind.pending.rows);
    copy_row(kv, out, half);
    copy_row(kv + 2 * half, out + half, half);
  }
}

// Bound by latency for a few boundaries, by bytes for many: 78 KB each of a V4-Flash layer. blockIdx.y: the boundary;
// blockIdx.x: tiles of its window, then the pending rows of each kind.
__global__ void __launch_bounds__(kThreads)
    save(const __grid_constant__ BoundaryParams p, const __grid_constant__ Boundaries boundaries, int window_tiles) {
  launch_dependents();
  grid_dependency_wait();
  const Boundary& b = boundaries.list[blockIdx.y];
  const int tile = static_cast<int>(blockIdx.x);
  if (tile < window_tiles) return copy_window(p, b, tile);
  int row = tile - window_tiles;
  for (int k = 0; k < p.layer.num_kinds; ++k) {
    if (!p.layer.kinds[k].overlap) continue;
    if (row < p.layer.kinds[k].ratio) return save_pending(p, b, k, row);
    row -= p.layer.kinds[k].ratio;
  }
}

}  // namespace

cudaError_t save_boundaries(const BoundaryParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch save_boundaries", true);
  const int window_tiles = (params.layer.window_tokens + kTileRows - 1) / kTileRows;
  int ctas = window_tiles;
  for (int k = 0; k < params.layer.num_kinds; ++k)
    if (params.layer.kinds[k].overlap) ctas += params.layer.kinds[k].ratio;
  for (std::int32_t first = 0; first < params.count; first += kMaxBoundaries) {
    const std::int32_t count = std::min(params.count - first, kMaxBoundaries);
    Boundaries boundaries;
    std::copy_n(params.boundaries + first, count, boundaries.list);
    const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(count));
    const cudaError_t status = launch(save, grid, kThreads, stream, params, boundaries, window_tiles);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace kv4::cuda
