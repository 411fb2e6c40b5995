// append: one launch per layer. Thread blocks take roles by index: the entries' compressor, the index keys', the
// window.
#include <algorithm>

#include "backend/cuda/append_plain.cuh"
#include "backend/cuda/compress_open.cuh"
#include "backend/cuda/compress_overlap.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/window_row.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

constexpr int kBlockWarps = 4;
constexpr int kBlockThreads = kBlockWarps * kWarp;

using EntryLanes = RowLanes<kBlockWarps, 1>;  // 512
using KeyLanes = RowLanes<1, 1>;              // 128

enum class Compression { none, overlap, open };

/// Who does what: the kinds' blocks first, then the window's.
struct AppendGrid {
  int groups[ops::LayerDesc::kMaxKinds];  // each takes every groups-th token
  int blocks[ops::LayerDesc::kMaxKinds];
  int window_warps;
};

// Thread blocks that share an SM. Rows under way live in registers; how many pay depends on whether one block's time
// counts or all blocks'.
constexpr int blocks_per_sm(Compression compression, bool latency, bool mixed_types) {
  return latency ? 2 : compression == Compression::open || mixed_types ? 3 : 4;
}

// kLatency: a decode, bound by latency: a record, then all the rows it asks for at once, one barrier for the norm. Else
// a prefill, bound by the bytes of its inputs, each read once.
template <Compression kCompression, bool kLatency, class In, class Pending>
__global__ void __launch_bounds__(kBlockThreads, blocks_per_sm(kCompression, kLatency, sizeof(In) != sizeof(Pending)))
    append_kernel(const __grid_constant__ ops::AppendParams p, const __grid_constant__ AppendGrid grid) {
  __shared__ float parts[2 * kBlockWarps];
  let_next_start();
  int block = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if constexpr (kCompression != Compression::none) {
    for (int k = 0; k < ops::LayerDesc::kMaxKinds; ++k) {
      if (block < grid.blocks[k]) {
        const int groups = grid.groups[k], group = block * kBlockWarps + warp;
        if constexpr (kCompression == Compression::open)
          OpenSpans<kLatency, In, Pending, EntryLanes>(p, k, EntryLanes(parts)).run(block, groups);
        else if (p.layer.kinds[k].page.shape.width == EntryLanes::kWidth)
          compress_overlap<kLatency, In, Pending>(p, k, EntryLanes(parts), block, groups);
        else if (group < groups)
          compress_overlap<kLatency, In, Pending>(p, k, KeyLanes(nullptr), group, groups);
        return;
      }
      block -= grid.blocks[k];
    }
  }
  wait_for_previous();
  if (p.window_rows.dtype == DType::f32)
    append_window<float>(p, block * kBlockWarps + warp, grid.window_warps);
  else
    append_window<Bf16>(p, block * kBlockWarps + warp, grid.window_warps);
}

// --- which steps it can do

bool aligned(const void* data, std::int64_t stride, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 && stride % bytes == 0;
}
bool aligned(const ops::Plane& plane, std::int64_t bytes) {
  return aligned(plane.data, plane.block_stride, bytes) && plane.row_stride % bytes == 0;
}
bool aligned(const ops::InputDesc& in) {
  const std::int64_t stride = in.row_stride * static_cast<std::int64_t>(element_bytes(in.dtype));
  return aligned(in.data, stride, 16) && stride <= INT32_MAX;
}

bool fits_row(const ops::RowPlanes& rows) {
  const bool format =
      rows.format == Format::fp8_tile64 || rows.format == Format::fp8_row || rows.format == Format::bf16;
  return format && rows.shape.width == EntryLanes::kWidth && rows.shape.tail == 64 && aligned(rows.payload, 8) &&
         aligned(rows.scale, 4);
}

bool fits_key(const ops::RowPlanes& rows) {
  const bool format = rows.format == Format::mxfp4 || rows.format == Format::nvfp4 || rows.format == Format::fp8 ||
                      rows.format == Format::bf16;
  return format && rows.shape.width == KeyLanes::kWidth && rows.shape.tail == 0 && aligned(rows.payload, 8) &&
         aligned(rows.scale, 4) && aligned(rows.global, 4);
}

bool fits_window(const ops::AppendParams& p) {
  const ops::WindowDesc& w = p.layer.window;
  const ops::FrontEndDesc& f = p.front_end;
  const int payload = w.ring.format == Format::bf16 ? 16 : 8;
  return fits_row(w.ring) && aligned(w.ring.payload, payload) && aligned(w.scratch.payload, payload) &&
         aligned(w.scratch.scale, 4) && aligned(w.displaced.payload, 4) && aligned(w.displaced.scale, 4) &&
         aligned(p.window_rows) &&
         (f.norm_weight == nullptr ||
          (aligned(f.norm_weight, 0, 16) && f.rope.rope_dim % kOctetChannels == 0 && f.rope.rope_dim <= kOctetStride));
}

