// attend for rows of 512 channels in fp8_tile64 and bf16 queries, on Hopper. Everything else goes to attend_plain.cu.
//
// A thread block takes 64 heads of a token and a run of its rows, in tiles of 64 rows. Four warpgroups:
//   2 loaders  bring a tile's raw rows into registers and convert them to fp16 times their scale, into one of two
//              shared tiles of 64 KB, right panels first. fp16 because e4m3 becomes it in one instruction and scales
//              are powers of two; rows that do not fit get an exponent, which goes into scores and weights.
//   scorer     S = Q K^T (m64n64k16, Q stays in shared memory as fp16 with an exponent per head), online softmax,
//              weights P as fp16 into shared memory, and O += P V for the left half of the channels (m64n128k16). The
//              values of tile i are multiplied while the scores of tile i + 1 become weights.
//   adder      O += P V for the right half, from the same tile: a row is loaded and converted once and serves as K
//              and as V. It also finds the rows for the loaders, three tiles ahead, and brings them into L2: the
//              loaders have registers for one tile, and about 25 KB must be under way to keep memory busy.
// Few tokens: the rows of a token are split over the thread blocks of a cluster, and where there are thread blocks to
// spare also the channels of V, which needs no merging: such blocks score the same rows. Blocks exchange (max, sum) of
// each head and scale their part of O; then each finishes some heads and reads the others' shares of them, in fp16 with
// a scale, through distributed shared memory (13 to 15 bytes per clock, whatever the instruction): one launch, nothing
// through global memory. The grid depends on the params alone; how many rows there are is read on the device.
//
// Bounds, per row of 584 bytes and 64 heads, in clocks of a multiprocessor: bytes 32, multiplies 32, shared memory
// about 40 (scores 16, values 12, converted rows 8, raw rows 4), conversion 12. Measured: 66 (H200, 2026-11-15;
// counters in docs/performance.md). The loaders bound it: storing takes twice its time while multiplies read shared
// memory, and loads are waited for between one tile's conversion and the next, about 17 clocks a row even out of L2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#pragma nv_diag_suppress 177  // the kernel has no body there, so its parts are not used
#endif

#include "backend/cuda/attend_block.cuh"
#include "backend/cuda/attend_end.cuh"
#include "backend/cuda/attend_mma.cuh"
#include "backend/cuda/attend_plain.cuh"
#include "backend/cuda/attend_rows.cuh"
#include "backend/cuda/attend_split.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/warp_row.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

// --- loaders

/// Four lanes share a row: of each 64 bytes a lane has 16. 7 units of codes, one of each scale's tile, and 2 of bf16.
class Loader {
 public:
  __device__ explicit Loader(Shared& s) : s_(s), row_(lane() / 4), unit_(lane() % 4) {}

