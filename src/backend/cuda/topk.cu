// The best k of a row of scores, exactly: ties go to the smaller entry. The result's order is the same on every run.
//
// Exact selection begins with a histogram of 2,048 equal intervals from the smallest to the largest score. As a rule
// few scores are in the bin that the k-th best lies in: they are ranked against each other. If not, histograms over
// ever smaller ranges of the scores' bits; among very many equal scores, over entries.
//
// select_row: a thread block of 1,024 per row, at most 8 numbers in a thread's registers.
//   Rows of up to 8,192 scores: selection from them.
//   Longer ones, where the scorer left the largest score of each group of keys: the k-th largest of those is a bound
//   below the k-th best score, for k scores are at least as large. Only groups that reach it are read, and their
//   scores that reach it, a little more than k as a rule, are selected from.
// select_long: rows of given scores, each read once by a cluster of up to 8 thread blocks of 512 that hold up to 64
//   scores in a thread's registers. Neighbouring scores lie in different threads. The bound is the k-th largest of the
//   threads' maxima; a block of a cluster of c takes its k/c-th, the cluster the smallest of those. What reaches it is
//   listed in the first block's shared memory, which selects from the lists.
// If a list gets too long (many equal scores, say) or the row does not fit the registers, exact selection goes over the
// row in memory.
//
// Bound by latency: about ten barriers, loads that depend on each other, instructions that are run once.
#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/index_tile.cuh"
#include "backend/cuda/launch.cuh"
#include "ops/score_row.h"

namespace kv4::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kFew = 256;  // numbers that are ranked against each other
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Found {
  std::uint32_t bin;
  int above, inside;  // numbers in the bins above, in the bin
};

/// Numbers from low to high that still count; those above are taken.
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

/// The score of an ops::score_order.
__device__ float score_of(std::uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

/// Equal intervals of scores. What lies outside counts as in the first or the last.
struct Intervals {
  float low, per_score;

  __device__ explicit Intervals(const Range& keys)
      : low(score_of(keys.low)), per_score((kBins - 1) / (score_of(keys.high) - low)) {}
  /// Whether there are any: scores are finite and not all the same.
  __device__ bool are_finite() const { return per_score > 0.0f && per_score < __builtin_huge_valf(); }
  __device__ int bin_of(std::uint32_t key) const {
    constexpr float kWhole = 0x1p23f;  // from here on the bits count in ones
    const float at = fmaxf((score_of(key) - low) * per_score, 0.0f);
    return min(__float_as_int(at + kWhole) - __float_as_int(kWhole), kBins - 1);
  }
};

/// What a block of so many threads selects with.
template <int kBlockThreads>
struct Selection {
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / 32;
  static_assert(kBins % kThreads == 0);
  std::uint32_t histogram[kBins];  // all zero between uses
  int sums[2][kWarps];
  std::uint32_t lows[kWarps], highs[kWarps];
  Found found;
  std::uint32_t few_keys[kFew];
  std::int32_t few_entries[kFew];
  int few, last_of_few;  // how many, which is the last that is taken
  std::int32_t chosen[ops::kMaxTopk];

  /// A barrier must follow.
  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) histogram[i] = 0;
    if (threadIdx.x == 0) few = 0;
  }
};

/// Sums over a block's threads, two barriers apart.
template <class S>
class Scan {
 public:
  __device__ explicit Scan(S& s) : s_(s) {}

