// The best k of a row of scores, exactly: ties go to the smaller entry. The result's order is the same on every run.
//
// A row belongs to a cluster of up to 8 thread blocks of 512 threads; a thread holds up to 64 scores in registers, so
// that the row is read once. Neighbouring scores lie in different threads.
//   1. A bound below the k-th best: the k-th largest of the threads' maxima, for k of them are at least as large. A
//      block of a cluster of c takes its k/c-th; the cluster takes the smallest of those. One histogram over one number
//      per thread instead of one over the row.
//   2. Scores not below the bound are listed in shared memory, a little more than k as a rule.
//   3. The first block selects from the lists, exactly: histograms over ever smaller ranges, 2,048 bins each; at last,
//      among equal scores, over entries.
// Rows of up to 8,192 scores begin with step 3. If a list gets too long (many equal scores, say) or the row does not
// fit the registers, the first block makes step 3 over the row in memory.
//
// Bound by latency: about ten barriers, and by waiting for instructions, most of which are run once. 512 of 32,768
// scores: 10.8 us for one row, 15.2 for 128, on an H200, 2026-11-15.
#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/index_tile.cuh"
#include "backend/cuda/launch.cuh"
#include "ops/score_row.h"

namespace kv4::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 512, kWarps = kThreads / 32, kHeld = 64;
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kRoom = 8192;          // of a list
constexpr int kBlockScores = 8192;   // a row is shared out over more blocks if each gets this many
constexpr unsigned kMostBlocks = 8;  // of a cluster
constexpr unsigned kAll = 0xFFFFFFFFu;
static_assert(kBins == 4 * kThreads && kHeld <= 64 && kHeld % 4 == 0);

struct Found {
  std::uint32_t bin;
  int above, inside;  // numbers in the bins above, in the bin
};

/// Numbers from low to high that still count; those above are taken.
struct Range {
  std::uint32_t low, high;

  __device__ int shift() const { return max(0, 32 - kBinBits - __clz(static_cast<int>(high - low))); }
  __device__ void enter(std::uint32_t bin) {
    const int by = shift();
    low += bin << by;
    high = low + min(high - low, (1u << by) - 1u);
  }
};

struct Shared {
  std::uint32_t histogram[kBins];  // all zero between uses
  int sums[2][kWarps];
  std::uint32_t lows[kWarps], highs[kWarps];
  Found found;
  // Written by the whole cluster, each block in its place.
  Range ranges[kMostBlocks];
  int listed[kMostBlocks];
  std::uint32_t keys[kRoom];  // ops::score_order; a segment for each block
  std::int32_t entries[kRoom];
};

/// Sums over a block's threads, two barriers apart.
class Scan {
 public:
  __device__ explicit Scan(Shared& s) : s_(s) {}