bool fits_kind(const ops::AppendParams& p, int k) {
  const ops::KindDesc &kind = p.layer.kinds[k], &first = p.layer.kinds[0];
  const ops::PendingDesc& pending = kind.pending;
  const int width = kind.page.shape.width;
  const std::int64_t quad = kQuad * static_cast<std::int64_t>(element_bytes(pending.dtype));
  return ((fits_key(kind.page) && kind.overlap) || (fits_row(kind.page) && !kind.hadamard)) &&
         kind.overlap == first.overlap && (!kind.overlap || kind.ratio == kOverlapRatio) &&
         pending.columns == (kind.overlap ? 2 : 1) * width && pending.dtype == first.pending.dtype &&
         aligned(pending.ring, quad) && aligned(pending.accumulator, 16) && p.kv[k].dtype == p.kv[0].dtype &&
         p.gate[k].dtype == p.kv[0].dtype && aligned(p.kv[k]) && aligned(p.gate[k]) && aligned(kind.bias, 0, 16) &&
         aligned(kind.norm_weight, 0, 16) && p.rope.rope_dim % kQuad == 0 && p.rope.rope_dim <= width;
}

bool fits(const ops::AppendParams& p, int num_kinds) {
  bool fit = fits_window(p);
  for (int k = 0; k < num_kinds; ++k) fit = fit && fits_kind(p, k);
  return fit;
}

// --- how it is spread

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A token per group while the groups find room at once, so that a decode waits for one of them only. In larger steps
// few tokens have work: an overlapping kind closes an entry every 4 tokens, the others one every `ratio`, and two
// thread blocks per SM at that are enough to read at full speed. Odd: see for_each_record.
int num_groups(const ops::KindDesc& kind, int num_tokens) {
  constexpr int kOverlapAtOnce = 1024, kOpenAtOnce = 512, kOpenGroups = 257;
  if (kind.overlap)
    return num_tokens <= kOverlapAtOnce ? num_tokens : std::max(kOverlapAtOnce, num_tokens / kOverlapRatio) | 1;
  return num_tokens <= kOpenAtOnce ? num_tokens : kOpenGroups;
}

int num_window_warps(int num_tokens) {
  constexpr int kAtOnce = 4096, kTokensPerWarp = 4;
  return num_tokens <= kAtOnce ? num_tokens : std::max(kAtOnce, num_tokens / kTokensPerWarp);
}

template <Compression kCompression, bool kLatency, class In, class Pending>
cudaError_t launch_tuned(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  AppendGrid grid{};
  grid.window_warps = num_window_warps(p.step.num_tokens);
  int blocks = ceil_div(grid.window_warps, kBlockWarps);
  for (int k = 0; k < num_kinds; ++k) {
    const bool whole_block = p.layer.kinds[k].page.shape.width == EntryLanes::kWidth;
    grid.groups[k] = num_groups(p.layer.kinds[k], p.step.num_tokens);
    grid.blocks[k] = whole_block ? grid.groups[k] : ceil_div(grid.groups[k], kBlockWarps);
    blocks += grid.blocks[k];
  }
  return launch(append_kernel<kCompression, kLatency, In, Pending>, static_cast<unsigned>(blocks), kBlockThreads,
                stream, p, grid);
}

template <class In, class Pending>
cudaError_t launch_kinds(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  constexpr int kDecodeTokens = 192;
  const bool latency = p.step.num_tokens <= kDecodeTokens;
  if (p.layer.kinds[0].overlap)
    return latency ? launch_tuned<Compression::overlap, true, In, Pending>(p, num_kinds, stream)
                   : launch_tuned<Compression::overlap, false, In, Pending>(p, num_kinds, stream);
  return latency ? launch_tuned<Compression::open, true, In, Pending>(p, num_kinds, stream)
                 : launch_tuned<Compression::open, false, In, Pending>(p, num_kinds, stream);
}

}  // namespace

cudaError_t append(const ops::AppendParams& p, cudaStream_t stream) {
  if (p.step.num_tokens <= 0) return cudaSuccess;
  const int num_kinds = p.kv[0].data == nullptr ? 0 : p.layer.num_kinds;
  if (!fits(p, num_kinds)) return append_plain(p, stream);
  if (num_kinds == 0) return launch_tuned<Compression::none, false, float, float>(p, 0, stream);
  const bool in_f32 = p.kv[0].dtype == DType::f32;
  if (p.layer.kinds[0].pending.dtype == DType::f32)
    return in_f32 ? launch_kinds<float, float>(p, num_kinds, stream) : launch_kinds<Bf16, float>(p, num_kinds, stream);
  return in_f32 ? launch_kinds<float, Bf16>(p, num_kinds, stream) : launch_kinds<Bf16, Bf16>(p, num_kinds, stream);
}

}  // namespace kv4::cuda
