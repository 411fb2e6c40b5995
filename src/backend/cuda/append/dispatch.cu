// append: one launch per layer. CTAs take roles by index: compressor of the entries, compressor of the index keys,
// window. Decodes are bound by latency, prefills by the bytes of their inputs. H200, 2026-11-18: with every entry due,
// one token of a CSA layer takes 2.0 us, 128 take 3.5; a prefill of 32,768 tokens takes 1.10 (CSA) to 1.13 (HCA, SWA)
// times as long as its bytes at the copy speed.
#include <algorithm>

#include "backend/cuda/append/csa.cuh"
#include "backend/cuda/append/generic.cuh"
#include "backend/cuda/append/hca.cuh"
#include "backend/cuda/append/window.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

constexpr int kCtaWarps = 8;
constexpr int kCtaThreads = kCtaWarps * kWarp;

using EntryLanes = RowLanes<kRowWidth / kChunk, kCtaWarps>;
using KeyLanes = RowLanes<kKeyWidth / kChunk, kCtaWarps>;

enum class Compression { none, overlap, open };

union RowsShared {
  EntryLanes::Shared entries[EntryLanes::kRows];
  KeyLanes::Shared keys[KeyLanes::kRows];
};

/// CTAs of each kind in a decode; the window's CTAs follow.
struct AppendGrid {
  int ctas[ops::LayerDesc::kMaxKinds];
};

__device__ bool holds_entries(const ops::KindDesc& kind) { return kind.page.shape.width == EntryLanes::kWidth; }

// When a decode launches its dependents. CSA layers do so at once: 2.52 to 2.13 us with 16 requests and an entry due.
// Other layers with few CTAs do so only after their own wait, so that one kernel waits instead of a queue of kernels
// (HCA, 16 requests, entry due: 3.31 to 3.06 us; SWA, 128 requests: 2.16 to 1.92). H200, 2026-11-16,
// `kv4_gpu_bench --only append`.
constexpr unsigned kFewCtas = 80;

// A decode, bound by latency: one token per group of lanes; CTAs take roles by index.
template <WindowCase kWindow, Compression kCompression, class In, class Pending>
__global__ void __launch_bounds__(kCtaThreads, 2)
    decode_kernel(const __grid_constant__ ops::AppendParams p, const __grid_constant__ AppendGrid grid) {
  __shared__ RowsShared shared;
  if (kCompression == Compression::overlap || gridDim.x > kFewCtas) launch_dependents();
  touch(p);
  int cta = static_cast<int>(blockIdx.x);
  if constexpr (kCompression != Compression::none) {
    for (int k = 0; k < ops::LayerDesc::kMaxKinds; ++k) {
      if (cta < grid.ctas[k]) {
        if constexpr (kCompression == Compression::open) {
          OpenSpans<true, In, Pending, EntryLanes>(p, 0, EntryLanes(shared.entries)).decode(cta);
        } else if (holds_entries(p.layer.kinds[k])) {
          OverlapSpans<In, Pending, EntryLanes>(p, k, EntryLanes(shared.entries)).decode(cta);
        } else {
          const KeyLanes lanes(shared.keys);
          OverlapSpans<In, Pending, KeyLanes>(p, k, lanes).decode(cta * KeyLanes::kRows + lanes.row());
        }
        return;
      }
      cta -= grid.ctas[k];
    }
  }
  const int token = cta * kCtaWarps + static_cast<int>(threadIdx.x) / kWarp;
  with_window_input<kWindow>(p, [&](auto element, auto projection, auto format) {
    append_window_row<projection.value, decltype(element)>(p, format, token);
  });
}

// The distribution of a prefill. Every warp takes its part of every role. Open spans are so long that two CTAs per SM
// can take all of them: separate warps of these CTAs append the window rows.
template <Compression kCompression, class In, class Pending>
struct PrefillShape {
  static constexpr bool kSeparateWindowWarps = kCompression == Compression::open;
  static constexpr int kWindowWarps = kSeparateWindowWarps ? kCtaWarps / 2 : kCtaWarps;
  static constexpr int kWindowBarrier = kSeparateWindowWarps ? 2 : 0;  // RowLanes of one row use barrier 1
  static constexpr int kThreads = kWarp * (kCtaWarps + (kSeparateWindowWarps ? kWindowWarps : 0));
  static constexpr int kCtasPerSm =
      kSeparateWindowWarps || sizeof(In) != sizeof(Pending) ? 2 : 3;  // limited by registers

  struct Shared {
    RowsShared rows;
    NormWeights window_weights;
  };
  union BatchShared {  // the roles use it one after the other
    RowsShared rows;
    NormWeights window_weights;
    EntryBatch<kCtaWarps>::Shared batch;
  };

