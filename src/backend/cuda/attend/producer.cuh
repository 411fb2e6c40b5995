// The loaders of dispatch.cu: raw rows into registers, converted to fp16 into the shared tiles. For dispatch.cu alone.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"

namespace kv4::cuda {
namespace {

/// A branch that is never taken: what comes after it cannot begin before.
__device__ void branch_on(unsigned x) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5DEECE66; @p nanosleep.u32 1; }" ::"r"(x) : "memory");
}

/// A row's eighth scale is padding.
__device__ int top_of_codes(uint2 scales) {
  constexpr std::uint32_t kEvenBytes = 0x00FF00FFu;
  constexpr int kCodeTop = 9;  // codes are below 2^9
  const std::uint32_t most = larger_halves(larger_halves(scales.x & kEvenBytes, scales.x >> 8 & kEvenBytes),
                                           larger_halves(scales.y & kEvenBytes, scales.y >> 8 & 0xFFu));
  return larger_half(most) + kCodeTop;
}

/// Of what all rows of a warp become multiples of.
__device__ int exponent_for_warp(int codes_top, int tail_top) {
  const auto is_plain = [](int top) { return top >= kLeastPlainTop && top <= kTopInFp16; };
  if (__all_sync(kAllLanes, is_plain(codes_top) && is_plain(tail_top))) return 0;
  return exponent_of(__reduce_max_sync(kAllLanes, max(codes_top, tail_top)));
}

/// What the codes of a panel are multiplied by, as fp16 twice.
__device__ std::uint32_t factors_of(uint2 scales, int panel, int exponent) {
  const std::uint32_t biased = (panel < 4 ? scales.x : scales.y) >> (panel % 4 * 8) & 0xFFu;
  const float factor = codec::bits_float(static_cast<std::uint32_t>(max(static_cast<int>(biased) - exponent, 0)) << 23);
  return pack_fp16(factor, factor);
}

