// append: one launch per layer. CTAs take roles by index: the entries' compressor, the index keys', the
// window.
#include <algorithm>

#include "backend/cuda/append/csa.cuh"
#include "backend/cuda/append/generic.cuh"
#include "backend/cuda/append/hca.cuh"
#include "backend/cuda/append/window.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = kBlockWarps * kWarp;

using EntryLanes = RowLanes<kRowWidth / kChunk, kBlockWarps>;
using KeyLanes = RowLanes<kKeyWidth / kChunk, kBlockWarps>;

enum class Compression { none, overlap, open };

union RowsShared {
  EntryLanes::Shared entries[EntryLanes::kRows];
  KeyLanes::Shared keys[KeyLanes::kRows];
};

/// Who does what in a decode: the kinds' blocks first, then the window's.
struct AppendGrid {
  int blocks[ops::LayerDesc::kMaxKinds];
};

__device__ bool holds_entries(const ops::KindDesc& kind) { return kind.page.shape.width == EntryLanes::kWidth; }

// When a decode lets the next kernel start. Of entries that overlap at once: 16 requests, entry due, 2.52 to 2.13 us.
// Others of few CTAs only after their own wait, so that one kernel waits and not a queue of them (HCA, 16
// requests, entry due: 3.31 to 3.06 us; SWA, 128 requests: 2.16 to 1.92). H200, 2026-11-16.
constexpr unsigned kFewBlocks = 80;

// A decode, bound by latency: a token per group of lanes, CTAs take roles by index.
template <WindowCase kWindow, Compression kCompression, class In, class Pending>
__global__ void __launch_bounds__(kBlockThreads, 2)
    decode_kernel(const __grid_constant__ ops::AppendParams p, const __grid_constant__ AppendGrid grid) {
  __shared__ RowsShared shared;
  if (kCompression == Compression::overlap || gridDim.x > kFewBlocks) launch_dependents();
  touch(p);
  int block = static_cast<int>(blockIdx.x);
  if constexpr (kCompression != Compression::none) {
    for (int k = 0; k < ops::LayerDesc::kMaxKinds; ++k) {
      if (block < grid.blocks[k]) {
        if constexpr (kCompression == Compression::open) {
          OpenSpans<true, In, Pending, EntryLanes>(p, 0, EntryLanes(shared.entries)).run_one(block);
        } else if (holds_entries(p.layer.kinds[k])) {
          OverlapSpans<In, Pending, EntryLanes>(p, k, EntryLanes(shared.entries)).run_one(block);
        } else {
          const KeyLanes lanes(shared.keys);
          OverlapSpans<In, Pending, KeyLanes>(p, k, lanes).run_one(block * KeyLanes::kRows + lanes.row());
        }
        return;
      }
      block -= grid.blocks[k];
    }
  }
  const int token = block * kBlockWarps + static_cast<int>(threadIdx.x) / kWarp;
  with_window_input<kWindow>(p, [&](auto element, auto projection, auto format) {
    append_window_row<projection.value, decltype(element)>(p, format, token);
  });
}

// How a prefill is spread. Every warp takes its share of every role. Open spans are so long that there are no more of
// them than two CTAs per SM can take: other warps beside theirs do the window.
template <Compression kCompression, class In, class Pending>
struct Prefill {
  static constexpr bool kWindowApart = kCompression == Compression::open;
  static constexpr int kWindowWarps = kWindowApart ? kBlockWarps / 2 : kBlockWarps;
  static constexpr int kWindowBarrier = kWindowApart ? 2 : 0;  // RowLanes of one row take 1
  static constexpr int kThreads = kWarp * (kBlockWarps + (kWindowApart ? kWindowWarps : 0));
  static constexpr int kBlocksPerSm = kWindowApart || sizeof(In) != sizeof(Pending) ? 2 : 3;  // as registers allow

  struct Shared {
    RowsShared rows;
    NormWeights window_weights;
  };
  union BatchShared {  // roles one after the other
    RowsShared rows;
    NormWeights window_weights;
    EntryBatch<kBlockWarps>::Shared batch;
  };

  // Of rows under way.
  static constexpr int kRowBytes = stage_row_bytes(kBlockThreads);
  static constexpr int kOverlapStage = 2 * kOverlapRows * 2 * kRowBytes;        // two entries'
  static constexpr int kOpenStage = kOpenBatches * kOpenBatch * 2 * kRowBytes;  // some of one's
  static constexpr int kWindowStageBytes = kWindowWarps * kWindowStage;
  static constexpr int kWindowAt = kWindowApart ? kOpenStage : 0;
  static constexpr int kStageBytes =
      std::max(kCompression == Compression::overlap ? kOverlapStage : 0, kWindowAt + kWindowStageBytes);
};

/// The largest odd number that is not above n: see TokenWalk.
constexpr int odd(int n) { return (n - 1) | 1; }

