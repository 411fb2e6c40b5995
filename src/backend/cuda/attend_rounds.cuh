// Many tokens of 64 heads, as in a prefill: as many thread blocks as run at once take tokens in turn, so that one
// token's end and the next one's begin overlap. Tiles are counted through all rounds of a thread block. The finder and
// the loaders go on into the next round's rows while scorer and adder are at the last tiles of the one before; the
// loaders bring the next queries once the last scores are there, while those store their output. For attend.cu alone.
//
// H200, 2026-11-16, 1,024 tokens: 128 rows 104 to 78 us, 640 chosen rows 257 to 243, 8,320 rows 2,492 to 2,467. What is
// known of a round is read once per tile: each look into shared memory waits behind the loaders' stores.
#pragma once

#include "backend/cuda/attend_ahead.cuh"
#include "backend/cuda/attend_block.cuh"
#include "backend/cuda/attend_end.cuh"
#include "backend/cuda/attend_load.cuh"
#include "backend/cuda/attend_multiply.cuh"
#include "backend/cuda/attend_neighbours.cuh"

namespace kv4::cuda {
namespace {

/// What a thread block does, or two that have neighbouring tokens, round by round. Half of Shared::rounds is learned at
/// a time, when nobody is left in the half before: the finder is at most kSpread rounds ahead of others.
template <int kMates>
class Rounds {
 public:
  __device__ Rounds(const AttendParams& p, Shared& s, int head_tiles) : p_(p), s_(s), head_tiles_(head_tiles) {}

  __device__ int count() const { return s_.num_rounds; }  // there are no registers to keep it in
  __device__ const Round& at(int round) const { return s_.rounds[round % kRounds]; }
  __device__ int tiles(int round) const { return at(round).tiles; }
  /// In registers. By whole words: an assignment would be one of bytes.
  __device__ Round copy_of(int round) const {
    const auto* from = reinterpret_cast<const uint4*>(&at(round));
    const uint4 a = from[0], b = from[1], c = from[2], d = from[3];
    Round x;
    x.rows.at = {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z), static_cast<int>(a.w),
                 static_cast<int>(b.x), static_cast<int>(b.y), static_cast<int>(b.z), static_cast<int>(b.w)};
    x.rows.first = static_cast<int>(c.x);
    x.rows.begin = static_cast<int>(c.y);
    x.rows.window = static_cast<int>(c.z);
    x.rows.entries = static_cast<int>(c.w);
    x.token = static_cast<int>(d.x);
    x.first_head = static_cast<int>(d.y);
    x.tiles = static_cast<int>(d.z);
    x.common = {d.w};
    return x;
  }

  /// A thread per round.
  __device__ void learn_first() const {
    const int units = (p_.step.num_tokens + kMates - 1) / kMates * head_tiles_;
    const int count = (units - first_unit() + at_once() - 1) / at_once();
    if (threadIdx.x == 0) s_.num_rounds = count;
    if (static_cast<int>(threadIdx.x) < min(kHalf, count)) learn(static_cast<int>(threadIdx.x));
  }
  /// By a warp that is about to find rows of `round`.
  __device__ void learn_more(int round, int lane) const {
    const int next = round - kSpread + kHalf + lane;
    if (round % kHalf == kSpread && lane < kHalf && next < count()) learn(next);
  }

 private:
  static constexpr int kHalf = kRounds / 2, kSpread = 8;
  static_assert(kSpread < kHalf && kFoundTiles + 3 < kSpread);  // key, block and end: three more

  __device__ static int first_unit() { return static_cast<int>(blockIdx.x) / kMates; }
  __device__ static int at_once() { return static_cast<int>(gridDim.x) / kMates; }

