// Single-pass selection of the best k of a CTA's numbers, with one histogram of as many equal intervals as there are
// threads. Numbers above the interval of the k-th best are taken while they are listed. Numbers in that interval, few
// as a rule, are ambiguous candidates and are settled among each other. It needs five barriers and one pass over the
// numbers after the histogram; nothing is sorted or read again. If there are too many candidates, nothing is written
// and radix_select.cuh selects. For long rows with known group maxima, the same histogram of the maxima finds the
// groups to read.
//
// It runs once per launch, so it is bound by latency and by instruction fetch. Rarely needed code is not inlined:
// jumping over such code took 780 clocks on an H200, 2026-11-16, and 200 without it. Short loops are not unrolled.
// Loops over as many iterations as a lane has numbers are slow: making lists with masks and such a loop took 3,000
// clocks, with votes 2,250.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/topk/radix_select.cuh"

namespace kv4::cuda {

/// Numbers in registers, in runs of four consecutive ones (float4). Absent numbers are NaN.
template <class Shared>
struct FoursSource {
  static constexpr int kMaxPerThread = Shared::kHeld, kStep = 4;
  static constexpr bool kInLists = false, kIsBounded = true;
  static_assert(kMaxPerThread % 4 == 0);
  const float (&held)[kMaxPerThread];
  int count;
  __device__ static std::int32_t entry(int i) {
    return 4 * (static_cast<int>(threadIdx.x) + i / 4 * Shared::kThreads) + i % 4;
  }
  __device__ int size() const { return count; }
  __device__ float score(int i) const { return held[i]; }
  /// Whether any thread has its i-th number; i is a multiple of kStep.
  __device__ bool reaches(int i) const { return i * Shared::kThreads < count; }
  /// Whether every thread has a number.
  __device__ bool is_everywhere() const { return count > 4 * (Shared::kThreads - 1); }
  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kMaxPerThread; ++i) {
      if (i % kStep == 0 && i > 0 && !reaches(i)) break;
      f(held[i], entry(i));
    }
  }
};

/// Loads a row into registers; all loads are in flight when it returns. in_fours: `from` is aligned to 16 bytes and has
/// room for whole float4s.
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

/// Sets numbers behind the row's end to NaN, after its last float4 was loaded whole.
template <class Shared>
__device__ void mask_last_four(int numbers, float (&held)[Shared::kHeld]) {
#pragma unroll
  for (int i = 0; i < Shared::kHeld; ++i)
    if (FoursSource<Shared>::entry(i) >= numbers) held[i] = __builtin_nanf("");
}

/// Bounds between which at least `top` numbers lie. The lower bound is the smallest of the threads' largest numbers if
/// every thread has a number and there are at least `top` threads, else the smallest number. Its barrier also serves as
/// the one after clear().
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

/// Writes the slots of the chosen entries.
__device__ inline __noinline__ void put_slots(Choice choice) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < choice.tile.p.top; i += static_cast<int>(blockDim.x))
    choice.put(i, choice.indices()[i]);
}

// take_best needs more of a source: the i-th number of a thread is score(i) of entry(i), NaN if it is absent. For
// multiples of kStep, reaches(i) says whether any thread of the warp has it. kInLists: the source reads the memory in
// which warps list numbers. kIsBounded: no number is larger than the upper bound.

template <class Source, class F>
__device__ void for_each_number(const Source& source, F&& f) {
#pragma unroll
  for (int i = 0; i < Source::kMaxPerThread; ++i) {
    if (i % Source::kStep == 0 && i > 0 && !source.reaches(i)) break;
    f(i);
  }
}

/// Numbers from low to high are ambiguous. Numbers above are among the best, numbers below are not.
struct AmbiguousRange {
  float low, high;
};

