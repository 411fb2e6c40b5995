// What a CTA of dispatch.cu has in common: sizes, shared memory, its job, and numbers in fp16 with an exponent
// kept apart. For dispatch.cu and persistent_window.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/rows/warp_row.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

using ops::AttendParams;

constexpr int kWidth = 512, kTail = 64, kTile = 64;  // a tile: 64 heads or 64 rows, and the channels of a panel
constexpr int kPanels = kWidth / kTile, kTileBytes = kPanels * kPanelBytes;
constexpr int kStages = 2, kFoundTiles = 4;
constexpr int kRounds = 26, kSinks = 4;  // rounds of a CTA that are known, and sinks kept, at a time
constexpr int kGroup = 128, kLoaders = 2 * kGroup, kThreads = 4 * kGroup;
constexpr int kLoaderWarps = kLoaders / 32, kGroupWarps = kGroup / 32;
constexpr int kScorerRegisters = 192, kAdderRegisters = 160, kLoaderRegisters = 80;
static_assert(kStages == 2);
static_assert(kScorerRegisters + kAdderRegisters + 2 * kLoaderRegisters <= 65536 / kGroup);
constexpr int kConsumerRegisters = 192, kRoundLoaderRegisters = 64, kStagedUnits = 4;  // see persistent.cuh
static_assert(2 * (kConsumerRegisters + kRoundLoaderRegisters) <= 65536 / kGroup);
constexpr int kNeighbourAdderRegisters = 176, kNeighbourLoaderRegisters = 72;
static_assert(kScorerRegisters + kNeighbourAdderRegisters + 2 * kNeighbourLoaderRegisters <= 65536 / kGroup);
constexpr float kLn2 = 0.693147181f;

/// Of one head over some rows: about the largest logit (times log2 e), plus the exponent of its row, and the sum of
/// 2^(logit - that).
struct Stats {
  float most, sum;
};

/// Where a row lies.
struct alignas(16) Found {
  const std::uint8_t *payload, *scale;
};

/// What a row that is not there is read from: loads that depend on a condition would be waited for where they are
/// issued. Its weight is 0. Its scales and values are the least that need no exponent (kLeastPlainTop), so that rows
/// beside it decide.
struct AbsentRow {
  alignas(16) std::uint8_t payload[kWidth + kTail] = {};
  std::uint8_t scale[8] = {};

  constexpr AbsentRow() {
    for (int i = kWidth - kTail; i < kWidth + kTail; i += 2) {  // bf16 2^-16
      payload[i] = 0x80;
      payload[i + 1] = 0x37;
    }
    for (std::uint8_t& x : scale) x = 103;
  }
};
__device__ const AbsentRow kAbsentRow;

/// What is to be known of 32 rows, four by four: the exponent of what they are multiples of, and a bit for each that is
/// there.
constexpr int kHalfFours = kTile / 8;
struct alignas(16) Fours {
  std::int8_t exponents[kHalfFours];
  std::uint8_t there[kHalfFours];
};

/// Tiles that are the same for two neighbouring tokens: see token_pair.cuh.
struct CommonTiles {
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  std::uint32_t others = kNone;  // two that are not, 16 bits each; 0: all of them

  __device__ bool has(int tile) const {
    const auto x = static_cast<std::uint32_t>(tile) + 1;
    return others != 0 && x != (others & 0xFFFFu) && x != others >> 16;
  }
};

/// What a CTA that takes 64 heads of a token after another does next: see persistent.cuh.
struct alignas(16) Round {
  QueryRows rows;
  int token, first_head, tiles;
  CommonTiles common;  // with the mate
};
static_assert(sizeof(Round) == 64);

constexpr int kStagedBytes = kStagedUnits * kLoaders * 16;

