// Many tokens of 64 heads, as in a prefill: as many CTAs as run at once take tokens in turn, so that one
// token's end and the next one's begin overlap. Tiles are counted through all rounds of a CTA. The loaders,
// who find their rows themselves, go on into the next round's while the consumers are at the last tiles of the one
// before; they bring the next queries once the last scores are there, while the consumers store their output. The
// consumers are alike (ping_pong.cuh), which leaves 64 registers to a loader's thread: the left panels' raw rows
// wait in shared memory. For dispatch.cu alone.
//
// H200, 2026-11-16, 1,024 tokens of 640 chosen rows: a CTA per token 257 us, in turn with scorer and adder
// 241, with consumers alike 213 (docs/performance.md). Nobody is busy all the time: a tile goes through loaders,
// scores, weights and values in two stages, and what loaders store waits behind multiplies that read shared memory. A
// register that is spilled comes back behind all loads under way, 350 clocks of a tile's 4,100.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/ping_pong.cuh"
#include "backend/cuda/attend/producer.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/attend/token_pair.cuh"

namespace kv4::cuda {
namespace {

/// What a CTA does, or two that have neighbouring tokens, round by round. Half of Shared::rounds is learned at
/// a time, when nobody is left in the half before and before anybody looks for what is in the next.
template <int kMates>
class Rounds {
 public:
  __device__ Rounds(const AttendParams& p, Shared& s, int head_tiles) : p_(p), s_(s), head_tiles_(head_tiles) {}

  __device__ int count() const { return s_.num_rounds; }  // there are no registers to keep it in
  __device__ const Round& at(int round) const { return s_.rounds[round % kRounds]; }
  __device__ int tiles(int round) const { return at(round).tiles; }
  /// In registers, by whole words: each look into shared memory waits behind the loaders' stores.
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
  /// By a warp of the loaders that is about to fill the first tile of `round`: the others and the consumers are at most
  /// three tiles away, and rows are found up to seven tiles ahead. Of neighbours by a warp that is about to find rows
  /// of it, which is ahead of all others.
  __device__ void learn_more(int round, int lane) const {
    const int next = round - kSpread + kHalf + lane;
    if (round % kHalf == kSpread && lane < kHalf && next < count()) learn(next);
  }

 private:
  static constexpr int kHalf = kRounds / 2, kSpread = kMates == 1 ? 3 : 8;
  static_assert(kMates == 1 ? 2 * kSpread + 2 * kFoundTiles - 1 <= kHalf
                            : kSpread < kHalf && kFoundTiles + 3 < kSpread);  // key, block and end: three more

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

/// Finds rows, through all rounds: a loader's lane finds one for every four tiles, of the row that it has a part of.
class RoundFinder {
 public:
  __device__ RoundFinder(const AttendParams& p, Shared& s, const Rounds<1>& rounds, bool fetches)
      : p_(p), s_(s), rounds_(rounds), fetches_(fetches) {}

  __device__ void begin() {
    const unsigned lane = static_cast<unsigned>(thread_here()) % kLoaders;
    at_ = {0, 0};
    find_key(static_cast<int>(lane % kFoundTiles), lane);
    if (ended()) {  // something to load
      at_ = {0, 0};
      find_key(0, lane);
    }
    find_block(lane);
    locate(lane);
  }

  /// After the place of a row of the tile after `tile` has been read. Loads have a tile's time each: nothing of what
  /// they bring is looked at before.
  __device__ void advance(int tile, unsigned lane) {
    const int turn = tile % kFoundTiles;
    if (turn == 0) find_key(kFoundTiles, lane);
    if (turn == 1) find_block(lane);
    if (turn == kFoundTiles - 2) locate(lane);
  }

 private:
  struct Place {
    int round, tile;  // of the round; round -1: after all of them
  };

  __device__ bool ended() const { return at_.round < 0; }

  __device__ int row(unsigned lane) const { return at_.tile * kTile + static_cast<int>(lane / kFoundTiles); }

  /// So many tiles on.
  __device__ void find_key(int tiles, unsigned lane) {
    if (ended()) return;
    at_.tile += tiles;
    Round round = rounds_.copy_of(at_.round);
    while (at_.tile >= round.tiles) {
      at_ = {at_.round + 1, at_.tile - round.tiles};
      if (at_.round == rounds_.count()) {
        at_.round = -1;
        return;
      }
      round = rounds_.copy_of(at_.round);
    }
    key_ = round.rows.key<true>(p_, round.token, row(lane));
  }
  __device__ void find_block(unsigned lane) {
    if (ended()) return;
    const Round round = rounds_.copy_of(at_.round);
    key_ = round.rows.seen<true>(p_, row(lane), key_);
    block_ = round.rows.block<true>(p_, row(lane), key_);
  }
  __device__ void locate(unsigned lane) {
    __syncwarp();    // the last of the places before these has been read
    if (!ended()) {  // else what is there is loaded once more, and not used
      const RowPlace place = rounds_.copy_of(at_.round).rows.place<true>(p_, row(lane), key_, block_);
      Found found{kAbsentRow.payload, kAbsentRow.scale};
      if (place.payload != nullptr) {
        found = {place.payload, place.scale};
        if (fetches_) prefetch(found);
      }
      s_.found[lane % kFoundTiles][lane / kFoundTiles] = found;
    }
    __syncwarp();
  }

