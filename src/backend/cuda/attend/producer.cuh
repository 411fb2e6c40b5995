// Dequantising producers: they load raw rows into registers and store them as fp16 in the shared KV tiles.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/bulk_copy.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/registers.cuh"

namespace kv4::cuda::attend_wgmma {

/// Stands in for a row that does not exist. A conditional load would be waited for where it is issued, so the kernels
/// load this row instead; its P is 0. Its scales and values are the smallest that need no exponent (kLeastPlainTop), so
/// the rows beside it determine the exponent.
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

/// Brings a row into L2: the producers' registers hold one tile, which is less than the bytes that must be in flight.
__device__ inline void prefetch_row(const RowAddress& row) {
#pragma unroll
  for (int at = 0; at < kWidth + kTail; at += kLine) prefetch_l2(row.payload + at);
  prefetch_l2(row.scale);
}

/// A row's eighth scale is padding.
__device__ inline int top_of_codes(uint2 scales) {
  constexpr std::uint32_t kEvenBytes = 0x00FF00FFu;
  constexpr int kCodeTop = 9;  // codes are below 2^9
  const std::uint32_t amax = larger_halves(larger_halves(scales.x & kEvenBytes, scales.x >> 8 & kEvenBytes),
                                           larger_halves(scales.y & kEvenBytes, scales.y >> 8 & 0xFFu));
  return larger_half(amax) + kCodeTop;
}

/// The common exponent of a warp's rows.
__device__ inline int exponent_for_warp(int codes_top, int tail_top) {
  const auto is_plain = [](int top) { return top >= kLeastPlainTop && top <= kTopInFp16; };
  if (__all_sync(kAllLanes, is_plain(codes_top) && is_plain(tail_top))) return 0;
  return exponent_of(__reduce_max_sync(kAllLanes, max(codes_top, tail_top)));
}

/// The factor of a panel's codes, as fp16 twice.
__device__ inline std::uint32_t factors_of(uint2 scales, int panel, int exponent) {
  const std::uint32_t biased = (panel < 4 ? scales.x : scales.y) >> (panel % 4 * 8) & 0xFFu;
  const float factor = codec::bits_float(static_cast<std::uint32_t>(max(static_cast<int>(biased) - exponent, 0)) << 23);
  return fp16_pair(factor, factor);
}

__device__ inline uint4 eight_codes(std::uint32_t low, std::uint32_t high, std::uint32_t factors) {
  std::uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair = (i < 2 ? low : high) >> (i % 2 * 16);
    out[i] = scaled_fp16_pair_of_e4m3(static_cast<std::uint16_t>(pair), factors);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Four lanes share a row; a lane has 16 of every 64 bytes. There are 7 chunks of codes, one of each scale's panel, and
// 2 chunks of bf16. The right panels take 5 of the chunks.
inline constexpr int kCodeChunks = 7, kChunks = 9, kRightChunks = 5;

/// The order of conversion: the right panels first, because they are free first, and the bf16 chunks first of these.
__device__ constexpr int chunk_at(int i) {
  return i < 2 ? kCodeChunks + i : i < kRightChunks ? i + 2 : kChunks - 1 - i;
}

/// One bit for each row of a warp in which four lanes share a row: bits 0 to 3 for four rows, 16 to 19 for the others.
__device__ inline unsigned quads_of_four_lanes(bool is_present) {
  unsigned rows = __ballot_sync(kAllLanes, is_present) & 0x11111111u;
  rows = (rows | rows >> 3) & 0x03030303u;
  return (rows | rows >> 6) & 0x000F000Fu;
}

/// Stores the facts about a warp's eight rows; warp: of the four whose rows are in `quads`; present: as returned by
/// quads_of_four_lanes.
__device__ inline void store_quads(RowQuads& quads, unsigned warp, int exponent, unsigned present) {
  *reinterpret_cast<std::uint16_t*>(&quads.exponents[warp * 2]) =
      static_cast<std::uint16_t>((exponent & 0xFF) * 0x0101);
  *reinterpret_cast<std::uint16_t*>(&quads.present[warp * 2]) = static_cast<std::uint16_t>(present | present >> 8);
}

__device__ inline void copy_scales(std::uint64_t& to, const std::uint8_t* from) {
  copy_async<8>(shared_address(&to), from);
}

/// Loads chunk j of a row. Odd rows swap the halves of the last panel: otherwise stores of adjacent rows would meet in
/// the same banks. row(): the row, needed for bf16 chunks only.
template <class Row>
__device__ void load_chunk(uint4& raw, const std::uint8_t* from, int j, Row row) {
  const unsigned odd = j < kCodeChunks ? 0 : row() % 2 * 64 ^ (j > kCodeChunks ? 64 : 0);
  raw = load16_no_l1(from + odd + min(j, kCodeChunks) * 64);
}

/// Stores chunk j of codes; low, high: the addresses of its two halves in the first panel.
__device__ inline void store_codes(std::uint32_t low, std::uint32_t high, int j, const uint4& raw, uint2 scales,
                                   int exponent) {
  const std::uint32_t factors = factors_of(scales, j, exponent);
  store_shared16(low + j * kPanelBytes, eight_codes(raw.x, raw.y, factors));
  store_shared16(high + j * kPanelBytes, eight_codes(raw.z, raw.w, factors));
}

/// Keeps the whole tile in registers.
class Producer {
 public:
  __device__ explicit Producer(Shared& s) : s_(s), lane_(static_cast<unsigned>(thread_here()) % kProducerThreads) {
    const unsigned row = lane_ / 4, chunk = lane_ % 4;
    codes_at_ = panel_offset(row, 2 * chunk);
    tail_at_ = kCodeChunks * kPanelBytes + panel_offset(row, row % 2 * 4 + chunk);
  }

  __device__ void run(int tiles) {
    begin(tiles > 0);
    for (int tile = 0; tile < tiles; ++tile) fill(tile, tile + 1 < tiles);
  }

  /// Loads the first tile, if there is one.
  __device__ void begin(bool has_tile) {
    if (has_tile) start(0);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) load(chunk_at(i));
  }

  /// Converts the loaded tile, and loads the next tile into the same registers.
  __device__ void fill(int tile, bool is_next) {
    const unsigned stage = static_cast<unsigned>(tile) % kStages, warp = lane() / 32;
    wait_for_all_copies();
    __syncwarp();
    const uint2 scales = *reinterpret_cast<const uint2*>(&s_.scales[tile % 2][row()]);
    const unsigned present = quads_of_four_lanes(there_);
    if (is_next) start(tile + 1);
    wait_for_loads();
    const int exponent = exponent_of_rows(scales);
    mbarrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) store_quads(s_.quads[stage][warp / 4], warp % 4, exponent, present);
#pragma unroll
    for (int i = 0; i < kRightChunks; ++i) {
      convert(chunk_at(i), shared_address(s_.rows[stage]), scales, exponent);
      load(chunk_at(i));
    }
    announce(stage, 1);
    mbarrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
    // The softmax warpgroup waits for these chunks. Loads come after them: conversions share a counter with loads in
    // flight.
#pragma unroll
    for (int i = kRightChunks; i < kChunks; ++i) {
      if (i == kRightChunks + 2) branch_on_ordered(scales.x);  // there are no registers for three chunks at once
      convert(chunk_at(i), shared_address(s_.rows[stage]), scales, exponent);
    }
    announce(stage, 0);
#pragma unroll
    for (int i = kRightChunks; i < kChunks; ++i) load(chunk_at(i));
  }

