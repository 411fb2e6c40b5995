// What scorers on Hopper's tensor cores share: a CTA of a few warpgroups per SM that takes an equal
// run of units, 128 keys of a token each, from the list of all tokens' units; keys on their way from pages to shared
// memory; queries as given. Queries have 128 channels and at most 64 heads, a key 4 bytes of scales.
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
constexpr int kMostClusterBlocks = 6;
constexpr int kEvenUnits = 256;  // of a block, up to which it is worth a few SMs that do nothing
constexpr int kWarpKeys = 32, kUnitKeys = 4 * kWarpKeys, kRows = 4;  // rows: keys of a quad in a unit

/// The warpgroups of a CTA, each on units of its own: a warpgroup's lie kStep keys apart. A SM has
/// room for a whole crew or for two halves. Short rows are for half crews, one to an SM: beside it the next
/// launch's gets ready and waits.
template <int kCount>
struct Crew {
  static constexpr int kWarpgroups = kCount, kWarps = 4 * kCount, kThreads = 128 * kCount, kStep = kCount * kUnitKeys;
};
using WholeCrew = Crew<4>;
using HalfCrew = Crew<2>;
constexpr int kScoreThreads = WholeCrew::kThreads, kScoreWarps = WholeCrew::kWarps;

// --- shares

/// A block's part of all tokens' units: `count` of them from this one on.
struct Share {
  int token, unit, count;
  int request, scored;  // of the token: its request, how many keys it has scored
  int before, total;    // units of all tokens: before this one's, in all
};

struct ShareRoom {
  std::uint32_t sums[kScoreWarps];
  Share first;
};

__device__ inline const ops::StepRecord* record_of(const IndexTile& tile, int token) {
  return tile.p.step.tokens + tile.first + token;
}
__device__ inline int units_of(int keys) { return (keys + kUnitKeys - 1) / kUnitKeys; }

/// The sum over this lane and those before it.
__device__ inline int scan_warp(int sum) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) sum += other;
  }
  return sum;
}

/// A block's first unit of `total`, and how many it takes.
struct Run {
  int begin, count;

  __device__ explicit Run(int total) : begin(0), count(0) {
    const unsigned blocks = min(gridDim.x, static_cast<unsigned>(total)), block = blockIdx.x;
    if (block >= blocks) return;
    const unsigned each = static_cast<unsigned>(total) / blocks, rest = static_cast<unsigned>(total) % blocks;
    begin = static_cast<int>(block * each + min(block, rest));
    count = static_cast<int>(each + (block < rest ? 1 : 0));
  }

  /// The block that takes a unit of `total`.
  __device__ static int block_of(int unit, int total) {
    const int blocks = min(static_cast<int>(gridDim.x), total), each = total / blocks, rest = total % blocks;
    return unit < rest * (each + 1) ? unit / (each + 1) : rest + (unit - rest * (each + 1)) / each;
  }
};

/// Which of its token's shares it is.
__device__ inline int ordinal_of(const Share& share) {
  return share.unit == 0 ? 0 : static_cast<int>(blockIdx.x) - Run::block_of(share.before, share.total);
}

/// Of up to 32 tokens: each warp finds it by itself. load(address) gives records.
constexpr int kFewTokens = 32;
template <class Load>
__device__ Share find_share_of_few(const IndexTile& tile, Load&& load) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int request = 0, scored = 0;
  if (lane < tile.count) {
    const ops::StepRecord record = load(record_of(tile, lane));
    request = record.row;
    scored = tile.scored(record);
  }
  const int mine = units_of(scored), sum = scan_warp(mine);
  const int total = __shfl_sync(kAllLanes, sum, 31);
  const Run run(total);
  const int at = run.begin - (sum - mine);
  const int token = __ffs(static_cast<int>(__ballot_sync(kAllLanes, at >= 0 && at < mine))) - 1;
  if (run.count == 0) return {};
  return {token,
          __shfl_sync(kAllLanes, at, token),
          run.count,
          __shfl_sync(kAllLanes, request, token),
          __shfl_sync(kAllLanes, scored, token),
          run.begin - __shfl_sync(kAllLanes, at, token),
          total};
}