  /// Over the threads before this one; total: over all. One barrier.
  __device__ int before(int mine, int& total) {
    constexpr int kWarps = S::kWarps;
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += other;
    }
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

/// In which bin the `rank`-th largest number lies. for_each(f) calls f(bin) for this thread's numbers.
template <class S, class ForEach>
__device__ Found find_bin(S& s, Scan<S>& scan, int rank, ForEach&& for_each) {
  constexpr int kEach = kBins / S::kThreads;
  for_each([&](std::uint32_t bin) { atomicAdd(&s.histogram[bin], 1u); });
  __syncthreads();
  const std::uint32_t highest = kBins - 1 - kEach * threadIdx.x;
  int inside[kEach], mine = 0;  // the uppermost first
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    inside[i] = static_cast<int>(s.histogram[highest - i]);
    s.histogram[highest - i] = 0;
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

/// What is chosen: keys above the range, and those in it whose entry is at most `last`.
struct Cut {
  Range range;
  std::uint32_t last;
  __device__ bool takes(std::uint32_t key, std::int32_t entry) const {
    return key >= range.low && (key > range.high || static_cast<std::uint32_t>(entry) <= last);
  }
};

/// The cut that takes the `count` best of the few numbers that `among` holds for, and what is better than those.
template <class S, class Source, class Among>
__device__ Cut cut_few(S& s, const Source& source, int count, Among&& among) {
  source.for_each([&](std::uint32_t key, std::int32_t entry) {
    if (!among(key)) return;
    const int at = atomicAdd(&s.few, 1);
    s.few_keys[at] = key;
    s.few_entries[at] = entry;
  });
  __syncthreads();
  const int few = s.few, lane = static_cast<int>(threadIdx.x % 32);
  for (int i = static_cast<int>(threadIdx.x / 32); i < few; i += S::kWarps) {
    const std::uint32_t key = s.few_keys[i];
    const std::int32_t entry = s.few_entries[i];
    int better = 0;
    for (int j = lane; j < few; j += 32)
      better += s.few_keys[j] > key || (s.few_keys[j] == key && s.few_entries[j] < entry);
    if (__reduce_add_sync(kAll, better) == count - 1) s.last_of_few = i;
  }
  __syncthreads();
  const std::uint32_t key = s.few_keys[s.last_of_few];
  return {{key, key}, static_cast<std::uint32_t>(s.few_entries[s.last_of_few])};
}

/// The cut that takes `count` of a source's scores, at least as many of which lie in `range`. Once per selection.
template <class S, class Source>
__device__ Cut find_cut(S& s, Scan<S>& scan, const Source& source, Range range, int count) {
  if (const Intervals intervals(range); intervals.are_finite()) {
    const Found found = find_bin(s, scan, count, [&](auto&& f) {
      source.for_each([&](std::uint32_t key, std::int32_t) { f(intervals.bin_of(key)); });
    });
    if (found.inside <= kFew)
      return cut_few(s, source, count - found.above,
                     [&](std::uint32_t key) { return intervals.bin_of(key) == static_cast<int>(found.bin); });
  }
  for (;;) {
    const bool last = range.shift() == 0;
    const Found found = find_bin(s, scan, count, [&](auto&& f) {
      source.for_each([&](std::uint32_t key, std::int32_t) {
        if (range.has(key)) f(range.bin_of(key));
      });
    });
    range.enter(found.bin);
    count -= found.above;
    if (found.inside == count) return {range, 0xFFFFFFFFu};
    if (found.inside <= kFew) return cut_few(s, source, count, [&](std::uint32_t key) { return range.has(key); });
    if (last) break;
  }
  Range entries{~static_cast<std::uint32_t>(source.size() - 1), 0xFFFFFFFFu};  // the complement: smaller is better
  for (;;) {
    const Found found = find_bin(s, scan, count, [&](auto&& f) {
      source.for_each([&](std::uint32_t key, std::int32_t entry) {
        const std::uint32_t x = ~static_cast<std::uint32_t>(entry);
        if (key == range.low && entries.has(x)) f(entries.bin_of(x));
      });
    });
    entries.enter(found.bin);
    count -= found.above;
    if (found.inside == count) return {range, ~entries.low};
  }
}

/// A row in memory.
template <int kThreads>
struct RowSource {
  const float* row;
  int count;
  __device__ int size() const { return count; }
  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) f(ops::score_order(row[i]), i);
  }
};