  __device__ void run(int tiles) {
    if (tiles > 0) start(0);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) load(unit_at(i));
    for (int tile = 0; tile < tiles; ++tile) fill(tile, tile + 1 < tiles);
  }

 private:
  static constexpr int kCodeUnits = 7, kUnits = 9, kRightUnits = 5;
  static constexpr int kCodeTop = 9;  // codes are below 2^9

  /// Units in the order they are converted: right panels first, which are free first, and of them first the bf16 ones.
  __device__ static constexpr int unit_at(int i) {
    return (i + kCodeUnits) % kUnits + (i < 2 ? 0 : i < kRightUnits ? 4 : -3);
  }

  // Unsigned: less to compute and to keep for a warp that has no register to spare.
  __device__ static unsigned lane() { return threadIdx.x % kLoaders; }

  __device__ void start(int tile) {
    const int slot = tile % kFoundTiles;
    barrier_wait(shared_address(&s_.located[slot]), tile / kFoundTiles & 1);
    const Found row = s_.found[slot][row_];
    if (unit_ == 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(&s_.scales[tile % 2][row_])),
                   "l"(__cvta_generic_to_global(row.scale))
                   : "memory");
    from_ = row.payload + unit_ * 16;
    there_ = row.payload != kAbsentRow.payload;
  }

  __device__ void load(int j) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw_[j].x), "=r"(raw_[j].y), "=r"(raw_[j].z), "=r"(raw_[j].w)
                 : "l"(from_ + j * 64));
  }

  /// Waits for all loads under way. Else the first use of each unit would: a warp has few counters of loads under way,
  /// so waiting for a unit means waiting for younger loads too, those of the next tile among them.
  __device__ void settle() const {
    unsigned any = 0;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) any |= raw_[j].x;
    branch_on(any);
  }

  /// A branch that is never taken: what comes after it cannot begin before.
  __device__ static void branch_on(unsigned x) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5DEECE66; @p nanosleep.u32 1; }" ::"r"(x) : "memory");
  }

  /// Of the warp's rows. A row's eighth scale is padding.
  __device__ int exponent_of_rows(uint2 scales) const {
    constexpr std::uint32_t kEvenBytes = 0x00FF00FFu;
    const std::uint32_t most = larger_halves(larger_halves(scales.x & kEvenBytes, scales.x >> 8 & kEvenBytes),
                                             larger_halves(scales.y & kEvenBytes, scales.y >> 8 & 0xFFu));
    const int codes = larger_half(most) + kCodeTop;
    const int tail = max(top_of_pairs(raw_[kCodeUnits]), top_of_pairs(raw_[kCodeUnits + 1]));
    const auto is_plain = [](int top) { return top >= kLeastPlainTop && top <= kTopInFp16; };
    if (__all_sync(kAllLanes, is_plain(codes) && is_plain(tail))) return 0;
    return exponent_of(__reduce_max_sync(kAllLanes, max(codes, tail)));
  }

  /// Converts what was loaded, and loads the next tile's in its place.
  __device__ void fill(int tile, bool is_next) {
    const unsigned stage = static_cast<unsigned>(tile) % kStages, warp = lane() / 32;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    const uint2 scales = *reinterpret_cast<const uint2*>(&s_.scales[tile % 2][row_]);
    settle();
    const int exponent = exponent_of_rows(scales);
    unsigned there = __ballot_sync(kAllLanes, there_) & 0x11111111u;
    there = (there | there >> 3) & 0x03030303u;
    there = (there | there >> 6) & 0x000F000Fu;
    if (is_next) start(tile + 1);
    barrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) {
      s_.there[stage][warp] = static_cast<std::uint8_t>(there | there >> 12);
      s_.exponents[stage][warp] = static_cast<std::int8_t>(exponent);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i == kRightUnits) {
        announce(stage, 1);
        barrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
      }
      if (i == kRightUnits + 2) branch_on(scales.x);  // there are no registers for three units at once
      convert(unit_at(i), shared_address(s_.rows[stage]), scales, exponent);
      load(unit_at(i));
    }
    announce(stage, 0);
  }

  __device__ void convert(int j, std::uint32_t to, uint2 scales, int exponent) const {
    const uint4 raw = raw_[j];
    if (j < kCodeUnits) {
      const std::uint32_t biased = (j < 4 ? scales.x : scales.y) >> (j % 4 * 8) & 0xFFu;
      const float factor =
          codec::bits_float(static_cast<std::uint32_t>(max(static_cast<int>(biased) - exponent, 0)) << 23);
      const std::uint32_t factors = pack_fp16(factor, factor);
      store_half(to + panel_offset(row_, 2 * unit_) + j * kPanelBytes, raw.x, raw.y, factors);
      store_half(to + panel_offset(row_, 2 * unit_ + 1) + j * kPanelBytes, raw.z, raw.w, factors);
    } else {
      store_shared(to + kCodeUnits * kPanelBytes + panel_offset(row_, (j - kCodeUnits) * 4 + unit_),
                   to_fp16(raw, power_of_two(-exponent)));
    }
  }

  __device__ static void store_half(std::uint32_t at, std::uint32_t low, std::uint32_t high, std::uint32_t factors) {
    std::uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t pair = (i < 2 ? low : high) >> (i % 2 * 16);
      asm("{ .reg .b32 x; cvt.rn.f16x2.e4m3x2 x, %1; mul.rn.f16x2 %0, x, %2; }"
          : "=r"(out[i])
          : "h"(static_cast<std::uint16_t>(pair)), "r"(factors));
    }
    store_shared(at, make_uint4(out[0], out[1], out[2], out[3]));
  }

  // Without the fence that the multiplies need: it would wait for the loads under way. Their side has it.
  __device__ void announce(int stage, int half) {
    __syncwarp();
    if (lane() % 32 == 0) barrier_arrive(shared_address(&s_.full[stage][half]));
  }

  Shared& s_;
  const unsigned row_, unit_;
  const std::uint8_t* from_ = kAbsentRow.payload;  // the row whose units are being loaded
  bool there_ = false;
  uint4 raw_[kUnits];
};

