// Radix selection of the best k of a row of any scores, by a CTA. It is the fallback of single_pass_select.cuh and
// works for all inputs.
//
// The first histogram has 2,048 equal intervals from the smallest to the largest score. As a rule few scores are in the
// bin of the k-th best; they become candidates and are ranked against each other. If there are too many, histograms
// over ever smaller ranges of the scores' bits follow, and among very many equal scores histograms over their entries.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/ptx/warp_sum.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "ops/score_row.h"

namespace kv4::cuda {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kMaxCandidates = 256;  // the most numbers that are ranked against each other
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Found {
  std::uint32_t bin;
  int above, inside;  // how many numbers are in the bins above, and in the bin
};

/// Numbers from low to high are undecided; numbers above are taken.
struct Range {
  std::uint32_t low, high;

  __device__ int shift() const { return max(0, 32 - kBinBits - __clz(static_cast<int>(high - low))); }
  __device__ bool has(std::uint32_t x) const { return x >= low && x <= high; }
  __device__ std::uint32_t bin_of(std::uint32_t x) const { return (x - low) >> shift(); }
  __device__ void enter(std::uint32_t bin) {
    const int by = shift();
    low += bin << by;
    high = low + min(high - low, (1u << by) - 1u);
  }
};

/// The inverse of ops::score_order.
__device__ inline float score_of(std::uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// The smallest and the largest of some scores; NaN is ignored.
struct Bounds {
  float low, high;

  __device__ Bounds() : low(__builtin_huge_valf()), high(-low) {}
  __device__ Bounds(float low, float high) : low(low), high(high) {}
  __device__ explicit Bounds(const Range& keys) : low(score_of(keys.low)), high(score_of(keys.high)) {}
};

/// Equal intervals of scores. Scores outside count in the first or last interval, NaN in the first.
struct Intervals {
  float low, per_score;  // maps scores to 0 .. 1

  __device__ explicit Intervals(const Bounds& bounds) : low(bounds.low), per_score(1.0f / (bounds.high - low)) {}
  /// Whether the intervals are usable: scores are finite and not all equal.
  __device__ bool are_finite() const { return per_score > 0.0f && per_score < __builtin_huge_valf(); }
  __device__ int bin_of(float score) const {
    constexpr float kWhole = 0x1p23f;  // from here on, consecutive integers have consecutive bits
    return __float_as_int(codec::fused(__saturatef((score - low) * per_score), float{kBins - 1}, kWhole)) & (kBins - 1);
  }
  /// A score below all scores of a bin.
  __device__ float below(int bin) const {
    return low + (static_cast<float>(bin) - 1.0f) / (float{kBins - 1} * per_score);  // a whole bin covers the roundings
  }
};

/// Shared memory of a selection by kBlockThreads threads.
template <int kBlockThreads>
struct Selection {
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / 32;
  static_assert(kBins % kThreads == 0);
  alignas(16) std::uint32_t below[4];  // take_best counts the numbers below its bins here
  std::uint32_t histogram[kBins];      // all zero between uses
  int sums[2][kWarps];
  std::uint32_t lows[kWarps], highs[kWarps];
  Found found;
  std::uint32_t candidate_keys[kMaxCandidates];
  std::int32_t candidate_entries[kMaxCandidates];
  int candidates, last_candidate;  // how many there are; the index of the last one taken
  std::int32_t chosen[ops::kMaxTopk];

  /// A barrier must follow.
  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) histogram[i] = 0;
    if (threadIdx.x == 0) candidates = 0;
  }
};

/// Prefix sums over the threads of a CTA. There are two buffers, so one barrier per sum is enough.
template <class S>
class Scan {
 public:
  __device__ explicit Scan(S& s) : s_(s) {}

