// The best k of a row of scores, exactly: ties go to the smaller entry. The result's order is the same on every run.
//
// select_row: a CTA per row, up to 8,192 numbers in its registers (a kernel of its own for up to 2,048).
//   Rows of up to 8,192 scores: selection from them (fast_select.cuh).
//   Longer ones, where the scorer left the largest score of each group of keys: the k-th largest of those is a bound
//   below the k-th best score, for k scores are at least as large. Only groups that reach it are read, and their
//   scores that reach it, a little more than k as a rule, are selected from.
// select_long: rows of given scores of any length, each read once by a cluster of up to 8 CTAs. A sample from
//   all over the row gives a bound that k scores and some more are expected to reach. While later scores are under way,
//   the entries of those that reach it are listed; their scores are fetched again, into the first block's shared
//   memory, which selects from the lists.
// If a list gets too long (many equal scores, say), or, against all odds, fewer than k reach the bound, exact selection
// (exact_select.cuh) goes over the row in memory.
//
// Given rows are brought into L2 and records looked at while the kernel before ends; the record is read again after the
// wait, beside the scores.
// Rows of up to 8,192: bound by latency and instructions. H200, 2026-11-16: 2.2 us for 2,048 scores, 3.0 for 8,192,
// 1,000 clocks of it until the kernel after may begin. Long rows: by memory if there are many, 128 x 262,144 scores in
// 44.5 us where reading them takes 31; a single one by latency, 9.3 us.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/cuda/topk/exact_select.cuh"
#include "backend/cuda/topk/fast_select.cuh"

namespace kv4::cuda {
namespace {

/// By the record as it is now, from the row in memory: where the record or the numbers are not as expected.
template <class S>
__device__ __noinline__ void select_anew(S& s, const IndexTile& tile, int token) {
  const TokenRow seen(tile, token);
  const Choice choice{tile, token, seen.request};
  if (seen.count <= tile.p.top) return take_whole(choice, seen.count);
  select_from_row(s, tile.row(token), seen.count, Bounds(), choice);
}

/// kByGroups: rows may be longer than kNumbers, and then their groups' maxima are known.
template <int kThreads, int kNumbers, bool kByGroups>
__global__ void __launch_bounds__(kThreads, 1) select_row(const __grid_constant__ IndexTile tile) {
  using Row = RowSelection<kThreads, kNumbers>;
  extern __shared__ __align__(16) unsigned char bytes[];
  Row& s = *reinterpret_cast<Row*>(bytes);
  s.selection.clear();
  touch(tile);
  const int token = static_cast<int>(blockIdx.x), top = tile.p.top;
  const float* row = tile.row(token);
  const bool in_fours = reinterpret_cast<std::intptr_t>(row) % 16 == 0 && tile.score_stride % 4 == 0;
  constexpr int kLineNumbers = 32;
  if (!tile.is_scored && static_cast<int>(threadIdx.x) * kLineNumbers < min(tile.score_stride, std::int64_t{kNumbers}))
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + threadIdx.x * kLineNumbers));
  // The record is there already, unless the kernel before writes it: it is read again after the wait.
  const ops::StepRecord* const record = tile.p.step.tokens + tile.first + token;
  const auto load = [](const std::int32_t& x) {
    std::int32_t value;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value) : "l"(&x) : "memory");
    return value;
  };
  ops::StepRecord guess;
  guess.row = load(record->row);
  guess.position = load(record->position);
  const int count = tile.visible(guess);
  const bool whole = !kByGroups || count <= kNumbers;
  const int numbers = whole ? count : groups_of(count);
  const float* const from = whole ? row : tile.maxima(token);
  grid_dependency_wait_after(max(numbers, 0));
  launch_dependents();
  float held[Row::kHeld];
  load_fours<kThreads>(from, numbers, in_fours, held);
  const bool is_same = load(record->row) == guess.row & load(record->position) == guess.position;
  if (!is_same || numbers <= top || numbers > kNumbers) return select_anew(s.selection, tile, token);
  if (in_fours && numbers % 4 != 0) leave_out_rest_of_fours<Row>(numbers, held);
  const Choice choice{tile, token, guess.row};
  const FoursSource<Row> source{held, numbers};
  const Bounds bounds = find_top_bounds(s, source, top);
  bool is_done = false;
  if (whole) {
    is_done = take_best(s, source, bounds, choice);
  } else if constexpr (kByGroups) {
    select_by_groups(
        s, source, bounds, {row, count, group_size(count), top, 0.0f},
        [&](const auto& lists, const Bounds& of_lists) { is_done = take_best(s, lists, of_lists, choice); });
  }
  if (!is_done) select_anew(s.selection, tile, token);
}