__device__ uint4 eight_codes(std::uint32_t low, std::uint32_t high, std::uint32_t factors) {
  std::uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair = (i < 2 ? low : high) >> (i % 2 * 16);
    asm("{ .reg .b32 x; cvt.rn.f16x2.e4m3x2 x, %1; mul.rn.f16x2 %0, x, %2; }"
        : "=r"(out[i])
        : "h"(static_cast<std::uint16_t>(pair)), "r"(factors));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Four lanes share a row: of each 64 bytes a lane has 16. 7 units of codes, one of each scale's tile, and 2 of bf16, of
// which 5 belong to the right panels.
constexpr int kCodeUnits = 7, kUnits = 9, kRightUnits = 5;

/// Units in the order they are converted: right panels first, which are free first, and of them first the bf16 ones.
__device__ constexpr int unit_at(int i) { return i < 2 ? kCodeUnits + i : i < kRightUnits ? i + 2 : kUnits - 1 - i; }

/// The whole tile in registers.
class Loader {
 public:
  __device__ explicit Loader(Shared& s) : s_(s), lane_(static_cast<unsigned>(thread_here()) % kLoaders) {
    const unsigned row = lane_ / 4, unit = lane_ % 4;
    codes_at_ = panel_offset(row, 2 * unit);
    tail_at_ = kCodeUnits * kPanelBytes + panel_offset(row, row % 2 * 4 + unit);
  }

  __device__ void run(int tiles) {
    begin(tiles > 0);
    for (int tile = 0; tile < tiles; ++tile) fill(tile, tile + 1 < tiles);
  }

  /// Loads the first tile, if there is one.
  __device__ void begin(bool is_first) {
    if (is_first) start(0);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) load(unit_at(i));
  }

  /// Converts what was loaded, and loads the next tile's in its place.
  __device__ void fill(int tile, bool is_next) {
    const unsigned stage = static_cast<unsigned>(tile) % kStages, warp = lane() / 32;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    const uint2 scales = *reinterpret_cast<const uint2*>(&s_.scales[tile % 2][row()]);
    unsigned there = __ballot_sync(kAllLanes, there_) & 0x11111111u;
    there = (there | there >> 3) & 0x03030303u;
    there = (there | there >> 6) & 0x000F000Fu;
    if (is_next) start(tile + 1);
    settle();
    const int exponent = exponent_of_rows(scales);
    barrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) {
      Fours& fours = s_.fours[stage][warp / 4];
      *reinterpret_cast<std::uint16_t*>(&fours.exponents[warp % 4 * 2]) =
          static_cast<std::uint16_t>((exponent & 0xFF) * 0x0101);
      *reinterpret_cast<std::uint16_t*>(&fours.there[warp % 4 * 2]) = static_cast<std::uint16_t>(there | there >> 8);
    }
#pragma unroll
    for (int i = 0; i < kRightUnits; ++i) {
      convert(unit_at(i), shared_address(s_.rows[stage]), scales, exponent);
      load(unit_at(i));
    }
    announce(stage, 1);
    barrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
    // The scorer waits for these. Loads come after them: conversions share a counter with loads under way.
#pragma unroll
    for (int i = kRightUnits; i < kUnits; ++i) {
      if (i == kRightUnits + 2) branch_on(scales.x);  // there are no registers for three units at once
      convert(unit_at(i), shared_address(s_.rows[stage]), scales, exponent);
    }
    announce(stage, 0);
#pragma unroll
    for (int i = kRightUnits; i < kUnits; ++i) load(unit_at(i));
  }

 private:
  // Unsigned: less to compute and to keep for a warp that has no register to spare.
  __device__ unsigned lane() const { return lane_; }
  __device__ unsigned row() const { return lane_ / 4; }
  __device__ unsigned unit() const { return lane_ % 4; }

  __device__ void start(int tile) {
    const int slot = tile % kFoundTiles;
    barrier_wait(shared_address(&s_.located[slot]), tile / kFoundTiles & 1);
    const Found found = s_.found[slot][row()];
    if (unit() == 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(&s_.scales[tile % 2][row()])),
                   "l"(__cvta_generic_to_global(found.scale))
                   : "memory");
    from_ = found.payload + unit() * 16;
    there_ = found.payload != kAbsentRow.payload;
  }

  __device__ void load(int j) {
    // The last panel's halves the other way round in odd rows: else stores of neighbours would meet in the same banks.
    const unsigned odd = j < kCodeUnits ? 0 : row() % 2 * 64 ^ (j > kCodeUnits ? 64 : 0);
    const std::uint8_t* from = from_ + odd + min(j, kCodeUnits) * 64;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw_[j].x), "=r"(raw_[j].y), "=r"(raw_[j].z), "=r"(raw_[j].w)
                 : "l"(from));
  }

  /// Waits for all loads under way. Else the first use of each unit would: a warp has few counters of loads under way,
  /// so waiting for a unit means waiting for younger loads too, those of the next tile among them.
  __device__ void settle() const {
    unsigned any = 0;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) any |= raw_[j].x;
    branch_on(any);
  }

  /// Of the warp's rows.
  __device__ int exponent_of_rows(uint2 scales) const {
    return exponent_for_warp(top_of_codes(scales),
                             max(top_of_pairs(raw_[kCodeUnits]), top_of_pairs(raw_[kCodeUnits + 1])));
  }

  __device__ void convert(int j, std::uint32_t to, uint2 scales, int exponent) const {
    const uint4& raw = raw_[j];
    if (j < kCodeUnits) {
      const std::uint32_t factors = factors_of(scales, j, exponent);
      store_shared(to + codes_at_ + j * kPanelBytes, eight_codes(raw.x, raw.y, factors));
      store_shared(to + (codes_at_ ^ 16) + j * kPanelBytes, eight_codes(raw.z, raw.w, factors));
    } else {
      store_shared(to + (j == kCodeUnits ? tail_at_ : tail_at_ ^ 64), to_fp16(raw, power_of_two(-exponent)));
    }
  }

  // Without the fence that the multiplies need: it would wait for the loads under way. Their side has it.
  __device__ void announce(int stage, int half) {
    if (arrives_for_warp(lane() % 32)) barrier_arrive(shared_address(&s_.full[stage][half]));
  }

  Shared& s_;
  const unsigned lane_;
  std::uint32_t codes_at_, tail_at_;  // where it stores its units in a tile's first panel, and of the last one's first
  const std::uint8_t* from_ = kAbsentRow.payload;  // the row whose units are being loaded
  bool there_ = false;
  uint4 raw_[kUnits];
};

/// The same where two CTAs share the rows: each converts half of a tile's, and copies what it made into the
/// other's shared memory, whole panels of it at a time. Eight lanes share a row, 16 bytes of a panel each. The next
/// half is loaded while one is converted. Of a tile that is not the same for both, each converts its own half and then
/// the other.
/// What was stored becomes visible to copies and multiplies by fences of the few threads that copy and announce it,
/// after all have met: one of each thread before that would wait for the thread's loads under way (H200, 2026-11-16,
/// 8,320 rows: 1,024 neighbouring tokens 2,393 to 2,124 us, 128 tokens of 128 heads 571 to 517).
class PairLoader {
 public:
  __device__ PairLoader(Shared& s, int mate, std::uint32_t to_mate)
      : s_(s), to_mate_(to_mate), mate_(mate), row_(lane() / 8), unit_(lane() % 8) {}

  __device__ void run(int tiles) {
    if (tiles == 0) return;
    begin();
    for (int tile = 0; tile < tiles; ++tile) fill(tile, true, tile + 1 < tiles);
  }

  /// Loads the first tile.
  __device__ void begin() {
    start({0, mate_});
    load();
  }

  __device__ void fill(int tile, bool shared, bool is_next) {
    Lot lot{tile, mate_};
    if (!shared) {
      const Lot other{tile, mate_ ^ 1};
      fill(lot, false, false, other, true);
      lot = other;
    }
    fill(lot, shared, true, {tile + 1, mate_}, is_next);
  }

 private:
  static constexpr int kRows = kTile / 2, kCodePanels = kPanels - 1;
  static constexpr std::uint32_t kCopyBytes = kPanelBytes / 2;