  /// Exclusive prefix sum; total: the sum over all threads. One barrier.
  __device__ int before(int mine, int& total) {
    constexpr int kWarps = S::kWarps;
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int sum = sum_to_lane(mine);
    int(&sums)[kWarps] = s_.sums[half_];
    half_ ^= 1;
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    const int of_warp = lane < kWarps ? sums[lane] : 0;
    total = __reduce_add_sync(kAll, of_warp);
    return __reduce_add_sync(kAll, lane < warp ? of_warp : 0) + sum - mine;
  }

 private:
  S& s_;
  int half_ = 0;
};

/// Finds the bin of the `rank`-th largest number. for_each(f) calls f(bin) for each of this thread's numbers.
template <class S, class ForEach>
__device__ Found find_bin(S& s, Scan<S>& scan, int rank, ForEach&& for_each) {
  constexpr int kEach = kBins / S::kThreads;
  for_each([&](std::uint32_t bin) { atomicAdd(&s.histogram[bin], 1u); });
  __syncthreads();
  const std::uint32_t highest = kBins - 1 - kEach * threadIdx.x;
  int inside[kEach], mine = 0;  // the highest bin first
  using Bins = std::conditional_t<kEach == 4, uint4, uint2>;
  static_assert(sizeof(Bins) == 4 * kEach);
  Bins* const own = reinterpret_cast<Bins*>(&s.histogram[highest - (kEach - 1)]);
  std::uint32_t bins[kEach];
  memcpy(bins, own, sizeof(bins));
  *own = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    inside[i] = static_cast<int>(bins[kEach - 1 - i]);
    mine += inside[i];
  }
  int total, before = scan.before(mine, total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (before < rank && rank <= before + inside[i]) s.found = {highest - i, before, inside[i]};
    before += inside[i];
  }
  __syncthreads();
  return s.found;
}

/// The result of a selection: scores above the range are taken, and scores in the range whose entry is at most `last`.
struct Cut {
  Range range;
  std::uint32_t last;

  /// Calls f(takes); takes(score, entry) says whether a score is taken. It compares floats directly where that is
  /// enough.
  template <class F>
  __device__ void with_test(F&& f) const {
    const float score = score_of(range.low);
    if (range.low == range.high && !codec::is_nan(score))
      f([score, last = last](float x, std::int32_t entry) {  // without branches
        return bool(int{x > score} | (int{x >= score} & int{static_cast<std::uint32_t>(entry) <= last}));
      });
    else
      f([*this](float x, std::int32_t entry) {
        const std::uint32_t key = ops::score_order(x);
        return key >= range.low && (key > range.high || static_cast<std::uint32_t>(entry) <= last);
      });
  }
};

/// The cut that takes the `count` best of the candidates, and all numbers above. The candidates are the numbers for
/// which among(score) is true; there are at most kMaxCandidates.
template <class S, class Source, class Among>
__device__ Cut cut_candidates(S& s, const Source& source, int count, Among&& among) {
  source.for_each([&](float score, std::int32_t entry) {
    if (!among(score)) return;
    const int at = atomicAdd(&s.candidates, 1);
    s.candidate_keys[at] = ops::score_order(score);
    s.candidate_entries[at] = entry;
  });
  __syncthreads();
  const int candidates = s.candidates, lane = static_cast<int>(threadIdx.x % 32);
  for (int i = static_cast<int>(threadIdx.x / 32); i < candidates; i += S::kWarps) {
    const std::uint32_t key = s.candidate_keys[i];
    const std::int32_t entry = s.candidate_entries[i];
    int better = 0;
    for (int j = lane; j < candidates; j += 32)
      better += s.candidate_keys[j] > key || (s.candidate_keys[j] == key && s.candidate_entries[j] < entry);
    if (__reduce_add_sync(kAll, better) == count - 1) s.last_candidate = i;
  }
  __syncthreads();
  const std::uint32_t key = s.candidate_keys[s.last_candidate];
  return {{key, key}, static_cast<std::uint32_t>(s.candidate_entries[s.last_candidate])};
}

