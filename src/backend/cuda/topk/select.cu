// Top-k of rows of scores. The chosen set is exact, ties go to the smaller entry, and the order of the result is the
// same on every run.
//
// select_row: one CTA per row, with up to 8,192 numbers in its registers (another instance takes up to 2,048).
//   Rows of up to 8,192 scores: the numbers are the scores (single_pass_select.cuh).
//   Longer rows, for which the score kernel has written group maxima: the k-th largest maximum is a lower bound of the
//   k-th best score, because k scores are at least as large. The CTA reads only groups that reach the bound, and
//   selects from their scores that reach it, a little more than k as a rule.
// select_long: rows of given scores of any length. A cluster of up to 8 CTAs reads each row once. A sample from the
//   whole row gives a bound that a few more than k scores are expected to reach. While later scores are loaded, each
//   CTA lists the entries of scores that reach the bound. Their scores are then loaded again into the shared memory of
//   the first CTA, which selects from the lists.
// If a list gets too long (for example with many equal scores), or if fewer than k scores reach the bound, radix
// selection (radix_select.cuh) goes over the row in memory.
//
// Before the grid dependency wait, given rows are prefetched into L2 and the record is read speculatively; the record
// is read again after the wait, together with the scores. Rows of up to 8,192 scores are bound by latency and
// instructions. H200, 2026-11-16: 2.2 us for 2,048 scores, 3.0 for 8,192, of which the next kernel waits 1,000 clocks.
// Many long rows are bound by memory: 128 x 262,144 scores take 44.5 us, reading them takes 31. A single long row is
// bound by latency, 9.3 us.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/cuda/topk/kernels.h"
#include "backend/cuda/topk/radix_select.cuh"
#include "backend/cuda/topk/single_pass_select.cuh"

namespace kv4::cuda {
namespace {

/// Selects from the row in memory by the record as it is after the wait. It is called if the speculative record was
/// wrong, or if the numbers do not suit the single pass.
template <class S>
__device__ __noinline__ void select_after_wait(S& s, const TokenTile& tile, int token) {
  const TokenRow seen(tile, token);
  const Choice choice{tile, token, seen.request};
  if (seen.count <= tile.p.top) return take_whole(choice, seen.count);
  select_from_row(s, tile.row(token), seen.count, Bounds(), choice);
}

/// kByGroups: rows may be longer than kNumbers, and then their group maxima are known.
template <int kThreads, int kNumbers, bool kByGroups>
__global__ void __launch_bounds__(kThreads, 1) select_row(const __grid_constant__ TokenTile tile) {
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
    prefetch_l2(row + threadIdx.x * kLineNumbers);
  // The speculative record is right unless the kernel before writes it; it is read again after the wait.
  const ops::StepRecord* const record = tile.p.step.tokens + tile.first + token;
  const auto load = [](const std::int32_t& x) { return static_cast<std::int32_t>(load_l2<1>(&x).w[0]); };
  ops::StepRecord speculative;
  speculative.row = load(record->row);
  speculative.position = load(record->position);
  const int count = tile.visible(speculative);
  const bool whole = !kByGroups || count <= kNumbers;
  const int numbers = whole ? count : groups_of(count);
  const float* const from = whole ? row : tile.maxima(token);
  grid_dependency_wait_after(max(numbers, 0));
  launch_dependents();
  float held[Row::kHeld];
  load_fours<kThreads>(from, numbers, in_fours, held);
  const bool is_same = load(record->row) == speculative.row & load(record->position) == speculative.position;
  if (!is_same || numbers <= top || numbers > kNumbers) return select_after_wait(s.selection, tile, token);
  if (in_fours && numbers % 4 != 0) mask_last_four<Row>(numbers, held);
  const Choice choice{tile, token, speculative.row};
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
  if (!is_done) select_after_wait(s.selection, tile, token);
}

template <int kThreads, int kNumbers, bool kByGroups>
cudaError_t launch_select_row(const TokenTile& tile, cudaStream_t stream) {
  // After a score kernel, one CTA per SM: CTAs that begin early would otherwise crowd the few free SMs.
  constexpr int kMoreThanHalf = 116 << 10, kUsed = sizeof(RowSelection<kThreads, kNumbers>);
  constexpr int kBytes = kByGroups ? std::max(kUsed, kMoreThanHalf) : kUsed;
  const auto kernel = select_row<kThreads, kNumbers, kByGroups>;
  return launch<kBytes>(kernel, static_cast<unsigned>(tile.count), kThreads, stream, tile);
}

// --- longer rows of given scores

// The sizes were chosen on an H200, 2026-11-16: one CTA instead of four takes 32,768 scores from 9.6 to 8.8 us, the
// smaller sample to 8.3. To check them, change one and compare `kv4_gpu_bench --only index`.
constexpr int kLongThreads = 512;
constexpr int kRoom = 16384;      // entries of a cluster's lists together
constexpr int kMaxSample = 8192;  // scores of the sample; half of them if each CTA gets at most kScoresPerCta
constexpr int kBatch = 8;         // float4s of scores that a thread has in flight together
constexpr unsigned kMaxClusterCtas = 8;
constexpr std::int64_t kScoresPerCta = 32768;  // a row is split over more CTAs if each gets this many
using LongSelection = Selection<kLongThreads>;

struct LongShared {
  static constexpr int kWarpRoom = kListRoom / LongSelection::kWarps;
  LongSelection selection;
  float scores[LongSelection::kWarps][kWarpRoom];  // for take_best
  std::int32_t entries[LongSelection::kWarps][kWarpRoom];
  // Used in the cluster's first CTA; each CTA writes its own part.
  int listed[kMaxClusterCtas];
  float listed_scores[kRoom];
  std::int32_t listed_entries[kRoom];
};

/// The lists of all CTAs of the cluster, whose entries are below `bound`.
struct ListSource {
  static constexpr int kMaxPerThread = 0;
  const LongShared& s;
  int ctas, bound;
  __device__ int size() const { return bound; }
  template <class F>
  __device__ void for_each(F&& f) const {
    const int segment = kRoom / ctas;
    for (int cta = 0; cta < ctas; ++cta)
      for (int i = static_cast<int>(threadIdx.x); i < s.listed[cta]; i += kLongThreads)
        f(s.listed_scores[cta * segment + i], s.listed_entries[cta * segment + i]);
  }
};

/// The same for short lists: each list is taken by some of the warps.
struct ShortListSource {
  static constexpr int kMaxPerThread = LongShared::kWarpRoom / 32, kStep = 1;
  static constexpr bool kInLists = false, kIsBounded = false;
  const LongShared& s;
  int begin, end, step;  // of this thread

