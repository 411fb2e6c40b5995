// Copies many pieces in one launch, and folds the accumulators of open spans.
#include <algorithm>
#include <cstdint>
#include <span>

#include "backend/cuda/ptx/bulk_copy.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "codec/numeric.h"
#include "kv4/cuda.h"
#include "ops/compress_row.h"

namespace kv4::cuda {
namespace {

using ops::CopyPiece;

constexpr int kThreads = 256;
constexpr int kLoadsAhead = 4;
constexpr std::int64_t kMinTileBytes = kThreads * 16;             // one load per thread
constexpr std::int64_t kTileBytes = kMinTileBytes * kLoadsAhead;  // copied by a CTA at a time
constexpr std::int64_t kMaxTiles = 4096;                          // of one piece

template <class T>
__device__ void copy_as(const std::uint8_t* from, std::uint8_t* to, std::int64_t bytes) {
  const T* source = reinterpret_cast<const T*>(from);
  T* target = reinterpret_cast<T*>(to);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(T));
#pragma unroll 1
  for (std::int64_t first = threadIdx.x; first < count; first += kLoadsAhead * kThreads) {
    T value[kLoadsAhead];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i)
      if (first + i * kThreads < count) value[i] = source[first + i * kThreads];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i)
      if (first + i * kThreads < count) target[first + i * kThreads] = value[i];
  }
  const std::int64_t rest = count * static_cast<std::int64_t>(sizeof(T)) + threadIdx.x;
  if (rest < bytes) to[rest] = from[rest];
}

/// Pieces in the kernel's parameters.
struct FewPieces {
  CopyPiece pieces[kMostFewPieces];
};
static_assert(sizeof(FewPieces) <= 4000, "a kernel's parameters");

/// Pieces in device memory.
struct ManyPieces {
  const CopyPiece* pieces;
};

// Bound by bytes where pieces are large, by latency (load the piece, then its bytes) for a few MB. A CTA copies one
// tile of one piece; CTAs beyond the end of a short piece exit at once.
template <class Pieces>
__global__ void __launch_bounds__(kThreads) copy_tiles(const __grid_constant__ Pieces list, std::int64_t tile_bytes) {
  launch_dependents();
  grid_dependency_wait();
  const CopyPiece piece = list.pieces[blockIdx.y];
  const std::int64_t at = blockIdx.x * tile_bytes;
  if (at >= piece.bytes) return;
  const std::int64_t bytes = min(piece.bytes - at, tile_bytes);
  const std::uint8_t* from = piece.source() + at;
  std::uint8_t* to = piece.to + at;
  const auto alignment = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  if (alignment % 16 == 0)
    copy_as<uint4>(from, to, bytes);
  else if (alignment % 8 == 0)  // scales of an odd number of fp8_tile64 rows
    copy_as<uint2>(from, to, bytes);
  else if (alignment % 4 == 0)
    copy_as<std::uint32_t>(from, to, bytes);
  else
    copy_as<std::uint8_t>(from, to, bytes);
}

constexpr int kCtasPerSm = 4;

template <class Pieces>
cudaError_t launch_tiles(const Pieces& pieces, std::int32_t count, std::int64_t largest, std::int64_t tile_bytes,
                         cudaStream_t stream) {
  while (largest > tile_bytes * kMaxTiles) tile_bytes *= 2;
  const dim3 grid(static_cast<unsigned>((largest + tile_bytes - 1) / tile_bytes), static_cast<unsigned>(count));
  return launch(copy_tiles<Pieces>, grid, kThreads, stream, pieces, tile_bytes);
}

// --- many bytes: bulk copies through shared memory

// H200, 2026-11-15: 64 blocks take 16.4 us so, 18.0 by loads and stores; to check the limit, change it and compare
// `kv4_gpu_bench --only snapshot`.
constexpr int kStages = 16, kBulkTileBytes = 4 << 10, kBulkBytes = kStages * kBulkTileBytes;
constexpr int kBulkCtasPerSm = 3;  // limited by shared memory
constexpr int kBulkThreads = 32;
constexpr std::int64_t kBulkFrom = 8 << 20;  // total bytes from which bulk copies are used