  __device__ void learn(int round) const {
    const int unit = first_unit() + round * at_once(), first = unit / head_tiles_ * kMates;
    Round& to = s_.rounds[round % kRounds];
    to.first_head = unit % head_tiles_ * kTile;
    if constexpr (kMates == 1) {
      to.token = first;
      to.rows = QueryRows(p_, first);
      to.tiles = tiles_of(to.rows.count());
    } else {
      const int last = p_.step.num_tokens - 1, mate = static_cast<int>(blockIdx.x) % kMates;
      to.token = min(first + mate, last);
      to.rows = ring_rows(p_, to.token);
      const QueryRows others = ring_rows(p_, min(first + (mate ^ 1), last));
      to.tiles = tiles_of(max(to.rows.count(), others.count()));
      to.common = common_tiles(to.rows, others);
    }
  }
  __device__ static int tiles_of(int rows) { return max((rows + kTile - 1) / kTile, 1); }

  const AttendParams& p_;
  Shared& s_;
  const int head_tiles_;
};

/// Finder through all rounds.
class RoundFinder {
 public:
  __device__ RoundFinder(const AttendParams& p, Shared& s, const Rounds<1>& rounds, bool fetches)
      : p_(p), s_(s), rounds_(rounds), fetches_(fetches) {}

  __device__ void begin() {
    if (!takes_part()) return;
    Place at[kLead + 2];
    int keys[kLead + 2], blocks[kLead + 1];
    at[0] = {0, 0};
#pragma unroll
    for (int i = 1; i < kLead + 2; ++i) at[i] = after(at[i - 1], rounds_.at(at[i - 1].round));
#pragma unroll
    for (int i = 0; i < kLead + 2; ++i) keys[i] = key(at[i], rounds_.at(at[i].round));
#pragma unroll
    for (int i = 0; i < kLead + 1; ++i) blocks[i] = block(at[i], rounds_.at(at[i].round), keys[i]);
#pragma unroll
    for (int i = 0; i < kLead; ++i) locate(i, at[i], rounds_.at(at[i].round), keys[i], blocks[i]);
    at_ = at[kLead];
    key_ = keys[kLead];
    block_ = blocks[kLead];
    next_key_ = keys[kLead + 1];
  }

  /// When `tile` has been filled. What is known of the round is read once: each look into shared memory waits behind
  /// the loaders' stores. Tiles rarely lie in different rounds.
  __device__ void advance(int tile) {
    if (!takes_part()) return;
    Round round = rounds_.copy_of(at_.round);
    locate(tile + kLead, at_, round, key_, block_);
    at_ = after(at_, round);
    if (at_.tile == 0) round = rounds_.copy_of(at_.round);
    key_ = next_key_;
    block_ = block(at_, round, key_);
    const Place next = after(at_, round);
    if (next.tile == 0) {
      if (lane() < 32) {
        rounds_.learn_more(next.round, lane());
        __syncwarp();
      }
      round = rounds_.copy_of(next.round);
    }
    next_key_ = key(next, round);
  }

 private:
  static constexpr int kLead = kFoundTiles - 1;

  struct Place {
    int round, tile;  // of the round
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kGroup; }
  __device__ static bool takes_part() { return lane() < kTile; }
  __device__ static int row(const Place& at) { return at.tile * kTile + lane(); }
  __device__ bool ended(const Place& at) const { return at.round >= rounds_.count(); }