// A prefill, bound by the bytes of its inputs, each read once.
template <WindowCase kWindow, Compression kCompression, class In, class Pending,
          class Spread = Prefill<kCompression, In, Pending>>
__global__ void __launch_bounds__(Spread::kThreads, Spread::kBlocksPerSm)
    prefill_kernel(const __grid_constant__ ops::AppendParams p, int num_kinds) {
  extern __shared__ __align__(kStageLine) std::uint8_t stage[];
  __shared__
      std::conditional_t<kCompression == Compression::overlap, typename Spread::BatchShared, typename Spread::Shared>
          shared;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const auto window_warp = [] { return thread_again() / kWarp - (Spread::kWindowApart ? kBlockWarps : 0); };
  const int window_warps = Spread::kWindowWarps * blocks;
  const auto load_window_weights = [&] {
    if (p.front_end.norm_weight == nullptr) return;
    constexpr int kThreads = Spread::kWindowWarps * kWarp;
    shared.window_weights.fill(p.front_end.norm_weight, thread_again() % kThreads, kThreads);
    named_barrier_sync(Spread::kWindowBarrier, kThreads);
  };
  const auto append_window = [&] {
    const int warp = window_warp();
    const std::uint8_t* window_stage = stage + Spread::kWindowAt + warp * kWindowStage;
    with_window_input<kWindow>(p, [&](auto element, auto projection, auto format) {
      append_window_rows<projection.value, decltype(element)>(p, format, window_stage, shared.window_weights,
                                                              warp * blocks + block, window_warps);
    });
  };
  launch_dependents();
  touch(p);
  if (kCompression == Compression::none || (Spread::kWindowApart && window_warp() >= 0)) {
    with_window_input<kWindow>(p, [&](auto element, auto, auto) {
      fetch_window_rows<decltype(element)>(p, window_warp() * blocks + block, window_warps);
    });
    load_window_weights();
  } else if constexpr (kCompression == Compression::overlap) {
    fetch_inputs<In>(p, block * kOverlapRatio, kOverlapRatio);
  }
  grid_dependency_wait();
  if constexpr (Spread::kWindowApart)
    if (window_warp() >= 0) return append_window();
  if constexpr (kCompression == Compression::open)
    OpenSpans<false, In, Pending, EntryLanes>(p, 0, EntryLanes(shared.rows.entries)).run(stage, block, odd(blocks));
  if constexpr (kCompression == Compression::overlap) {
    for (int k = 0; k < num_kinds; ++k) {
      if (holds_entries(p.layer.kinds[k])) {
        OverlapSpans<In, Pending, EntryLanes>(p, k, EntryLanes(shared.rows.entries))
            .run(stage, block, odd(blocks), EntryBatch<kBlockWarps>(shared.batch, p, p.layer.kinds[k]));
      } else {
        const KeyLanes lanes(shared.rows.keys);
        OverlapSpans<In, Pending, KeyLanes>(p, k, lanes)
            .run(stage, lanes.row() * blocks + block, odd(KeyLanes::kRows * blocks),
                 EachEntry<KeyLanes>(lanes, p, p.layer.kinds[k]));
      }
      __syncthreads();
    }
  }
  if constexpr (kCompression == Compression::overlap) load_window_weights();
  if constexpr (!Spread::kWindowApart) append_window();
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

bool aligned(const ops::RopeDesc& rope) {
  return rope.cos != nullptr || (aligned(rope.angles.high, 0, 16) && aligned(rope.angles.low, 0, 16));
}

/// In octets (rows/octet_row.cuh).
bool fits_turn(const ops::RopeDesc& rope) {
  return aligned(rope) && rope.rope_dim % kOctetChannels == 0 && rope.rope_dim <= kMostTurned;
}

bool fits_row(const ops::RowPlanes& rows) {
  const bool format =
      rows.format == Format::fp8_tile64 || rows.format == Format::fp8_row || rows.format == Format::bf16;
  return format && rows.shape.width == kRowWidth && rows.shape.tail == kRowTail && aligned(rows.payload, 16) &&
         aligned(rows.scale, 4);
}

bool fits_key(const ops::RowPlanes& rows) {
  const bool format = rows.format == Format::mxfp4 || rows.format == Format::nvfp4 || rows.format == Format::fp8 ||
                      rows.format == Format::bf16;
  return format && rows.shape.width == kKeyWidth && rows.shape.tail == 0 && aligned(rows.payload, 8) &&
         aligned(rows.scale, 4) && aligned(rows.global, 4);
}

bool fits_window(const ops::AppendParams& p) {
  const ops::WindowDesc& w = p.layer.window;
  const ops::FrontEndDesc& f = p.front_end;
  return fits_row(w.ring) && aligned(w.scratch.payload, 16) && aligned(w.scratch.scale, 4) &&
         aligned(w.undo_row.payload, 4) && aligned(w.undo_row.scale, 4) && aligned(p.window_rows) &&
         (f.norm_weight == nullptr || (aligned(f.norm_weight, 0, 16) && fits_turn(f.rope)));
}

bool fits_kind(const ops::AppendParams& p, int k) {
  const ops::KindDesc &kind = p.layer.kinds[k], &first = p.layer.kinds[0];
  const ops::PendingDesc& pending = kind.pending;
  const int width = kind.page.shape.width;
  const std::int64_t pair = kPair * static_cast<std::int64_t>(element_bytes(pending.dtype));
  return ((fits_key(kind.page) && kind.overlap) || (fits_row(kind.page) && !kind.hadamard)) &&
         kind.overlap == first.overlap && (!kind.overlap || kind.ratio == kOverlapRatio) &&
         pending.columns == (kind.overlap ? 2 : 1) * width && pending.dtype == first.pending.dtype &&
         aligned(pending.ring, pair) && aligned(pending.accumulator, 16) && p.kv[k].dtype == p.kv[0].dtype &&
         p.gate[k].dtype == p.kv[0].dtype && aligned(p.kv[k]) && aligned(p.gate[k]) && aligned(kind.bias, 0, 16) &&
         aligned(kind.norm_weight, 0, 16) && fits_turn(p.rope);
}

bool fits(const ops::AppendParams& p, int num_kinds) {
  bool fit = fits_window(p) && (num_kinds < 2 || p.layer.kinds[0].overlap);
  for (int k = 0; k < num_kinds; ++k) fit = fit && fits_kind(p, k);
  return fit;
}

// --- how it is spread

constexpr int kDecodeTokens = 192;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <Compression kCompression, class In, class Pending>
cudaError_t launch_decode(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  AppendGrid grid{};
  int blocks = ceil_div(p.step.num_tokens, kBlockWarps);
  for (int k = 0; k < num_kinds; ++k) {
    const bool entries = p.layer.kinds[k].page.shape.width == kRowWidth;
    grid.blocks[k] = ceil_div(p.step.num_tokens, entries ? EntryLanes::kRows : KeyLanes::kRows);
    blocks += grid.blocks[k];
  }
  const auto kernel = window_case(p) == WindowCase::usual ? decode_kernel<WindowCase::usual, kCompression, In, Pending>
                                                          : decode_kernel<WindowCase::rare, kCompression, In, Pending>;
  return launch(kernel, static_cast<unsigned>(blocks), kBlockThreads, stream, p, grid);
}

template <Compression kCompression, class In, class Pending>
cudaError_t launch_prefill(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  using Spread = Prefill<kCompression, In, Pending>;
  const auto kernel = window_case(p) == WindowCase::usual ? prefill_kernel<WindowCase::usual, kCompression, In, Pending>
                                                          : prefill_kernel<WindowCase::rare, kCompression, In, Pending>;
  const int blocks = std::min(p.step.num_tokens, Spread::kBlocksPerSm * num_sms());
  return launch<Spread::kStageBytes>(kernel, static_cast<unsigned>(blocks), Spread::kThreads, stream, p, num_kinds);
}

template <class In, class Pending>
cudaError_t launch_kinds(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  const bool decode = p.step.num_tokens <= kDecodeTokens;
  if (p.layer.kinds[0].overlap)
    return decode ? launch_decode<Compression::overlap, In, Pending>(p, num_kinds, stream)
                  : launch_prefill<Compression::overlap, In, Pending>(p, num_kinds, stream);
  return decode ? launch_decode<Compression::open, In, Pending>(p, num_kinds, stream)
                : launch_prefill<Compression::open, In, Pending>(p, num_kinds, stream);
}

}  // namespace

cudaError_t append(const ops::AppendParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch append", true);
  if (p.step.num_tokens <= 0) return cudaSuccess;
  const int num_kinds = p.kv[0].data == nullptr ? 0 : p.layer.num_kinds;
  if (!fits(p, num_kinds)) return append_plain(p, stream);
  if (num_kinds == 0)
    return p.step.num_tokens <= kDecodeTokens ? launch_decode<Compression::none, float, float>(p, 0, stream)
                                              : launch_prefill<Compression::none, float, float>(p, 0, stream);
  const bool in_f32 = p.kv[0].dtype == DType::f32;
  if (p.layer.kinds[0].pending.dtype == DType::f32)
    return in_f32 ? launch_kinds<float, float>(p, num_kinds, stream) : launch_kinds<Bf16, float>(p, num_kinds, stream);
  return in_f32 ? launch_kinds<float, Bf16>(p, num_kinds, stream) : launch_kinds<Bf16, Bf16>(p, num_kinds, stream);
}

}  // namespace kv4::cuda