/// Where the chosen entries of a token go.
struct Choice {
  const IndexTile& tile;
  int token, request;

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
  int mine = 0, total;
  source.for_each([&](std::uint32_t key, std::int32_t entry) { mine += cut.takes(key, entry); });
  int place = scan.before(mine, total);
  source.for_each([&](std::uint32_t key, std::int32_t entry) {
    if (cut.takes(key, entry)) s.chosen[place++] = entry;
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < choice.tile.p.top; i += S::kThreads) choice.put(i, s.chosen[i]);
}

template <class S>
__device__ __noinline__ void select_from_row(S& s, const float* scores, int count, Range range, Choice choice) {
  const RowSource<S::kThreads> row{scores, count};
  Scan<S> scan(s);
  __syncthreads();
  write_chosen(s, scan, row, find_cut(s, scan, row, range, choice.tile.p.top), choice);
}

/// A row that is taken whole, and what no entry is left for.
__device__ void fill_choice(const Choice& choice, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < choice.tile.p.top; i += static_cast<int>(blockDim.x))
    if (i >= count || count <= choice.tile.p.top) choice.put(i, i < count ? i : -1);
}

/// The smallest and largest of the block's numbers.
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

constexpr int kRowThreads = 1024, kRowHeld = kRowNumbers / kRowThreads, kRowWarps = kRowThreads / 32;
constexpr int kGroupRoom = 4096;  // groups that reach the bound
constexpr int kWarpRoom = 128;    // of a warp's list of their scores
using RowSelection = Selection<kRowThreads>;

struct RowShared {
  RowSelection selection;
  std::int32_t groups[kGroupRoom];
  std::uint32_t keys[kRowWarps][kWarpRoom];  // ops::score_order
  std::int32_t entries[kRowWarps][kWarpRoom];
};

/// Numbers in registers, the i-th of a thread being that of entry thread + i * kRowThreads.
struct HeldSource {
  const std::uint32_t (&held)[kRowHeld];
  int count;
  __device__ int size() const { return count; }
  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kRowHeld; ++i) {
      const int entry = static_cast<int>(threadIdx.x) + i * kRowThreads;
      if (entry < count) f(held[i], entry);
    }
  }
};

/// The warps' lists of entries below `bound`; each thread has some of its own warp's.
struct WarpListSource {
  const RowShared& s;
  int listed, bound;
  __device__ int size() const { return bound; }
  template <class F>
  __device__ void for_each(F&& f) const {
    const int warp = static_cast<int>(threadIdx.x / 32);
    for (int i = static_cast<int>(threadIdx.x % 32); i < listed; i += 32) f(s.keys[warp][i], s.entries[warp][i]);
  }
};

/// A row by the maxima of its groups, which lie in registers. False: too many reach the bound.
__device__ bool select_by_groups(RowShared& s, Scan<RowSelection>& scan, const HeldSource& maxima, Range range,
                                 const float* row, int count, int group, const Choice& choice) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const Intervals intervals(range);
  if (!intervals.are_finite()) return false;
  const Found found = find_bin(s.selection, scan, choice.tile.p.top, [&](auto&& f) {
    maxima.for_each([&](std::uint32_t key, std::int32_t) { f(intervals.bin_of(key)); });
  });
  const auto reaches_bound = [&](std::uint32_t key) { return intervals.bin_of(key) >= static_cast<int>(found.bin); };
  int mine = 0, total;
  maxima.for_each([&](std::uint32_t key, std::int32_t) { mine += reaches_bound(key); });
  int place = scan.before(mine, total);
  if (total > kGroupRoom) return false;
  maxima.for_each([&](std::uint32_t key, std::int32_t entry) {
    if (reaches_bound(key)) s.groups[place++] = entry;
  });
  __syncthreads();

  constexpr int kAhead = 8;
  const int bits = 31 - __clz(group);
  int listed = 0;
  for (int first = 32 * warp; first < total * group; first += kAhead * kRowThreads) {
    float scores[kAhead];
    std::int32_t entries[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = first + i * kRowThreads + lane;
      const int entry = at < total * group ? (s.groups[at >> bits] << bits) + (at & (group - 1)) : count;
      entries[i] = entry < count ? entry : -1;
      scores[i] = entry < count ? row[entry] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::uint32_t key = ops::score_order(scores[i]);
      const bool reaches = entries[i] >= 0 && reaches_bound(key);
      const unsigned all = __ballot_sync(kAll, reaches);
      const int at = listed + __popc(all & ((1u << lane) - 1u));
      if (reaches && at < kWarpRoom) {
        s.keys[warp][at] = key;
        s.entries[warp][at] = entries[i];
      }
      listed += __popc(all);
    }
  }
  if (__syncthreads_or(listed > kWarpRoom)) return false;
  const WarpListSource source{s, listed, count};
  const float bins_below = static_cast<float>(found.bin) - 1.0f;  // one less: roundings
  range.low = max(range.low, ops::score_order(intervals.low + bins_below / intervals.per_score));
  write_chosen(s.selection, scan, source, find_cut(s.selection, scan, source, range, choice.tile.p.top), choice);
  return true;
}