  /// Past the end, rounds go on, a tile each.
  __device__ Place after(const Place& at, const Round& round) const {
    return !ended(at) && at.tile + 1 < round.tiles ? Place{at.round, at.tile + 1} : Place{at.round + 1, 0};
  }
  __device__ int key(const Place& at, const Round& round) const {
    return ended(at) ? -1 : round.rows.key(p_, round.token, row(at));
  }
  __device__ int block(const Place& at, const Round& round, int key) const {
    return ended(at) ? -1 : round.rows.block(p_, row(at), key);
  }
  __device__ void locate(int tile, const Place& at, const Round& round, int key, int block) {
    if (ended(at)) return;
    const RowPlace place = round.rows.place(p_, row(at), key, block);
    Found found{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) {
      found = {place.payload, place.scale};
      if (fetches_) prefetch(found);
    }
    s_.found[tile % kFoundTiles][lane()] = found;
    barrier_arrive(shared_address(&s_.located[tile % kFoundTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const Rounds<1>& rounds_;
  const bool fetches_;
  Place at_;  // of the rows that are to be located next; there are no registers for later ones
  int key_, block_, next_key_;
};

/// Scorer (kGroupIndex 0) or adder (1).
template <int kGroupIndex, int kMates, class RowFinder>
__device__ void consume_rounds(const AttendParams& p, Shared& s, const Rounds<kMates>& rounds, RowFinder& finder,
                               std::uint32_t to_mate) {
  constexpr int kPanel = kGroupIndex * kPanels / 2;
  named_barrier(1, kThreads);  // the first queries are in place
  for (int round = 0, tile = 0; round < rounds.count(); ++round) {
    const int end = tile + rounds.tiles(round);
    float o[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) o[i] = 0.0f;
    if constexpr (kGroupIndex == 0) {
      if (round > 0) barrier_wait(shared_address(&s.queries_there), (round - 1) & 1);
      Scorer scorer(p, s);
      scorer.template run<(kMates > 1), true>(o, tile, end, kPanel, to_mate);
      for (int half = 0; half < 2; ++half) {
        const Stats mine = scorer.stats(half);
        if (quad_of_thread() == 0) s.round_stats[round % 2][head_of_thread() + 8 * half] = mine;
      }
    } else {
      run_adder<(kMates > 1)>(o, s, finder, tile, end, kPanel, to_mate);
    }
    named_barrier(1, 2 * kGroup);
    const Job job(rounds.at(round), round);
    const int head = head_of_thread();
    scale_heads(o, factor_of(s, job, head, 0), factor_of(s, job, head + 8, 0));
    if (kGroupIndex == 0) store_lse(p, s, job);
    if (kGroupIndex == 1) turn_back_last(p, job, o);
    store_output(p, job, o, kPanel * kTile);
    tile = end;
  }
}

/// The queries of a round, after its first tile has been filled: scorer and adder are at the round before.
template <int kMates>
__device__ void renew_queries(const AttendParams& p, Shared& s, const Rounds<kMates>& rounds, int round) {
  if (round > 0) {
    const Job job(rounds.at(round), round);
    const Queries<kLoaderWarps, 2> queries(p, s, job);
    barrier_wait(shared_address(&s.queries_used), (round - 1) & 1);
    queries.begin();
    queries.finish();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&s.queries_there));
  }
  if (round + 1 == rounds.count()) return;
  const Round& next = rounds.at(round + 1);
  const auto* q = static_cast<const std::uint8_t*>(p.q.data) +
                  (std::int64_t{next.token} * p.q.row_stride + next.first_head * kWidth) * 2;
  const int bytes = min(kTile, p.num_heads - next.first_head) * kWidth * 2;
  const int line = thread_here() % kLoaders * kLine;
  if (line < bytes) fetch(q + line);
  if (line + kLoaders * kLine < bytes) fetch(q + line + kLoaders * kLine);
}

__device__ void load_rounds(const AttendParams& p, Shared& s, const Rounds<1>& rounds) {
  Loader<kRoundStagedUnits> loader(s);
  loader.begin(true);
  for (int round = 0, tile = 0; round < rounds.count(); ++round) {
    const int first = tile, end = tile + rounds.tiles(round);
    for (; tile < end; ++tile) {
      loader.fill(tile, tile + 1 < end || round + 1 < rounds.count());
      if (tile == first) renew_queries(p, s, rounds, round);
    }
  }
}

/// Of two thread blocks that have neighbouring tokens.
__device__ void load_neighbours(const AttendParams& p, Shared& s, const Rounds<2>& rounds, int mate,
                                std::uint32_t to_mate) {
  PairLoader loader(s, mate, to_mate);
  loader.begin();
  for (int round = 0, tile = 0; round < rounds.count(); ++round) {
    const int first = tile, end = tile + rounds.tiles(round);
    const CommonTiles common = rounds.at(round).common;
    for (; tile < end; ++tile) {
      loader.fill(tile, common.has(tile - first), tile + 1 < end || round + 1 < rounds.count());
      if (tile == first) renew_queries(p, s, rounds, round);
    }
  }
}

}  // namespace
}  // namespace kv4::cuda
