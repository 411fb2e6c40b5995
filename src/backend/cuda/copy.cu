// Images and snapshots: many pieces copied in one launch, and the open spans of the accumulators folded.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kv4/cuda.h"
#include "ops/compress_row.h"

namespace kv4::cuda {
namespace {

using ops::CopyPiece;

constexpr int kThreads = 256;
constexpr int kLoadsAhead = 4;
constexpr int kSmallUnitBits = 14;  // 16 KiB: every thread of a block has kLoadsAhead loads of 16 bytes, once
constexpr std::int64_t kManyUnits = 4096;

// Unit u of all pieces, counted through them in order. piece -1: there are fewer.
struct Unit {
  std::int32_t piece;
  std::int32_t number;  // within the piece
};

// Every thread counts the units of a few pieces; a prefix sum over the block says whose has number `wanted`.
__device__ Unit find_unit(const CopyPiece* pieces, std::int32_t count, int unit_bits, std::int32_t wanted) {
  constexpr int kPiecesPerThread = 4, kWarps = kThreads / 32;
  __shared__ std::int32_t warp_sums[kWarps];
  __shared__ Unit found;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x == 0) found = {-1, 0};
  for (std::int32_t first = 0; first < count; first += kThreads * kPiecesPerThread) {
    const std::int32_t mine = first + static_cast<std::int32_t>(threadIdx.x) * kPiecesPerThread;
    std::int32_t units[kPiecesPerThread], sum = 0;
#pragma unroll
    for (int i = 0; i < kPiecesPerThread; ++i) {
      const std::int64_t bytes = mine + i < count ? pieces[mine + i].bytes : 0;
      units[i] = static_cast<std::int32_t>((bytes + (std::int64_t{1} << unit_bits) - 1) >> unit_bits);
      sum += units[i];
    }
    std::int32_t end = sum;  // inclusive over the lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(0xFFFFFFFFu, end, step);
      if (lane >= step) end += before;
    }
    if (lane == 31) warp_sums[warp] = end;
    __syncthreads();
    std::int32_t total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) end += total;
      total += warp_sums[w];
    }
    std::int32_t begin = end - sum;
#pragma unroll
    for (int i = 0; i < kPiecesPerThread; ++i) {
      if (wanted >= begin && wanted - begin < units[i]) found = {mine + i, wanted - begin};
      begin += units[i];
    }
    __syncthreads();
    if (wanted < total) break;
    wanted -= total;
  }
  return found;
}

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

// Bound by bytes where pieces are large; by latency (the sizes of all pieces, the piece, its bytes) where there are
// only a few MB. A block copies one unit of one piece, so that small pieces do not wait for each other.
__global__ void __launch_bounds__(kThreads) copy_units(const CopyPiece* pieces, std::int32_t count, int unit_bits) {
  const Unit unit = find_unit(pieces, count, unit_bits, static_cast<std::int32_t>(blockIdx.x));
  if (unit.piece < 0) return;
  const CopyPiece piece = pieces[unit.piece];
  const std::int64_t at = std::int64_t{unit.number} << unit_bits;
  const std::int64_t bytes = min(piece.bytes - at, std::int64_t{1} << unit_bits);
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

// --- open spans

__device__ float stored_value(float x) { return x; }
__device__ float stored_value(std::uint16_t x) { return codec::bf16_value(x); }

// Ring rows of [position, length) in order, channel c.
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
constexpr int kFoldParts = 4;

// Bound by latency: the rows of a channel are folded one after the other, at most `ratio` of them.
__global__ void __launch_bounds__(kFoldThreads) fold_spans(const ops::OpenSpan* spans) {
  const ops::OpenSpan& span = spans[blockIdx.y];
  const ops::PendingDesc& p = span.kind.pending;
  const int width = span.kind.page.shape.width;
  const std::int32_t begin = (span.length - 1) / span.kind.ratio * span.kind.ratio;
  const std::int32_t folded = p.frontiers[span.slot * p.frontier_stride];
  const float* stored = reinterpret_cast<const float*>(p.accumulator.at(span.slot, 0));
  for (int c = static_cast<int>(blockIdx.x * kFoldThreads + threadIdx.x); c < width; c += kFoldParts * kFoldThreads) {
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

cudaError_t copy_pieces(const CopyPiece* pieces, std::int32_t count, std::int64_t bytes, cudaStream_t stream) {
  if (count == 0 || bytes == 0) return cudaSuccess;
  int unit_bits = kSmallUnitBits;
  while (bytes >> unit_bits > kManyUnits) ++unit_bits;  // every block reads all sizes: not too many blocks
  const cudaLaunchConfig_t config{.gridDim = static_cast<unsigned>((bytes >> unit_bits) + count),
                                  .blockDim = kThreads,
                                  .dynamicSmemBytes = 0,
                                  .stream = stream,
                                  .attrs = nullptr,
                                  .numAttrs = 0};
  return cudaLaunchKernelEx(&config, copy_units, pieces, count, unit_bits);
}

cudaError_t fold_open(const ops::OpenSpan* spans, std::int32_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const cudaLaunchConfig_t config{.gridDim = {kFoldParts, static_cast<unsigned>(count)},
                                  .blockDim = kFoldThreads,
                                  .dynamicSmemBytes = 0,
                                  .stream = stream,
                                  .attrs = nullptr,
                                  .numAttrs = 0};
  return cudaLaunchKernelEx(&config, fold_spans, spans);
}

}  // namespace kv4::cuda