 private:
  // Unsigned: this saves instructions and registers, and the warp has no register to spare.
  __device__ unsigned lane() const { return lane_; }
  __device__ unsigned row() const { return lane_ / 4; }
  __device__ unsigned chunk() const { return lane_ % 4; }

  __device__ void start(int tile) {
    const int slot = tile % kAddressTiles;
    mbarrier_wait(shared_address(&s_.located[slot]), tile / kAddressTiles & 1);
    const RowAddress address = s_.addresses[slot][row()];
    if (chunk() == 0) copy_scales(s_.scales[tile % 2][row()], address.scale);
    from_ = address.payload + chunk() * 16;
    there_ = address.payload != kAbsentRow.payload;
  }

  __device__ void load(int j) {
    load_chunk(raw_[j], from_, j, [this] { return row(); });
  }

  /// Waits for all loads in flight. Otherwise the first use of each chunk would wait: a warp has few counters of loads
  /// in flight, so a wait for one chunk also waits for younger loads, among them those of the next tile.
  __device__ void wait_for_loads() const {
    unsigned any = 0;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) any |= raw_[j].x;
    branch_on_ordered(any);
  }

  /// The exponent that the warp's rows share.
  __device__ int exponent_of_rows(uint2 scales) const {
    return exponent_for_warp(top_of_codes(scales),
                             max(top_of_pairs(raw_[kCodeChunks]), top_of_pairs(raw_[kCodeChunks + 1])));
  }

  __device__ void convert(int j, std::uint32_t to, uint2 scales, int exponent) const {
    const uint4& raw = raw_[j];
    if (j < kCodeChunks) {
      store_codes(to + codes_at_, to + (codes_at_ ^ 16), j, raw, scales, exponent);
    } else {
      store_shared16(to + (j == kCodeChunks ? tail_at_ : tail_at_ ^ 64), to_fp16(raw, power_of_two(-exponent)));
    }
  }

  // Without the fence that wgmma needs: it would wait for the loads in flight. The consumers issue it.
  __device__ void announce(int stage, int half) {
    if (arrives_for_warp(lane() % 32)) mbarrier_arrive(shared_address(&s_.full[stage][half]));
  }

  Shared& s_;
  const unsigned lane_;
  // This thread's places in a tile: for codes in the first panel, and for the first bf16 chunk in the last panel.
  std::uint32_t codes_at_, tail_at_;
  const std::uint8_t* from_ = kAbsentRow.payload;  // the row whose chunks are being loaded
  bool there_ = false;
  uint4 raw_[kChunks];
};

