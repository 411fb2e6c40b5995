// The best k of a thread block's numbers, the short way: one histogram of as many equal intervals as there are threads.
// Numbers of intervals above the one that the k-th best lies in are taken as they are listed, those in it (few, as a
// rule) go by their rank among each other: five barriers, one pass over the numbers after the histogram, nothing sorted
// or looked at again. Where too many lie in the interval, nothing is written, and topk_select.cuh does it.
//
// It runs once per launch, so it is bound by latency and by how fast code is fetched: what is rarely needed is not
// inlined (the way over such code to the last part took 780 clocks on an H200, 2026-11-16, 200 where there was none),
// and loops that are short are not unrolled.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/topk_select.cuh"

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

/// Writes the best of a source's numbers. bounds: the largest number, and one that at least as many reach as are to be
/// taken. False: it could not, and nothing is written; the selection is as after clear(), once a barrier is passed.
template <class Shared, class Source>
__device__ bool take_best(Shared& s, const Source& source, const Bounds& bounds, const Choice& choice) {
  using S = std::remove_reference_t<decltype(s.selection)>;
  constexpr int kThreads = S::kThreads, kWarps = S::kWarps, kMost = Source::kMost, kRoom = Shared::kWarpRoom;
  S& selection = s.selection;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, top = choice.tile.p.top;
  // Bins are floats from 2^23 on, whose bits count in ones. What is below them, NaN too, comes one or two before.
  constexpr float kFirst = 0x1p23f;
  const std::uint32_t first_bits = __float_as_uint(kFirst);
  const float low = bounds.low, per_score = __fdividef(float{kThreads - 1}, bounds.high - low);
  if (!(per_score > 0.0f && per_score < -kNoScore)) return false;  // also: all the same, or not finite
  const auto bin_of = [&](float score) {
    const float bin = fmaxf(codec::fused(score - low, per_score, kFirst), kFirst - 1.0f);
    return Source::kIsBounded ? bin : fminf(bin, kFirst + float{kThreads - 1});
  };
  const auto for_each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i % Source::kStep == 0 && i > 0 && !source.reaches(i)) break;
      f(i);
    }
  };

  float bins[kMost];
  std::uint32_t bin_zero = static_cast<std::uint32_t>(__cvta_generic_to_shared(selection.histogram)) - 4 * first_bits;
  asm volatile("" : "+r"(bin_zero));  // one number: not two to be added for each address
  for_each([&](int i) {
    bins[i] = bin_of(source.score(i));
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bin_zero + 4 * __float_as_uint(bins[i])) : "memory");
  });
  __syncthreads();
  const int inside = static_cast<int>(selection.histogram[kThreads - 1 - thread]);  // the uppermost first
  selection.histogram[kThreads - 1 - thread] = 0;
  const int sum = sum_to_lane(inside);
  if (lane == 31) selection.sums[0][warp] = sum;
  __syncthreads();
  const int before_warp = __reduce_add_sync(kAll, lane < warp ? selection.sums[0][lane] : 0);
  const int bins_above = __syncthreads_count(before_warp + sum < top);
  if (bins_above == kThreads) return false;  // too few numbers
  const float found = __uint_as_float(first_bits + kThreads - 1 - static_cast<std::uint32_t>(bins_above));

  // A warp lists its numbers from that bin on.
  const std::uint32_t lower_lanes = (1u << lane) - 1u;
  float* const scores = s.scores[warp];
  std::int32_t* const entries = s.entries[warp];
  int listed = 0;
  for_each([&](int i) {
    const float score = source.score(i);
    const std::int32_t entry = source.entry(i);
    if constexpr (Source::kInLists) __syncwarp();  // all have read what others may write now
    const std::uint32_t in = __ballot_sync(kAll, bins[i] >= found);
    const bool fits = 32 * (i + 1) <= kRoom || listed <= kRoom - 32;
    if (bins[i] >= found && fits) {
      const int at = listed + __popc(in & lower_lanes);
      scores[at] = score;
      entries[at] = entry;
    }
    listed += __popc(in);
  });
  if (32 * kMost > kRoom && listed > kRoom - 32) {
    if (lane == 0) atomicAdd(&selection.few, kFew + 1);
    listed = 0;
  }
  // Those above it stay, those in it go to the block's list.
  int taken = 0;
#pragma unroll 1
  for (int first = 0; first < listed; first += 32) {
    __syncwarp();  // and all have written
    const bool is_there = first + lane < listed;
    const float score = scores[first + lane];
    const std::int32_t entry = entries[first + lane];
    const float bin = is_there ? bin_of(score) : 0.0f;
    const std::uint32_t above = __ballot_sync(kAll, bin > found);
    __syncwarp();  // all have read what others may write now
    if (bin == found) {
      const int at = atomicAdd(&selection.few, 1);
      if (at < kFew) {
        selection.few_keys[at] = ops::score_order(score);
        selection.few_entries[at] = entry;
      }
    }
    if (bin > found) entries[taken + __popc(above & lower_lanes)] = entry;
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
#pragma unroll 1
  for (int i = lane; i < taken; i += 32) to[i] = entries[i];
#pragma unroll 1
  for (int i = warp; i < few; i += kWarps) {
    const std::uint32_t key = selection.few_keys[i];
    const std::int32_t entry = selection.few_entries[i];
    int better = 0;
#pragma unroll 1
    for (int j = lane; j < few; j += 32)
      better += selection.few_keys[j] > key || (selection.few_keys[j] == key && selection.few_entries[j] < entry);
    const int place = all_taken + __reduce_add_sync(kAll, better);
    if (lane == 0 && place < top) choice.indices()[place] = entry;
  }
  if (choice.tile.p.slots != nullptr) put_slots(choice);
  return true;
}

}  // namespace kv4::cuda
