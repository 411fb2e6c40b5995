// The parts that all scorers on Hopper's tensor cores share. Queries have 128 channels and at most 64 heads; a key has
// 4 bytes of scales. The tile scheduler gives each CTA an equal range of work tiles; a work tile is one KV tile, 128
// keys, of one token. The key pipeline copies keys from pages to shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/rows/encode.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/runtime/launch.cuh"
#include "ops/score_row.h"

namespace kv4::cuda {

constexpr int kWidth = 128, kHeads = ops::kMaxIndexHeads, kQuad = 4, kKeyScaleBytes = 4;
constexpr int kMaxClusterCtas = 6;
// With up to this many KV tiles per CTA, equal counts of CTAs per token are worth a few idle SMs.
constexpr int kEvenKVTiles = 256;
constexpr int kWarpKeys = 32, kBlockKV = 4 * kWarpKeys;  // keys of a KV tile: of each warp, of the warpgroup
constexpr int kKeysPerQuad = 4;                          // keys of a KV tile that a quad of lanes scores

/// A CTA of kCount warpgroups. Each warpgroup takes KV tiles of its own, which lie kStep keys apart. An SM has room for
/// one CTA of four warpgroups or for two CTAs of two. Short rows are scored by CTAs of two warpgroups, one per SM: the
/// CTA of the next launch runs its prologue beside it.
template <int kCount>
struct Warpgroups {
  static constexpr int kWarpgroups = kCount, kWarps = 4 * kCount, kThreads = 128 * kCount, kStep = kCount * kBlockKV;
};
using FourWarpgroups = Warpgroups<4>;
using TwoWarpgroups = Warpgroups<2>;
constexpr int kScoreThreads = FourWarpgroups::kThreads, kScoreWarps = FourWarpgroups::kWarps;

// --- tile scheduler

/// The work tiles of a CTA that are left to do: `count` from KV tile `kv_tile` of `token` on.
struct Assignment {
  int token, kv_tile, count;
  int request, scored;  // the token's request, and how many of its keys are scored
  int before, total;    // work tiles before the token's first one, and of all tokens
};

struct SchedulerShared {
  std::uint32_t sums[kScoreWarps];
  Assignment first;
};

__device__ inline const ops::StepRecord* record_of(const TokenTile& tile, int token) {
  return tile.p.step.tokens + tile.first + token;
}
__device__ inline int kv_tiles_of(int keys) { return (keys + kBlockKV - 1) / kBlockKV; }

/// Inclusive prefix sum over the lanes of a warp.
__device__ inline int scan_warp(int sum) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) sum += other;
  }
  return sum;
}

/// The range of `total` work tiles that this CTA takes.
struct TileRange {
  int begin, count;

  __device__ explicit TileRange(int total) : begin(0), count(0) {
    const unsigned ctas = min(gridDim.x, static_cast<unsigned>(total)), cta = blockIdx.x;
    if (cta >= ctas) return;
    const unsigned each = static_cast<unsigned>(total) / ctas, rest = static_cast<unsigned>(total) % ctas;
    begin = static_cast<int>(cta * each + min(cta, rest));
    count = static_cast<int>(each + (cta < rest ? 1 : 0));
  }

  /// The CTA that takes a work tile of `total`.
  __device__ static int cta_of(int kv_tile, int total) {
    const int ctas = min(static_cast<int>(gridDim.x), total), each = total / ctas, rest = total % ctas;
    return kv_tile < rest * (each + 1) ? kv_tile / (each + 1) : rest + (kv_tile - rest * (each + 1)) / each;
  }
};

/// The index of this CTA's split among the splits of its token.
__device__ inline int split_index(const Assignment& assignment) {
  return assignment.kv_tile == 0
             ? 0
             : static_cast<int>(blockIdx.x) - TileRange::cta_of(assignment.before, assignment.total);
}

/// The assignment for up to 32 tokens; each warp computes it alone. load(address) gives records.
constexpr int kFewTokens = 32;
template <class Load>
__device__ Assignment assign_few_tokens(const TokenTile& tile, Load&& load) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int request = 0, scored = 0;
  if (lane < tile.count) {
    const ops::StepRecord record = load(record_of(tile, lane));
    request = record.row;
    scored = tile.scored(record);
  }
  const int mine = kv_tiles_of(scored), sum = scan_warp(mine);
  const int total = __shfl_sync(kAllLanes, sum, 31);
  const TileRange range(total);
  const int at = range.begin - (sum - mine);
  const int token = __ffs(static_cast<int>(__ballot_sync(kAllLanes, at >= 0 && at < mine))) - 1;
  if (range.count == 0) return {};
  return {token,
          __shfl_sync(kAllLanes, at, token),
          range.count,
          __shfl_sync(kAllLanes, request, token),
          __shfl_sync(kAllLanes, scored, token),
          range.begin - __shfl_sync(kAllLanes, at, token),
          total};
}