/// The cut that takes the `count` best of a source's scores. bounds: of the scores among which the cut is expected. It
/// is called once per selection.
template <class S, class Source>
__device__ Cut find_cut(S& s, Scan<S>& scan, const Source& source, const Bounds& bounds, int count) {
  if (const Intervals intervals(bounds); intervals.are_finite()) {
    const Found found = find_bin(s, scan, count, [&](auto&& f) {
      source.for_each([&](float score, std::int32_t) { f(intervals.bin_of(score)); });
    });
    if (found.inside <= kMaxCandidates)
      return cut_candidates(s, source, count - found.above,
                            [&](float score) { return intervals.bin_of(score) == static_cast<int>(found.bin); });
  }
  Range range{0, 0xFFFFFFFFu};
  for (;;) {
    const bool last = range.shift() == 0;
    const Found found = find_bin(s, scan, count, [&](auto&& f) {
      source.for_each([&](float score, std::int32_t) {
        if (const std::uint32_t key = ops::score_order(score); range.has(key)) f(range.bin_of(key));
      });
    });
    range.enter(found.bin);
    count -= found.above;
    if (found.inside == count) return {range, 0xFFFFFFFFu};
    if (found.inside <= kMaxCandidates)
      return cut_candidates(s, source, count, [&](float score) { return range.has(ops::score_order(score)); });
    if (last) break;
  }
  Range entries{~static_cast<std::uint32_t>(source.size() - 1),
                0xFFFFFFFFu};  // complements, because the smaller entry wins
  for (;;) {
    const Found found = find_bin(s, scan, count, [&](auto&& f) {
      source.for_each([&](float score, std::int32_t entry) {
        const std::uint32_t x = ~static_cast<std::uint32_t>(entry);
        if (ops::score_order(score) == range.low && entries.has(x)) f(entries.bin_of(x));
      });
    });
    entries.enter(found.bin);
    count -= found.above;
    if (found.inside == count) return {range, ~entries.low};
  }
}

// Sources of scores. for_each(f) calls f(score, entry) for each of this thread's scores, always in the same order. An
// absent score is NaN with an entry behind all others, so it loses every comparison. kMaxPerThread: the most scores of
// a thread, where entry(i) is the entry of the i-th; 0 means any number.

/// A row in memory.
template <int kThreads>
struct RowSource {
  static constexpr int kMaxPerThread = 0;
  const float* row;
  int count;
  __device__ int size() const { return count; }
  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) f(row[i], i);
  }
};

/// The output of a token: its row of indices, and of slots if they are wanted.
struct Choice {
  const TokenTile& tile;
  int token, request;

  __device__ std::int32_t* indices() const { return tile.p.indices + std::int64_t{tile.first + token} * tile.p.top; }
  __device__ void put(int place, std::int32_t entry) const {
    const std::int64_t at = std::int64_t{tile.first + token} * tile.p.top + place;
    tile.p.indices[at] = entry;
    if (tile.p.slots == nullptr) return;
    const std::int32_t rows = tile.kind().rows_per_block;
    const std::int64_t in_table = std::int64_t{request} * tile.p.step.blocks_per_request + entry / rows;
    const std::int32_t block = entry < 0 ? -1 : tile.p.step.block_table[in_table];
    tile.p.slots[at] = block < 0 ? -1 : block * rows + entry % rows;
  }
};