  /// Over the threads before this one; total: over all. One barrier.
  __device__ int before(int mine, int& total) {
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
  Shared& s_;
  int half_ = 0;
};

/// In which of the range's bins the `rank`-th largest number lies. for_each(f) calls f(number) for this thread's.
template <class ForEach>
__device__ Found find_bin(Shared& s, Scan& scan, const Range& range, int rank, ForEach&& for_each) {
  const int by = range.shift();
  for_each([&](std::uint32_t x) {
    if (x >= range.low && x <= range.high) atomicAdd(&s.histogram[(x - range.low) >> by], 1u);
  });
  __syncthreads();
  const std::uint32_t lowest = kBins - 4 - 4 * threadIdx.x;
  uint4& bins = *reinterpret_cast<uint4*>(&s.histogram[lowest]);
  const int inside[4] = {static_cast<int>(bins.w), static_cast<int>(bins.z), static_cast<int>(bins.y),
                         static_cast<int>(bins.x)};  // the uppermost first
  bins = {0, 0, 0, 0};
  int total, before = scan.before(inside[0] + inside[1] + inside[2] + inside[3], total);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < rank && rank <= before + inside[i])
      s.found = {lowest + 3u - static_cast<unsigned>(i), before, inside[i]};
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

/// The cut that takes `count` of a source's scores, at least as many of which lie in `range`.
template <class Source>
__device__ Cut find_cut(Shared& s, Scan& scan, const Source& source, Range range, int count) {
  for (;;) {
    const bool last = range.shift() == 0;
    const Found found = find_bin(s, scan, range, count,
                                 [&](auto&& f) { source.for_each([&](std::uint32_t key, std::int32_t) { f(key); }); });
    range.enter(found.bin);
    count -= found.above;
    if (found.inside == count) return {range, 0xFFFFFFFFu};
    if (last) break;
  }
  Range entries{~static_cast<std::uint32_t>(source.size() - 1), 0xFFFFFFFFu};  // the complement: smaller is better
  for (;;) {
    const Found found = find_bin(s, scan, entries, count, [&](auto&& f) {
      source.for_each([&](std::uint32_t key, std::int32_t entry) {
        if (key == range.low) f(~static_cast<std::uint32_t>(entry));
      });
    });
    entries.enter(found.bin);
    count -= found.above;
    if (found.inside == count) return {range, ~entries.low};
  }
}

/// The cluster's lists of entries below `bound`.
struct ListSource {
  const Shared& s;
  int blocks, bound;
  __device__ int size() const { return bound; }
  template <class F>
  __device__ void for_each(F&& f) const {
    const int segment = kRoom / blocks;
    for (int block = 0; block < blocks; ++block)
      for (int i = static_cast<int>(threadIdx.x); i < s.listed[block]; i += kThreads)
        f(s.keys[block * segment + i], s.entries[block * segment + i]);
  }
};

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

/// Calls f with each of a thread's scores; four at a time may be left out by the whole block.
template <int kMost = kHeld, class F>
__device__ void for_each_held(int stride, int count, F&& f) {
#pragma unroll
  for (int i = 0; i < kMost; i += 4) {
    if (i * stride >= count) continue;
    f(i), f(i + 1), f(i + 2), f(i + 3);
  }
}

/// A row that one block holds, a few scores in each thread.
struct HeldSource {
  static constexpr int kMost = kBlockScores / kThreads;
  const std::uint32_t (&held)[kHeld];
  int first, stride, count;
  __device__ int size() const { return count; }
  template <class F>
  __device__ void for_each(F&& f) const {
    for_each_held<kMost>(stride, count, [&](int i) {
      if (first + i * stride < count) f(held[i], first + i * stride);
    });
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

template <class Source>
__device__ void write_chosen(Scan& scan, const Source& source, const Cut& cut, const Choice& choice) {
  int mine = 0, total;
  source.for_each([&](std::uint32_t key, std::int32_t entry) { mine += cut.takes(key, entry); });
  int place = scan.before(mine, total);
  source.for_each([&](std::uint32_t key, std::int32_t entry) {
    if (cut.takes(key, entry)) choice.put(place++, entry);
  });
}

__device__ __noinline__ void select_from_row(Shared& s, RowSource row, Range range, Choice choice) {
  Scan scan(s);
  __syncthreads();
  write_chosen(scan, row, find_cut(s, scan, row, range, choice.tile.p.top), choice);
}

/// The smallest and largest of the block's numbers.
__device__ Range find_range(Shared& s, std::uint32_t low, std::uint32_t high) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  low = __reduce_min_sync(kAll, low);
  high = __reduce_max_sync(kAll, high);
  if (lane == 0) {
    s.lows[warp] = low;
    s.highs[warp] = high;
  }
  __syncthreads();
  const int at = lane % kWarps;
  return {__reduce_min_sync(kAll, s.lows[at]), __reduce_max_sync(kAll, s.highs[at])};
}

/// Step 1 in one block: what `rank` of its scores at least reach, and the largest of them.
__device__ Range find_bound(Shared& s, Scan& scan, const std::uint32_t (&held)[kHeld], int rank) {
  constexpr int kParts = 8;  // maxima per thread; neighbours join as long as twice `rank` are left
  std::uint32_t most[kParts] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most[i % kParts] = max(most[i % kParts], held[i]);
  int parts = kParts;
#pragma unroll
  for (int half = kParts / 2; half > 0; half /= 2) {
    if (half * kThreads < 2 * rank) break;
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
  Range range = find_range(s, low, high);
  const std::uint32_t top = range.high;
  for (int pass = 0; pass < 2; ++pass) {
    const bool last = range.shift() == 0;
    const Found found = find_bin(s, scan, range, rank, [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (i < parts) f(most[i]);
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
__device__ Shared& shared_of(Shared& s, int block) { return *cg::this_cluster().map_shared_rank(&s, block); }
#else
__device__ void arrive_cluster() {}
__device__ void wait_cluster() {}
__device__ int block_in_cluster() { return 0; }
__device__ Shared& shared_of(Shared& s, int) { return s; }
#endif
__device__ void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

__global__ void __launch_bounds__(kThreads, 1) select_best(const __grid_constant__ IndexTile tile, int most_blocks) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  reinterpret_cast<uint4*>(s.histogram)[threadIdx.x] = {0, 0, 0, 0};
  wait_for_previous();
  let_next_start();
  const int token = static_cast<int>(blockIdx.x) / most_blocks, rank = block_in_cluster();
  const ops::StepRecord record = tile.p.step.tokens[tile.first + token];
  const int count = tile.visible(record), top = tile.p.top;
  const int blocks = count <= kBlockScores ? 1 : most_blocks;  // all of a cluster or one: a barrier waits for all
  if (rank >= blocks || (rank > 0 && count <= top)) return;
  const Choice choice{tile, token, record.row};
  if (rank == 0)
    for (int i = count + static_cast<int>(threadIdx.x); i < top; i += kThreads) choice.put(i, -1);
  if (count <= top) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) choice.put(i, i);
    return;
  }

  const float* row = tile.row(token);
  const int stride = blocks * kThreads, first = rank * kThreads + static_cast<int>(threadIdx.x);
  if (count > stride * kHeld) {
    if (rank == 0) select_from_row(s, {row, count}, {0, 0xFFFFFFFFu}, choice);
    return;
  }
  if (blocks > 1) arrive_cluster();
  std::uint32_t held[kHeld] = {};            // absent ones are below all
  for_each_held(stride, count, [&](int i) {  // all loads before the first use
    held[i] = __float_as_uint(row[min(first + i * stride, count - 1)]);
  });
  for_each_held(stride, count,
                [&](int i) { held[i] = first + i * stride < count ? ops::score_order(__uint_as_float(held[i])) : 0u; });
  Scan scan(s);
  __syncthreads();              // the histogram is zero
  if (count <= kBlockScores) {  // short enough to select from the registers
    std::uint32_t low = 0xFFFFFFFFu, high = 0;
    const HeldSource source{held, first, stride, count};
    source.for_each([&](std::uint32_t key, std::int32_t) {
      low = min(low, key);
      high = max(high, key);
    });
    const Range all = find_range(s, low, high);
    return write_chosen(scan, source, find_cut(s, scan, source, all, top), choice);
  }
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
  Shared& leader = shared_of(s, 0);
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
  if (most > segment) return select_from_row(s, {row, count}, range, choice);
  const ListSource source{s, blocks, count};
  const Cut cut = all == top ? Cut{{0, 0xFFFFFFFFu}, 0xFFFFFFFFu} : find_cut(s, scan, source, range, top);
  write_chosen(scan, source, cut, choice);
}

}  // namespace

cudaError_t select_tile(const IndexTile& tile, cudaStream_t stream) {
  const cudaError_t status =
      cudaFuncSetAttribute(select_best, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (status != cudaSuccess) return status;
  // As many blocks as hold the longest row, or as keep the GPU busy.
  const std::int64_t longest = std::min(tile.score_stride, max_entries(tile.p));
  unsigned blocks = 1;
  while (overlaps_launches() && blocks < kMostBlocks && blocks * std::int64_t{kBlockScores} < longest &&
         (blocks * std::int64_t{kThreads * kHeld} < longest || 2 * blocks * tile.count <= 128))
    blocks *= 2;
  return launch_clusters<sizeof(Shared)>(select_best, blocks, blocks * static_cast<unsigned>(tile.count), kThreads,
                                         stream, tile, static_cast<int>(blocks));
}

}  // namespace kv4::cuda