// --- scorer and adder

/// Queries in shared memory as fp16. All warps take part, a head each at a time; lanes convert what they have copied.
class Queries {
 public:
  __device__ Queries(const AttendParams& p, Shared& s, const Job& job) : p_(p), s_(s), job_(job) {}

  __device__ void begin() const {
    const auto* q = static_cast<const std::uint8_t*>(p_.q.data) +
                    (std::int64_t{job_.token} * p_.q.row_stride + job_.first_head * kWidth) * 2;
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
#pragma unroll
      for (int unit = lane(); unit < kUnits; unit += 32) {
        const bool there = job_.first_head + head(i) < p_.num_heads;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place(head(i), unit)),
                     "l"(q + (there ? (head(i) * kUnits + unit) * 16 : 0)), "r"(there ? 16 : 0)
                     : "memory");
      }
    if (threadIdx.x < kTile) {
      const int head = job_.first_head + static_cast<int>(threadIdx.x);
      const bool sinks = p_.sink != nullptr && !job_.padded && head < p_.num_heads;
      s_.sink[threadIdx.x] = sinks ? p_.sink[head] * codec::kLog2e : -INFINITY;
    }
  }

  __device__ void finish() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const uint4 left = load_shared(place(head(i), lane())), right = load_shared(place(head(i), lane() + 32));
      const int exponent = exponent_of(__reduce_max_sync(kAllLanes, max(top_of_pairs(left), top_of_pairs(right))));
      store_shared(place(head(i), lane()), to_fp16(left, power_of_two(-exponent)));
      store_shared(place(head(i), lane() + 32), to_fp16(right, power_of_two(-exponent)));
      if (lane() == 0) s_.q_unit[head(i)] = power_of_two(exponent);
    }
    publish_to_mma();
  }

 private:
  static constexpr int kUnits = kWidth * 2 / 16, kWarps = kThreads / 32, kHeads = kTile / kWarps;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int head(int i) { return static_cast<int>(threadIdx.x) / 32 + i * kWarps; }
  __device__ std::uint32_t place(int head, int unit) const {
    return shared_address(s_.q) + unit / 8 * kPanelBytes + panel_offset(head, unit % 8);
  }

  const AttendParams& p_;
  Shared& s_;
  const Job& job_;
};

template <int kSize>
__device__ void scale_heads(float (&o)[kSize], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    o[i] *= upper;
    o[i + 1] *= upper;
    o[i + 2] *= lower;
    o[i + 3] *= lower;
  }
}

