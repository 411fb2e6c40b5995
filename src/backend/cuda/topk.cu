// The best k of a row of scores, exactly: ties go to the smaller entry. The result's order is the same on every run.
//
// select_row: a thread block of 512 per row, at most 16 numbers in a thread's registers.
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
// Bound by instructions, of which half are the same for any number of scores: so not more warps. And by latency: ten
// barriers, loads that depend on each other.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/cluster.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/topk_select.cuh"

namespace kv4::cuda {
namespace {

constexpr int kRowThreads = 512;
using Row = RowSelection<kRowThreads>;

__global__ void __launch_bounds__(kRowThreads, 1) select_row(const __grid_constant__ IndexTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Row& s = *reinterpret_cast<Row*>(bytes);
  s.selection.clear();
  touch(tile);
  const int token = static_cast<int>(blockIdx.x);
  const TokenRow seen = row_and_wait(tile, token);
  const int count = seen.count, top = tile.p.top;
  const Choice choice{tile, token, seen.request};
  if (count <= top) return take_whole(choice, count);

  const float* row = tile.row(token);
  const bool whole = count <= kRowNumbers;
  const int group = group_size(count), numbers = whole ? count : groups_of(count);
  if (numbers <= top) return select_from_row(s.selection, row, count, Bounds(), choice);
  float held[Row::kHeld];
  load_numbers(whole ? row : tile.maxima(token), numbers, held);
  const HeldSource<Row> source{held, numbers};
  const Bounds all = find_bounds(s, source);
  Scan scan(s.selection);
  const auto select = [&](const auto& from, const Bounds& bounds) {
    write_chosen(s.selection, scan, from, find_cut(s.selection, scan, from, bounds, top), choice);
  };
  if (whole)
    select(source, all);
  else if (!select_by_groups(s, scan, source, all, {row, count, group, top, 0.0f}, select))
    select_from_row(s.selection, row, count, Bounds(), choice);
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
  static constexpr int kMost = 0;
  const LongShared& s;
  int blocks, bound;
  __device__ int size() const { return bound; }
  template <class F>
  __device__ void for_each(F&& f) const {
    const int segment = kRoom / blocks;
    for (int block = 0; block < blocks; ++block)
      for (int i = static_cast<int>(threadIdx.x); i < s.listed[block]; i += kLongThreads)
        f(score_of(s.keys[block * segment + i]), s.entries[block * segment + i]);
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

__global__ void __launch_bounds__(kLongThreads, 1)
    select_long(const __grid_constant__ IndexTile tile, int most_blocks) {
  extern __shared__ __align__(16) unsigned char bytes[];
  LongShared& s = *reinterpret_cast<LongShared*>(bytes);
  s.selection.clear();
  touch(tile);
  wait_for_previous();
  let_next_start();
  const int token = static_cast<int>(blockIdx.x) / most_blocks, rank = block_in_cluster();
  const TokenRow seen(tile, token);
  const int count = seen.count, top = tile.p.top;
  const int blocks = count <= kBlockScores ? 1 : most_blocks;  // all of a cluster or one: a barrier waits for all
  if (rank >= blocks) return;
  const Choice choice{tile, token, seen.request};
  if (count <= top) {
    if (rank == 0) take_whole(choice, count);
    return;
  }

  const float* row = tile.row(token);
  const int stride = blocks * kLongThreads, first = rank * kLongThreads + static_cast<int>(threadIdx.x);
  if (count > stride * kHeld) {
    if (rank == 0) select_from_row(s.selection, row, count, Bounds(), choice);
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
  if (most > segment) return select_from_row(s.selection, row, count, Bounds(range), choice);
  const ListSource source{s, blocks, count};
  const Cut cut =
      all == top ? Cut{{0, 0xFFFFFFFFu}, 0xFFFFFFFFu} : find_cut(s.selection, scan, source, Bounds(range), top);
  write_chosen(s.selection, scan, source, cut, choice);
}

}  // namespace

cudaError_t select_tile(const IndexTile& tile, cudaStream_t stream) {
  const std::int64_t longest = std::min(tile.score_stride, max_entries(tile.p));
  const unsigned rows = static_cast<unsigned>(tile.count);
  if (tile.has_maxima || longest <= kRowNumbers) {
    const cudaError_t status =
        cudaFuncSetAttribute(select_row, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Row)));
    return status == cudaSuccess ? launch<sizeof(Row)>(select_row, rows, kRowThreads, stream, tile) : status;
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