#if __CUDA_ARCH__ >= 900
/// One thread of a CTA copies tiles first, first + stride, ... of all pieces. kStages - 1 tiles are being loaded while
/// the tile before them is being stored.
class BulkTiles {
 public:
  __device__ BulkTiles(const FewPieces& list, int count, int tiles_per_piece, std::uint8_t* stage,
                       std::uint64_t (&arrived)[kStages])
      : list_(list),
        tiles_(count * tiles_per_piece),
        tiles_per_piece_(tiles_per_piece),
        stage_(static_cast<std::uint32_t>(__cvta_generic_to_shared(stage))),
        arrived_(static_cast<std::uint32_t>(__cvta_generic_to_shared(arrived))) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(arrived_ + 8 * i, Arrivals::of_copies());
    fence_mbarrier_init();
    part_init_from_arrival();
  }

  __device__ void copy(int first, int stride) const {
    for (int i = 0; i < kStages - 1; ++i) load(i, first + i * stride);
    int number = 0;
    for (int tile = first; tile < tiles_; tile += stride, ++number) {
      const Extent extent = extent_of(tile);
      const int stage = number % kStages;
      mbarrier_wait(arrived_ + 8 * stage, number / kStages % 2);
      if (extent.bytes > 0)
        bulk_store(list_.pieces[extent.piece].to + extent.at, stage_ + stage * kBulkTileBytes, extent.bytes);
      commit_bulk_stores();
      wait_for_bulk_reads<1>();  // the stage of the tile before is free
      load(number + kStages - 1, tile + (kStages - 1) * stride);
    }
    wait_for_bulk_stores();
  }

 private:
  struct Extent {
    int piece;
    std::int64_t at;
    int bytes;  // 0 beyond the end of a short piece
  };
  __device__ Extent extent_of(int tile) const {
    const int piece = tile / tiles_per_piece_;
    const std::int64_t at = std::int64_t{tile - piece * tiles_per_piece_} * kBulkTileBytes;
    const std::int64_t left = list_.pieces[piece].bytes - at;
    return {piece, at, static_cast<int>(max(min(left, std::int64_t{kBulkTileBytes}), std::int64_t{0}))};
  }

  /// Loads a tile, if it exists, into the stage of that number.
  __device__ void load(int number, int tile) const {
    if (tile >= tiles_) return;
    const Extent extent = extent_of(tile);
    const int stage = number % kStages;
    mbarrier_arrive_expect_tx(arrived_ + 8 * stage, extent.bytes);
    if (extent.bytes > 0)
      bulk_load(stage_ + stage * kBulkTileBytes, list_.pieces[extent.piece].source() + extent.at, extent.bytes,
                arrived_ + 8 * stage);
  }

  const FewPieces& list_;
  int tiles_, tiles_per_piece_;
  std::uint32_t stage_, arrived_;
};
#endif

// Bound by bytes. Few CTAs, so that all of them are resident at once, and 192 KB in flight per SM.
__global__ void __launch_bounds__(kBulkThreads)
    copy_bulk(const __grid_constant__ FewPieces list, int count, int tiles_per_piece) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::uint8_t stage[];
  __shared__ std::uint64_t arrived[kStages];
  launch_dependents();
  if (threadIdx.x != 0) return grid_dependency_wait();
  const BulkTiles tiles(list, count, tiles_per_piece, stage, arrived);
  grid_dependency_wait();
  tiles.copy(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
#endif
}

bool fits_bulk(const CopyPiece& piece) {
  const auto all = reinterpret_cast<std::uintptr_t>(piece.from) | reinterpret_cast<std::uintptr_t>(piece.to) |
                   reinterpret_cast<std::uintptr_t>(piece.instead) | static_cast<std::uintptr_t>(piece.bytes);
  return all % 16 == 0;
}

cudaError_t launch_bulk(const FewPieces& few, int count, std::int64_t largest, cudaStream_t stream) {
  const std::int64_t per_piece = (largest + kBulkTileBytes - 1) / kBulkTileBytes;
  const std::int64_t ctas = std::min<std::int64_t>(count * per_piece, kBulkCtasPerSm * num_sms());
  return launch<kBulkBytes>(copy_bulk, static_cast<unsigned>(ctas), kBulkThreads, stream, few, count,
                            static_cast<int>(per_piece));
}

// --- open spans

__device__ float stored_value(float x) { return x; }
__device__ float stored_value(std::uint16_t x) { return codec::bf16_value(x); }