  // Stages of rows in flight.
  static constexpr int kRowBytes = stage_row_bytes(kCtaThreads);
  static constexpr int kOverlapStage = 2 * kOverlapRows * 2 * kRowBytes;        // two entries
  static constexpr int kOpenStage = kOpenBatches * kOpenBatch * 2 * kRowBytes;  // some rows of one entry
  static constexpr int kWindowStageBytes = kWindowWarps * kWindowStage;
  static constexpr int kWindowAt = kSeparateWindowWarps ? kOpenStage : 0;
  static constexpr int kStageBytes =
      std::max(kCompression == Compression::overlap ? kOverlapStage : 0, kWindowAt + kWindowStageBytes);
};

/// The largest odd number <= n: see TokenIterator.
constexpr int largest_odd(int n) { return (n - 1) | 1; }

// A prefill, bound by the bytes of its inputs, which it reads once.
template <WindowCase kWindow, Compression kCompression, class In, class Pending,
          class Shape = PrefillShape<kCompression, In, Pending>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    prefill_kernel(const __grid_constant__ ops::AppendParams p, int num_kinds) {
  extern __shared__ __align__(kStageLine) std::uint8_t stage[];
  __shared__
      std::conditional_t<kCompression == Compression::overlap, typename Shape::BatchShared, typename Shape::Shared>
          shared;
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  const auto window_warp = [] { return reload_thread_index() / kWarp - (Shape::kSeparateWindowWarps ? kCtaWarps : 0); };
  const int window_warps = Shape::kWindowWarps * ctas;
  const auto load_window_weights = [&] {
    if (p.front_end.norm_weight == nullptr) return;
    constexpr int kThreads = Shape::kWindowWarps * kWarp;
    shared.window_weights.fill(p.front_end.norm_weight, reload_thread_index() % kThreads, kThreads);
    named_barrier_sync(Shape::kWindowBarrier, kThreads);
  };
  const auto append_window = [&] {
    const int warp = window_warp();
    const std::uint8_t* window_stage = stage + Shape::kWindowAt + warp * kWindowStage;
    with_window_input<kWindow>(p, [&](auto element, auto projection, auto format) {
      append_window_rows<projection.value, decltype(element)>(p, format, window_stage, shared.window_weights,
                                                              warp * ctas + cta, window_warps);
    });
  };
  launch_dependents();
  touch(p);
  if (kCompression == Compression::none || (Shape::kSeparateWindowWarps && window_warp() >= 0)) {
    with_window_input<kWindow>(p, [&](auto element, auto, auto) {
      prefetch_window_rows<decltype(element)>(p, window_warp() * ctas + cta, window_warps);
    });
    load_window_weights();
  } else if constexpr (kCompression == Compression::overlap) {
    prefetch_inputs<In>(p, cta * kOverlapRatio, kOverlapRatio);
  }
  grid_dependency_wait();
  if constexpr (Shape::kSeparateWindowWarps)
    if (window_warp() >= 0) return append_window();
  if constexpr (kCompression == Compression::open)
    OpenSpans<false, In, Pending, EntryLanes>(p, 0, EntryLanes(shared.rows.entries))
        .prefill(stage, cta, largest_odd(ctas));
  if constexpr (kCompression == Compression::overlap) {
    for (int k = 0; k < num_kinds; ++k) {
      if (holds_entries(p.layer.kinds[k])) {
        OverlapSpans<In, Pending, EntryLanes>(p, k, EntryLanes(shared.rows.entries))
            .prefill(stage, cta, largest_odd(ctas), EntryBatch<kCtaWarps>(shared.batch, p, p.layer.kinds[k]));
      } else {
        const KeyLanes lanes(shared.rows.keys);
        OverlapSpans<In, Pending, KeyLanes>(p, k, lanes)
            .prefill(stage, lanes.row() * ctas + cta, largest_odd(KeyLanes::kRows * ctas),
                     EachEntry<KeyLanes>(lanes, p, p.layer.kinds[k]));
      }
      __syncthreads();
    }
  }
  if constexpr (kCompression == Compression::overlap) load_window_weights();
  if constexpr (!Shape::kSeparateWindowWarps) append_window();
}

// --- steps that the tuned kernels support

bool fits_input(const ops::InputDesc& in) {
  const std::int64_t stride = in.row_stride * static_cast<std::int64_t>(element_bytes(in.dtype));
  return is_aligned(in.data, stride, 16) && stride <= INT32_MAX;
}

/// RoPE that rotates whole octets (rows/octet_row.cuh).
bool fits_rotation(const ops::RopeDesc& rope) {
  const bool angles = rope.cos != nullptr || (is_aligned(rope.angles.high, 16) && is_aligned(rope.angles.low, 16));
  return angles && rope.rope_dim % kOctetChannels == 0 && rope.rope_dim <= kMaxRotated;
}

bool fits_row(const ops::RowPlanes& rows) {
  const bool format =
      rows.format == Format::fp8_tile64 || rows.format == Format::fp8_row || rows.format == Format::bf16;
  return format && rows.shape.width == kRowWidth && rows.shape.tail == kRowTail && is_aligned(rows.payload, 16) &&
         is_aligned(rows.scale, 4);
}

