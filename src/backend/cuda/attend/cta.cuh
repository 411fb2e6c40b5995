// Common parts of the wgmma kernels' CTAs: sizes, shared memory, the CTA's job, and fp16 numbers whose exponent is kept
// separately.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/rows/warp_row.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda::attend_wgmma {

using ops::AttendParams;

inline constexpr int kWidth = kAttendWidth, kTail = kAttendTail;
inline constexpr int kTile = kAttendTile;  // a tile: 64 heads or 64 rows (a KV tile), or the 64 channels of a panel
inline constexpr int kPanels = kWidth / kTile, kTileBytes = kPanels * kPanelBytes;
inline constexpr int kStages = 2, kAddressTiles = 4;
inline constexpr int kKnownWork = 26, kSinks = 4;  // work tiles that a CTA knows at a time, and sets of its sinks
inline constexpr int kWarpgroupThreads = 128, kProducerThreads = 2 * kWarpgroupThreads,
                     kThreads = 4 * kWarpgroupThreads;
inline constexpr int kProducerWarps = kProducerThreads / 32, kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kSoftmaxRegisters = 192, kPvRegisters = 160, kProducerRegisters = 80;
static_assert(kStages == 2);
static_assert(kSoftmaxRegisters + kPvRegisters + 2 * kProducerRegisters <= 65536 / kWarpgroupThreads);
inline constexpr int kStagedChunks = 4;  // see persistent.cu
inline constexpr float kLn2 = 0.693147181f;

/// The softmax of one head over some rows: a reference close to the row maximum (logits times log2 e, plus the exponent
/// of the row), and the sum of 2^(logit - reference).
struct Stats {
  float row_max, sum;
};

/// The address of a row.
struct alignas(16) RowAddress {
  const std::uint8_t *payload, *scale;
};

/// Facts about 32 rows in groups of four: the exponent of the power of two that the rows are multiples of, and one bit
/// for each row that exists.
inline constexpr int kHalfQuads = kTile / 8;
struct alignas(16) RowQuads {
  std::int8_t exponents[kHalfQuads];
  std::uint8_t present[kHalfQuads];
};

/// The tiles that two consecutive tokens have in common: see token_pair.cu.
struct CommonTiles {
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  std::uint32_t differing = kNone;  // two tiles that differ, 16 bits each; 0: all tiles differ

  __device__ bool has(int tile) const {
    const auto x = static_cast<std::uint32_t>(tile) + 1;
    return differing != 0 && x != (differing & 0xFFFFu) && x != differing >> 16;
  }
};

/// One work tile of a persistent CTA: 64 heads of a token. See persistent.cu.
struct alignas(16) WorkTile {
  QueryRows rows;
  int token, first_head, tiles;
  CommonTiles common;  // with the peer's token
};
static_assert(sizeof(WorkTile) == 64);

inline constexpr int kStagedBytes = kStagedChunks * kProducerThreads * 16;

struct Shared {
  std::uint8_t q[kTileBytes];              // [8 panels, 64 heads]
  std::uint8_t rows[kStages][kTileBytes];  // [8 panels, 64 rows]
  std::uint8_t p_tile[kStages][kPanelBytes];
  Stats stats[kMaxCluster][kTile];     // [KV split, head]
  Stats work_stats[2][kTile];          // of even and odd work tiles
  float rescale[kStages][kTile];       // O's rescale factor before a tile is added; ping-pong: the tile's reference
  float sink[kSinks][kTile];           // times log2 e; ping-pong consumers keep sums in the upper half
  float factors[kTile + kMaxCluster];  // [head that this CTA reduces, KV split]: factors of the partial outputs
  float q_scale[kTile];                // the power of two that a head's queries are multiples of
  RowAddress addresses[kAddressTiles][kTile];
  std::uint64_t scales[2][kTile];  // of even and odd tiles
  RowQuads quads[kStages][2];      // for the two halves of a tile
  // [0]: left panels, of the softmax warpgroup; [1]: right panels, of the PV warpgroup
  std::uint64_t full[kStages][2], empty[kStages][2];
  std::uint64_t p_full[kStages], located[kAddressTiles];
  int partials_to_reduce;  // see MemoryCombine
  WorkTile work_tiles[kKnownWork];
  int num_work_tiles;
  std::uint64_t queries_empty, queries_full;  // of a work tile