struct Shared {
  std::uint8_t q[kTileBytes];              // [8 panels, 64 heads]
  std::uint8_t rows[kStages][kTileBytes];  // [8 panels, 64 rows]
  std::uint8_t weights[kStages][kPanelBytes];
  Stats stats[kMaxCluster][kTile];     // [row part, head]
  Stats round_stats[2][kTile];         // of rounds by turns
  float past[kStages][kTile];          // what O is multiplied by before a tile is added; in rounds the tile's base
  float sink[kSinks][kTile];           // times log2 e; of consumers alike the upper half are sums
  float factors[kTile + kMaxCluster];  // [head that this block finishes, row part]: what shares are multiplied by
  float q_unit[kTile];                 // what a head's queries are multiples of, a power of two
  Found found[kFoundTiles][kTile];
  std::uint64_t scales[2][kTile];                     // of even and odd tiles
  Fours fours[kStages][2];                            // of the halves of a tile
  std::uint64_t full[kStages][2], empty[kStages][2];  // left panels, the scorer's, and right ones, the adder's
  std::uint64_t weighted[kStages], located[kFoundTiles];
  int shares_to_add;  // see MemoryMerge
  Round rounds[kRounds];
  int num_rounds;
  std::uint64_t queries_used, queries_there;  // of a round

  /// Raw rows, where there are no parts and one lot of weights.
  __device__ std::uint8_t* staged() { return weights[1]; }
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to begin at a multiple of 1,024
static_assert(kSharedBytes <= 227 * 1024);
static_assert(kStagedBytes <= kPanelBytes + sizeof(Shared::stats));
static_assert(offsetof(Shared, stats) == offsetof(Shared, weights) + kStages * kPanelBytes);

/// What a CTA does.
struct Job {
  int token;
  int first_head;
  int rank;         // in the cluster
  int part, parts;  // of the rows
  int channel_part;
  int part_blocks;      // of a part
  int mate, mates;      // of two blocks that share the rows' conversion; 0 of 1 otherwise
  bool through_memory;  // parts are not in one cluster
  int position;         // of the query
  int begin, end;       // rows
  bool padded;
  bool in_rounds = false;
  int round = 0;       // of the CTA
  bool alike = false;  // two consumers, with a sum of weights each

  /// Mates are neighbours and have neighbouring heads.
  __device__ Job(int row_parts, int channel_parts, int mates, int head_tiles, bool through_memory)
      : parts(row_parts), part_blocks(channel_parts * mates), mates(mates), through_memory(through_memory) {
    const int blocks = row_parts * part_blocks, unit = static_cast<int>(blockIdx.x) / blocks;
    const int units = head_tiles / mates;  // of a token
    rank = static_cast<int>(blockIdx.x) % blocks;
    mate = rank % mates;
    token = unit / units;
    first_head = (unit % units * mates + mate) * kTile;
    part = rank / part_blocks;
    channel_part = rank % part_blocks / mates;
  }

  /// Mates have neighbouring tokens, whose head tiles come one after the other.
  __device__ Job(int mates, int head_tiles, int tokens) : Job(1, 1, mates, mates, false) {
    const int unit = static_cast<int>(blockIdx.x) / mates;
    token = min(unit / head_tiles * mates + mate, tokens - 1);
    first_head = unit % head_tiles * kTile;
  }

  /// One that does everything for a token, and then for others.
  __device__ Job(const Round& of, int round, bool alike = false)
      : token(of.token),
        first_head(of.first_head),
        rank(0),
        part(0),
        parts(1),
        channel_part(0),
        part_blocks(1),
        mate(0),
        mates(1),
        through_memory(false),
        position(of.rows.at.position),
        begin(0),
        end(of.rows.count()),
        padded(of.rows.at.padded()),
        in_rounds(true),
        round(round),
        alike(alike) {}

  __device__ void take_rows(const QueryRows& rows) {
    const int unit = through_memory ? kTile : 8, least = through_memory ? kTile : 0;
    const int share = max(((rows.count() + parts - 1) / parts + unit - 1) / unit * unit, least);
    if (through_memory) parts = max((rows.count() + share - 1) / share, 1);
    begin = min(part * share, rows.count());
    end = min(begin + share, rows.count());
    position = rows.at.position;
    padded = rows.at.padded();
  }