bool fits_key(const ops::RowPlanes& rows) {
  const bool format = rows.format == Format::mxfp4 || rows.format == Format::nvfp4 || rows.format == Format::fp8 ||
                      rows.format == Format::bf16;
  return format && rows.shape.width == kKeyWidth && rows.shape.tail == 0 && is_aligned(rows.payload, 8) &&
         is_aligned(rows.scale, 4) && is_aligned(rows.global, 4);
}

bool fits_window(const ops::AppendParams& p) {
  const ops::WindowDesc& w = p.layer.window;
  const ops::FrontEndDesc& f = p.front_end;
  return fits_row(w.ring) && is_aligned(w.scratch.payload, 16) && is_aligned(w.scratch.scale, 4) &&
         is_aligned(w.undo_row.payload, 4) && is_aligned(w.undo_row.scale, 4) && fits_input(p.window_rows) &&
         (f.norm_weight == nullptr || (is_aligned(f.norm_weight, 16) && fits_rotation(f.rope)));
}

bool fits_kind(const ops::AppendParams& p, int k) {
  const ops::KindDesc &kind = p.layer.kinds[k], &first = p.layer.kinds[0];
  const ops::PendingDesc& pending = kind.pending;
  const int width = kind.page.shape.width;
  const std::int64_t pair = kPair * static_cast<std::int64_t>(element_bytes(pending.dtype));
  return ((fits_key(kind.page) && kind.overlap) || (fits_row(kind.page) && !kind.hadamard)) &&
         kind.overlap == first.overlap && (!kind.overlap || kind.ratio == kOverlapRatio) &&
         pending.columns == (kind.overlap ? 2 : 1) * width && pending.dtype == first.pending.dtype &&
         is_aligned(pending.ring, pair) && is_aligned(pending.accumulator, 16) && p.kv[k].dtype == p.kv[0].dtype &&
         p.gate[k].dtype == p.kv[0].dtype && fits_input(p.kv[k]) && fits_input(p.gate[k]) &&
         is_aligned(kind.bias, 16) && is_aligned(kind.norm_weight, 16) && fits_rotation(p.rope);
}

bool fits(const ops::AppendParams& p, int num_kinds) {
  bool fit = fits_window(p) && (num_kinds < 2 || p.layer.kinds[0].overlap);
  for (int k = 0; k < num_kinds; ++k) fit = fit && fits_kind(p, k);
  return fit;
}

// --- launches

/// Steps of more tokens are prefills. Chosen on an H200, 2026-11-15; to check it, change it and compare
/// `kv4_gpu_bench --only append prefill`.
constexpr int kDecodeTokens = 192;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <Compression kCompression, class In, class Pending>
cudaError_t launch_decode(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  AppendGrid grid{};
  int ctas = ceil_div(p.step.num_tokens, kCtaWarps);
  for (int k = 0; k < num_kinds; ++k) {
    const bool entries = p.layer.kinds[k].page.shape.width == kRowWidth;
    grid.ctas[k] = ceil_div(p.step.num_tokens, entries ? EntryLanes::kRows : KeyLanes::kRows);
    ctas += grid.ctas[k];
  }
  const auto kernel = window_case(p) == WindowCase::usual ? decode_kernel<WindowCase::usual, kCompression, In, Pending>
                                                          : decode_kernel<WindowCase::rare, kCompression, In, Pending>;
  return launch(kernel, static_cast<unsigned>(ctas), kCtaThreads, stream, p, grid);
}

template <Compression kCompression, class In, class Pending>
cudaError_t launch_prefill(const ops::AppendParams& p, int num_kinds, cudaStream_t stream) {
  using Shape = PrefillShape<kCompression, In, Pending>;
  const auto kernel = window_case(p) == WindowCase::usual ? prefill_kernel<WindowCase::usual, kCompression, In, Pending>
                                                          : prefill_kernel<WindowCase::rare, kCompression, In, Pending>;
  const int ctas = std::min(p.step.num_tokens, Shape::kCtasPerSm * num_sms());
  return launch<Shape::kStageBytes>(kernel, static_cast<unsigned>(ctas), Shape::kThreads, stream, p, num_kinds);
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
  if (!fits(p, num_kinds)) return append_generic(p, stream);
  if (num_kinds == 0)
    return p.step.num_tokens <= kDecodeTokens ? launch_decode<Compression::none, float, float>(p, 0, stream)
                                              : launch_prefill<Compression::none, float, float>(p, 0, stream);
  const bool in_f32 = p.kv[0].dtype == DType::f32;
  if (p.layer.kinds[0].pending.dtype == DType::f32)
    return in_f32 ? launch_kinds<float, float>(p, num_kinds, stream) : launch_kinds<Bf16, float>(p, num_kinds, stream);
  return in_f32 ? launch_kinds<float, Bf16>(p, num_kinds, stream) : launch_kinds<Bf16, Bf16>(p, num_kinds, stream);
}

}  // namespace kv4::cuda