// Folds the ring rows of [position, length) in order, channel c.
template <class Stored>
__device__ ops::Pool fold_ring(const ops::OpenSpan& span, ops::Pool pool, std::int32_t position, int c) {
  constexpr int kRowsAhead = 8;
  const ops::KindDesc& kind = span.kind;
  const ops::PendingDesc& p = kind.pending;
  for (; position < span.length; position += kRowsAhead) {
    float kv[kRowsAhead], gate[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const std::int32_t at = min(position + i, span.length - 1);
      const Stored* row = reinterpret_cast<const Stored*>(p.ring.at(span.slot, at % p.rows));
      kv[i] = stored_value(row[c]);
      gate[i] = stored_value(row[p.columns + c]) + kind.bias[std::int64_t{at % kind.ratio} * p.columns + c];
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
      if (position + i < span.length) pool = ops::pool_add(pool, gate[i], kv[i]);
  }
  return pool;
}

constexpr int kFoldThreads = 128;
constexpr int kFoldCtas = 4;

// Bound by latency: folds the rows of a channel one after the other, at most `ratio` rows.
__global__ void __launch_bounds__(kFoldThreads) fold_spans(const ops::OpenSpan* spans) {
  grid_dependency_wait();
  const ops::OpenSpan& span = spans[blockIdx.y];
  const ops::PendingDesc& p = span.kind.pending;
  const int width = span.kind.page.shape.width;
  const std::int32_t begin = (span.length - 1) / span.kind.ratio * span.kind.ratio;
  const std::int32_t folded = p.fold_watermarks[span.slot * p.fold_watermark_stride];
  const float* stored = reinterpret_cast<const float*>(p.accumulator.at(span.slot, 0));
  for (int c = static_cast<int>(blockIdx.x * kFoldThreads + threadIdx.x); c < width; c += kFoldCtas * kFoldThreads) {
    ops::Pool pool =
        folded <= begin ? ops::empty_pool() : ops::Pool{stored[c], stored[width + c], stored[2 * width + c]};
    if (span.kind.bias != nullptr)
      pool = p.dtype == DType::bf16 ? fold_ring<std::uint16_t>(span, pool, max(begin, folded), c)
                                    : fold_ring<float>(span, pool, max(begin, folded), c);
    span.out[c] = pool.max;
    span.out[width + c] = codec::canonical_nan(pool.den);
    span.out[2 * width + c] = codec::canonical_nan(pool.num);
  }
}

}  // namespace

cudaError_t copy_pieces(const CopyPiece* pieces, std::int32_t count, std::int64_t largest, cudaStream_t stream) {
  const NvtxRange range("kv4 launch copy_pieces", true);
  if (count == 0 || largest == 0) return cudaSuccess;
  return launch_tiles(ManyPieces{pieces}, count, largest, kTileBytes, stream);
}

cudaError_t copy_few_pieces(std::span<const CopyPiece> pieces, cudaStream_t stream) {
  const NvtxRange range("kv4 launch copy_few_pieces", true);
  std::int64_t total = 0, largest = 0;
  for (const CopyPiece& piece : pieces) total += piece.bytes, largest = std::max(largest, piece.bytes);
  if (total == 0) return cudaSuccess;
  if (pieces.size() > kMostFewPieces) return cudaErrorInvalidValue;
  FewPieces few;
  std::copy(pieces.begin(), pieces.end(), few.pieces);
  const std::int64_t at_most = largest * static_cast<std::int64_t>(pieces.size());  // if all pieces were as large
  if (total >= kBulkFrom && at_most <= 2 * total && at_most / kBulkTileBytes < INT32_MAX / 2 && is_sm90() &&
      std::ranges::all_of(pieces, fits_bulk))
    return launch_bulk(few, static_cast<int>(pieces.size()), largest, stream);
  // Few bytes are spread over all SMs; many bytes take larger tiles.
  std::int64_t tile_bytes = kMinTileBytes;
  while (tile_bytes < kTileBytes && total > kCtasPerSm * num_sms() * tile_bytes) tile_bytes *= 2;
  return launch_tiles(few, static_cast<std::int32_t>(pieces.size()), largest, tile_bytes, stream);
}

cudaError_t fold_open(const ops::OpenSpan* spans, std::int32_t count, cudaStream_t stream) {
  const NvtxRange range("kv4 launch fold_open", true);
  if (count == 0) return cudaSuccess;
  return launch(fold_spans, dim3(kFoldCtas, static_cast<unsigned>(count)), kFoldThreads, stream, spans);
}

}  // namespace kv4::cuda