  /// Part of fewer rows than were planned for: nothing to do, and nobody waits for it.
  __device__ bool left_over() const { return part >= parts; }
  __device__ bool in_cluster() const { return (through_memory ? 1 : parts) * mates > 1; }
  __device__ std::uint32_t mate_rank() const { return static_cast<std::uint32_t>(through_memory ? mate : rank) ^ 1u; }
  /// The block that does the same for another part.
  __device__ std::uint32_t rank_of(int other) const {
    return static_cast<std::uint32_t>(rank + (other - part) * part_blocks);
  }
  __device__ int tiles() const { return (end - begin + kTile - 1) / kTile; }
  __device__ int sinks() const { return round % (alike ? kSinks / 2 : kSinks); }  // which of Shared::sink
  __device__ int own_heads() const { return (kTile + parts - 1) / parts; }  // that a part finishes, the last one fewer
};

/// The thread's index, in a register: else it is read again and again, each time behind the stores under way. What
/// follows from it is not found ahead of loops either. Whole warps only.
__device__ int thread_here() {
  const int thread = static_cast<int>(threadIdx.x);
  return __shfl_sync(kAllLanes, thread, thread % 32);
}

/// 2^x; 0 for -infinity.
__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ std::uint32_t pack_fp16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ std::uint32_t larger_halves(std::uint32_t x, std::uint32_t y) {
  asm("max.u16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ int larger_half(std::uint32_t x) { return static_cast<int>(max(x & 0xFFFFu, x >> 16)); }

// Values are kept in fp16 as multiples of 2^exponent. Rows are as they are, exponent 0, while that is exact up to
// 2^-25, 2^-12 of the largest; else they are brought just below 2^16, as queries always are. `top`: values are below
// 2^(top - 127).
constexpr int kTopInFp16 = 127 + 16, kLeastTop = 84, kLeastPlainTop = 112;

/// Of bf16 pairs.
__device__ int top_of_pairs(const uint4& pairs) {
  const std::uint32_t most = larger_halves(larger_halves(pairs.x & 0x7FFF7FFFu, pairs.y & 0x7FFF7FFFu),
                                           larger_halves(pairs.z & 0x7FFF7FFFu, pairs.w & 0x7FFF7FFFu));
  return (larger_half(most) >> 7) + 1;
}

__device__ int top_of_pairs(const uint4& a, const uint4& b) {
  const auto larger = [](std::uint32_t x, std::uint32_t y) { return larger_halves(x & 0x7FFF7FFFu, y & 0x7FFF7FFFu); };
  return top_of_pairs(make_uint4(larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w)));
}

__device__ int exponent_of(int top) { return max(top, kLeastTop) - kTopInFp16; }
__device__ float power_of_two(int exponent) {
  return codec::bits_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// bf16 pairs times a power of two, as fp16.
__device__ uint4 to_fp16(const uint4& pairs, float factor) {
  const std::uint32_t factors = pack_bf16(factor, factor);
  const auto convert = [factors](std::uint32_t pair) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(factors));
    return pack_fp16(codec::bits_float(pair << 16), codec::bits_float(pair & 0xFFFF0000u));
  };
  return make_uint4(convert(pairs.x), convert(pairs.y), convert(pairs.z), convert(pairs.w));
}

__device__ void store_shared(std::uint32_t at, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ uint4 load_shared(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

/// A thread's place in accumulators: its heads are head and head + 8, its columns 2 * quad and the next of every 8.
__device__ int head_of_thread() { return static_cast<int>(threadIdx.x) % kGroup / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int quad_of_thread() { return static_cast<int>(threadIdx.x) % 4; }

}  // namespace
}  // namespace kv4::cuda