template <class Cta, class Load>
__device__ Assignment assign_tiles(SchedulerShared& s, const TokenTile& tile, Load&& load) {
  if (tile.count <= kFewTokens) return assign_few_tokens(tile, load);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int each = (tile.count + Cta::kThreads - 1) / Cta::kThreads, first = static_cast<int>(threadIdx.x) * each;
  const int end = min(first + each, tile.count);
  int mine = 0;
  for (int token = first; token < end; ++token) mine += kv_tiles_of(tile.scored(load(record_of(tile, token))));
  const int sum = scan_warp(mine);
  if (lane == 31) s.sums[warp] = static_cast<std::uint32_t>(sum);
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int w = 0; w < Cta::kWarps; ++w) {
    const int of_warp = static_cast<int>(s.sums[w]);
    if (w < warp) before += of_warp;
    total += of_warp;
  }
  const TileRange range(total);
  if (range.count == 0) return {};
  if (before <= range.begin && range.begin < before + mine) {
    for (int token = first, at = range.begin - before;; ++token) {
      const ops::StepRecord record = load(record_of(tile, token));
      const int scored = tile.scored(record), kv_tiles = kv_tiles_of(scored);
      if (at < kv_tiles) {
        s.first = {token, at, range.count, record.row, scored, range.begin - at, total};
        break;
      }
      at -= kv_tiles;
    }
  }
  __syncthreads();
  return s.first;
}

/// The assignment by the records as they are after the grid dependency wait.
template <class Cta>
__device__ __noinline__ Assignment assign_tiles_after_wait(SchedulerShared& s, const TokenTile& tile) {
  return assign_tiles<Cta>(s, tile, load_record);
}

/// The first token of this CTA if all tokens see equally many keys.
__device__ inline int expected_token(const TokenTile& tile) {
  return static_cast<int>(blockIdx.x * static_cast<unsigned>(tile.count) / gridDim.x);
}

/// The record and block ids that an assignment was computed from before the grid dependency wait. With it the loads of
/// keys are issued right after the wait; a Validation checks it meanwhile.
struct SpeculativeRecord {
  bool is_there = false;    // same for all threads of the CTA; if not, they compute the assignment after the wait
  std::int32_t token = -1;  // token whose record this thread has read, or -1
  std::int32_t row = 0, position = 0;  // of that record
  std::int32_t ids = -1;               // block ids of the lane's first keys (KeyPipeline)

  /// The fields of a token's record that decide the assignment. A second call gives the same values, even if the
  /// record is written meanwhile.
  __device__ ops::StepRecord load(const TokenTile& tile, int token_in) {
    if (token != token_in) {
      const ops::StepRecord record = load_record_again(record_of(tile, token_in));
      token = token_in;
      row = record.row;
      position = record.position;
    }
    ops::StepRecord seen;
    seen.row = row;
    seen.position = position;
    return seen;
  }
};

/// Reads the record and block ids again after the wait. The constructor issues the loads.
class Validation {
 public:
  template <class Keys>
  __device__ Validation(const TokenTile& tile, const Keys& keys, const SpeculativeRecord& speculative)
      : row_(speculative.row), position_(speculative.position), ids_(speculative.ids) {
    if (!speculative.is_there) return;
    ids_ = keys.first_ids();
    if (speculative.token < 0) return;
    const ops::StepRecord* const record = record_of(tile, speculative.token);
    row_ = record->row;
    position_ = record->position;
  }
  __device__ bool holds(const SpeculativeRecord& speculative) {
    asm volatile("" : "+r"(row_), "+r"(position_), "+r"(ids_));  // the loads are not waited for earlier
    const bool same = row_ == speculative.row & position_ == speculative.position & ids_ == speculative.ids;
    row_ = position_ = ids_ = 0;  // frees the registers for the loop that follows
    return same;
  }

 private:
  std::int32_t row_, position_, ids_;
};