/// Finds the histogram interval of the `top`-th best number, and widens it by `slack` on either side. bounds: the
/// largest number, and a number that at least `top` numbers reach. False: there is no such interval, and the histogram
/// is zero again after the next barrier.
template <class S, class Source>
__device__ bool find_ambiguous_range(S& s, const Source& source, const Bounds& bounds, int top, float slack,
                                     AmbiguousRange& ambiguous) {
  constexpr int kThreads = S::kThreads;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // Bins are floats from 2^23 on, so consecutive bins have consecutive bits. Numbers below the bins, and NaN, count one
  // or two words before them.
  constexpr float kFirst = 0x1p23f;
  const float low = bounds.low, per_score = __fdividef(float{kThreads - 1}, bounds.high - low);
  if (!(per_score > 0.0f && per_score < -kNoScore)) return false;  // also if all are equal or not finite
  std::uint32_t bin_zero =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(s.histogram)) - 4 * __float_as_uint(kFirst);
  asm volatile("" : "+r"(bin_zero));  // one register, not a sum of two for each address
  for_each_number(source, [&](int i) {
    float bin = fmaxf(codec::fused(source.score(i) - low, per_score, kFirst), kFirst - 1.0f);
    if (!Source::kIsBounded) bin = fminf(bin, kFirst + float{kThreads - 1});
    increment_shared(bin_zero + 4 * __float_as_uint(bin));
  });
  __syncthreads();
  const int inside = static_cast<int>(s.histogram[kThreads - 1 - thread]);  // the highest bin first
  s.histogram[kThreads - 1 - thread] = 0;
  const int sum = sum_to_lane(inside);
  if (lane == 31) s.sums[0][warp] = sum;
  __syncthreads();
  const int before_warp = __reduce_add_sync(kAll, lane < warp ? s.sums[0][lane] : 0);
  const int bins_above = __syncthreads_count(before_warp + sum < top);
  if (bins_above == kThreads) return false;  // too few numbers
  // Bins end half way between their centres; roundings are below 2^-9 of a bin, and the rounding of the sum keeps the
  // order.
  const float bin = static_cast<float>(kThreads - 1 - bins_above);
  ambiguous.low = low + __fdividef(bin - 0.53125f, per_score) - slack;
  ambiguous.high = bins_above == 0 ? -kNoScore : low + __fdividef(bin + 0.53125f, per_score) + slack;
  return true;
}

/// Writes the best of a source's numbers. The ambiguous candidates lie in the selection's lists, and settle(taken,
/// candidates, write_taken) decides them; it also calls write_taken(), which writes the numbers that are certainly
/// taken. bounds, slack: as above. False: there were too many candidates and nothing is written; after the next barrier
/// the selection is as after clear().
template <class Shared, class Source, class Settle>
__device__ bool take_best(Shared& s, const Source& source, const Bounds& bounds, const Choice& choice, float slack,
                          Settle&& settle) {
  using S = std::remove_reference_t<decltype(s.selection)>;
  constexpr int kWarps = S::kWarps, kRoom = Shared::kWarpRoom;
  S& selection = s.selection;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  AmbiguousRange ambiguous;
  if (!find_ambiguous_range(selection, source, bounds, choice.tile.p.top, slack, ambiguous)) return false;

  // Each warp lists its numbers that may be among the best.
  const std::uint32_t lower_lanes = (1u << lane) - 1u;
  float* const scores = s.scores[warp];
  std::int32_t* const entries = s.entries[warp];
  int listed = 0;
  for_each_number(source, [&](int i) {
    const float score = source.score(i);
    const std::int32_t entry = source.entry(i);
    if constexpr (Source::kInLists) __syncwarp();  // all lanes have read before others overwrite
    const std::uint32_t in = __ballot_sync(kAll, score >= ambiguous.low);
    const bool fits = 32 * (i + 1) <= kRoom || listed <= kRoom - 32;
    if (score >= ambiguous.low && fits) {
      const int at = listed + __popc(in & lower_lanes);
      scores[at] = score;
      entries[at] = entry;
    }
    listed += __popc(in);
  });
  if (32 * Source::kMaxPerThread > kRoom && listed > kRoom - 32) {
    if (lane == 0) atomicAdd(&selection.candidates, kMaxCandidates + 1);
    listed = 0;
  }
  // Certain numbers stay in the warp's list, ambiguous candidates go to the CTA's list.
  int taken = 0;
#pragma unroll 1
  for (int first = 0; first < listed; first += 32) {
    __syncwarp();  // all lanes have written
    const bool is_there = first + lane < listed;
    const float score = is_there ? scores[first + lane] : __builtin_nanf("");
    const std::int32_t entry = entries[first + lane];
    const std::uint32_t above = __ballot_sync(kAll, score > ambiguous.high);
    __syncwarp();  // all lanes have read before others overwrite
    if (score <= ambiguous.high) {
      const int at = atomicAdd(&selection.candidates, 1);
      if (at < kMaxCandidates) {
        selection.candidate_keys[at] = ops::score_order(score);
        selection.candidate_entries[at] = entry;
      }
    }
    if (score > ambiguous.high) entries[taken + __popc(above & lower_lanes)] = entry;
    taken += __popc(above);
  }
  if (lane == 0) selection.sums[1][warp] = taken;
  __syncthreads();
  const int of_warp = lane < kWarps ? selection.sums[1][lane] : 0, candidates = selection.candidates;
  const int all_taken = __reduce_add_sync(kAll, of_warp);
  std::int32_t* const to = choice.indices() + __reduce_add_sync(kAll, lane < warp ? of_warp : 0);
  if (candidates > kMaxCandidates) {
    __syncthreads();
    if (thread == 0) selection.candidates = 0;
    return false;
  }
  settle(all_taken, candidates, [&] {
#pragma unroll 1
    for (int i = lane; i < taken; i += 32) to[i] = entries[i];
  });
  if (choice.tile.p.slots != nullptr) put_slots(choice);
  return true;
}

