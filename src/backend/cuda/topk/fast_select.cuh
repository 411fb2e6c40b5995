// The best k of a CTA's numbers, the short way: one histogram of as many equal intervals as there are threads.
// Numbers above the interval that the k-th best lies in are taken as they are listed, those in it (few, as a rule) are
// settled among each other: five barriers, one pass over the numbers after the histogram, nothing sorted or looked at
// again. Where too many lie in the interval, nothing is written, and exact_select.cuh does it. Of long rows whose
// groups' largest scores are known, the same histogram of those finds which groups to read.
//
// It runs once per launch, so it is bound by latency and by how fast code is fetched: what is rarely needed is not
// inlined (the way over such code to the last part took 780 clocks on an H200, 2026-11-16, 200 where there was none),
// and loops that are short are not unrolled. Loops that a lane runs as often as it has numbers are slow: lists by a
// mask and such a loop took 3,000 clocks, by votes 2,250.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/topk/exact_select.cuh"

namespace kv4::cuda {

/// Numbers in registers, fours of neighbours; those that are absent are NaN.
template <class Shared>
struct FoursSource {
  static constexpr int kMost = Shared::kHeld, kStep = 4;
  static constexpr bool kInLists = false, kIsBounded = true;
  static_assert(kMost % 4 == 0);
  const float (&held)[kMost];
  int count;
  __device__ static std::int32_t entry(int i) {
    return 4 * (static_cast<int>(threadIdx.x) + i / 4 * Shared::kThreads) + i % 4;
  }
  __device__ int size() const { return count; }
  __device__ float score(int i) const { return held[i]; }
  /// Whether some thread has the i-th, for multiples of kStep.
  __device__ bool reaches(int i) const { return i * Shared::kThreads < count; }
  /// Whether every thread has a number.
  __device__ bool is_everywhere() const { return count > 4 * (Shared::kThreads - 1); }
  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i % kStep == 0 && i > 0 && !reaches(i)) break;
      f(held[i], entry(i));
    }
  }
};

/// All loads are under way when it returns. in_fours: at a multiple of 16 bytes, with room for whole fours.
template <int kThreads, int kHeld>
__device__ void load_fours(const float* from, int numbers, bool in_fours, float (&held)[kHeld]) {
  const float nan = __builtin_nanf("");
  if (in_fours) {
#pragma unroll
    for (int i = 0; i < kHeld; i += 4) {
      const int four = static_cast<int>(threadIdx.x) + i / 4 * kThreads;
      float4 x = {nan, nan, nan, nan};
      if (4 * four < numbers) x = reinterpret_cast<const float4*>(from)[four];
      held[i] = x.x, held[i + 1] = x.y, held[i + 2] = x.z, held[i + 3] = x.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = 4 * (static_cast<int>(threadIdx.x) + i / 4 * kThreads) + i % 4;
      held[i] = at < numbers ? from[at] : nan;
    }
  }
}

/// Of fours that were loaded whole.
template <class Shared>
__device__ void leave_out_rest_of_fours(int numbers, float (&held)[Shared::kHeld]) {
#pragma unroll
  for (int i = 0; i < Shared::kHeld; ++i)
    if (FoursSource<Shared>::entry(i) >= numbers) held[i] = __builtin_nanf("");
}

/// Bounds that `top` numbers or more lie between: where every thread has a number and there are enough threads, the
/// least of the threads' largest, else the least of all. Its barrier is the one after clear().
template <class Shared>
__device__ Bounds find_top_bounds(Shared& s, const FoursSource<Shared>& source, int top) {
  Bounds mine;
  source.for_each([&](float score, std::int32_t) { mine.high = fmaxf(mine.high, score); });
  if (source.is_everywhere() && top <= Shared::kThreads)
    mine.low = mine.high;
  else
    source.for_each([&](float score, std::int32_t) { mine.low = fminf(mine.low, score); });
  return join_bounds(s.selection, mine);
}

/// Slots of what was chosen.
__device__ inline __noinline__ void put_slots(Choice choice) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < choice.tile.p.top; i += static_cast<int>(blockDim.x))
    choice.put(i, choice.indices()[i]);
}

// What take_best needs of a source, besides: the i-th number of a thread is score(i) of entry(i), NaN if it is absent;
// for multiples of kStep reaches(i) tells whether some thread of the warp has it. kInLists: it is read from where a
// warp lists numbers. kIsBounded: no number is larger than the upper bound.

template <class Source, class F>
__device__ void for_each_number(const Source& source, F&& f) {
#pragma unroll
  for (int i = 0; i < Source::kMost; ++i) {
    if (i % Source::kStep == 0 && i > 0 && !source.reaches(i)) break;
    f(i);
  }
}

/// Numbers from low to high are in doubt: above they are among the best, below they are not.
struct Doubt {
  float low, high;
};