/// The assignment by the records as they are before the wait. It has no work tiles if there are more tokens than
/// threads.
template <class Cta>
__device__ Assignment assign_tiles_speculatively(SchedulerShared& s, const TokenTile& tile,
                                                 SpeculativeRecord& speculative) {
  if (tile.count > Cta::kThreads) return {};
  const Assignment assignment = assign_tiles<Cta>(s, tile, [&](const ops::StepRecord* at) {  // each thread loads one
    return speculative.load(tile, static_cast<int>(at - record_of(tile, 0)));
  });
  speculative.is_there = __syncthreads_and(assignment.count > 0);  // a record may change while warps read it
  return assignment;
}

/// The loop over the CTA's tokens. Calls prefetch(next token) if another token follows, then score(assignment,
/// speculative) with the work tiles of one token. Only the first assignment is speculative. If its validation fails,
/// score returns false and has written nothing, and the loop starts again with the assignment after the wait.
template <class Cta, class Prefetch, class Score>
__device__ void for_each_assignment(SchedulerShared& s, const TokenTile& tile, Assignment assignment,
                                    SpeculativeRecord speculative, Prefetch&& prefetch, Score&& score) {
  while (assignment.count > 0) {
    const int left = max(assignment.count - (kv_tiles_of(assignment.scored) - assignment.kv_tile), 0),
              next = assignment.token + 1;
    assignment.count -= left;
    if (left > 0) prefetch(next);
    const bool is_done = assignment.count == 0 || score(assignment, speculative);
    speculative = {};
    if (!is_done) {
      assignment = assign_tiles_after_wait<Cta>(s, tile);
      continue;
    }
    if (left == 0) break;
    const ops::StepRecord record = load_record(record_of(tile, next));
    assignment = {next, 0, left, record.row, tile.scored(record), 0, 0};
  }
}

/// The work tiles of this CTA, of the token that its cluster takes.
static_assert(kRowNumbers <= 32 * FourWarpgroups::kStep);
__device__ inline Assignment cluster_assignment(const TokenTile& tile, int ctas, int token,
                                                const ops::StepRecord& record) {
  const int scored = tile.scored(record), kv_tiles = kv_tiles_of(scored), rank = block_in_cluster();
  const int each = kv_tiles / ctas, rest = kv_tiles % ctas;
  return {token, rank * each + min(rank, rest), each + (rank < rest ? 1 : 0), record.row, scored, 0, 0};
}

/// The same by the record as it is after the wait.
__device__ inline __noinline__ Assignment assign_cluster_tiles_after_wait(const TokenTile& tile, int ctas, int token) {
  return cluster_assignment(tile, ctas, token, load_record(record_of(tile, token)));
}

__device__ inline Assignment assign_cluster_tiles_speculatively(const TokenTile& tile, int ctas, int token,
                                                                SpeculativeRecord& speculative) {
  const Assignment assignment = cluster_assignment(tile, ctas, token, speculative.load(tile, token));
  speculative.is_there = __syncthreads_and(assignment.count > 0);
  return assignment;
}

// --- queries

// Consecutive lanes share a head; each has kChannels of its channels.

/// A lane's channels of a head as loaded: pairs of bf16, or codes if the caller gives encoded queries.
template <int kChannels>
struct RawChannels {
  uint4 words[kChannels / 8];
  std::uint32_t scale;
  float weight;  // of the head
};

/// The addresses of a lane's part of a token's queries: kChannels channels of a head, whose codes take kCodeBytes.
template <int kCodeBytes, int kChannels>
class QueryAddress {
 public:
  __device__ QueryAddress(const TokenTile& tile, int token, int head, int part) : head_(head) {
    constexpr bool kHasOneScale = kCodeBytes == kWidth;
    const ops::IndexParams& p = tile.p;
    const std::int64_t at = tile.first + token;
    const int element = p.q.dtype == DType::f32 ? 4 : 2;
    q_ = static_cast<const std::uint8_t*>(p.q.data) +
         (p.q.dtype == DType::u8 ? at * p.q.row_stride + head * kCodeBytes + part * kPartBytes
                                 : (at * p.q.row_stride + head * kWidth + part * kChannels) * element);
    scale_ = static_cast<const std::uint8_t*>(p.q_scale.data) + at * p.q_scale.row_stride + head * kKeyScaleBytes +
             (kHasOneScale ? 0 : part * kKeyScaleBytes * kChannels / kWidth);
    weight_ = static_cast<const float*>(p.weights.data) + at * p.weights.row_stride + head;
  }

