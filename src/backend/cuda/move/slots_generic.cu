// Rows of pools kept elsewhere, by slot: the codecs unchanged, a CTA per row. Bound by launches and byte-wide accesses.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/rows/cta_group.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "codec/codec.h"
#include "kv4/cuda.h"
#include "ops/compress_row.h"

namespace kv4::cuda {
namespace {

using ops::SlotRowsParams;

constexpr int kThreads = 128;
constexpr std::int64_t kMaxCtas = 1 << 16;  // of a launch; each takes several rows of a longer list

/// A row's place in its pool.
struct SlotPlace {
  std::int64_t block, row;

  __device__ SlotPlace(const SlotRowsParams& p, std::int64_t slot)
      : block(slot / p.rows_per_block), row(slot % p.rows_per_block) {}
};

/// Shared memory: a row [width].
__global__ void __launch_bounds__(kThreads) write_slot_rows(const __grid_constant__ SlotRowsParams p) {
  extern __shared__ float x[];
  __shared__ float scratch;
  const CtaGroup g(&scratch);
  const int width = p.rows.shape.width;
  const ops::RowType type = p.in.dtype == DType::bf16 ? ops::RowType::bf16 : ops::RowType::f32_as_bf16;
  for (std::int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const std::int64_t slot = p.slot(row);
    if (slot < 0) continue;
    const std::uint8_t* in = static_cast<const std::uint8_t*>(p.in.data) +
                             row * p.in.row_stride * static_cast<std::int64_t>(element_bytes(p.in.dtype));
    g.sync();  // the row before is stored
    for (int c = g.lane(); c < width; c += g.size()) x[c] = ops::load_element(in, type, c);
    g.sync();
    const SlotPlace to(p, slot);
    codec::with_codec(p.rows.format, [&](auto codec) {
      codec.encode(g, p.rows.shape, x, p.rows.payload.at(to.block, to.row), p.rows.scale.at(to.block, to.row), 1.0f);
    });
  }
}

__global__ void __launch_bounds__(kThreads) gather_slot_rows(const __grid_constant__ SlotRowsParams p) {
  extern __shared__ float x[];
  __shared__ float scratch;
  const CtaGroup g(&scratch);
  const int width = p.rows.shape.width;
  for (std::int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const std::int64_t slot = p.slot(row);
    g.sync();  // the row before is stored
    if (slot >= 0) {
      const SlotPlace from(p, slot);
      codec::with_codec(p.rows.format, [&](auto codec) {
        codec.decode(g, p.rows.shape, p.rows.payload.at(from.block, from.row), p.rows.scale.at(from.block, from.row),
                     1.0f, x);
      });
    } else {
      for (int c = g.lane(); c < width; c += g.size()) x[c] = 0.0f;
    }
    g.sync();
    if (p.valid != nullptr && g.lane() == 0) p.valid[row] = slot >= 0;
    for (int c = g.lane(); c < width; c += g.size()) {
      if (p.out.dtype == DType::bf16)
        static_cast<std::uint16_t*>(p.out.data)[row * width + c] = codec::bf16_bits(x[c]);
      else
        static_cast<float*>(p.out.data)[row * width + c] = codec::canonical_nan(x[c]);
    }
  }
}

cudaError_t launch_rows(void (*kernel)(SlotRowsParams), const SlotRowsParams& p, cudaStream_t stream) {
  if (p.num_rows <= 0) return cudaSuccess;
  return launch_in_order(kernel, static_cast<unsigned>(std::min(p.num_rows, kMaxCtas)), kThreads,
                         static_cast<std::size_t>(p.rows.shape.width) * sizeof(float), stream, p);
}

}  // namespace

cudaError_t write_slots(const SlotRowsParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch write_slots", true);
  return launch_rows(write_slot_rows, params, stream);
}

cudaError_t gather_slots(const SlotRowsParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch gather_slots", true);
  return launch_rows(gather_slot_rows, params, stream);
}

}  // namespace kv4::cuda