/// O += P V over the channels of a group, from its first panel on.
template <int kSize>
__device__ void add_values(float (&o)[kSize], Shared& s, int stage, int panel) {
  const std::uint32_t values = panel_place(shared_address(s.rows[stage]) + panel * kPanelBytes, kPanelBytes);
  const std::uint32_t weights = panel_place(shared_address(s.weights[stage]));
  mma_begin();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    const std::uint64_t a = panel_descriptor(weights, k * 32), b = panel_descriptor(values, k * 16 * kPanelRowBytes);
    if constexpr (kSize == 32) {
      multiply_rows_64<0>(o, a, b);
    } else {
      multiply_rows_128<0>(o, a, b);
      if constexpr (kSize == 128)
        multiply_rows_128<64>(o, a, panel_descriptor(values, k * 16 * kPanelRowBytes + 2 * kPanelBytes));
    }
  }
  mma_commit();
}

/// Whether scorer and adder each add up one half of the panels, so that a half is free when one of them is done with
/// it.
template <int kSize>
constexpr bool kOwnHalf = kSize == kWidth / 4;

/// A tile is no longer read by this warp, of the scorer (0) or the adder (1).
template <int kSize>
__device__ void release(Shared& s, int stage, int group) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  barrier_arrive(shared_address(&s.empty[stage][group]));
  if (!kOwnHalf<kSize>) barrier_arrive(shared_address(&s.empty[stage][group ^ 1]));
}

class Scorer {
 public:
  /// Queries are in place.
  __device__ Scorer(const AttendParams& p, Shared& s) : s_(s) {
    for (int half = 0; half < 2; ++half)
      scale_[half] = p.softmax_scale * codec::kLog2e * s.q_unit[head_of_thread() + 8 * half];
  }