  /// Loads kCount heads, from this one on, kHeads / kCount apart. Loads are in flight when it returns, except for fp32
  /// queries. Absent heads are zero.
  template <int kCount>
  __device__ void load(const ops::IndexParams& p, RawChannels<kChannels> (&raw)[kCount]) const {
    constexpr int kApart = kHeads / kCount;
    const auto for_each = [&](auto&& load_codes) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw[i] = {};
        if (head_ + kApart * i >= p.num_heads) continue;
        load_codes(raw[i], kApart * i);
        raw[i].weight = weight_[kApart * i];
      }
    };
    if (p.q.dtype == DType::bf16)
      for_each([&](RawChannels<kChannels>& to, int head) {
        const uint4* from = reinterpret_cast<const uint4*>(q_ + head * kWidth * 2);
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) to.words[j] = from[j];
      });
    else if (p.q.dtype == DType::u8)
      for_each([&](RawChannels<kChannels>& to, int head) {
        const std::uint8_t *from = q_ + head * kCodeBytes, *scale = scale_ + head * kKeyScaleBytes;
        if constexpr (kPartBytes == 16) {
          to.words[0] = *reinterpret_cast<const uint4*>(from);
        } else {
          const uint2 half = *reinterpret_cast<const uint2*>(from);
          to.words[0].x = half.x, to.words[0].y = half.y;
        }
        to.scale = kCodeBytes == kWidth ? *reinterpret_cast<const std::uint32_t*>(scale) : *scale;
      });
    else
      for_each([&](RawChannels<kChannels>& to, int head) {
        const float4* from = reinterpret_cast<const float4*>(q_ + head * kWidth * 4);
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) {
          const float4 a = from[2 * j], b = from[2 * j + 1];
          to.words[j] = {bf16_pair(a.x, a.y), bf16_pair(a.z, a.w), bf16_pair(b.x, b.y), bf16_pair(b.z, b.w)};
        }
      });
  }

  /// Frees the registers for the loop that follows.
  __device__ void drop() {
    q_ = scale_ = nullptr;
    weight_ = nullptr;
    head_ = 0;
  }

  /// For grid_dependency_wait_after.
  __device__ int made() const {
    const auto low = [](const void* at) { return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(at)); };
    return static_cast<int>((low(q_) ^ low(scale_) ^ low(weight_)) & 0x7FFFFFFFu);
  }

 private:
  static constexpr int kPartBytes = kCodeBytes * kChannels / kWidth;
  static_assert(kPartBytes == 16 || kPartBytes == 8);
  const std::uint8_t *q_, *scale_;
  const float* weight_;
  int head_;
};

template <int kChannels>
__device__ void channels_of(const RawChannels<kChannels>& raw, float (&x)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kChannels / 8; ++i) {
    const std::uint32_t pairs[4] = {raw.words[i].x, raw.words[i].y, raw.words[i].z, raw.words[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[8 * i + 2 * j] = low_value(pairs[j]);
      x[8 * i + 2 * j + 1] = high_value(pairs[j]);
    }
  }
}

/// ops::hadamard_row over a head's 128 channels, without its last rounding.
template <int kChannels>
__device__ void transform(float (&x)[kChannels]) {
#pragma unroll
  for (int h = 1; h < kChannels; h *= 2)
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
#pragma unroll
  for (int lane = 1; lane < kWidth / kChannels; lane *= 2) {
    const float sign = (threadIdx.x & lane) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) x[i] = codec::fused(sign, x[i], __shfl_xor_sync(kAllLanes, x[i], lane));
  }
  static_assert(kWidth == 128);
  constexpr float kScale = 0x1.6a09e6p-4f;  // 1 / sqrt(128), each rounded
#pragma unroll
  for (int i = 0; i < kChannels; ++i) x[i] *= kScale;
}

/// Rounds a lane's channels to bf16; returns the largest magnitude, ignoring NaN.
template <int kChannels>
__device__ float round_channels(const float (&x)[kChannels], std::uint32_t (&pairs)[kChannels / 2]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    pairs[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
    asm("max.bf16x2 %0, %0, %1;" : "+r"(largest) : "r"(pairs[i] & 0x7FFF7FFFu));
  }
  return fmaxf(low_value(largest), high_value(largest));
}