  const AttendParams& p_;
  Shared& s_;
  const Rounds<1>& rounds_;
  const bool fetches_;
  Place at_;  // of the row that is to be located next
  int key_, block_;
};

/// A loader with few registers: the left panels' units are copied into shared memory and wait there, which also makes
/// loads that are not waited for. After the last tile something is loaded once more.
class RoundLoader {
 public:
  __device__ RoundLoader(Shared& s, RoundFinder& finder)
      : s_(s), finder_(finder), lane_(static_cast<unsigned>(thread_here()) % kLoaders) {}

  /// Loads the first tile.
  __device__ void begin() {
    start(0);
    close_copies();
#pragma unroll
    for (int i = 0; i < kRightUnits; ++i) load(unit_at(i));
    copy_left();
  }

  /// Converts what was loaded, and loads the next tile's in its place. `between` right and left panels a batch of other
  /// copies may begin.
  template <class Between>
  __device__ void fill(int tile, Between between) {
    const unsigned stage = static_cast<unsigned>(tile) % kStages, warp = lane() / 32;
    wait_for_copies();
    __syncwarp();
    const uint2 scales = *reinterpret_cast<const uint2*>(&s_.scales[tile % 2][row()]);
    unsigned there = __ballot_sync(kAllLanes, is_there()) & 0x11111111u;
    there = (there | there >> 3) & 0x03030303u;
    there = (there | there >> 6) & 0x000F000Fu;
    start(tile + 1);
    settle();
    const int exponent = exponent_of_rows(scales);
    close_copies();
    barrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) {
      Fours& fours = s_.fours[stage][warp / 4];
      *reinterpret_cast<std::uint16_t*>(&fours.exponents[warp % 4 * 2]) =
          static_cast<std::uint16_t>((exponent & 0xFF) * 0x0101);
      *reinterpret_cast<std::uint16_t*>(&fours.there[warp % 4 * 2]) = static_cast<std::uint16_t>(there | there >> 8);
    }
    const std::uint32_t tile_at = shared_address(s_.rows[stage]), tail_to = tail_at(tile_at);
    std::uint32_t codes_to = codes_at(tile_at);
#pragma unroll
    for (int i = 0; i < kRightUnits; ++i) {
      const int j = unit_at(i);
      if (i == kRightUnits - 1) branch_on(scales.x);  // there are no registers for more units at once
      if (j < kCodeUnits)
        convert(j, raw(j), codes_to, scales, exponent);
      else
        store_shared(j == kCodeUnits ? tail_to : tail_to ^ 64, to_fp16(raw(j), power_of_two(-exponent)));
      load(j);
    }
    announce(stage, 1);
    wait_for_copies();
    between();
    // Two units under way, and rows are found meanwhile: what is read waits behind the stores of all loaders.
    uint4 even = load_shared(staged(unit_at(kRightUnits))), odd = load_shared(staged(unit_at(kRightUnits + 1)));
    finder_.advance(tile, lane());
    barrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
    codes_to = codes_at(tile_at);
#pragma unroll
    for (int i = kRightUnits; i < kUnits; ++i) {
      uint4& raw = (i - kRightUnits) % 2 == 0 ? even : odd;
      convert(unit_at(i), raw, codes_to, scales, exponent);
      if (i + 2 < kUnits) raw = load_shared(staged(unit_at(i + 2)));
    }
    announce(stage, 0);
    copy_left();
  }

  __device__ static void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  /// For all copies but the youngest batch. Batches are, by turns, the next tile's scales and its left panels, and
  /// between these sometimes others'.
  __device__ static void wait_for_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
  /// Nothing is on its way any more.
  __device__ void end() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  static_assert(kStagedUnits == kUnits - kRightUnits);

  __device__ std::uint32_t staged(int j) const {
    return shared_address(s_.staged()) + (static_cast<unsigned>(j) * kLoaders + lane()) * 16;
  }
  __device__ void copy_left() const {
#pragma unroll
    for (int j = 0; j < kStagedUnits; ++j)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(staged(j)),
                   "l"(__cvta_generic_to_global(from_ + j * 64))
                   : "memory");
    close_copies();
  }