__global__ void __launch_bounds__(kRowThreads, 1) select_row(const __grid_constant__ IndexTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  RowShared& s = *reinterpret_cast<RowShared*>(bytes);
  s.selection.clear();
  wait_for_previous();
  let_next_start();
  const int token = static_cast<int>(blockIdx.x);
  const ops::StepRecord record = tile.p.step.tokens[tile.first + token];
  const int count = tile.visible(record), top = tile.p.top;
  const Choice choice{tile, token, record.row};
  fill_choice(choice, count);
  if (count <= top) return;

  const float* row = tile.row(token);
  const bool whole = count <= kRowNumbers;
  const int group = group_size(count), numbers = whole ? count : (count + group - 1) / group;
  if (numbers <= top) return select_from_row(s.selection, row, count, {0, 0xFFFFFFFFu}, choice);
  const float* from = whole ? row : tile.maxima(token);
  std::uint32_t held[kRowHeld];
#pragma unroll
  for (int i = 0; i < kRowHeld; ++i) {  // all loads before the first use
    const int at = static_cast<int>(threadIdx.x) + i * kRowThreads;
    held[i] = at < numbers ? __float_as_uint(from[at]) : 0u;
  }
  std::uint32_t low = 0xFFFFFFFFu, high = 0;
#pragma unroll
  for (int i = 0; i < kRowHeld; ++i) {
    held[i] = ops::score_order(__uint_as_float(held[i]));
    if (static_cast<int>(threadIdx.x) + i * kRowThreads >= numbers) continue;
    low = min(low, held[i]);
    high = max(high, held[i]);
  }
  const Range all = find_range(s.selection, low, high);  // its barrier is the one after clear()
  Scan<RowSelection> scan(s.selection);
  const HeldSource source{held, numbers};
  if (whole)
    write_chosen(s.selection, scan, source, find_cut(s.selection, scan, source, all, top), choice);
  else if (!select_by_groups(s, scan, source, all, row, count, group, choice))
    select_from_row(s.selection, row, count, {0, 0xFFFFFFFFu}, choice);
}

// --- longer rows of given scores

constexpr int kLongThreads = 512, kHeld = 64;
constexpr int kRoom = 8192;          // of a list
constexpr int kBlockScores = 8192;   // a row is shared out over more blocks if each gets this many
constexpr unsigned kMostBlocks = 8;  // of a cluster
static_assert(kHeld % 4 == 0);
using LongSelection = Selection<kLongThreads>;

struct LongShared {
  LongSelection selection;
  // Written by the whole cluster, each block in its place.
  Range ranges[kMostBlocks];
  int listed[kMostBlocks];
  std::uint32_t keys[kRoom];  // ops::score_order; a segment for each block
  std::int32_t entries[kRoom];
};