/// The interval of a histogram that the `top`-th best number lies in, and `slack` more on either side. bounds: the
/// largest number, and one that at least `top` reach. False: there is none, and the histogram is as it was, once a
/// barrier is passed.
template <class S, class Source>
__device__ bool find_doubt(S& s, const Source& source, const Bounds& bounds, int top, float slack, Doubt& doubt) {
  constexpr int kThreads = S::kThreads;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // Bins are floats from 2^23 on, whose bits count in ones. What is below them, NaN too, comes one or two before.
  constexpr float kFirst = 0x1p23f;
  const float low = bounds.low, per_score = __fdividef(float{kThreads - 1}, bounds.high - low);
  if (!(per_score > 0.0f && per_score < -kNoScore)) return false;  // also: all the same, or not finite
  std::uint32_t bin_zero =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(s.histogram)) - 4 * __float_as_uint(kFirst);
  asm volatile("" : "+r"(bin_zero));  // one number: not two to be added for each address
  for_each_number(source, [&](int i) {
    float bin = fmaxf(codec::fused(source.score(i) - low, per_score, kFirst), kFirst - 1.0f);
    if (!Source::kIsBounded) bin = fminf(bin, kFirst + float{kThreads - 1});
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bin_zero + 4 * __float_as_uint(bin)) : "memory");
  });
  __syncthreads();
  const int inside = static_cast<int>(s.histogram[kThreads - 1 - thread]);  // the uppermost first
  s.histogram[kThreads - 1 - thread] = 0;
  const int sum = sum_to_lane(inside);
  if (lane == 31) s.sums[0][warp] = sum;
  __syncthreads();
  const int before_warp = __reduce_add_sync(kAll, lane < warp ? s.sums[0][lane] : 0);
  const int bins_above = __syncthreads_count(before_warp + sum < top);
  if (bins_above == kThreads) return false;  // too few numbers
  // Bins end half way from one to the next; roundings are below 2^-9 of a bin, and that of the sum keeps order.
  const float bin = static_cast<float>(kThreads - 1 - bins_above);
  doubt.low = low + __fdividef(bin - 0.53125f, per_score) - slack;
  doubt.high = bins_above == 0 ? -kNoScore : low + __fdividef(bin + 0.53125f, per_score) + slack;
  return true;
}

/// Writes the best of a source's numbers, of which those in doubt are left to settle(taken, few, write_taken), beside
/// those that are taken: they lie in the selection's lists. It calls its last argument, which writes those. bounds,
/// slack: as above. False: it could not, and nothing is written; the selection is as after clear(), once a barrier is
/// passed.
template <class Shared, class Source, class Settle>
__device__ bool take_best(Shared& s, const Source& source, const Bounds& bounds, const Choice& choice, float slack,
                          Settle&& settle) {
  using S = std::remove_reference_t<decltype(s.selection)>;
  constexpr int kWarps = S::kWarps, kRoom = Shared::kWarpRoom;
  S& selection = s.selection;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  Doubt doubt;
  if (!find_doubt(selection, source, bounds, choice.tile.p.top, slack, doubt)) return false;

  // A warp lists its numbers that are not out.
  const std::uint32_t lower_lanes = (1u << lane) - 1u;
  float* const scores = s.scores[warp];
  std::int32_t* const entries = s.entries[warp];
  int listed = 0;
  for_each_number(source, [&](int i) {
    const float score = source.score(i);
    const std::int32_t entry = source.entry(i);
    if constexpr (Source::kInLists) __syncwarp();  // all have read what others may write now
    const std::uint32_t in = __ballot_sync(kAll, score >= doubt.low);
    const bool fits = 32 * (i + 1) <= kRoom || listed <= kRoom - 32;
    if (score >= doubt.low && fits) {
      const int at = listed + __popc(in & lower_lanes);
      scores[at] = score;
      entries[at] = entry;
    }
    listed += __popc(in);
  });
  if (32 * Source::kMost > kRoom && listed > kRoom - 32) {
    if (lane == 0) atomicAdd(&selection.few, kFew + 1);
    listed = 0;
  }
  // Those that are in stay, those in doubt go to the block's list.
  int taken = 0;
#pragma unroll 1
  for (int first = 0; first < listed; first += 32) {
    __syncwarp();  // and all have written
    const bool is_there = first + lane < listed;
    const float score = is_there ? scores[first + lane] : __builtin_nanf("");
    const std::int32_t entry = entries[first + lane];
    const std::uint32_t above = __ballot_sync(kAll, score > doubt.high);
    __syncwarp();  // all have read what others may write now
    if (score <= doubt.high) {
      const int at = atomicAdd(&selection.few, 1);
      if (at < kFew) {
        selection.few_keys[at] = ops::score_order(score);
        selection.few_entries[at] = entry;
      }
    }
    if (score > doubt.high) entries[taken + __popc(above & lower_lanes)] = entry;
    taken += __popc(above);
  }
  if (lane == 0) selection.sums[1][warp] = taken;
  __syncthreads();
  const int of_warp = lane < kWarps ? selection.sums[1][lane] : 0, few = selection.few;
  const int all_taken = __reduce_add_sync(kAll, of_warp);
  std::int32_t* const to = choice.indices() + __reduce_add_sync(kAll, lane < warp ? of_warp : 0);
  if (few > kFew) {
    __syncthreads();
    if (thread == 0) selection.few = 0;
    return false;
  }
  settle(all_taken, few, [&] {
#pragma unroll 1
    for (int i = lane; i < taken; i += 32) to[i] = entries[i];
  });
  if (choice.tile.p.slots != nullptr) put_slots(choice);
  return true;
}