  // What follows from it is found anew each time: there is no register to keep it in, and one that is spilled comes
  // back behind all loads under way.
  __device__ unsigned lane() const {
    unsigned lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }
  __device__ unsigned row() const { return lane() / 4; }
  __device__ unsigned unit() const { return lane() % 4; }

  __device__ void start(int tile) {
    const Found found = s_.found[tile % kFoundTiles][row()];
    if (unit() == 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(&s_.scales[tile % 2][row()])),
                   "l"(__cvta_generic_to_global(found.scale))
                   : "memory");
    from_ = found.payload + unit() * 16;
  }
  __device__ bool is_there() const { return from_ != kAbsentRow.payload + unit() * 16; }

  __device__ void load(int j) {
    // As in Loader.
    const unsigned odd = j < kCodeUnits ? 0 : row() % 2 * 64 ^ (j > kCodeUnits ? 64 : 0);
    const std::uint8_t* from = from_ + odd + min(j, kCodeUnits) * 64;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw(j).x), "=r"(raw(j).y), "=r"(raw(j).z), "=r"(raw(j).w)
                 : "l"(from));
  }

  __device__ uint4& raw(int j) { return raw_[j - kStagedUnits]; }
  __device__ const uint4& raw(int j) const { return raw_[j - kStagedUnits]; }

  /// Waits for all loads under way; see Loader.
  __device__ void settle() const {
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < kRightUnits; ++i) any |= raw_[i].x;
    branch_on(any);
  }

  /// Of the warp's rows.
  __device__ int exponent_of_rows(uint2 scales) const {
    return exponent_for_warp(top_of_codes(scales), top_of_pairs(raw(kCodeUnits), raw(kCodeUnits + 1)));
  }

  /// Where units go in a tile: codes of the first panel, and bf16 of the last one.
  __device__ std::uint32_t codes_at(std::uint32_t to) const {
    const unsigned lane = this->lane();
    return to + panel_offset(lane / 4, 2 * (lane % 4));
  }
  __device__ std::uint32_t tail_at(std::uint32_t to) const {
    const unsigned lane = this->lane(), row = lane / 4;
    return to + kCodeUnits * kPanelBytes + panel_offset(row, row % 2 * 4 + lane % 4);
  }

  __device__ void convert(int j, const uint4& raw, std::uint32_t codes_to, uint2 scales, int exponent) const {
    const std::uint32_t factors = factors_of(scales, j, exponent);
    store_shared(codes_to + j * kPanelBytes, eight_codes(raw.x, raw.y, factors));
    store_shared((codes_to ^ 16) + j * kPanelBytes, eight_codes(raw.z, raw.w, factors));
  }

  // Without a fence; see Loader.
  __device__ void announce(int stage, int half) {
    if (arrives_for_warp(lane() % 32)) barrier_arrive(shared_address(&s_.full[stage][half]));
  }

  Shared& s_;
  RoundFinder& finder_;
  const unsigned lane_;
  const std::uint8_t* from_;  // the row whose units are being loaded
  uint4 raw_[kRightUnits];
};

/// The end of a round, by a thread that has the left (0) or the right half of the channels.
template <int kMates>
__device__ void store_round(const AttendParams& p, Shared& s, const Rounds<kMates>& rounds, int round,
                            float (&o)[kWidth / 4], int half) {
  named_barrier(1, 2 * kGroup);
  const Job job(rounds.at(round), round, kMates == 1);
  const int head = head_of_thread();
  scale_heads(o, factor_of(s, job, head, 0), factor_of(s, job, head + 8, 0));
  if (half == 0) store_lse(p, s, job);
  if (half == 1) inverse_rope_last(p, job, o);
  store_output(p, job, o, half * (kWidth / 2));
}

/// Two consumers alike, which run the same instructions.
__device__ void consume_rounds(const AttendParams& p, Shared& s, const Rounds<1>& rounds) {
  // The same for a warp, and known to be: in uniform registers.
  const int half = static_cast<int>(__reduce_max_sync(kAllLanes, threadIdx.x / kGroup));
  named_barrier(1, kThreads);  // the first queries are in place
  for (int round = 0, tile = 0; round < rounds.count(); ++round) {
    const int end = tile + rounds.tiles(round);
    float o[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) o[i] = 0.0f;
    if (round > 0) barrier_wait(shared_address(&s.queries_there), (round - 1) & 1);
    Consumer consumer(p, s, half);
    consumer.run(o, tile, end);
    for (int below = 0; below < 2; ++below) {
      const Stats mine = consumer.stats(below);
      const int head = head_of_thread() + 8 * below;
      if (quad_of_thread() != 0) continue;
      if (half == 0)
        s.round_stats[round % 2][head] = mine;
      else
        s.sink[kSinks / 2 + round % 2][head] = mine.sum;
    }
    store_round(p, s, rounds, round, o, half);
    tile = end;
  }
}