/// The cluster's lists of entries below `bound`.
struct ListSource {
  const LongShared& s;
  int blocks, bound;
  __device__ int size() const { return bound; }
  template <class F>
  __device__ void for_each(F&& f) const {
    const int segment = kRoom / blocks;
    for (int block = 0; block < blocks; ++block)
      for (int i = static_cast<int>(threadIdx.x); i < s.listed[block]; i += kLongThreads)
        f(s.keys[block * segment + i], s.entries[block * segment + i]);
  }
};

/// Calls f with each of a thread's scores; four at a time may be left out by the whole block.
template <class F>
__device__ void for_each_held(int stride, int count, F&& f) {
#pragma unroll
  for (int i = 0; i < kHeld; i += 4) {
    if (i * stride >= count) continue;
    f(i), f(i + 1), f(i + 2), f(i + 3);
  }
}

/// In one block: what `rank` of its scores at least reach, and the largest of them.
__device__ Range find_bound(LongShared& s, Scan<LongSelection>& scan, const std::uint32_t (&held)[kHeld], int rank) {
  constexpr int kParts = 8;  // maxima per thread; neighbours join as long as twice `rank` are left
  std::uint32_t most[kParts] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most[i % kParts] = max(most[i % kParts], held[i]);
  int parts = kParts;
#pragma unroll
  for (int half = kParts / 2; half > 0; half /= 2) {
    if (half * kLongThreads < 2 * rank) break;
    parts = half;
#pragma unroll
    for (int i = 0; i < half; ++i) most[i] = max(most[i], most[i + half]);
  }
  std::uint32_t low = most[0], high = most[0];
#pragma unroll
  for (int i = 1; i < kParts; ++i) {
    if (i >= parts) break;
    low = min(low, most[i]);
    high = max(high, most[i]);
  }
  Range range = find_range(s.selection, low, high);
  const std::uint32_t top = range.high;
  for (int pass = 0; pass < 2; ++pass) {
    const bool last = range.shift() == 0;
    const Found found = find_bin(s.selection, scan, rank, [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (i < parts && range.has(most[i])) f(range.bin_of(most[i]));
    });
    range.enter(found.bin);
    rank -= found.above;
    if (last || found.inside <= 64) break;
  }
  return {range.low, top};
}

// A block may write another's memory once that one has started: each arrives when it starts, and waits before it
// writes.
#if __CUDA_ARCH__ >= 900
__device__ void arrive_cluster() { cg::this_cluster().barrier_arrive(); }
__device__ void wait_cluster() { cg::this_cluster().barrier_wait(); }
__device__ int block_in_cluster() { return static_cast<int>(cg::this_cluster().block_rank()); }
__device__ LongShared& shared_of(LongShared& s, int block) { return *cg::this_cluster().map_shared_rank(&s, block); }
#else
__device__ void arrive_cluster() {}
__device__ void wait_cluster() {}
__device__ int block_in_cluster() { return 0; }
__device__ LongShared& shared_of(LongShared& s, int) { return s; }
#endif
__device__ void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