  /// The values of a tile are multiplied while the next one's scores become weights.
  template <int kSize>
  __device__ void run(float (&o)[kSize], int tiles, int panel) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages;
      score(tile);
      const uint2 there = *reinterpret_cast<const uint2*>(s_.there[stage]);
      const uint2 exponents = *reinterpret_cast<const uint2*>(s_.exponents[stage]);
      if (tile > 0) {
        add_values(o, s_, stage ^ 1, panel);
        mma_wait<1>();
      } else {
        mma_wait<0>();
      }
      float past[2];
      weigh(stage, there, exponents, past);
      publish_to_mma();
      named_barrier(2, kGroup);
      if (threadIdx.x == 0) barrier_arrive(shared_address(&s_.weighted[stage]));
      mma_wait<0>();
      if (tile > 0) release<kSize>(s_, stage ^ 1, 0);
      if (__any_sync(kAllLanes, past[0] != 1.0f || past[1] != 1.0f)) scale_heads(o, past[0], past[1]);
    }
    if (tiles > 0) {
      add_values(o, s_, (tiles - 1) % kStages, panel);
      mma_wait<0>();
    }
  }

  /// Of the thread's upper or lower head; all lanes call it.
  __device__ Stats stats(int half) const {
    float sum = sum_[half];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    return {most_[half], sum};
  }

 private:
  static constexpr int kScores = kTile / 2;
  static constexpr int kNanExponent = 255 + 9 - kTopInFp16;  // of rows with a scale that is NaN

  __device__ void score(int tile) {
    const int stage = tile % kStages, parity = tile / kStages & 1;
    const std::uint32_t q = panel_place(shared_address(s_.q)), rows = panel_place(shared_address(s_.rows[stage]));
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      barrier_wait(shared_address(&s_.full[stage][half]), parity);
      publish_to_mma();
      mma_begin();
#pragma unroll
      for (int panel = half * kPanels / 2; panel < (half + 1) * kPanels / 2; ++panel)
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          const std::uint32_t at = panel * kPanelBytes + k * 32;
          multiply_channels(z_, panel_descriptor(q, at), panel_descriptor(rows, at),
                            half == 0 || panel > kPanels / 2 || k > 0);
        }
    }
    mma_commit();
  }

  /// Scores to weights relative to the largest so far; O must be multiplied by `past`. Weights include the power of two
  /// that a row's values lack, so that the largest is 1 in fp16 however rows differ; the sum does not.
  __device__ void weigh(int stage, uint2 there, uint2 exponents, float (&past)[2]) {
    const bool plain = (exponents.x | exponents.y) == 0;
    const auto exponent_of_score = [exponents](int i) {
      return static_cast<int>((i < kScores / 2 ? exponents.x : exponents.y) << (24 - i / 4 % 4 * 8)) >> 24;
    };
    float factor[2] = {scale_[0], scale_[1]};
    if (!plain) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int exponent = exponent_of_score(i);
        const float unit = exponent == kNanExponent ? NAN : power_of_two(exponent);
        z_[i] = codec::fused(z_[i], scale_[i / 2 % 2] * unit, static_cast<float>(exponent));
      }
      factor[0] = factor[1] = 1.0f;
    }
    if ((there.x & there.y) != 0xFFFFFFFFu) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int byte = i / 4;
        const unsigned bits = (byte < 4 ? there.x : there.y) >> (byte % 4 * 8 + 2 * quad_of_thread() + i % 2);
        if ((bits & 1) == 0) z_[i] = -INFINITY;
      }
    }
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fmaxf(z_[i], z_[i + 1]));
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float upper = __shfl_xor_sync(kAllLanes, most[0], step), lower = __shfl_xor_sync(kAllLanes, most[1], step);
      most[0] = fmaxf(most[0], upper);
      most[1] = fmaxf(most[1], lower);
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half] * factor[half], most_[half]);
      base[half] = most[half] == -INFINITY ? 0.0f : most[half];
      past[half] = exp2_fast(most_[half] - base[half]);
      most_[half] = most[half];
      sum_[half] *= past[half];
    }
    const int head = head_of_thread(), quad = quad_of_thread();
    const std::uint32_t to = shared_address(s_.weights[stage]) + quad * 4;
    const auto store_weights = [&](auto inverse_unit) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const int half = i / 2 % 2;
        const float x = exp2_fast(codec::fused(z_[i], factor[half], -base[half]));
        const float y = exp2_fast(codec::fused(z_[i + 1], factor[half], -base[half]));
        sum_[half] = codec::fused(x + y, inverse_unit(i), sum_[half]);
        shared_store(to + panel_offset(head + 8 * half, i / 4), pack_fp16(x, y));
      }
    };
    if (plain)
      store_weights([](int) { return 1.0f; });
    else
      store_weights([&](int i) { return power_of_two(-exponent_of_score(i)); });
    if (quad == 0) {
      s_.past[stage][head] = past[0];
      s_.past[stage][head + 8] = past[1];
    }
  }

  Shared& s_;
  float scale_[2];  // of the thread's heads
  float z_[kScores];
  float most_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0.0f, 0.0f};
};

/// Finds rows for the loaders, three tiles ahead; a thread per row, of the adder's first two warps. The index of a row
/// is loaded two tiles before its place is needed, its block one.
class Finder {
 public:
  __device__ Finder(const AttendParams& p, Shared& s, const QueryRows& rows, const Job& job)
      : p_(p), s_(s), rows_(rows), job_(job) {}

  __device__ void begin() {
    if (!takes_part()) return;
    int keys[kLead], blocks[kLead];
#pragma unroll
    for (int i = 0; i < kLead; ++i) keys[i] = key(i);
#pragma unroll
    for (int i = 0; i < kLead; ++i) blocks[i] = rows_.block(p_, row(i), keys[i]);
#pragma unroll
    for (int i = 0; i < kLead; ++i) locate(i, keys[i], blocks[i]);
    key_ = key(kLead);
    block_ = rows_.block(p_, row(kLead), key_);
    next_key_ = key(kLead + 1);
  }

  /// When `tile` has been filled.
  __device__ void advance(int tile) {
    if (!takes_part()) return;
    locate(tile + kLead, key_, block_);
    key_ = next_key_;
    block_ = rows_.block(p_, row(tile + kLead + 1), key_);
    next_key_ = key(tile + kLead + 2);
  }