  __device__ ShortListSource(const LongShared& s, int ctas) : s(s) {
    const int warp = static_cast<int>(threadIdx.x / 32), cta = warp & (ctas - 1), segment = kRoom / ctas;
    begin = cta * segment + warp / ctas * 32 + static_cast<int>(threadIdx.x % 32);
    end = cta * segment + s.listed[cta];
    step = kLongThreads / ctas;
  }
  __device__ static bool fits(int longest, int ctas) { return longest * ctas <= kMaxPerThread * kLongThreads; }
  __device__ std::int32_t entry(int i) const { return s.listed_entries[min(begin + i * step, kRoom - 1)]; }
  __device__ float score(int i) const {
    return begin + i * step < end ? s.listed_scores[begin + i * step] : __builtin_nanf("");
  }
  __device__ bool reaches(int i) const { return begin - static_cast<int>(threadIdx.x % 32) + i * step < end; }
};

/// A row as float4s aligned to 16 bytes, and the scores left over at its two ends.
struct LongRow {
  const float* scores;
  int count, head, fours;  // head: scores before the first float4

  __device__ LongRow(const float* scores, int count)
      : scores(scores),
        count(count),
        head(min(count, static_cast<int>(-(reinterpret_cast<std::intptr_t>(scores) / 4) & 3))),
        fours((count - head) / 4) {}
  __device__ const float4* data() const { return reinterpret_cast<const float4*>(scores + head); }
  __device__ int ends() const { return count - 4 * fours; }
  /// The entry of the i-th score at the ends.
  __device__ int end_entry(int i) const { return i < head ? i : i + 4 * fours; }
  __device__ int entry(int four, int i) const { return head + 4 * four + i; }
};

__device__ float4 no_four() {
  const float nan = __builtin_nanf("");
  return {nan, nan, nan, nan};
}

/// Loads kBatch float4s per thread, the CTA's from index `first` on. All loads are in flight when it returns.
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

/// A sample of a row's scores, spread over the whole row.
class Sample {
 public:
  /// All loads are in flight when it returns.
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
  static constexpr int kFours = kMaxSample / 4 / kLongThreads, kShift = 10;
  static_assert(kMaxSample / 8 == 1 << kShift && kFours % 2 == 0);
  int fours_;
  float4 x_[kFours];
};

/// A bound that somewhat more than `top` scores of the row probably reach, and the largest score of the sample. The
/// bound is infinite if the sample gives none.
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
  // The expected number of the best scores in the sample, plus eight standard deviations.
  const float expected = static_cast<float>(top) * sample.size() / static_cast<float>(count);
  const float rank = fminf(expected + 8.0f * sqrtf(expected) + 16.0f, sample.size());
  const Found found = find_bin(s, scan, static_cast<int>(rank),
                               [&](auto&& f) { sample.for_each([&](float x) { f(intervals.bin_of(x)); }); });
  return {intervals.below(static_cast<int>(found.bin)), all.high};
}

/// Selects from lists that are too long for take_best or have too many equal scores.
__device__ __noinline__ void select_from_lists(LongShared& s, const ListSource& source, int all, Bounds bounds,
                                               Choice choice) {
  __syncthreads();
  Scan<LongSelection> scan(s.selection);
  const int top = choice.tile.p.top;
  const Cut cut = all == top ? Cut{{0, 0xFFFFFFFFu}, 0xFFFFFFFFu} : find_cut(s.selection, scan, source, bounds, top);
  write_chosen(s.selection, scan, source, cut, choice);
}

__global__ void __launch_bounds__(kLongThreads, 1) select_long(const __grid_constant__ TokenTile tile, int ctas) {
  extern __shared__ __align__(16) unsigned char bytes[];
  LongShared& s = *reinterpret_cast<LongShared*>(bytes);
  s.selection.clear();
  touch(tile);
  grid_dependency_wait();
  launch_dependents();
  const int token = static_cast<int>(blockIdx.x) / ctas, rank = cta_rank();
  const TokenRow seen(tile, token);
  const int count = seen.count, top = tile.p.top;
  const Choice choice{tile, token, seen.request};
  if (count <= top) {
    if (rank == 0) take_whole(choice, count);
    return;
  }
  if (ctas > 1) cluster_arrive_diverged();

  const LongRow row(tile.row(token), count);
  const Sample sample(row, count > ctas * kScoresPerCta);
  float4 x[2][kBatch];
  const int stride = ctas * kBatch * kLongThreads;
  int first = rank * kBatch * kLongThreads;
  load_batch(row, first, x[0]);
  load_batch(row, first + stride, x[1]);
  Scan<LongSelection> scan(s.selection);
  const Bounds bounds = estimate_bounds(s.selection, scan, sample, count, top);
  if (ctas > 1) cluster_wait_diverged();
  const float bound = bounds.low;
  if (!(bound < -kNoScore)) {
    if (rank == 0) select_from_row(s.selection, row.scores, count, Bounds(), choice);
    return;
  }

  // Each CTA lists the entries that reach the bound in its own memory.
  const int segment = kRoom / ctas;
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
  LongShared& leader = shared_of_cta(s, 0);
  if (threadIdx.x == 0) leader.listed[rank] = listed;
  if (listed <= segment)
    for (int i = static_cast<int>(threadIdx.x); i < listed; i += kLongThreads) {
      const std::int32_t entry = entries[i];
      leader.listed_scores[rank * segment + i] = row.scores[entry];
      if (rank > 0) leader.listed_entries[rank * segment + i] = entry;
    }
  if (ctas > 1)
    cluster_sync_diverged();
  else
    __syncthreads();
  if (rank > 0) return;

  int longest = 0, all = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    longest = max(longest, s.listed[cta]);
    all += s.listed[cta];
  }
  const bool are_short = ShortListSource::fits(longest, ctas) && all >= top;
  if (are_short && take_best(s, ShortListSource(s, ctas), bounds, choice)) return;
  if (longest > segment || all < top) return select_from_row(s.selection, row.scores, count, Bounds(), choice);
  select_from_lists(s, {s, ctas, count}, all, bounds, choice);
}

