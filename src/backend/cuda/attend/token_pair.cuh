// Two neighbouring tokens, 64 heads each, by two CTAs of a cluster which share the conversion of rows, as
// those with other heads of one token do. Window rows stand in the order of position modulo the window, so that two
// tokens whose positions follow each other differ in one of them, and of the entries at most in the last. Tiles that
// are the same for both are shared. Each block converts others for itself, both halves one after the other: nothing is
// masked, and no token's tile ever holds a row that it does not see. For dispatch.cu alone.
//
// H200, 2026-11-16, 1,024 tokens of 64 heads: 1,152 rows 388 to 339 us, 8,320 rows 2,457 to 2,124.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/producer.cuh"

namespace kv4::cuda {
namespace {

/// A token's rows, with a place for each of the window's.
__device__ QueryRows ring_rows(const AttendParams& p, std::int64_t token) {
  QueryRows rows(p, token);
  if (!rows.at.padded()) rows.window = p.layer.window_tokens;
  return rows;
}

__device__ CommonTiles common_tiles(const QueryRows& one, const QueryRows& other) {
  const int apart = one.at.position - other.at.position, late = max(one.at.position, other.at.position);
  if (one.at.padded() || one.at.row != other.at.row || abs(apart) > 1) return {0};
  CommonTiles common;
  if (apart != 0 && one.window > 0) common.others = 0xFFFF0000u | static_cast<unsigned>(late % one.window / kTile + 1);
  if (one.entries != other.entries) {
    const auto last = static_cast<unsigned>(min(one.count(), other.count()) / kTile + 1);
    common.others = (common.others & 0xFFFFu) | last << 16;
  }
  return common;
}

/// Finds the rows of all rounds, as RoundFinder does; all rows of a tile, whoever converts them. What is known of a
/// round is kept in registers as far as entries need it: each look into shared memory waits behind the loaders' stores.
template <class NeighbourRounds>
class NeighbourFinder {
 public:
  __device__ NeighbourFinder(const AttendParams& p, Shared& s, const NeighbourRounds& rounds)
      : p_(p), s_(s), rounds_(rounds) {}

  __device__ void begin() {
    if (!takes_part()) return;
    enter(0);
    learn();
    for (int tile = 0; tile < kLead; ++tile) advance(tile - kLead);
  }

  /// When `tile` has been filled.
  __device__ void advance(int tile) {
    if (!takes_part() || tiles_ == kEnded) return;
    locate(tile + kLead);
    if (++tile_ == tiles_) enter(round_ + 1);
    if (tiles_ != kEnded) learn();
  }

 private:
  static constexpr int kLead = kFoundTiles - 1, kEnded = -1;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kGroup; }
  __device__ static bool takes_part() { return lane() < kTile; }
  __device__ int row() const { return tile_ * kTile + lane(); }

  __device__ void enter(int round) {
    round_ = round;
    tile_ = 0;
    tiles_ = kEnded;
    if (round >= rounds_.count()) return;
    if (lane() < 32) {
      rounds_.learn_more(round, lane());
      __syncwarp();
    }
    const Round& r = rounds_.at(round);
    tiles_ = r.tiles;
    window_ = r.rows.window;
    count_ = r.rows.count();
    table_row_ = r.rows.at.row;
  }
  __device__ void learn() {
    if (row() < window_) {
      const QueryRows& rows = rounds_.at(round_).rows;
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
      place = rounds_.at(round_).rows.place(p_, row(), key_, block_);
    else if (block_ >= 0)
      place = place_of(p_.layer.kinds[0].page, block_, key_ % p_.layer.kinds[0].rows_per_block);
    Found found{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) found = {place.payload, place.scale};
    s_.found[tile % kFoundTiles][lane()] = found;
    barrier_arrive(shared_address(&s_.located[tile % kFoundTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const NeighbourRounds& rounds_;
  int round_, tile_, tiles_, window_, count_, table_row_;  // of what is to be located next
  int key_, block_;
};

}  // namespace
}  // namespace kv4::cuda
