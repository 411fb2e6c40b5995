// A 2-CTA pair takes two consecutive tokens, 64 heads each. The CTAs share the conversion of rows, as those with
// different heads of one token do. Window rows are ordered by position modulo the window, so that two tokens with
// consecutive positions differ in one window row, and among the entries at most in the last. The pair shares the tiles
// that are the same for both tokens. Each CTA converts a tile that differs by itself, both halves one after the other:
// no row is masked, and no token's tile ever contains a row that the token does not see.
//
// H200, 2026-11-16, 1,024 tokens of 64 heads: 1,152 rows 388 to 339 us, 8,320 rows 2,457 to 2,124.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/producer.cuh"

namespace kv4::cuda {
namespace {

/// A token's rows, with a place for each row of the window.
__device__ QueryRows ring_rows(const AttendParams& p, std::int64_t token) {
  QueryRows rows(p, token);
  if (!rows.at.padded()) rows.window = p.layer.window_tokens;
  return rows;
}

__device__ CommonTiles common_tiles(const QueryRows& one, const QueryRows& other) {
  const int apart = one.at.position - other.at.position, late = max(one.at.position, other.at.position);
  if (one.at.padded() || one.at.row != other.at.row || abs(apart) > 1) return {0};
  CommonTiles common;
  if (apart != 0 && one.window > 0)
    common.differing = 0xFFFF0000u | static_cast<unsigned>(late % one.window / kTile + 1);
  if (one.entries != other.entries) {
    const auto last = static_cast<unsigned>(min(one.count(), other.count()) / kTile + 1);
    common.differing = (common.differing & 0xFFFFu) | last << 16;
  }
  return common;
}

/// Locates the rows of all work tiles, as PersistentLocator does; it locates all rows of a tile, including those that
/// the peer converts. The facts about a work tile that entries need are kept in registers: each read of shared memory
/// waits behind the producers' stores.
template <class Scheduler>
class TokenPairLocator {
 public:
  __device__ TokenPairLocator(const AttendParams& p, Shared& s, const Scheduler& scheduler)
      : p_(p), s_(s), scheduler_(scheduler) {}

  __device__ void begin() {
    if (!takes_part()) return;
    enter(0);
    find_block();
    for (int tile = 0; tile < kLead; ++tile) advance(tile - kLead);
  }

  /// Called when `tile` has been filled.
  __device__ void advance(int tile) {
    if (!takes_part() || tiles_ == kEnded) return;
    locate(tile + kLead);
    if (++tile_ == tiles_) enter(work_ + 1);
    if (tiles_ != kEnded) find_block();
  }

 private:
  static constexpr int kLead = kAddressTiles - 1, kEnded = -1;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kWarpgroupThreads; }
  __device__ static bool takes_part() { return lane() < kTile; }
  __device__ int row() const { return tile_ * kTile + lane(); }

  __device__ void enter(int work) {
    work_ = work;
    tile_ = 0;
    tiles_ = kEnded;
    if (work >= scheduler_.count()) return;
    if (lane() < 32) {
      scheduler_.schedule_more(work, lane());
      __syncwarp();
    }
    const WorkTile& r = scheduler_.at(work);
    tiles_ = r.tiles;
    window_ = r.rows.window;
    count_ = r.rows.count();
    table_row_ = r.rows.at.row;
  }
  __device__ void find_block() {
    if (row() < window_) {
      const QueryRows& rows = scheduler_.at(work_).rows;
      key_ = RingSlots(p_, rows).position(row());
      block_ = rows.block(p_, row(), key_);
      return;
    }
    key_ = row() - window_;
    block_ = -1;
    if (row() < count_)
      block_ = p_.step.block_table[std::int64_t{table_row_} * p_.step.blocks_per_request +
                                   key_ / p_.layer.kinds[0].rows_per_block];
  }
  __device__ void locate(int tile) {
    RowPlace place;
    if (row() < window_)
      place = scheduler_.at(work_).rows.place(p_, row(), key_, block_);
    else if (block_ >= 0)
      place = place_of(p_.layer.kinds[0].page, block_, key_ % p_.layer.kinds[0].rows_per_block);
    RowAddress address{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) address = {place.payload, place.scale};
    s_.addresses[tile % kAddressTiles][lane()] = address;
    barrier_arrive(shared_address(&s_.located[tile % kAddressTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const Scheduler& scheduler_;
  int work_, tile_, tiles_, window_, count_, table_row_;  // of the row that is located next
  int key_, block_;
};

}  // namespace
}  // namespace kv4::cuda