  /// Raw rows, in kernels with one KV split and one P buffer.
  __device__ std::uint8_t* staged() { return p_tile[1]; }
};
inline constexpr int kSharedBytes = sizeof(Shared) + 1024;  // so that Shared can begin at a multiple of 1,024
static_assert(kSharedBytes <= 227 * 1024);
static_assert(kStagedBytes <= kPanelBytes + sizeof(Shared::stats));
static_assert(offsetof(Shared, stats) == offsetof(Shared, p_tile) + kStages * kPanelBytes);

/// The work of a CTA.
struct Job {
  int token;
  int first_head;
  int rank;                 // in the cluster
  int kv_split, kv_splits;  // of the rows
  int channel_split;
  int ctas_per_split;        // CTAs of one KV split
  int pair_rank, pair_size;  // of a 2-CTA pair, which shares the conversion of rows; 0 of 1 without a pair
  bool combines_in_memory;   // the KV splits are not in one cluster
  int position;              // of the query
  int begin, end;            // rows of this KV split
  bool padded;
  bool persistent = false;
  int work = 0;            // index of the work tile in this CTA
  bool ping_pong = false;  // two symmetric consumers, each with its own softmax sum

  /// The CTAs of a pair are adjacent and have adjacent head tiles.
  __device__ Job(int kv_splits, int channel_splits, int pair_size, int head_tiles, bool combines_in_memory)
      : kv_splits(kv_splits),
        ctas_per_split(channel_splits * pair_size),
        pair_size(pair_size),
        combines_in_memory(combines_in_memory) {
    const int ctas = kv_splits * ctas_per_split, work_tile = static_cast<int>(blockIdx.x) / ctas;
    const int token_tiles = head_tiles / pair_size;
    rank = static_cast<int>(blockIdx.x) % ctas;
    pair_rank = rank % pair_size;
    token = work_tile / token_tiles;
    first_head = (work_tile % token_tiles * pair_size + pair_rank) * kTile;
    kv_split = rank / ctas_per_split;
    channel_split = rank % ctas_per_split / pair_size;
  }

  /// The CTAs of a pair have consecutive tokens; the head tiles of these follow each other.
  __device__ Job(int pair_size, int head_tiles, int tokens) : Job(1, 1, pair_size, pair_size, false) {
    const int work_tile = static_cast<int>(blockIdx.x) / pair_size;
    token = min(work_tile / head_tiles * pair_size + pair_rank, tokens - 1);
    first_head = work_tile % head_tiles * kTile;
  }

  /// A persistent CTA: one work tile after another, each with all rows and all channels.
  __device__ Job(const WorkTile& tile, int index, bool ping_pong = false)
      : token(tile.token),
        first_head(tile.first_head),
        rank(0),
        kv_split(0),
        kv_splits(1),
        channel_split(0),
        ctas_per_split(1),
        pair_rank(0),
        pair_size(1),
        combines_in_memory(false),
        position(tile.rows.at.position),
        begin(0),
        end(tile.rows.count()),
        padded(tile.rows.at.padded()),
        persistent(true),
        work(index),
        ping_pong(ping_pong) {}

  __device__ void take_rows(const QueryRows& rows) {
    const int multiple = combines_in_memory ? kTile : 8, least = combines_in_memory ? kTile : 0;
    const int split_rows =
        max(((rows.count() + kv_splits - 1) / kv_splits + multiple - 1) / multiple * multiple, least);
    if (combines_in_memory) kv_splits = max((rows.count() + split_rows - 1) / split_rows, 1);
    begin = min(kv_split * split_rows, rows.count());
    end = min(begin + split_rows, rows.count());
    position = rows.at.position;
    padded = rows.at.padded();
  }