/// The producer of a 2-CTA pair that shares the rows. Each CTA converts half of a tile's rows and copies the result
/// into the peer's shared memory, whole panels of the half at a time. Eight lanes share a row, 16 bytes of each panel
/// per lane. The next half is loaded while one is converted. If a tile differs between the two CTAs, each CTA converts
/// its own half and then the other half.
/// The few threads that copy and announce the tile issue the fences that make the stores visible to copies and
/// multiplies, after a barrier of all producers. A fence in each thread before that barrier would wait for the thread's
/// loads in flight (H200, 2026-11-16, 8,320 rows: 1,024 tokens in pairs 2,393 to 2,124 us, 128 tokens of 128 heads 571
/// to 517).
class CtaPairProducer {
 public:
  __device__ CtaPairProducer(Shared& s, int pair_rank, std::uint32_t to_peer)
      : s_(s), to_peer_(to_peer), pair_rank_(pair_rank), row_(lane() / 8), chunk_(lane() % 8) {}

  __device__ void run(int tiles) {
    if (tiles == 0) return;
    begin();
    for (int tile = 0; tile < tiles; ++tile) fill(tile, true, tile + 1 < tiles);
  }

  /// Loads the first tile.
  __device__ void begin() {
    start({0, pair_rank_});
    load();
  }

  __device__ void fill(int tile, bool shared, bool is_next) {
    HalfTile half_tile{tile, pair_rank_};
    if (!shared) {
      const HalfTile other{tile, pair_rank_ ^ 1};
      fill(half_tile, false, false, other, true);
      half_tile = other;
    }
    fill(half_tile, shared, true, {tile + 1, pair_rank_}, is_next);
  }

 private:
  static constexpr int kRows = kTile / 2, kCodePanels = kPanels - 1;
  static constexpr std::uint32_t kCopyBytes = kPanelBytes / 2;

  /// The rows that are converted at a time.
  struct HalfTile {
    int tile, half;  // half of the tile's rows
  };

  __device__ static unsigned lane() { return threadIdx.x % kProducerThreads; }
  __device__ unsigned row(int half) const { return row_ + static_cast<unsigned>(half) * kRows; }

  __device__ void start(const HalfTile& half_tile) {
    const int slot = half_tile.tile % kAddressTiles;
    mbarrier_wait(shared_address(&s_.located[slot]), half_tile.tile / kAddressTiles & 1);
    const RowAddress address = s_.addresses[slot][row(half_tile.half)];
    if (chunk_ == 0) copy_scales(s_.scales[half_tile.tile % 2][row(half_tile.half)], address.scale);
    from_ = address.payload;
    there_ = address.payload != kAbsentRow.payload;
  }