/// Whether `rows` clusters of `cluster` CTAs, one per SM, run together. A cluster must not cross a GPC, and GPCs have
/// different sizes: on an H200 28 clusters of 4 CTAs fit, 32 do not. As parts of the SMs: 32 of 33 for clusters of 2,
/// 28 of 33 for larger ones.
bool fit_at_once(unsigned cluster, unsigned rows, const DeviceFacts& device) {
  return cluster * rows * 33 <= static_cast<unsigned>(device.num_sms) * (cluster == 2 ? 32 : 28);
}

}  // namespace

cudaError_t select_short_rows(const TokenTile& tile, const DeviceFacts&, cudaStream_t stream) {
  return launch_select_row<512, kShortRowNumbers, false>(tile, stream);
}

cudaError_t select_rows(const TokenTile& tile, const DeviceFacts&, cudaStream_t stream) {
  return launch_select_row<512, kRowNumbers, false>(tile, stream);
}

cudaError_t select_grouped_rows(const TokenTile& tile, const DeviceFacts&, cudaStream_t stream) {
  return launch_select_row<512, kRowNumbers, true>(tile, stream);
}

bool can_select_long_rows() { return has_shared_memory(sizeof(LongShared)); }

cudaError_t select_long_rows(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  const std::int64_t longest = std::min(tile.score_stride, max_entries(tile.p));
  const unsigned rows = static_cast<unsigned>(tile.count);
  unsigned ctas = 1;
  while (device.is_sm90 && ctas < kMaxClusterCtas && ctas * kScoresPerCta < longest &&
         fit_at_once(2 * ctas, rows, device))
    ctas *= 2;
  return launch_clusters<sizeof(LongShared)>(select_long, ctas, ctas * rows, kLongThreads, stream, tile,
                                             static_cast<int>(ctas));
}

}  // namespace kv4::cuda