/// Prefetches a token's queries and weights into L2. May run before the grid dependency wait.
__device__ inline void prefetch_queries(const TokenTile& tile, int token) {
  constexpr int kLine = 64;
  const ops::IndexParams& p = tile.p;
  if (token >= tile.count) return;
  const auto fetch = [&](const ops::InputDesc& in, int bytes, int element) {
    const std::uint8_t* from =
        static_cast<const std::uint8_t*>(in.data) + (tile.first + token) * in.row_stride * element;
    for (int i = static_cast<int>(threadIdx.x) * kLine; i < bytes; i += static_cast<int>(blockDim.x) * kLine)
      fetch_ahead(from + i);
  };
  if (p.q.dtype == DType::u8) {
    fetch(p.q, p.num_heads * static_cast<int>(tile.kind().page.payload.row_stride), 1);
    fetch(p.q_scale, p.num_heads * kKeyScaleBytes, 1);
  } else {
    const int element = p.q.dtype == DType::f32 ? 4 : 2;
    fetch(p.q, p.num_heads * kWidth * element, element);
  }
  fetch(p.weights, p.num_heads * 4, 4);
}

/// The row of a head in the wgmma operand. The order makes the accumulators of a lane one chain of heads.
__device__ inline int operand_row(int head) { return 8 * (head % 16 / 2) + 2 * (head / 16) + head % 2; }

/// The wgmma descriptor of an operand in shared memory: K-major rows of 128 bytes, 128-byte swizzle, 1,024 bytes per 8
/// rows.
__device__ inline std::uint64_t operand_at(std::uint32_t shared_address) {
  return (shared_address >> 4 & 0x3FFFu) | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 |
         std::uint64_t{1} << 62;
}
__device__ inline std::uint64_t operand_of(const std::uint8_t* q) {
  return operand_at(static_cast<std::uint32_t>(__cvta_generic_to_shared(q)));
}

// --- keys

/// The addresses of a layer's key pages: dense rows of payloads and of scales. The step from a warpgroup's KV tile to
/// its next is a whole number of blocks, so a warp's row in a block stays the same.
struct Pages {
  const std::uint8_t *payload, *scale;
  std::uint32_t payload_stride, scale_stride;  // from block to block
  std::int32_t block_shift;                    // log2 of rows per block
  const std::int32_t* table;                   // [requests, blocks_per_request]
  std::int32_t blocks_per_request;
  std::uint64_t policy;  // L2 eviction policy of keys that were read

  /// A key's row in its block.
  __device__ std::uint32_t row_of(int key) const { return static_cast<std::uint32_t>(key & ((1 << block_shift) - 1)); }
  __device__ const std::uint8_t* payload_of(std::uint32_t block) const {
    return payload + std::uint64_t{block} * payload_stride;
  }
  __device__ const std::uint8_t* scale_of(std::uint32_t block) const {
    return scale + std::uint64_t{block} * scale_stride;
  }

  /// Prefetches a warp's 32 keys, from a row of a block on, into L2. May run before the grid dependency wait: no result
  /// depends on it (kv4/cuda.h).
  template <int kKeyBytes>
  __device__ void prefetch(std::uint32_t block, std::uint32_t row) const {
    const auto prefetch_bytes = [&](const std::uint8_t* from, int bytes) {
#if __CUDA_ARCH__ >= 900
      asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes),
                   "l"(policy));
#endif
    };
    prefetch_bytes(payload_of(block) + kKeyBytes * row, kWarpKeys * kKeyBytes);
    prefetch_bytes(scale_of(block) + kKeyScaleBytes * row, kWarpKeys * kKeyScaleBytes);
  }
};