template <int kThreads, int kNumbers, bool kByGroups>
cudaError_t launch_select_row(const IndexTile& tile, cudaStream_t stream) {
  // After a scorer one block to an SM: those that begin early would else crowd the few that are free.
  constexpr int kMoreThanHalf = 116 << 10, kUsed = sizeof(RowSelection<kThreads, kNumbers>);
  constexpr int kBytes = kByGroups ? std::max(kUsed, kMoreThanHalf) : kUsed;
  const auto kernel = select_row<kThreads, kNumbers, kByGroups>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  return launch<kBytes>(kernel, static_cast<unsigned>(tile.count), kThreads, stream, tile);
}

// --- longer rows of given scores

constexpr int kLongThreads = 512;
constexpr int kRoom = 16384;       // of a cluster's list
constexpr int kMostSample = 8192;  // scores that the bound is taken from, of rows longer than a block likes; else half
constexpr int kBatch = 8;          // fours of scores of a thread that are under way together
constexpr unsigned kMostBlocks = 8;           // of a cluster
constexpr std::int64_t kBlockScores = 32768;  // a row is shared out over more blocks if each gets this many
using LongSelection = Selection<kLongThreads>;

struct LongShared {
  static constexpr int kWarpRoom = kListRoom / LongSelection::kWarps;
  LongSelection selection;
  float scores[LongSelection::kWarps][kWarpRoom];  // for take_best
  std::int32_t entries[LongSelection::kWarps][kWarpRoom];
  // Of the cluster's first block: each block writes its own part.
  int listed[kMostBlocks];
  float listed_scores[kRoom];
  std::int32_t listed_entries[kRoom];
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
        f(s.listed_scores[block * segment + i], s.listed_entries[block * segment + i]);
  }
};

/// The same, each block's list by some of the warps; for short lists.
struct ShortListSource {
  static constexpr int kMost = LongShared::kWarpRoom / 32, kStep = 1;
  static constexpr bool kInLists = false, kIsBounded = false;
  const LongShared& s;
  int begin, end, step;  // this thread's

  __device__ ShortListSource(const LongShared& s, int blocks) : s(s) {
    const int warp = static_cast<int>(threadIdx.x / 32), block = warp & (blocks - 1), segment = kRoom / blocks;
    begin = block * segment + warp / blocks * 32 + static_cast<int>(threadIdx.x % 32);
    end = block * segment + s.listed[block];
    step = kLongThreads / blocks;
  }
  __device__ static bool fits(int longest, int blocks) { return longest * blocks <= kMost * kLongThreads; }
  __device__ std::int32_t entry(int i) const { return s.listed_entries[min(begin + i * step, kRoom - 1)]; }
  __device__ float score(int i) const {
    return begin + i * step < end ? s.listed_scores[begin + i * step] : __builtin_nanf("");
  }
  __device__ bool reaches(int i) const { return begin - static_cast<int>(threadIdx.x % 32) + i * step < end; }
};

/// A row as fours at multiples of 16 bytes, and what is left of it at its ends.
struct LongRow {
  const float* scores;
  int count, head, fours;  // head: scores before the first four

  __device__ LongRow(const float* scores, int count)
      : scores(scores),
        count(count),
        head(min(count, static_cast<int>(-(reinterpret_cast<std::intptr_t>(scores) / 4) & 3))),
        fours((count - head) / 4) {}
  __device__ const float4* data() const { return reinterpret_cast<const float4*>(scores + head); }
  __device__ int ends() const { return count - 4 * fours; }
  /// Of the i-th score at the ends.
  __device__ int end_entry(int i) const { return i < head ? i : i + 4 * fours; }
  __device__ int entry(int four, int i) const { return head + 4 * four + i; }
};

__device__ float4 no_four() {
  const float nan = __builtin_nanf("");
  return {nan, nan, nan, nan};
}