/// Of two CTAs that have neighbouring tokens: scorer (0) and adder.
template <int kGroupIndex, class RowFinder>
__device__ void consume_neighbours(const AttendParams& p, Shared& s, const Rounds<2>& rounds, RowFinder& finder,
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
      scorer.run<true, true>(o, tile, end, kPanel, to_mate);
      for (int half = 0; half < 2; ++half) {
        const Stats mine = scorer.stats(half);
        if (quad_of_thread() == 0) s.round_stats[round % 2][head_of_thread() + 8 * half] = mine;
      }
    } else {
      run_adder<true>(o, s, finder, tile, end, kPanel, to_mate);
    }
    store_round(p, s, rounds, round, o, kGroupIndex);
    tile = end;
  }
}

using RoundQueries = Queries<kLoaderWarps, 2>;

__device__ void wait_for_use(const Shared& s, int round) {
  barrier_wait(shared_address(&s.queries_used), (round - 1) & 1);
}
__device__ void announce_queries(const Shared& s) {
  if (arrives_for_warp(threadIdx.x % 32)) barrier_arrive(shared_address(&s.queries_there));
}

/// The next round's queries into L2.
template <int kMates>
__device__ void fetch_queries(const AttendParams& p, const Rounds<kMates>& rounds, int round) {
  if (round + 1 == rounds.count()) return;
  const Round& next = rounds.at(round + 1);
  const auto* q = static_cast<const std::uint8_t*>(p.q.data) +
                  (std::int64_t{next.token} * p.q.row_stride + next.first_head * kWidth) * 2;
  const int bytes = min(kTile, p.num_heads - next.first_head) * kWidth * 2;
  const int line = thread_here() % kLoaders * kLine;
  if (line < bytes) fetch(q + line);
  if (line + kLoaders * kLine < bytes) fetch(q + line + kLoaders * kLine);
}

/// The queries of a round are asked for while its first tile is filled, and taken after it: the consumers are at the
/// round before.
__device__ void load_rounds(const AttendParams& p, Shared& s, const Rounds<1>& rounds, RoundFinder& finder) {
  RoundLoader loader(s, finder);
  loader.begin();
  for (int round = 0, tile = 0; round < rounds.count(); ++round) {
    if (static_cast<int>(threadIdx.x) < kThreads - kLoaders + 32) rounds.learn_more(round, thread_here() % 32);
    // Twice the tiles that are left, plus one at the first: a register less. Nor are there any for what follows from
    // these two, hence the empty statements.
    for (int more = 2 * rounds.tiles(round) + 1; more > 1; more = (more - 2) & ~1) {
      loader.fill(tile++, [&] {
        asm volatile("" : "+r"(more), "+r"(round));
        if (more % 2 == 0 || round == 0) return;
        const Job job(rounds.at(round), round, true);
        wait_for_use(s, round);
        RoundQueries(p, s, job).begin();
        loader.close_copies();
      });
      asm volatile("" : "+r"(more), "+r"(round));
      if (more % 2 == 0) continue;
      if (round > 0) {
        loader.wait_for_copies();
        const Job job(rounds.at(round), round, true);
        RoundQueries(p, s, job).convert();
        announce_queries(s);
      }
      asm volatile("" : "+r"(round));
      fetch_queries(p, rounds, round);
    }
  }
  loader.end();
}

/// Of two CTAs that have neighbouring tokens.
__device__ void load_neighbours(const AttendParams& p, Shared& s, const Rounds<2>& rounds, int mate,
                                std::uint32_t to_mate) {
  PairLoader loader(s, mate, to_mate);
  loader.begin();
  for (int round = 0, tile = 0; round < rounds.count(); ++round) {
    const int first = tile, end = tile + rounds.tiles(round);
    const CommonTiles common = rounds.at(round).common;
    for (; tile < end; ++tile) {
      loader.fill(tile, common.has(tile - first), tile + 1 < end || round + 1 < rounds.count());
      if (tile != first) continue;
      if (round > 0) {
        const Job job(rounds.at(round), round, false);
        const RoundQueries queries(p, s, job);
        wait_for_use(s, round);
        queries.begin();
        queries.finish();
        announce_queries(s);
      }
      fetch_queries(p, rounds, round);
    }
  }
}

}  // namespace
}  // namespace kv4::cuda