/// take_best for exact scores: candidates are ranked against each other.
template <class Shared, class Source>
__device__ bool take_best(Shared& s, const Source& source, const Bounds& bounds, const Choice& choice) {
  using S = std::remove_reference_t<decltype(s.selection)>;
  const S& selection = s.selection;
  return take_best(s, source, bounds, choice, 0.0f, [&](int taken, int candidates, auto&& write_taken) {
    write_taken();
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x / 32); i < candidates; i += S::kWarps) {
      const std::uint32_t key = selection.candidate_keys[i];
      const std::int32_t entry = selection.candidate_entries[i];
      int better = 0;
#pragma unroll 1
      for (int j = lane; j < candidates; j += 32)
        better += selection.candidate_keys[j] > key ||
                  (selection.candidate_keys[j] == key && selection.candidate_entries[j] < entry);
      const int place = taken + __reduce_add_sync(kAll, better);
      if (lane == 0 && place < choice.tile.p.top) choice.indices()[place] = entry;
    }
  });
}

/// A row whose group maxima are known.
struct GroupedRow {
  const float* scores;  // aligned to 16 bytes, with room for whole float4s
  int count, group, top;
  float slack;  // scores this far below the k-th best still count
};

/// Finds the groups that can hold one of the best scores by their maxima, and calls select(source, bounds) with the
/// scores of those groups that reach the bound. bounds: of the maxima, as above. False: too many groups or scores reach
/// the bound.
template <class Shared, class Maxima, class Select>
__device__ bool select_by_groups(Shared& s, const Maxima& maxima, const Bounds& bounds, const GroupedRow& row,
                                 Select&& select) {
  auto& selection = s.selection;
  const int count = row.count, group = row.group;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  AmbiguousRange ambiguous;
  if (!find_ambiguous_range(selection, maxima, bounds, row.top, row.slack, ambiguous)) return false;
  const float least = ambiguous.low;
  const std::uint32_t lower_lanes = (1u << lane) - 1u;
  const auto reaches_bound = [&](float score) { return score >= least; };
  // Lists the groups that reach the bound, the groups of a warp side by side.
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

  // Each thread has several float4s in flight. For a row of 32,768 scores, with a few more than 512 groups, that is
  // all.
  constexpr int kAhead = 5;
  const int bits = 31 - __clz(group), fours = total * group / 4;
  const float nan = __builtin_nanf("");
  int listed = 0;
#pragma unroll 1
  for (int first = 0; first < fours; first += kAhead * Shared::kThreads) {
    float4 scores[kAhead];
    std::int32_t entries[kAhead];  // the first entry of each float4
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