  /// There are fewer rows than the plan assumed, and no rows are left for this split. No CTA waits for it.
  __device__ bool is_idle() const { return kv_split >= kv_splits; }
  __device__ bool in_cluster() const { return (combines_in_memory ? 1 : kv_splits) * pair_size > 1; }
  __device__ std::uint32_t peer_rank() const {
    return static_cast<std::uint32_t>(combines_in_memory ? pair_rank : rank) ^ 1u;
  }
  /// The rank of the CTA that does the same work for another KV split.
  __device__ std::uint32_t rank_of(int other) const {
    return static_cast<std::uint32_t>(rank + (other - kv_split) * ctas_per_split);
  }
  __device__ int tiles() const { return (end - begin + kTile - 1) / kTile; }
  __device__ int sinks() const { return work % (ping_pong ? kSinks / 2 : kSinks); }  // index in Shared::sink
  /// Heads that a KV split reduces; the last split has fewer.
  __device__ int own_heads() const { return (kTile + kv_splits - 1) / kv_splits; }
};

/// The thread's index in a register. Otherwise the compiler reads it again and again, and each read waits behind the
/// stores in flight. The compiler also does not compute values that depend on it ahead of loops. Whole warps only.
__device__ inline int thread_here() {
  const int thread = static_cast<int>(threadIdx.x);
  return __shfl_sync(kAllLanes, thread, thread % 32);
}

__device__ inline int larger_half(std::uint32_t x) { return static_cast<int>(max(x & 0xFFFFu, x >> 16)); }

// Values are kept in fp16 as multiples of 2^exponent. Rows keep exponent 0 while that is exact up to 2^-25, which is
// 2^-12 of the largest value. Otherwise they are scaled to just below 2^16; queries always are. `top`: values are below
// 2^(top - 127).
inline constexpr int kTopInFp16 = 127 + 16, kLeastTop = 84, kLeastPlainTop = 112;

/// For bf16 pairs.
__device__ inline int top_of_pairs(const uint4& pairs) {
  const std::uint32_t amax = larger_halves(larger_halves(pairs.x & 0x7FFF7FFFu, pairs.y & 0x7FFF7FFFu),
                                           larger_halves(pairs.z & 0x7FFF7FFFu, pairs.w & 0x7FFF7FFFu));
  return (larger_half(amax) >> 7) + 1;
}

__device__ inline int top_of_pairs(const uint4& a, const uint4& b) {
  const auto larger = [](std::uint32_t x, std::uint32_t y) { return larger_halves(x & 0x7FFF7FFFu, y & 0x7FFF7FFFu); };
  return top_of_pairs(make_uint4(larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w)));
}

__device__ inline int exponent_of(int top) { return max(top, kLeastTop) - kTopInFp16; }
__device__ inline float power_of_two(int exponent) {
  return codec::bits_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// Multiplies bf16 pairs by a power of two and converts them to fp16.
__device__ inline uint4 to_fp16(const uint4& pairs, float factor) {
  const std::uint32_t factors = bf16_pair(factor, factor);
  const auto convert = [factors](std::uint32_t pair) {
    pair = multiply_bf16_pair(pair, factors);
    return fp16_pair(codec::bits_float(pair << 16), codec::bits_float(pair & 0xFFFF0000u));
  };
  return make_uint4(convert(pairs.x), convert(pairs.y), convert(pairs.z), convert(pairs.w));
}

/// The position of a thread in the accumulators: its heads are head and head + 8, its columns 2 * quad and the next one
/// of every 8.
__device__ inline int head_of_thread() {
  return static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ inline int quad_of_thread() { return static_cast<int>(threadIdx.x) % 4; }

}  // namespace kv4::cuda::attend_wgmma