/// The block's fours from the first-th on, kBatch of each thread: all loads are under way when it returns.
__device__ void load_batch(const LongRow& row, int first, float4 (&x)[kBatch]) {
  const float4* from = row.data() + (first + static_cast<int>(threadIdx.x));
  const int left = row.fours - first - static_cast<int>(threadIdx.x);
  if (row.fours - first >= kBatch * kLongThreads) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) x[i] = from[i * kLongThreads];
  } else {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) x[i] = i * kLongThreads < left ? from[i * kLongThreads] : no_four();
  }
}

/// Some of a row's scores, from all over it.
class Sample {
 public:
  /// All loads are under way when it returns.
  __device__ Sample(const LongRow& row, bool large) : fours_(large ? kFours : kFours / 2) {
    const std::uint64_t pieces = static_cast<std::uint64_t>(row.fours / 2);  // of 32 bytes
    const int shift = large ? kShift : kShift - 1;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (i >= fours_) break;
      const int at = static_cast<int>(threadIdx.x) + i * kLongThreads;
      const int four = static_cast<int>(static_cast<std::uint64_t>(at / 2) * pieces >> shift) * 2 + at % 2;
      x_[i] = four < row.fours ? row.data()[four] : no_four();
    }
  }
  __device__ float size() const { return static_cast<float>(4 * kLongThreads * fours_); }
  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (i >= fours_) break;
      f(x_[i].x), f(x_[i].y), f(x_[i].z), f(x_[i].w);
    }
  }

 private:
  static constexpr int kFours = kMostSample / 4 / kLongThreads, kShift = 10;
  static_assert(kMostSample / 8 == 1 << kShift && kFours % 2 == 0);
  int fours_;
  float4 x_[kFours];
};

/// What somewhat more than `top` scores of the row probably reach, and the largest of the sample. Not finite if there
/// is no telling.
__device__ Bounds estimate_bounds(LongSelection& s, Scan<LongSelection>& scan, const Sample& sample, int count,
                                  int top) {
  Bounds mine;
  sample.for_each([&](float x) {
    if (x > kNoScore) mine.low = fminf(mine.low, x);
    if (x < -kNoScore) mine.high = fmaxf(mine.high, x);
  });
  const Bounds all = join_bounds(s, mine);
  const Intervals intervals(all);
  if (!intervals.are_finite()) return Bounds();
  // So many of the best are expected in the sample, with their scatter eight times over.
  const float expected = static_cast<float>(top) * sample.size() / static_cast<float>(count);
  const float rank = fminf(expected + 8.0f * sqrtf(expected) + 16.0f, sample.size());
  const Found found = find_bin(s, scan, static_cast<int>(rank),
                               [&](auto&& f) { sample.for_each([&](float x) { f(intervals.bin_of(x)); }); });
  return {intervals.below(static_cast<int>(found.bin)), all.high};
}

/// Of lists that are too long for take_best, or have too many equal scores.
__device__ __noinline__ void select_from_lists(LongShared& s, const ListSource& source, int all, Bounds bounds,
                                               Choice choice) {
  __syncthreads();
  Scan<LongSelection> scan(s.selection);
  const int top = choice.tile.p.top;
  const Cut cut = all == top ? Cut{{0, 0xFFFFFFFFu}, 0xFFFFFFFFu} : find_cut(s.selection, scan, source, bounds, top);
  write_chosen(s.selection, scan, source, cut, choice);
}