 private:
  static constexpr int kLead = kFoundTiles - 1;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kGroup; }
  __device__ static bool takes_part() { return lane() < kTile; }
  __device__ int row(int tile) const { return job_.begin + tile * kTile + lane(); }
  __device__ int key(int tile) const { return row(tile) < job_.end ? rows_.key(p_, job_.token, row(tile)) : -1; }
  __device__ void locate(int tile, int key, int block) {
    if (tile >= job_.tiles()) return;
    const RowPlace place = rows_.place(p_, row(tile), key, block);
    Found found{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) {
      found = {place.payload, place.scale};
      prefetch(found);
    }
    s_.found[tile % kFoundTiles][lane()] = found;
    __syncwarp();
    if (lane() % 32 == 0) barrier_arrive(shared_address(&s_.located[tile % kFoundTiles]));
  }

  /// Into L2: the loaders have registers for one tile, less than what must be under way.
  __device__ static void prefetch(const Found& row) {
#pragma unroll
    for (int at = 0; at < kWidth + kTail; at += 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(row.payload + at)) : "memory");
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(row.scale)) : "memory");
  }

  const AttendParams& p_;
  Shared& s_;
  const QueryRows& rows_;
  const Job& job_;
  int key_, block_, next_key_;
};

template <int kSize>
__device__ void run_adder(float (&o)[kSize], Shared& s, Finder& finder, int tiles, int panel) {
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, parity = tile / kStages & 1;
    barrier_wait(shared_address(&s.full[stage][0]), parity);
    barrier_wait(shared_address(&s.full[stage][1]), parity);
    finder.advance(tile);
    barrier_wait(shared_address(&s.weighted[stage]), parity);
    publish_to_mma();
    const float upper = s.past[stage][head_of_thread()], lower = s.past[stage][head_of_thread() + 8];
    if (__any_sync(kAllLanes, upper != 1.0f || lower != 1.0f)) scale_heads(o, upper, lower);
    add_values(o, s, stage, panel);
    mma_wait<0>();
    release<kSize>(s, stage, 1);
  }
}

/// Scorer (kGroupIndex 0) or adder (1), up to the output.
template <int kChannelParts, int kGroupIndex>
__device__ void consume(const AttendParams& p, Shared& s, const Job& job, Finder& finder) {
  constexpr int kChannels = kWidth / kChannelParts / 2, kGroupPanels = kChannels / kTile;
  const int panel = (job.channel_part * 2 + kGroupIndex) * kGroupPanels;
  named_barrier(1, kThreads);  // queries are in place
  float o[kChannels / 2];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) o[i] = 0.0f;
  if constexpr (kGroupIndex == 0) {
    Scorer scorer(p, s);
    scorer.run(o, job.tiles(), panel);
    if (job.parts > 1) cluster_wait();  // all blocks have begun
    for (int half = 0; half < 2; ++half) {
      const Stats mine = scorer.stats(half);
      const std::uint32_t at = shared_address(&s.stats[job.part][head_of_thread() + 8 * half]);
      for (int to = quad_of_thread(); to < job.parts; to += 4)
        cluster_store(in_block(at, static_cast<std::uint32_t>(to * kChannelParts + job.channel_part)), mine.most,
                      mine.sum);
    }
  } else {
    run_adder(o, s, finder, job.tiles(), panel);
    if (job.parts > 1) cluster_wait();
  }
  if (job.parts > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    named_barrier(1, 2 * kGroup);
  }
  const int head = head_of_thread();
  scale_heads(o, factor_of(s, job, head), factor_of(s, job, head + 8));
  store_lse(p, s, job);
  if (job.parts == 1) {
    if (kGroupIndex == 1 && job.channel_part == kChannelParts - 1) turn_back_last(p, job, o);
    store_output(p, job, o, panel * kTile);
  } else {
    store_shares<kChannelParts, kGroupIndex>(s, o);
    cluster_arrive();
    cluster_wait();
    finish_heads<kChannelParts>(p, s, job);
  }
}