__device__ inline uint4 load_shared16(std::uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ inline std::uint32_t load_shared4(std::uint32_t at) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

/// The pipeline of one warp: it copies the warp's 32 keys of each of its warpgroup's KV tiles from the pages to a ring
/// of kStages stages. Every other row of 128 bytes has its halves swapped, so that the lanes of a quad load 16-byte
/// chunks without bank conflicts. Each lane owns one key of a KV tile: it copies the scales of that key and writes its
/// score. kIsLong: there may be more than 32 KV tiles. A warpgroup of a cluster has at most 32.
template <class CtaOf, int kKeyBytes, int kStages, bool kIsLong>
class KeyPipeline {
 public:
  using Cta = CtaOf;
  static constexpr int kPayloadBytes = kWarpKeys * kKeyBytes, kStageBytes = kPayloadBytes + kWarpKeys * kKeyScaleBytes;
  static constexpr int kStageStep = Cta::kWarps * kStageBytes;
  using Ring = std::uint8_t[kStages][Cta::kWarps][kStageBytes];
  static_assert(kStageBytes % 16 == 0 && (kKeyBytes == 64 || kKeyBytes == 128));

  /// kv_tiles: how many KV tiles this warpgroup takes, every Cta::kWarpgroups-th from first_kv_tile on. The request has
  /// `scored` keys.
  __device__ KeyPipeline(const Ring& ring, const Pages& pages, int request, int first_kv_tile, int kv_tiles, int scored)
      : pages_(&pages),
        first_(first_kv_tile * kBlockKV + static_cast<int>(threadIdx.x / 32 % 4) * kWarpKeys),
        units_(kv_tiles),
        scored_(scored),
        request_(request),
        ring_(static_cast<std::uint32_t>(__cvta_generic_to_shared(ring[0][threadIdx.x / 32]))) {
    const std::uint32_t row = pages.row_of(first_), lane = threadIdx.x % 32;
    payload_ = pages.payload + (kKeyBytes * row + 16 * lane);
    scale_ = pages.scale + kKeyScaleBytes * (row + own_key());
    asm("" : "+l"(payload_), "+l"(scale_), "+r"(ring_));  // kept in registers, not recomputed for every KV tile
  }

  /// Block ids of the first 32 KV tiles, one per lane. speculative_ids may run before the grid dependency wait.
  __device__ std::int32_t first_ids() const { return load_id(0); }
  __device__ std::int32_t speculative_ids() const { return load_id<true>(0); }

  /// Prefetches the first kCount KV tiles, which lie in these blocks, into L2. May run before the grid dependency wait.
  template <int kCount>
  __device__ void prefetch(std::int32_t first_ids) const {
    if (static_cast<int>(threadIdx.x % 32) < kCount && first_ids >= 0)
      pages_->template prefetch<kKeyBytes>(static_cast<std::uint32_t>(first_ids), pages_->row_of(first_));
  }

  /// The lane's own key among the warp's 32 keys of a KV tile.
  __device__ static std::uint32_t own_key() { return threadIdx.x % 32 / kQuad + 8 * (threadIdx.x % kQuad); }

  /// The warp's first key of the i-th KV tile.
  __device__ int first_key(int i) const { return first_ + i * Cta::kStep; }

  /// Prologue: issues the copies of the first kStages - 1 KV tiles, which lie in these blocks.
  __device__ void begin(std::int32_t first_ids) {
    ids_ = next_ = first_ids;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      free_ = i * kStageStep;
      issue(i);
    }
    stage_ = (kStages - 1) * kStageStep;
  }

  /// Waits for the next stage. Returns the shared address of its keys, which lie 64 or 128 bytes apart.
  __device__ std::uint32_t wait_next() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();
    free_ = stage_;
    stage_ = stage_ == (kStages - 1) * kStageStep ? 0 : stage_ + kStageStep;
    return ring_ + stage_;
  }
  /// The scales of the lane's own key in the current stage.
  __device__ std::uint32_t scales() const {
    return load_shared4(ring_ + stage_ + kPayloadBytes + kKeyScaleBytes * (threadIdx.x % 32));
  }

  /// Issues the copies of KV tile i + kStages - 1 into the stage before the current one; i is the current KV tile.
  __device__ void refill(int i) { issue(i + kStages - 1); }

 private:
  /// KV tiles are issued in order. Keys without a block are not copied; nobody uses their scores.
  __device__ void issue(int i) {
    if (kIsLong && i % 32 == 0) {
      ids_ = next_;
      next_ = load_id(i + 32);
    }
    const std::int32_t block = __shfl_sync(kAllLanes, ids_, i % 32);
    const std::uint32_t lane = threadIdx.x % 32, swapped = kKeyBytes == 128 ? lane / 8 % 2 * 4 : 0;
    const std::uint32_t to = ring_ + free_ + 16 * (lane ^ swapped), id = static_cast<std::uint32_t>(block);
    if (block >= 0) {
      const std::uint8_t* from = payload_ + std::uint64_t{id} * pages_->payload_stride;
#pragma unroll
      for (int at = 0; at < kPayloadBytes; at += 512)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to + at), "l"(from + at),
                     "l"(pages_->policy)
                     : "memory");
      asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;" ::"r"(ring_ + free_ + kPayloadBytes +
                                                                                       kKeyScaleBytes * lane),
                   "l"(scale_ + std::uint64_t{id} * pages_->scale_stride), "l"(pages_->policy)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  /// The block id of KV tile i + lane.
  template <bool kFromL2 = false>
  __device__ std::int32_t load_id(int i) const {
    i += static_cast<int>(threadIdx.x % 32);
    if (i >= units_ || first_key(i) >= scored_) return -1;
    const std::int32_t* const at =
        pages_->table + (std::int64_t{request_} * pages_->blocks_per_request + (first_key(i) >> pages_->block_shift));
    return kFromL2 ? __ldcg(at) : *at;
  }

  const Pages* pages_;
  int first_, units_, scored_, request_;
  const std::uint8_t *payload_, *scale_;  // the lane's first bytes in block 0
  std::uint32_t ring_, stage_, free_;     // stages are offsets in the ring
  std::int32_t ids_ = -1, next_;
};