template <class S, class Source>
__device__ void write_chosen(S& s, Scan<S>& scan, const Source& source, const Cut& cut, const Choice& choice) {
  cut.with_test([&](auto&& takes) {
    int total;
    if constexpr (Source::kMaxPerThread > 0) {
      std::uint32_t taken = 0, at = 1;
      source.for_each([&](float score, std::int32_t entry) {
        if (takes(score, entry)) taken |= at;
        at += at;
      });
      int place = scan.before(__popc(taken), total);
      for (; taken != 0; taken &= taken - 1) s.chosen[place++] = source.entry(__ffs(static_cast<int>(taken)) - 1);
    } else {
      int mine = 0;
      source.for_each([&](float score, std::int32_t entry) { mine += takes(score, entry); });
      int place = scan.before(mine, total);
      source.for_each([&](float score, std::int32_t entry) {
        if (takes(score, entry)) s.chosen[place++] = entry;
      });
    }
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < choice.tile.p.top; i += S::kThreads) choice.put(i, s.chosen[i]);
}

template <class S>
__device__ __noinline__ void select_from_row(S& s, const float* scores, int count, Bounds bounds, Choice choice) {
  const RowSource<S::kThreads> row{scores, count};
  Scan<S> scan(s);
  __syncthreads();
  write_chosen(s, scan, row, find_cut(s, scan, row, bounds, choice.tile.p.top), choice);
}

/// The fields of a token's record that a selection needs.
struct TokenRow {
  int request, count;  // count: how many keys the token sees

  TokenRow() = default;
  __device__ TokenRow(const TokenTile& tile, int token) {
    const ops::StepRecord record = tile.p.step.tokens[tile.first + token];
    request = record.row;
    count = tile.visible(record);
  }
};

/// Takes a whole row of at most `top` keys; -1 fills the rest.
__device__ inline __noinline__ void take_whole(Choice choice, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < choice.tile.p.top; i += static_cast<int>(blockDim.x))
    choice.put(i, i < count ? i : -1);
}

/// The same by the token's record as it is after the grid dependency wait.
__device__ inline __noinline__ void take_whole_after_wait(const TokenTile& tile, int token) {
  const TokenRow seen(tile, token);
  take_whole({tile, token, seen.request}, seen.count);
}

/// The smallest and largest number of all threads.
template <class S>
__device__ Range find_range(S& s, std::uint32_t low, std::uint32_t high) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  low = __reduce_min_sync(kAll, low);
  high = __reduce_max_sync(kAll, high);
  if (lane == 0) {
    s.lows[warp] = low;
    s.highs[warp] = high;
  }
  __syncthreads();
  const int at = lane % S::kWarps;
  return {__reduce_min_sync(kAll, s.lows[at]), __reduce_max_sync(kAll, s.highs[at])};
}

// --- rows of up to 8,192 scores, or of groups

constexpr int kGroupRoom = 4096;  // the most groups that reach the bound
constexpr int kListRoom = 4096;   // of the lists of all warps together

/// Shared memory of a selection from a row by kBlockThreads threads.
template <int kBlockThreads, int kNumbers = kRowNumbers>
struct RowSelection {
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / 32, kWarpRoom = kListRoom / kWarps;
  static constexpr int kHeld = kNumbers / kThreads;  // numbers in the registers of a thread
  Selection<kThreads> selection;
  std::int32_t groups[kGroupRoom];
  float scores[kWarps][kWarpRoom];
  std::int32_t entries[kWarps][kWarpRoom];
};

/// The warps' lists of scores, whose entries are below `bound`. Each thread takes numbers of its own warp's list.
template <class Shared>
struct WarpListSource {
  static constexpr int kMaxPerThread = Shared::kWarpRoom / 32, kStep = 1;
  static constexpr bool kInLists = true, kIsBounded = true;
  const Shared& s;
  int listed, bound;
  __device__ std::int32_t entry(int i) const { return s.entries[threadIdx.x / 32][threadIdx.x % 32 + 32 * i]; }
  __device__ int size() const { return bound; }
  __device__ bool reaches(int i) const { return 32 * i < listed; }
  __device__ float score(int i) const {
    const int at = static_cast<int>(threadIdx.x % 32) + 32 * i;
    return at < listed ? s.scores[threadIdx.x / 32][at] : __builtin_nanf("");
  }
};

/// Joins the bounds of all threads. Its barrier also serves as the one after clear().
template <class S>
__device__ Bounds join_bounds(S& s, const Bounds& mine) {
  const auto order = [](float number) {  // the inverse of score_of
    const std::uint32_t bits = __float_as_uint(number);
    return bits ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31) | 0x80000000u);
  };
  return Bounds(find_range(s, order(mine.low), order(mine.high)));
}

}  // namespace kv4::cuda