template <class Crew, class Load>
__device__ Share find_share(ShareRoom& s, const IndexTile& tile, Load&& load) {
  if (tile.count <= kFewTokens) return find_share_of_few(tile, load);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int each = (tile.count + Crew::kThreads - 1) / Crew::kThreads, first = static_cast<int>(threadIdx.x) * each;
  const int end = min(first + each, tile.count);
  int mine = 0;
  for (int token = first; token < end; ++token) mine += units_of(tile.scored(load(record_of(tile, token))));
  const int sum = scan_warp(mine);
  if (lane == 31) s.sums[warp] = static_cast<std::uint32_t>(sum);
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int w = 0; w < Crew::kWarps; ++w) {
    const int of_warp = static_cast<int>(s.sums[w]);
    if (w < warp) before += of_warp;
    total += of_warp;
  }
  const Run run(total);
  if (run.count == 0) return {};
  if (before <= run.begin && run.begin < before + mine) {
    for (int token = first, at = run.begin - before;; ++token) {
      const ops::StepRecord record = load(record_of(tile, token));
      const int scored = tile.scored(record), units = units_of(scored);
      if (at < units) {
        s.first = {token, at, run.count, record.row, scored, run.begin - at, total};
        break;
      }
      at -= units;
    }
  }
  __syncthreads();
  return s.first;
}

/// By the records as they are after the wait.
template <class Crew>
__device__ __noinline__ Share find_share_anew(ShareRoom& s, const IndexTile& tile) {
  return find_share<Crew>(s, tile, load_record);
}

/// The token that this block begins with if all are equally long.
__device__ inline int likely_token(const IndexTile& tile) {
  return static_cast<int>(blockIdx.x * static_cast<unsigned>(tile.count) / gridDim.x);
}

/// What a share rests on that was found by the records and the block table as they are before the wait, so that keys
/// can be asked for right after it; it is looked at again meanwhile.
struct Guess {
  bool is_there = false;               // of the whole block: where it is not, all find their share after the wait
  std::int32_t token = -1;             // whose record this thread has seen, if any
  std::int32_t row = 0, position = 0;  // in that record
  std::int32_t ids = -1;               // blocks of the lane's first keys (KeyStream)