  /// What is converted at a time.
  struct Lot {
    int tile, half;  // of its rows
  };

  __device__ static unsigned lane() { return threadIdx.x % kLoaders; }
  __device__ unsigned row(int half) const { return row_ + static_cast<unsigned>(half) * kRows; }

  __device__ void start(const Lot& lot) {
    const int slot = lot.tile % kFoundTiles;
    barrier_wait(shared_address(&s_.located[slot]), lot.tile / kFoundTiles & 1);
    const Found found = s_.found[slot][row(lot.half)];
    if (unit_ == 0)
      asm volatile(
          "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(&s_.scales[lot.tile % 2][row(lot.half)])),
          "l"(__cvta_generic_to_global(found.scale))
          : "memory");
    from_ = found.payload;
    there_ = found.payload != kAbsentRow.payload;
  }

  __device__ void load() {
#pragma unroll
    for (int panel = 0; panel < kCodePanels; ++panel)
      asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                   : "=r"(next_codes_[panel].x), "=r"(next_codes_[panel].y)
                   : "l"(from_ + panel * kTile + unit_ * 8));
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(next_tail_.x), "=r"(next_tail_.y), "=r"(next_tail_.z), "=r"(next_tail_.w)
                 : "l"(from_ + kCodePanels * kTile + unit_ * 16));
  }

  /// `done`: with the tile.
  __device__ void fill(const Lot& lot, bool shared, bool done, const Lot& next, bool is_next) {
    const int tile = lot.tile;
    const unsigned stage = static_cast<unsigned>(tile) % kStages, row = this->row(lot.half);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    const uint2 scales = *reinterpret_cast<const uint2*>(&s_.scales[tile % 2][row]);
    uint2 codes[kCodePanels];
    unsigned any = 0;
#pragma unroll
    for (int panel = 0; panel < kCodePanels; ++panel) {
      codes[panel] = next_codes_[panel];
      any |= codes[panel].x;
    }
    const uint4 tail = next_tail_;
    branch_on(any | tail.x);
    const int exponent = exponent_for_warp(top_of_codes(scales), top_of_pairs(tail));
    std::uint32_t there = __ballot_sync(kAllLanes, there_) & 0x01010101u;
    there = (there | there >> 7) & 0x00030003u;
    if (is_next) {
      start(next);
      load();
    }
    const std::uint32_t to = shared_address(s_.rows[stage]) + panel_offset(row, unit_);
    barrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) {
      Fours& fours = s_.fours[stage][lot.half];
      fours.exponents[row_ / 4] = static_cast<std::int8_t>(exponent);
      fours.there[row_ / 4] = static_cast<std::uint8_t>(there | there >> 14);
    }
    store_shared(to + kCodePanels * kPanelBytes, to_fp16(tail, power_of_two(-exponent)));
#pragma unroll
    for (int panel = kPanels / 2; panel < kCodePanels; ++panel)
      store_shared(to + panel * kPanelBytes,
                   eight_codes(codes[panel].x, codes[panel].y, factors_of(scales, panel, exponent)));
    if (done) hand_over(stage, 1, shared);
    barrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
#pragma unroll
    for (int panel = 0; panel < kPanels / 2; ++panel)
      store_shared(to + panel * kPanelBytes,
                   eight_codes(codes[panel].x, codes[panel].y, factors_of(scales, panel, exponent)));
    if (done) hand_over(stage, 0, shared);
  }

  /// To the multiplies here, and to the mate. The place is not written again before the mate has read what it got.
  __device__ void hand_over(int stage, int half, bool shared) const {
    constexpr unsigned kCopies = kPanels / 2;
    named_barrier(3, kLoaders);
    if (lane() <= kCopies) publish_to_mma();
    const std::uint32_t full = shared_address(&s_.full[stage][half]);
    const unsigned i = lane(), mine = static_cast<unsigned>(mate_);
    if (!shared) {
      if (arrives_for_group(i)) barrier_arrive(full);
      return;
    }
    if (i < kCopies)
      copy_to_mate(shared_address(s_.rows[stage]) + (half * kCopies + i) * kPanelBytes + mine * kCopyBytes, kCopyBytes,
                   full);
    if (i == kCopies && half == 1) copy_to_mate(shared_address(&s_.fours[stage][mine]), sizeof(Fours), full);
    if (i == 0)
      barrier_arrive_expecting(full, kCopies * kCopyBytes + (half == 1 ? sizeof(Fours) : 0));
    else if (arrives_for_group(i))
      barrier_arrive(full);
  }

  __device__ void copy_to_mate(std::uint32_t from, std::uint32_t bytes, std::uint32_t full) const {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     from + to_mate_),
                 "r"(from), "r"(bytes), "r"(full + to_mate_)
                 : "memory");
  }

  Shared& s_;
  const std::uint32_t to_mate_;
  const int mate_;
  const unsigned row_, unit_;  // row_: of a half
  const std::uint8_t* from_;
  bool there_;
  uint2 next_codes_[kCodePanels];  // of the tile that is being loaded
  uint4 next_tail_;
};

}  // namespace
}  // namespace kv4::cuda