__global__ void __launch_bounds__(kLongThreads, 1)
    select_long(const __grid_constant__ IndexTile tile, int most_blocks) {
  extern __shared__ __align__(16) unsigned char bytes[];
  LongShared& s = *reinterpret_cast<LongShared*>(bytes);
  s.selection.clear();
  wait_for_previous();
  let_next_start();
  const int token = static_cast<int>(blockIdx.x) / most_blocks, rank = block_in_cluster();
  const ops::StepRecord record = tile.p.step.tokens[tile.first + token];
  const int count = tile.visible(record), top = tile.p.top;
  const int blocks = count <= kBlockScores ? 1 : most_blocks;  // all of a cluster or one: a barrier waits for all
  if (rank >= blocks) return;
  const Choice choice{tile, token, record.row};
  if (rank == 0) fill_choice(choice, count);
  if (count <= top) return;

  const float* row = tile.row(token);
  const int stride = blocks * kLongThreads, first = rank * kLongThreads + static_cast<int>(threadIdx.x);
  if (count > stride * kHeld) {
    if (rank == 0) select_from_row(s.selection, row, count, {0, 0xFFFFFFFFu}, choice);
    return;
  }
  if (blocks > 1) arrive_cluster();
  std::uint32_t held[kHeld] = {};            // absent ones are below all
  for_each_held(stride, count, [&](int i) {  // all loads before the first use
    held[i] = __float_as_uint(row[min(first + i * stride, count - 1)]);
  });
  for_each_held(stride, count,
                [&](int i) { held[i] = first + i * stride < count ? ops::score_order(__uint_as_float(held[i])) : 0u; });
  Scan<LongSelection> scan(s.selection);
  __syncthreads();  // the histogram is zero
  Range range = find_bound(s, scan, held, (top + blocks - 1) / blocks);
  if (blocks > 1) {
    wait_cluster();
    if (threadIdx.x < static_cast<unsigned>(blocks)) shared_of(s, static_cast<int>(threadIdx.x)).ranges[rank] = range;
    sync_cluster();
    const Range& other = s.ranges[min(static_cast<int>(threadIdx.x % 32), blocks - 1)];
    range = {__reduce_min_sync(kAll, other.low), __reduce_max_sync(kAll, other.high)};
  }
  const auto chosen = [&](int i) { return held[i] >= range.low && first + i * stride < count; };
  int mine = 0;
  for_each_held(stride, count, [&](int i) { mine += chosen(i); });
  int total, place = scan.before(mine, total);
  const int segment = kRoom / blocks;
  LongShared& leader = shared_of(s, 0);
  if (total <= segment) {
    place += rank * segment;
    for_each_held(stride, count, [&](int i) {
      if (!chosen(i)) return;
      leader.keys[place] = held[i];
      leader.entries[place++] = first + i * stride;
    });
  }
  if (threadIdx.x == 0) leader.listed[rank] = total;
  if (blocks > 1)
    sync_cluster();
  else
    __syncthreads();
  if (rank > 0) return;

  int most = 0, all = 0;
  for (int block = 0; block < blocks; ++block) {
    most = max(most, s.listed[block]);
    all += s.listed[block];
  }
  if (most > segment) return select_from_row(s.selection, row, count, range, choice);
  const ListSource source{s, blocks, count};
  const Cut cut = all == top ? Cut{{0, 0xFFFFFFFFu}, 0xFFFFFFFFu} : find_cut(s.selection, scan, source, range, top);
  write_chosen(s.selection, scan, source, cut, choice);
}

}  // namespace

cudaError_t select_tile(const IndexTile& tile, cudaStream_t stream) {
  const std::int64_t longest = std::min(tile.score_stride, max_entries(tile.p));
  const unsigned rows = static_cast<unsigned>(tile.count);
  if (tile.has_maxima || longest <= kRowNumbers) {
    const cudaError_t status = cudaFuncSetAttribute(select_row, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(sizeof(RowShared)));
    return status == cudaSuccess ? launch<sizeof(RowShared)>(select_row, rows, kRowThreads, stream, tile) : status;
  }
  const cudaError_t status = cudaFuncSetAttribute(select_long, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(LongShared)));
  if (status != cudaSuccess) return status;
  // As many blocks as hold the longest row, or as keep the GPU busy.
  unsigned blocks = 1;
  while (overlaps_launches() && blocks < kMostBlocks && blocks * std::int64_t{kBlockScores} < longest &&
         (blocks * std::int64_t{kLongThreads * kHeld} < longest || 2 * blocks * rows <= 128))
    blocks *= 2;
  return launch_clusters<sizeof(LongShared)>(select_long, blocks, blocks * rows, kLongThreads, stream, tile,
                                             static_cast<int>(blocks));
}

}  // namespace kv4::cuda