/// Of exact scores: those in doubt go by their rank.
template <class Shared, class Source>
__device__ bool take_best(Shared& s, const Source& source, const Bounds& bounds, const Choice& choice) {
  using S = std::remove_reference_t<decltype(s.selection)>;
  const S& selection = s.selection;
  return take_best(s, source, bounds, choice, 0.0f, [&](int taken, int few, auto&& write_taken) {
    write_taken();
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x / 32); i < few; i += S::kWarps) {
      const std::uint32_t key = selection.few_keys[i];
      const std::int32_t entry = selection.few_entries[i];
      int better = 0;
#pragma unroll 1
      for (int j = lane; j < few; j += 32)
        better += selection.few_keys[j] > key || (selection.few_keys[j] == key && selection.few_entries[j] < entry);
      const int place = taken + __reduce_add_sync(kAll, better);
      if (lane == 0 && place < choice.tile.p.top) choice.indices()[place] = entry;
    }
  });
}

/// A row whose groups' maxima are known.
struct GroupedRow {
  const float* scores;  // at a multiple of 16 bytes, with room for whole fours
  int count, group, top;
  float slack;  // how far below the k-th best scores still count
};

/// Calls select(source, bounds) with what may be among the best of the row, found by the maxima of its groups. bounds:
/// of those, as above. False: too many reach the bound.
template <class Shared, class Maxima, class Select>
__device__ bool select_by_groups(Shared& s, const Maxima& maxima, const Bounds& bounds, const GroupedRow& row,
                                 Select&& select) {
  auto& selection = s.selection;
  const int count = row.count, group = row.group;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  Doubt doubt;
  if (!find_doubt(selection, maxima, bounds, row.top, row.slack, doubt)) return false;
  const float least = doubt.low;
  const std::uint32_t lower_lanes = (1u << lane) - 1u;
  const auto reaches_bound = [&](float score) { return score >= least; };
  // Groups that reach it, those of a warp side by side.
  int mine = 0;
  for_each_number(maxima, [&](int i) { mine += __popc(__ballot_sync(kAll, reaches_bound(maxima.score(i)))); });
  if (lane == 0) selection.sums[1][warp] = mine;
  __syncthreads();
  const int of_warp = lane < Shared::kWarps ? selection.sums[1][lane] : 0;
  const int total = __reduce_add_sync(kAll, of_warp);
  int place = __reduce_add_sync(kAll, lane < warp ? of_warp : 0);
  if (total > kGroupRoom) return false;
  for_each_number(maxima, [&](int i) {
    const bool reaches = reaches_bound(maxima.score(i));
    const std::uint32_t in = __ballot_sync(kAll, reaches);
    if (reaches) s.groups[place + __popc(in & lower_lanes)] = maxima.entry(i);
    place += __popc(in);
  });
  __syncthreads();

  // Fours of scores, some of each thread under way: of a row of 32,768 all, whose groups are a few more than 512.
  constexpr int kAhead = 5;
  const int bits = 31 - __clz(group), fours = total * group / 4;
  const float nan = __builtin_nanf("");
  int listed = 0;
#pragma unroll 1
  for (int first = 0; first < fours; first += kAhead * Shared::kThreads) {
    float4 scores[kAhead];
    std::int32_t entries[kAhead];  // of each four the first
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * Shared::kThreads >= fours) break;
      const int at = 4 * (first + i * Shared::kThreads + static_cast<int>(threadIdx.x));
      entries[i] = at < 4 * fours ? (s.groups[at >> bits] << bits) + (at & (group - 1)) : count;
      scores[i] = {nan, nan, nan, nan};
      if (entries[i] < count) scores[i] = *reinterpret_cast<const float4*>(row.scores + entries[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * Shared::kThreads >= fours) break;
      const float four[4] = {scores[i].x, scores[i].y, scores[i].z, scores[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool reaches = reaches_bound(four[j]) && entries[i] + j < count;
        const std::uint32_t in = __ballot_sync(kAll, reaches);
        const int at = listed + __popc(in & lower_lanes);
        if (reaches && at < Shared::kWarpRoom) {
          s.scores[warp][at] = four[j];
          s.entries[warp][at] = entries[i] + j;
        }
        listed += __popc(in);
      }
    }
  }
  if (__syncthreads_or(listed > Shared::kWarpRoom)) return false;
  const WarpListSource<Shared> source{s, listed, count};
  select(source, Bounds(least, bounds.high));
  return true;
}

}  // namespace kv4::cuda