__global__ void __launch_bounds__(kLongThreads, 1) select_long(const __grid_constant__ IndexTile tile, int blocks) {
  extern __shared__ __align__(16) unsigned char bytes[];
  LongShared& s = *reinterpret_cast<LongShared*>(bytes);
  s.selection.clear();
  touch(tile);
  grid_dependency_wait();
  launch_dependents();
  const int token = static_cast<int>(blockIdx.x) / blocks, rank = block_in_cluster();
  const TokenRow seen(tile, token);
  const int count = seen.count, top = tile.p.top;
  const Choice choice{tile, token, seen.request};
  if (count <= top) {
    if (rank == 0) take_whole(choice, count);
    return;
  }
  if (blocks > 1) arrive_cluster();

  const LongRow row(tile.row(token), count);
  const Sample sample(row, count > blocks * kBlockScores);
  float4 x[2][kBatch];
  const int stride = blocks * kBatch * kLongThreads;
  int first = rank * kBatch * kLongThreads;
  load_batch(row, first, x[0]);
  load_batch(row, first + stride, x[1]);
  Scan<LongSelection> scan(s.selection);
  const Bounds bounds = estimate_bounds(s.selection, scan, sample, count, top);
  if (blocks > 1) wait_cluster();
  const float bound = bounds.low;
  if (!(bound < -kNoScore)) {
    if (rank == 0) select_from_row(s.selection, row.scores, count, Bounds(), choice);
    return;
  }

  // Entries that reach the bound into this block's own memory.
  const int segment = kRoom / blocks;
  std::int32_t* const entries = s.listed_entries + rank * segment;
  int listed = 0;
  const auto list = [&](std::uint32_t reach, auto&& entry_of) {
    int total, place = listed + scan.before(__popc(reach), total);
    listed += total;
    if (listed > segment) return;
    for (; reach != 0; reach &= reach - 1) entries[place++] = entry_of(__ffs(static_cast<int>(reach)) - 1);
  };
  if (rank == 0 && row.ends() > 0) {
    const int i = static_cast<int>(threadIdx.x), entry = row.end_entry(i);
    list(i < row.ends() && row.scores[entry] >= bound, [&](int) { return entry; });
  }
  const auto list_batch = [&](float4(&batch)[kBatch]) {
    static_assert(4 * kBatch == 32);
    std::uint32_t reach = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch[i].x >= bound) reach |= 1u << (4 * i);
      if (batch[i].y >= bound) reach |= 2u << (4 * i);
      if (batch[i].z >= bound) reach |= 4u << (4 * i);
      if (batch[i].w >= bound) reach |= 8u << (4 * i);
    }
    const int at = first + static_cast<int>(threadIdx.x);
    first += stride;
    load_batch(row, first + stride, batch);
    list(reach, [&](int bit) { return row.entry(at + bit / 4 * kLongThreads, bit % 4); });
  };
  while (first < row.fours) {
    list_batch(x[0]);
    list_batch(x[1]);
  }
  __syncthreads();
  LongShared& leader = shared_of(s, 0);
  if (threadIdx.x == 0) leader.listed[rank] = listed;
  if (listed <= segment)
    for (int i = static_cast<int>(threadIdx.x); i < listed; i += kLongThreads) {
      const std::int32_t entry = entries[i];
      leader.listed_scores[rank * segment + i] = row.scores[entry];
      if (rank > 0) leader.listed_entries[rank * segment + i] = entry;
    }
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
  const bool are_short = ShortListSource::fits(most, blocks) && all >= top;
  if (are_short && take_best(s, ShortListSource(s, blocks), bounds, choice)) return;
  if (most > segment || all < top) return select_from_row(s.selection, row.scores, count, Bounds(), choice);
  select_from_lists(s, {s, blocks, count}, all, bounds, choice);
}

/// Whether clusters of so many blocks, one to an SM, run together on an H200: its parts are of different
/// sizes. 28 of 4 do, 32 do not.
bool fit_at_once(unsigned cluster, unsigned rows) { return cluster * rows <= (cluster == 2 ? 128 : 112); }

}  // namespace

cudaError_t select_tile(const IndexTile& tile, cudaStream_t stream) {
  const std::int64_t longest = std::min(tile.score_stride, max_entries(tile.p));
  const unsigned rows = static_cast<unsigned>(tile.count);
  if (tile.has_maxima || longest <= kRowNumbers) {
    constexpr int kFewNumbers = 2048;
    if (longest <= kFewNumbers) return launch_select_row<512, kFewNumbers, false>(tile, stream);
    if (longest <= kRowNumbers) return launch_select_row<512, kRowNumbers, false>(tile, stream);
    return launch_select_row<512, kRowNumbers, true>(tile, stream);
  }
  // Other GPUs than Hopper: exact selection goes over rows in memory.
  if (!has_shared_memory(sizeof(LongShared))) return launch_select_row<512, kRowNumbers, false>(tile, stream);
  const cudaError_t status = cudaFuncSetAttribute(select_long, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(LongShared)));
  if (status != cudaSuccess) return status;
  unsigned blocks = 1;
  while (is_sm90() && blocks < kMostBlocks && blocks * kBlockScores < longest && fit_at_once(2 * blocks, rows))
    blocks *= 2;
  return launch_clusters<sizeof(LongShared)>(select_long, blocks, blocks * rows, kLongThreads, stream, tile,
                                             static_cast<int>(blocks));
}

}  // namespace kv4::cuda