/// How many KV tiles of a CTA's assignment a warpgroup takes, and the pipeline of its keys.
template <class Cta>
__device__ int kv_tiles_of_warpgroup(const Assignment& assignment, int warpgroup) {
  return (assignment.count - warpgroup + Cta::kWarpgroups - 1) / Cta::kWarpgroups;
}
template <class Keys>
__device__ Keys keys_of(const typename Keys::Ring& ring, const Pages& pages, const Assignment& assignment,
                        int warpgroup) {
  return Keys(ring, pages, assignment.request, assignment.kv_tile + warpgroup,
              kv_tiles_of_warpgroup<typename Keys::Cta>(assignment, warpgroup), assignment.scored);
}

/// Prefetches the first keys of a speculative assignment into L2, before the grid dependency wait: 32 keys of kStages
/// KV tiles for each warp of the CTA. kWorkers otherwise idle warps do it. Where no warp is idle, each warp calls
/// KeyPipeline::prefetch.
template <class Cta, int kKeyBytes, int kStages, int kWorkers>
__device__ void prefetch_first_keys(const Assignment& assignment, const Pages& pages, int worker) {
  constexpr int kEach = kStages * Cta::kWarps / kWorkers;
  static_assert(kEach <= 32);
  if (assignment.count == 0) return;
  const int first = assignment.kv_tile * kBlockKV, end = min(first + assignment.count * kBlockKV, assignment.scored);
  const int lane = static_cast<int>(threadIdx.x % 32), key = first + (worker + lane * kWorkers) * kWarpKeys;
  if (lane >= kEach || key >= end) return;
  const std::int32_t block =
      __ldcg(pages.table + std::int64_t{assignment.request} * pages.blocks_per_request + (key >> pages.block_shift));
  if (block >= 0) pages.prefetch<kKeyBytes>(static_cast<std::uint32_t>(block), pages.row_of(key));
}

// --- epilogue

/// Adds the chains of heads, (c0 + c1) + (c2 + c3), for the four keys of a quad. Lane c gets the score of key c.
__device__ inline float add_chains(const float (&sum)[kKeysPerQuad], int c) {
  const bool odd = c % 2 != 0, upper = c >= 2;
  const float low = (odd ? sum[1] : sum[0]) + __shfl_xor_sync(kAllLanes, odd ? sum[0] : sum[1], 1);
  const float high = (odd ? sum[3] : sum[2]) + __shfl_xor_sync(kAllLanes, odd ? sum[2] : sum[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
}

/// The group maxima of a token, or null if its row is too short to need them.
__device__ inline float* maxima_of(const TokenTile& tile, int token, int scored) {
  return tile.has_maxima && scored > kRowNumbers ? tile.maxima(token) : nullptr;
}

/// Writes the group maxima of a warp's 32 keys; each lane has one score. NaN is ignored.
__device__ inline void write_maxima(float* maxima, int first_key, int group, float score) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  static_assert(kSmallGroup == 8 && kLargeGroup == kWarpKeys);
  if (group == kLargeGroup) {
    const int bits = __float_as_int(fmaxf(score, kNoScore));  // ordered like integers after the xor
    const int largest = __reduce_max_sync(kAllLanes, bits ^ (bits >> 31 & 0x7FFFFFFF));
    if (lane == 0)
      maxima[static_cast<unsigned>(first_key) / kLargeGroup] = __int_as_float(largest ^ (largest >> 31 & 0x7FFFFFFF));
    return;
  }
#pragma unroll
  for (int step = kQuad; step < 32; step *= 2) score = fmaxf(score, __shfl_xor_sync(kAllLanes, score, step));
  if (lane < kQuad) maxima[static_cast<unsigned>(first_key) / kSmallGroup + lane] = score;
}

// --- grid sizes and launches

inline bool is_power_of_two(std::int64_t x) { return (x & (x - 1)) == 0; }

/// Whether keys of `key_bytes` bytes, and queries, have the layout that KeyPipeline and QueryAddress read.
inline bool can_stream_keys(const ops::IndexParams& p, int key_bytes) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const ops::Plane &payload = kind.page.payload, &scale = kind.page.scale;
  const std::int64_t q_bytes = p.q.dtype == DType::u8 ? 1 : p.q.dtype == DType::bf16 ? 2 : 4;
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  return is_sm90() && kind.page.shape.width == kWidth && kind.rows_per_block >= kWarpKeys &&
         is_power_of_two(kind.rows_per_block) && FourWarpgroups::kStep % kind.rows_per_block == 0 &&
         max_entries(p) < kLimit && payload.row_stride == key_bytes && scale.row_stride == kKeyScaleBytes &&
         payload.block_stride < kLimit && scale.block_stride < kLimit &&
         is_aligned(payload.data, payload.block_stride, 16) && is_aligned(scale.data, scale.block_stride, 16) &&
         is_aligned(p.q.data, p.q.row_stride * q_bytes, 16);
}