  /// What counts of a token's record. Asked again, the same, even if the record is written meanwhile.
  __device__ ops::StepRecord see(const IndexTile& tile, int token_in) {
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

/// The same after the wait. Loads are under way once it is made.
class SecondLook {
 public:
  template <class Keys>
  __device__ SecondLook(const IndexTile& tile, const Keys& keys, const Guess& guess)
      : row_(guess.row), position_(guess.position), ids_(guess.ids) {
    if (!guess.is_there) return;
    ids_ = keys.first_ids();
    if (guess.token < 0) return;
    const ops::StepRecord* const record = record_of(tile, guess.token);
    row_ = record->row;
    position_ = record->position;
  }
  __device__ bool confirms(const Guess& guess) {
    asm volatile("" : "+r"(row_), "+r"(position_), "+r"(ids_));  // not earlier
    const bool same = row_ == guess.row & position_ == guess.position & ids_ == guess.ids;
    row_ = position_ = ids_ = 0;  // no registers are needed any more, in a loop that goes on
    return same;
  }

 private:
  std::int32_t row_, position_, ids_;
};

/// The share by the records as they are before the wait; of no units if it is not known then.
template <class Crew>
__device__ Share guess_share(ShareRoom& s, const IndexTile& tile, Guess& guess) {
  if (tile.count > Crew::kThreads) return {};
  const Share share = find_share<Crew>(s, tile, [&](const ops::StepRecord* at) {  // each thread asks for one
    return guess.see(tile, static_cast<int>(at - record_of(tile, 0)));
  });
  guess.is_there = __syncthreads_and(share.count > 0);  // a record may change while warps look at it
  return share;
}

/// Calls score(share, guess) with the block's units of each of its tokens, of which the first were guessed, and
/// prefetch(token) before that with the token it will go on to. score returns false where the guess did not hold, and
/// then has done nothing.
template <class Crew, class Prefetch, class Score>
__device__ void for_each_share(ShareRoom& s, const IndexTile& tile, Share share, Guess guess, Prefetch&& prefetch,
                               Score&& score) {
  while (share.count > 0) {
    const int left = max(share.count - (units_of(share.scored) - share.unit), 0), next = share.token + 1;
    share.count -= left;
    if (left > 0) prefetch(next);
    const bool is_done = share.count == 0 || score(share, guess);
    guess = {};
    if (!is_done) {
      share = find_share_anew<Crew>(s, tile);
      continue;
    }
    if (left == 0) break;
    const ops::StepRecord record = load_record(record_of(tile, next));
    share = {next, 0, left, record.row, tile.scored(record), 0, 0};
  }
}

/// This block's part of its cluster's token.
static_assert(kRowNumbers <= 32 * WholeCrew::kStep);
__device__ inline Share share_of_cluster(const IndexTile& tile, int blocks, int token, const ops::StepRecord& record) {
  const int scored = tile.scored(record), units = units_of(scored), rank = block_in_cluster();
  const int each = units / blocks, rest = units % blocks;
  return {token, rank * each + min(rank, rest), each + (rank < rest ? 1 : 0), record.row, scored, 0, 0};
}

/// By the record as it is after the wait.
__device__ inline __noinline__ Share find_share_of_cluster(const IndexTile& tile, int blocks, int token) {
  return share_of_cluster(tile, blocks, token, load_record(record_of(tile, token)));
}

__device__ inline Share guess_share_of_cluster(const IndexTile& tile, int blocks, int token, Guess& guess) {
  const Share share = share_of_cluster(tile, blocks, token, guess.see(tile, token));
  guess.is_there = __syncthreads_and(share.count > 0);
  return share;
}

// --- queries

// Lanes next to each other share a head, kChannels of it each.

/// A lane's channels of a head: pairs of bf16, or encoded as given.
template <int kChannels>
struct RawChannels {
  uint4 words[kChannels / 8];
  std::uint32_t scale;
  float weight;  // of the head
};

/// Where a lane's part of a token's queries lies: kChannels of a head, whose codes take kCodeBytes.
template <int kCodeBytes, int kChannels>
class QueryPlace {
 public:
  __device__ QueryPlace(const IndexTile& tile, int token, int head, int part) : head_(head) {
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

  /// Of this head and those kHeads / kCount after each other. Loads are under way when it returns, but for fp32. Heads
  /// that are not there are zero.
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

  /// Not needed any more, so that no registers are, in a loop that goes on.
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

/// A lane's channels rounded to bf16; returns the largest magnitude, NaN passed over.
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

/// A token's queries and weights into L2. Before the wait, too.
__device__ inline void fetch_queries(const IndexTile& tile, int token) {
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

/// Where a head's row of the matrix operand lies, so that a lane's accumulators are a chain.
__device__ inline int operand_row(int head) { return 8 * (head % 16 / 2) + 2 * (head / 16) + head % 2; }

/// K-major rows of 128 bytes, 128-byte swizzle, 1,024 bytes from 8 rows to the next.
__device__ inline std::uint64_t operand_at(std::uint32_t shared_address) {
  return (shared_address >> 4 & 0x3FFFu) | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 |
         std::uint64_t{1} << 62;
}
__device__ inline std::uint64_t operand_of(const std::uint8_t* q) {
  return operand_at(static_cast<std::uint32_t>(__cvta_generic_to_shared(q)));
}

// --- keys

/// The pages of keys: dense rows of payload and of scales. From one unit of a warpgroup to its next there is a whole
/// number of blocks: so a warp's row in a block stays the same.
struct Pages {
  const std::uint8_t *payload, *scale;
  std::uint32_t payload_stride, scale_stride;  // from block to block
  std::int32_t block_shift;                    // log2 of rows per block
  const std::int32_t* table;                   // [requests, blocks_per_request]
  std::int32_t blocks_per_request;
  std::uint64_t policy;  // what L2 does with keys that were read

  /// A key's row in its block.
  __device__ std::uint32_t row_of(int key) const { return static_cast<std::uint32_t>(key & ((1 << block_shift) - 1)); }
  __device__ const std::uint8_t* payload_of(std::uint32_t block) const {
    return payload + std::uint64_t{block} * payload_stride;
  }
  __device__ const std::uint8_t* scale_of(std::uint32_t block) const {
    return scale + std::uint64_t{block} * scale_stride;
  }

  /// A warp's 32 keys from a row of a block on into L2. Before the wait, too: nothing depends on it (kv4/cuda.h).
  template <int kKeyBytes>
  __device__ void fetch(std::uint32_t block, std::uint32_t row) const {
    const auto bring = [&](const std::uint8_t* from, int bytes) {
#if __CUDA_ARCH__ >= 900
      asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes),
                   "l"(policy));
#endif
    };
    bring(payload_of(block) + kKeyBytes * row, kWarpKeys * kKeyBytes);
    bring(scale_of(block) + kKeyScaleBytes * row, kWarpKeys * kKeyScaleBytes);
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

/// A warp's part of its warpgroup's units of keys on their way from the pages to its ring, which holds kStages of them.
/// Of every other row of 128 bytes the halves change places, so that quads can load four chunks of a row each without
/// bank conflicts. Each lane has a key of its own, whose scales it copies and whose score it writes.
/// kIsLong: it may have more than 32 units, which no warpgroup of a cluster has (below).
template <class CrewOf, int kKeyBytes, int kStages, bool kIsLong>
class KeyStream {
 public:
  using Crew = CrewOf;
  static constexpr int kPayloadBytes = kWarpKeys * kKeyBytes, kStageBytes = kPayloadBytes + kWarpKeys * kKeyScaleBytes;
  static constexpr int kStageStep = Crew::kWarps * kStageBytes;
  using Ring = std::uint8_t[kStages][Crew::kWarps][kStageBytes];
  static_assert(kStageBytes % 16 == 0 && (kKeyBytes == 64 || kKeyBytes == 128));

  /// units: of this warpgroup, every Crew::kWarpgroups-th from first_unit on; they hold `scored` keys of a request.
  __device__ KeyStream(const Ring& ring, const Pages& pages, int request, int first_unit, int units, int scored)
      : pages_(&pages),
        first_(first_unit * kUnitKeys + static_cast<int>(threadIdx.x / 32 % 4) * kWarpKeys),
        units_(units),
        scored_(scored),
        request_(request),
        ring_(static_cast<std::uint32_t>(__cvta_generic_to_shared(ring[0][threadIdx.x / 32]))) {
    const std::uint32_t row = pages.row_of(first_), lane = threadIdx.x % 32;
    payload_ = pages.payload + (kKeyBytes * row + 16 * lane);
    scale_ = pages.scale + kKeyScaleBytes * (row + own_key());
    asm("" : "+l"(payload_), "+l"(scale_), "+r"(ring_));  // kept, not made anew for every unit
  }

  /// The blocks of the first units, one of each lane; before the wait, what they probably are.
  __device__ std::int32_t first_ids() const { return load_id(0); }
  __device__ std::int32_t guess_ids() const { return load_id<true>(0); }

  /// Brings the first kCount units, which lie in these blocks, into L2. Before the wait, too.
  template <int kCount>
  __device__ void fetch(std::int32_t first_ids) const {
    if (static_cast<int>(threadIdx.x % 32) < kCount && first_ids >= 0)
      pages_->template fetch<kKeyBytes>(static_cast<std::uint32_t>(first_ids), pages_->row_of(first_));
  }

  /// Of the 32 of a warp and unit.
  __device__ static std::uint32_t own_key() { return threadIdx.x % 32 / kQuad + 8 * (threadIdx.x % kQuad); }

  /// The first key of the i-th unit.
  __device__ int first_key(int i) const { return first_ + i * Crew::kStep; }

  /// Asks for the first units, which lie in these blocks.
  __device__ void begin(std::int32_t first_ids) {
    ids_ = next_ = first_ids;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      free_ = i * kStageStep;
      ask(i);
    }
    stage_ = (kStages - 1) * kStageStep;
  }

  /// The next unit, once it is there: where its keys lie, at 64 or 128 bytes from each to the next.
  __device__ std::uint32_t take() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();
    free_ = stage_;
    stage_ = stage_ == (kStages - 1) * kStageStep ? 0 : stage_ + kStageStep;
    return ring_ + stage_;
  }
  /// The scales of the lane's own key of the unit that was taken last.
  __device__ std::uint32_t scales() const {
    return load_shared4(ring_ + stage_ + kPayloadBytes + kKeyScaleBytes * (threadIdx.x % 32));
  }

  /// Asks for the unit kStages - 1 after the i-th, which was taken last: in place of the one before that.
  __device__ void refill(int i) { ask(i + kStages - 1); }

 private:
  /// In order. Keys that no token sees are left as they come.
  __device__ void ask(int i) {
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

  /// The block of this lane's unit from the i-th on.
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
  const std::uint8_t *payload_, *scale_;  // this lane's in block 0
  std::uint32_t ring_, stage_, free_;     // stages as offsets
  std::int32_t ids_ = -1, next_;
};

/// How many units of its block's share a warpgroup has, and their keys.
template <class Crew>
__device__ int units_of_warpgroup(const Share& share, int warpgroup) {
  return (share.count - warpgroup + Crew::kWarpgroups - 1) / Crew::kWarpgroups;
}
template <class Keys>
__device__ Keys keys_of(const typename Keys::Ring& ring, const Pages& pages, const Share& share, int warpgroup) {
  return Keys(ring, pages, share.request, share.unit + warpgroup,
              units_of_warpgroup<typename Keys::Crew>(share, warpgroup), share.scored);
}

/// Before the wait: the keys that this block probably begins with, kStages of 32 for each of its warps, into L2, by
/// kWorkers warps that have nothing else to do; KeyStream::fetch, where all have as much to do.
template <class Crew, int kKeyBytes, int kStages, int kWorkers>
__device__ void fetch_first_keys(const Share& share, const Pages& pages, int worker) {
  constexpr int kEach = kStages * Crew::kWarps / kWorkers;
  static_assert(kEach <= 32);
  if (share.count == 0) return;
  const int first = share.unit * kUnitKeys, end = min(first + share.count * kUnitKeys, share.scored);
  const int lane = static_cast<int>(threadIdx.x % 32), key = first + (worker + lane * kWorkers) * kWarpKeys;
  if (lane >= kEach || key >= end) return;
  const std::int32_t block =
      __ldcg(pages.table + std::int64_t{share.request} * pages.blocks_per_request + (key >> pages.block_shift));
  if (block >= 0) pages.fetch<kKeyBytes>(static_cast<std::uint32_t>(block), pages.row_of(key));
}

// --- scores

/// (c0 + c1) + (c2 + c3) of a quad's four keys: lane c gets the c-th one's.
__device__ inline float add_chains(const float (&sum)[kRows], int c) {
  const bool odd = c % 2 != 0, upper = c >= 2;
  const float low = (odd ? sum[1] : sum[0]) + __shfl_xor_sync(kAllLanes, odd ? sum[0] : sum[1], 1);
  const float high = (odd ? sum[3] : sum[2]) + __shfl_xor_sync(kAllLanes, odd ? sum[2] : sum[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
}

/// Where a token's maxima go, if it has any.
__device__ inline float* maxima_of(const IndexTile& tile, int token, int scored) {
  return tile.has_maxima && scored > kRowNumbers ? tile.maxima(token) : nullptr;
}

/// The largest score of each group of a unit's keys, of which this lane has one. NaN is passed over.
__device__ inline void write_maxima(float* maxima, int first_key, int group, float score) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  static_assert(kSmallGroup == 8 && kLargeGroup == kWarpKeys);
  if (group == kLargeGroup) {
    const int bits = __float_as_int(fmaxf(score, kNoScore));  // in the order of whole numbers
    const int most = __reduce_max_sync(kAllLanes, bits ^ (bits >> 31 & 0x7FFFFFFF));
    if (lane == 0)
      maxima[static_cast<unsigned>(first_key) / kLargeGroup] = __int_as_float(most ^ (most >> 31 & 0x7FFFFFFF));
    return;
  }
#pragma unroll
  for (int step = kQuad; step < 32; step *= 2) score = fmaxf(score, __shfl_xor_sync(kAllLanes, score, step));
  if (lane < kQuad) maxima[static_cast<unsigned>(first_key) / kSmallGroup + lane] = score;
}

// --- what the host checks and passes

inline bool is_power_of_two(std::int64_t x) { return (x & (x - 1)) == 0; }

/// Whether keys of so many bytes, and queries, lie as the above reads them.
inline bool can_stream_keys(const ops::IndexParams& p, int key_bytes) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const ops::Plane &payload = kind.page.payload, &scale = kind.page.scale;
  const std::int64_t q_bytes = p.q.dtype == DType::u8 ? 1 : p.q.dtype == DType::bf16 ? 2 : 4;
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  return is_sm90() && kind.page.shape.width == kWidth && kind.rows_per_block >= kWarpKeys &&
         is_power_of_two(kind.rows_per_block) && WholeCrew::kStep % kind.rows_per_block == 0 &&
         max_entries(p) < kMost && payload.row_stride == key_bytes && scale.row_stride == kKeyScaleBytes &&
         payload.block_stride < kMost && scale.block_stride < kMost &&
         is_aligned(payload.data, payload.block_stride, 16) && is_aligned(scale.data, scale.block_stride, 16) &&
         is_aligned(p.q.data, p.q.row_stride * q_bytes, 16);
}

// As createpolicy.fractional gives them on sm_90.
constexpr std::uint64_t kEvictNormal = 0x16F0000000000000u, kEvictFirst = 0x12F0000000000000u;

inline Pages make_pages(const IndexTile& tile) {
  const ops::KindDesc& kind = tile.kind();
  Pages pages{};
  // Keys that one token sees are not read again for long: scores, tables and code stay in L2 instead.
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

/// If all tokens are as long as can be.
inline std::int64_t units_of(const IndexTile& tile) {
  return (max_entries(tile.p) + kUnitKeys - 1) / kUnitKeys * tile.count;
}

/// As many blocks as can run at once, but for very few tokens' selection, which then gets ready meanwhile; if tokens
/// are few and not long, so many to each of them: a block that goes on to a second token prepares queries twice.
inline unsigned score_blocks(const IndexTile& tile) {
  constexpr int kVeryFew = 2;
  const std::int64_t units = units_of(tile);
  const int selecting = tile.is_scored && tile.count <= kVeryFew ? tile.count : 0;
  const std::int64_t all = std::clamp<std::int64_t>(units, 1, std::max(num_sms() - selecting, 1));
  const std::int64_t even = all / tile.count * tile.count;
  return static_cast<unsigned>(20 * even >= 19 * all && units <= kEvenUnits * all ? even : all);
}

/// A scorer whose blocks have a Shared each.
template <class Shared>
cudaError_t launch_scorer(void (*kernel)(IndexTile, Pages), unsigned blocks, unsigned threads, const IndexTile& tile,
                          const Pages& pages, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  return status != cudaSuccess ? status : launch<kBytes>(kernel, blocks, threads, stream, tile, pages);
}

/// Whether blocks may be half crews and have at most so many units each.
inline bool can_halve(const IndexTile& tile, int most_units) {
  return HalfCrew::kStep % tile.kind().rows_per_block == 0 &&
         units_of(tile) <= most_units * std::int64_t{score_blocks(tile)};
}

/// Of clusters that take a token of up to kRowNumbers keys each, with the selection: how many CTAs; 0 where
/// two launches are better or have to be.
inline int cluster_blocks(const IndexTile& tile) {
  if (max_entries(tile.p) > kRowNumbers) return 0;
  // So many clusters run at once on an H200.
  struct Fit {
    int blocks, clusters;
  };
  constexpr int kOf = 132;
  constexpr Fit kFits[] = {{kMostClusterBlocks, 16}, {4, 28}, {3, 32}, {2, 66}, {1, 132}};
  const int all = num_sms(), count = tile.count;
  for (const Fit& fit : kFits)
    if (count * kOf <= fit.clusters * all) {
      const bool keep_busy = fit.blocks == 1 ? 10 * count >= 9 * all : 2 * fit.blocks * count > all;
      return keep_busy ? fit.blocks : 0;
    }
  return 0;
}

}  // namespace kv4::cuda