template <int kRegisters>
__device__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kChannelParts>
__global__ void __launch_bounds__(kThreads, 1)
    attend_tiles(const __grid_constant__ AttendParams p, int row_parts, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&s.full[stage][0]), kLoaderWarps);
      barrier_init(shared_address(&s.full[stage][1]), kLoaderWarps);
      constexpr int kReaders = kOwnHalf<kWidth / kChannelParts / 4> ? kGroupWarps : 2 * kGroupWarps;
      barrier_init(shared_address(&s.empty[stage][0]), kReaders);
      barrier_init(shared_address(&s.empty[stage][1]), kReaders);
      barrier_init(shared_address(&s.weighted[stage]), 1);
    }
    for (int i = 0; i < kFoundTiles; ++i) barrier_init(shared_address(&s.located[i]), kTile / 32);
  }
  let_next_start();
  touch(p);
  __syncthreads();
  if (row_parts > 1) cluster_arrive();
  wait_for_previous();

  const int group = static_cast<int>(threadIdx.x) / kGroup;
  Job job(row_parts, kChannelParts, head_tiles);
  const QueryRows rows(p, job.token);
  job.take_rows(rows);
  const Queries queries(p, s, job);
  Finder finder(p, s, rows, job);
  queries.begin();
  if (group == 1) finder.begin();
  queries.finish();
  if (group == 0) {
    more_registers<kScorerRegisters>();
    consume<kChannelParts, 0>(p, s, job, finder);
  } else if (group == 1) {
    more_registers<kAdderRegisters>();
    consume<kChannelParts, 1>(p, s, job, finder);
  } else {
    fewer_registers<kLoaderRegisters>();
    named_barrier_arrive(1, kThreads);
    Loader(s).run(job.tiles());
    if (row_parts > 1) {
      job = Job(row_parts, kChannelParts, head_tiles);  // again: no registers to keep it in
      job.take_rows(QueryRows(p, job.token));
      cluster_wait();
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
      finish_heads<kChannelParts>(p, s, job);
    }
  }
#endif
}

// --- on the host

bool is_aligned(const void* data, std::int64_t to) { return reinterpret_cast<std::uintptr_t>(data) % to == 0; }

bool is_aligned(const ops::Plane& plane, std::int64_t to) {
  return is_aligned(plane.data, to) && (plane.block_stride | plane.row_stride) % to == 0;
}

/// Rows that are never read have no planes.
bool can_read(const ops::RowPlanes& rows) {
  return rows.payload.data == nullptr ||
         (rows.format == Format::fp8_tile64 && rows.shape.width == kWidth && rows.shape.tail == kTail &&
          is_aligned(rows.payload, 16) && is_aligned(rows.scale, 8));
}

bool can_tile(const AttendParams& p) {
  return width_of(p) == kWidth && can_read(p.layer.window.ring) && can_read(p.layer.window.scratch) &&
         (p.layer.num_kinds == 0 || can_read(p.layer.kinds[0].page)) && p.q.dtype == DType::bf16 &&
         is_aligned(p.q.data, 16) && p.q.row_stride % 8 == 0 && is_aligned(p.out.data, 16) &&
         p.turn_back.rope_dim <= kTail && p.softmax_scale > 0.0f;
}

template <class Kernel>
cudaError_t allow_tiles(Kernel kernel) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  return error != cudaSuccess ? error : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

cudaLaunchConfig_t tiles_config(int clusters, int blocks, cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(clusters * blocks);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return config;
}