// The policies that createpolicy.fractional gives on sm_90.
constexpr std::uint64_t kEvictNormal = 0x16F0000000000000u, kEvictFirst = 0x12F0000000000000u;

inline Pages make_pages(const TokenTile& tile) {
  const ops::KindDesc& kind = tile.kind();
  Pages pages{};
  // With one token per request no key is read again soon, so scores, tables and code stay in L2 instead.
  pages.policy = tile.p.step.num_items == tile.p.step.num_tokens ? kEvictFirst : kEvictNormal;
  pages.payload = kind.page.payload.data;
  pages.scale = kind.page.scale.data;
  pages.payload_stride = static_cast<std::uint32_t>(kind.page.payload.block_stride);
  pages.scale_stride = static_cast<std::uint32_t>(kind.page.scale.block_stride);
  while (kind.rows_per_block > 1 << pages.block_shift) ++pages.block_shift;
  pages.table = tile.p.step.block_table;
  pages.blocks_per_request = tile.p.step.blocks_per_request;
  return pages;
}

/// The number of work tiles if all tokens see as many keys as the block table has room for.
inline std::int64_t total_kv_tiles(const TokenTile& tile) {
  return (max_entries(tile.p) + kBlockKV - 1) / kBlockKV * tile.count;
}

/// How many CTAs score a tile: as many as run at once. For very few tokens it leaves SMs to the selection, whose
/// prologue then runs beside the scoring. If tokens are few and not long, each gets equally many CTAs: a CTA that goes
/// on to a second token prepares queries twice.
inline unsigned score_ctas(const TokenTile& tile) {
  constexpr int kVeryFew = 2;
  const std::int64_t kv_tiles = total_kv_tiles(tile);
  const int selecting = tile.is_scored && tile.count <= kVeryFew ? tile.count : 0;
  const std::int64_t all = std::clamp<std::int64_t>(kv_tiles, 1, std::max(num_sms() - selecting, 1));
  const std::int64_t even = all / tile.count * tile.count;
  return static_cast<unsigned>(20 * even >= 19 * all && kv_tiles <= kEvenKVTiles * all ? even : all);
}

/// Launches a scorer whose CTAs have a Shared each.
template <class Shared>
cudaError_t launch_scorer(void (*kernel)(TokenTile, Pages), unsigned ctas, unsigned threads, const TokenTile& tile,
                          const Pages& pages, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  return status != cudaSuccess ? status : launch<kBytes>(kernel, ctas, threads, stream, tile, pages);
}

/// Whether CTAs may have two warpgroups, with at most max_kv_tiles KV tiles per CTA.
inline bool can_use_two_warpgroups(const TokenTile& tile, int max_kv_tiles) {
  return TwoWarpgroups::kStep % tile.kind().rows_per_block == 0 &&
         total_kv_tiles(tile) <= max_kv_tiles * std::int64_t{score_ctas(tile)};
}

/// The CTAs of a cluster that scores and selects one token of up to kRowNumbers keys. 0: two launches are faster, or
/// necessary.
inline int cluster_ctas(const TokenTile& tile) {
  if (max_entries(tile.p) > kRowNumbers) return 0;
  // So many clusters run at once on an H200.
  struct Fit {
    int ctas, clusters;
  };
  constexpr int kOf = 132;
  constexpr Fit kFits[] = {{kMaxClusterCtas, 16}, {4, 28}, {3, 32}, {2, 66}, {1, 132}};
  const int all = num_sms(), count = tile.count;
  for (const Fit& fit : kFits)
    if (count * kOf <= fit.clusters * all) {
      const bool keep_busy = fit.ctas == 1 ? 10 * count >= 9 * all : 2 * fit.ctas * count > all;
      return keep_busy ? fit.ctas : 0;
    }
  return 0;
}

}  // namespace kv4::cuda