  __device__ void load() {
#pragma unroll
    for (int panel = 0; panel < kCodePanels; ++panel)
      next_codes_[panel] = load8_no_l1(from_ + panel * kTile + chunk_ * 8);
    next_tail_ = load16_no_l1(from_ + kCodePanels * kTile + chunk_ * 16);
  }

  /// `done`: the tile is complete.
  __device__ void fill(const HalfTile& half_tile, bool shared, bool done, const HalfTile& next, bool is_next) {
    const int tile = half_tile.tile;
    const unsigned stage = static_cast<unsigned>(tile) % kStages, row = this->row(half_tile.half);
    wait_for_all_copies();
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
    branch_on_ordered(any | tail.x);
    const int exponent = exponent_for_warp(top_of_codes(scales), top_of_pairs(tail));
    std::uint32_t there = __ballot_sync(kAllLanes, there_) & 0x01010101u;
    there = (there | there >> 7) & 0x00030003u;
    if (is_next) {
      start(next);
      load();
    }
    const std::uint32_t to = shared_address(s_.rows[stage]) + panel_offset(row, chunk_);
    mbarrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) {
      RowQuads& quads = s_.quads[stage][half_tile.half];
      quads.exponents[row_ / 4] = static_cast<std::int8_t>(exponent);
      quads.present[row_ / 4] = static_cast<std::uint8_t>(there | there >> 14);
    }
    store_shared16(to + kCodePanels * kPanelBytes, to_fp16(tail, power_of_two(-exponent)));
#pragma unroll
    for (int panel = kPanels / 2; panel < kCodePanels; ++panel)
      store_shared16(to + panel * kPanelBytes,
                     eight_codes(codes[panel].x, codes[panel].y, factors_of(scales, panel, exponent)));
    if (done) publish_half(stage, 1, shared);
    mbarrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
#pragma unroll
    for (int panel = 0; panel < kPanels / 2; ++panel)
      store_shared16(to + panel * kPanelBytes,
                     eight_codes(codes[panel].x, codes[panel].y, factors_of(scales, panel, exponent)));
    if (done) publish_half(stage, 0, shared);
  }

  /// Publishes a half for the multiplies of this CTA and for the peer. The place is not overwritten before the peer has
  /// read its copy.
  __device__ void publish_half(int stage, int half, bool shared) const {
    constexpr unsigned kCopies = kPanels / 2;
    named_barrier_sync(3, kProducerThreads);
    if (lane() <= kCopies) fence_async_proxy();
    const std::uint32_t full = shared_address(&s_.full[stage][half]);
    const unsigned i = lane(), mine = static_cast<unsigned>(pair_rank_);
    if (!shared) {
      if (arrives_for_group(i)) mbarrier_arrive(full);
      return;
    }
    if (i < kCopies)
      copy_to_peer(shared_address(s_.rows[stage]) + (half * kCopies + i) * kPanelBytes + mine * kCopyBytes, kCopyBytes,
                   full);
    if (i == kCopies && half == 1) copy_to_peer(shared_address(&s_.quads[stage][mine]), sizeof(RowQuads), full);
    if (i == 0)
      mbarrier_arrive_expect_tx(full, kCopies * kCopyBytes + (half == 1 ? sizeof(RowQuads) : 0));
    else if (arrives_for_group(i))
      mbarrier_arrive(full);
  }

  __device__ void copy_to_peer(std::uint32_t from, std::uint32_t bytes, std::uint32_t full) const {
    bulk_copy_to_cta(from + to_peer_, from, bytes, full + to_peer_);
  }

  Shared& s_;
  const std::uint32_t to_peer_;
  const int pair_rank_;
  const unsigned row_, chunk_;  // row_: within a half tile
  const std::uint8_t* from_;
  bool there_;
  uint2 next_codes_[kCodePanels];  // of the tile that is being loaded
  uint4 next_tail_;
};

}  // namespace kv4::cuda::attend_wgmma