template <int kChannelParts>
cudaError_t launch_tiles(const AttendParams& p, int row_parts, cudaStream_t stream) {
  const auto kernel = attend_tiles<kChannelParts>;
  const int blocks = row_parts * kChannelParts, head_tiles = (p.num_heads + kTile - 1) / kTile;
  if (const cudaError_t error = allow_tiles(kernel); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = tiles_config(p.step.num_tokens * head_tiles, blocks, attributes[1]);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs += 1;
  return cudaLaunchKernelEx(&config, kernel, p, row_parts, head_tiles);
}

/// As many rows as any query may have.
std::int64_t most_rows(const AttendParams& p) {
  std::int64_t rows = p.window_slots.slots != nullptr ? p.window_slots.stride : p.layer.window_tokens;
  if (p.entry_slots.slots != nullptr)
    rows += p.entry_slots.stride;
  else if (p.layer.num_kinds > 0)
    rows += p.chosen.data != nullptr ? p.num_chosen
                                     : std::int64_t{p.step.blocks_per_request} * p.layer.kinds[0].rows_per_block;
  return rows;
}

/// Clusters of so many blocks that run at once; a block takes a multiprocessor, and a cluster must fit into a part of
/// the chip. [kMaxCluster + 1]
std::array<int, kMaxCluster + 1> count_clusters() {
  std::array<int, kMaxCluster + 1> most{};
  if (allow_tiles(attend_tiles<1>) != cudaSuccess) return most;
  for (int blocks = 1; blocks <= kMaxCluster; ++blocks) {
    cudaLaunchAttribute cluster{};
    const cudaLaunchConfig_t config = tiles_config(1, blocks, cluster);
    if (cudaOccupancyMaxActiveClusters(&most[static_cast<std::size_t>(blocks)], attend_tiles<1>, &config) !=
        cudaSuccess)
      most[static_cast<std::size_t>(blocks)] = 0;
  }
  static_cast<void>(cudaGetLastError());  // of sizes that the chip does not have
  return most;
}

}  // namespace

/// The split that should take the least time, of those whose blocks all run at once: a start and an end that depend on
/// how O is merged, and a time per tile. In hundredths of a microsecond, fitted to an H200, 2026-11-15.
AttendSplit split_of(const AttendParams& p) {
  static const std::array<int, kMaxCluster + 1> at_once = count_clusters();
  const std::int64_t units = std::int64_t{p.step.num_tokens} * ((p.num_heads + kTile - 1) / kTile);
  const std::int64_t tiles = std::max<std::int64_t>((most_rows(p) + kTile - 1) / kTile, 1);
  struct Cost {
    int channels, alone, tile_alone, merged, per_part, tile_merged;
  };
  constexpr Cost kCosts[] = {{1, 800, 278, 980, 28, 220}, {2, 660, 260, 760, 30, 220}, {4, 560, 275, 600, 50, 220}};
  AttendSplit best{1, 1};
  std::int64_t least = kCosts[0].alone + tiles * kCosts[0].tile_alone;
  for (const Cost& cost : kCosts)
    for (int rows = 1; rows * cost.channels <= kMaxCluster; ++rows) {
      const std::int64_t own = (tiles + rows - 1) / rows;
      const std::int64_t time =
          rows == 1 ? cost.alone + own * cost.tile_alone : cost.merged + rows * cost.per_part + own * cost.tile_merged;
      if (units > at_once[static_cast<std::size_t>(rows * cost.channels)] || time >= least) continue;
      least = time;
      best = {rows, cost.channels};
    }
  return best;
}

cudaError_t attend_split(const AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  switch (split.channels) {
    case 1: return launch_tiles<1>(p, split.rows, stream);
    case 2: return launch_tiles<2>(p, split.rows, stream);
    default: return launch_tiles<4>(p, split.rows, stream);
  }
}

cudaError_t attend(const AttendParams& p, cudaStream_t stream) {
  if (p.step.num_tokens <= 0 || p.num_heads <= 0) return cudaSuccess;
  if (!overlaps_launches() || !can_tile(p)) return attend_plain(p, stream);
  if (const auto small = small_split_of(p, most_rows(p))) return attend_small(p, *small, stream);
  return attend_split(p, split_of(p), stream);
}

}  // namespace kv4::cuda
