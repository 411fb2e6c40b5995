// Rescoring selection: the best k keys by exact score, from fast scores of fp8 keys (index/fp8.cu). The result is exact
// for any keys.
//
// Fast scores differ from exact ones by at most an error bound m. Let T be the k-th best fast score. The k-th best
// exact score is at least T - m, so keys below T - 2m are out. Fewer than k keys have a fast score above T, so a key
// above T + 2m is in. It is enough to know the histogram bin of T. The keys between, a few dozen as a rule, are
// ambiguous candidates. The codes of a candidate give it an error bound of its own, several times smaller; with these
// bounds most candidates are in or out whatever their exact scores. The rest, a few, are scored exactly.
//
// The error bound of a key: with S_c = |q_c k_c|, in multiples of u = 2^-24,
//   exact dot product   channel c's product is in 128 - c sums, each rounded: S_c (128 - c)
//   tensor cores        a k-step adds 16 products to the sum so far, in up to four parts: 20 numbers cut off at u/2 of
//                       the largest (two bits more than fp32 has; the test IndexKernel, fp8_fast_cutoff, checks it),
//                       four results at 2u: S_c * 18 * (steps from the one that takes c on)
//   all other steps     scales that are no powers of two, weights, the sum over heads: less than 48 roundings
// This is summed over channels and over heads times their weights. Per channel, the factor that |q_c| and the weights
// give is the same for all keys. The bound for all keys uses 448 times the largest scale in place of |k_c|. Denormals
// add less than kTiny. If a scale, weight or sum is beyond the range of these bounds, or if more than kMaxCandidates
// keys are near T, the row in memory is rescored as far as necessary.
//
// One CTA of 512 threads; bound by latency and instructions. Clocks for 8,192 keys of one token on an H200, 2026-11-16,
// 9,800 after the wait: 1,300 until numbers are loaded and bounded, 1,300 for the bin, 2,250 for the lists, 850 until
// the loads of the ambiguous candidates (30 keys) are issued and the certain entries written, 900 for the candidates'
// error bounds, 950 to decide them, 2,250 for the exact scores of 1.7 keys and their places. Before candidates had
// error bounds of their own, all 30 were scored: 5,100 clocks of 16,500.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "backend/cuda/index/fp8_fast.cuh"
#include "backend/cuda/topk/radix_select.cuh"
#include "backend/cuda/topk/single_pass_select.cuh"

namespace kv4::cuda {

constexpr int kRescoreThreads = kScoreThreads, kRescoreWarps = kRescoreThreads / 32;
constexpr float kMaxCode = 448.0f, kTiny = 0x1p-80f;
constexpr int kOtherRoundings = 48;
constexpr int kStepParts = 4;
constexpr float kStepRoundings = 0.5f * (kStepChannels + kStepParts) + 2.0f * kStepParts;
// The sums that make up an error bound are rounded themselves, and so are scores plus error bounds, by up to two 67ths
// of the bound, because the bound counts at least 67 roundings of every term.
constexpr float kErrorFactor = 0x1p-24f * 1.03125f;

/// A token's encoded queries, and the error bounds that they give.
struct RescoreQueries {
  static constexpr int kRoom = kWidth + 16;  // padded against bank conflicts
  alignas(16) std::uint8_t codes[kHeads][kRoom];
  float scales[kHeads], weights[kHeads];
  alignas(16) float channel_errors[kWidth];  // a key's error bound: its scale times the sum of these times |codes|
  alignas(16) float channel_error_sums[kWidth / 32];  // of 32 channels each

  /// Stores a lane's part of a head. A barrier must follow.
  __device__ void put(const QueryPart& q, int head, int part) {
    *reinterpret_cast<uint4*>(&codes[head][kLaneChannels * part]) = q.codes;
    if (part > 0) return;
    scales[head] = q.scale;
    weights[head] = q.weight;
  }
};

/// Shared memory of a rescoring selection: the selection's, and the data of ambiguous candidates.
struct RescoreShared {
  using Row = RowSelection<kRescoreThreads>;
  static constexpr int kPass = kRescoreWarps;  // keys that are rescored at a time
  Row row;
  std::uint32_t largest[kRescoreWarps];  // largest scale of each warp, as bits
  union {
    alignas(16) float head_errors[kRescoreWarps][kWidth];  // of the channel errors, for the heads of a warp
    alignas(16) float k[kRescoreWarps][2][kWidth];         // a warp's two keys
  };
  // The following are indexed like the selection's list of candidates.
  alignas(16) std::uint8_t codes[kMaxCandidates][kWidth];
  float scales[kMaxCandidates];
  float low[kMaxCandidates], high[kMaxCandidates];  // the exact score is between them
  bool are_in[kMaxCandidates];
  int in, undecided;                           // how many candidates
  std::int32_t undecided_at[kRescoreThreads];  // indices of candidates; entries in rescore_row
  float dots[kRescoreWarps][2][32];
  float halves[kMaxCandidates][2];  // of undecided candidates: sums over each half of the heads

  /// A barrier must follow.
  __device__ void clear() {
    row.selection.clear();
    if (threadIdx.x == 0) in = undecided = 0;
  }
};

/// The keys of a token.
struct TokenKeys {
  const TokenTile& tile;
  const std::int32_t* table;  // block table row of its request
};

__device__ inline float2 floats_of(std::uint32_t pair) {
  __half2 halves;
  memcpy(&halves, &pair, sizeof(halves));
  return __half22float2(halves);
}
/// The values of four codes.
__device__ inline float4 values_of(std::uint32_t codes) {
  std::uint32_t low, high;
  half_pairs(codes, low, high);
  const float2 a = floats_of(low), b = floats_of(high);
  return {a.x, a.y, b.x, b.y};
}
constexpr std::uint32_t kMagnitudes = 0x7F7F7F7Fu;  // masks the signs of four codes

/// Computes the channel errors of the stored queries. It has one barrier; another must follow.
__device__ inline void make_error_bounds(RescoreShared& s, RescoreQueries& q, int num_heads) {
  constexpr int kEach = kHeads / kRescoreWarps;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  float4 sum = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int head = warp * kEach + i;
    const std::uint32_t bits = codec::float_bits(q.scales[head]);
    const bool is_out_of_range = head < num_heads && (bits < kMinScale || bits > kMaxScale);
    const float by = is_out_of_range ? __builtin_huge_valf() : fabsf(q.weights[head]) * q.scales[head];
    const float4 x = values_of(reinterpret_cast<const std::uint32_t*>(q.codes[head])[lane] & kMagnitudes);
    sum.x = codec::fused(x.x, by, sum.x), sum.y = codec::fused(x.y, by, sum.y);
    sum.z = codec::fused(x.z, by, sum.z), sum.w = codec::fused(x.w, by, sum.w);
  }
  reinterpret_cast<float4*>(s.head_errors[warp])[lane] = sum;
  __syncthreads();
  if (thread >= kWidth) return;
  const float roundings = static_cast<float>(kWidth - thread + kOtherRoundings) +
                          kStepRoundings * static_cast<float>(kMatrixSteps - matrix_step(thread));
  float bound = 0.0f;
#pragma unroll
  for (int w = 0; w < kRescoreWarps; ++w) bound += s.head_errors[w][thread];
  bound *= roundings * kErrorFactor;
  q.channel_errors[thread] = bound;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) bound += __shfl_xor_sync(kAll, bound, step);
  if (lane == 0) q.channel_error_sums[warp] = bound;
}

/// The error bound of fast scores.
struct ErrorBound {
  float size;
  bool holds;  // if not, nothing is known
};

/// The error bound for all keys. largest: bits of the largest scale.
__device__ inline ErrorBound error_bound_of(const RescoreQueries& q, std::uint32_t largest) {
  const float4 sums = *reinterpret_cast<const float4*>(q.channel_error_sums);
  const float per_scale = ((sums.x + sums.y) + (sums.z + sums.w)) * kMaxCode;
  const float size = per_scale * codec::bits_float(largest) + kTiny;
  return {size, largest <= kMaxScale && per_scale < 0x1p70f && size < 0x1p60f};
}

/// 16 of a key's codes, and its scale.
struct KeyPart {
  uint4 codes;
  float scale;
};

/// Loads the codes of one part. The loads are in flight when it returns.
__device__ inline KeyPart load_key(const TokenKeys& keys, int entry, int part) {
  const ops::KindDesc& kind = keys.tile.kind();
  const int shift = 31 - __clz(kind.rows_per_block), in_block = entry & (kind.rows_per_block - 1);
  const std::int32_t block = keys.table[entry >> shift];
  if (block < 0) return {};
  return {reinterpret_cast<const uint4*>(kind.page.payload.at(block, in_block))[part],
          *reinterpret_cast<const float*>(kind.page.scale.at(block, in_block))};
}

/// Stores a part of a key at its index in the list of candidates.
__device__ inline void put_key(RescoreShared& s, const KeyPart& key, int place, int part) {
  *reinterpret_cast<uint4*>(&s.codes[place][16 * part]) = key.codes;
  if (part == 0) s.scales[place] = key.scale;
}

/// Computes the exact scores of up to kPass keys into `halves`, a sum for each half of the heads. Key i is the
/// candidate place_of(i). A warp has two keys and half of the heads, one head per lane.
template <class PlaceOf>
__device__ void score_pass(RescoreShared& s, const RescoreQueries& q, int count, float (*halves)[2],
                           PlaceOf&& place_of) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int half = warp % 2, first = warp / 2 * 2, head = 32 * half + lane;
  if (first >= count) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = place_of(min(first + i, count - 1));
    const float4 x = values_of(reinterpret_cast<const std::uint32_t*>(s.codes[place])[lane]);
    const float scale = s.scales[place];
    reinterpret_cast<float4*>(s.k[warp][i])[lane] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
  }
  __syncwarp();
  constexpr int kStepWidth = 16, kFours = kStepWidth / 4;
  const float scale = q.scales[head];
  float dots[2] = {};
  uint4 codes = *reinterpret_cast<const uint4*>(q.codes[head]);
#pragma unroll 1
  for (int at = 0; at < kWidth; at += kStepWidth) {
    const std::uint32_t words[kFours] = {codes.x, codes.y, codes.z, codes.w};
    codes = *reinterpret_cast<const uint4*>(&q.codes[head][(at + kStepWidth) % kWidth]);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      float4 x = values_of(words[i]);
      x = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      const float4 a = *reinterpret_cast<const float4*>(&s.k[warp][0][at + 4 * i]);
      const float4 b = *reinterpret_cast<const float4*>(&s.k[warp][1][at + 4 * i]);
      dots[0] = codec::fused(x.x, a.x, dots[0]), dots[1] = codec::fused(x.x, b.x, dots[1]);
      dots[0] = codec::fused(x.y, a.y, dots[0]), dots[1] = codec::fused(x.y, b.y, dots[1]);
      dots[0] = codec::fused(x.z, a.z, dots[0]), dots[1] = codec::fused(x.z, b.z, dots[1]);
      dots[0] = codec::fused(x.w, a.w, dots[0]), dots[1] = codec::fused(x.w, b.w, dots[1]);
    }
  }
  s.dots[warp][0][lane] = ops::relu(dots[0]);
  s.dots[warp][1][lane] = ops::relu(dots[1]);
  __syncwarp();
  // Each lane adds a chain of heads of one key; absent heads add zero.
  const int key = lane / 2 % 2, chain = lane % 2;
  const float* const from = &s.dots[warp][key][chain * ops::kChainHeads];
  const float* const weights = &q.weights[32 * half + chain * ops::kChainHeads];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) sum = codec::fused(weights[i], from[i], sum);
  sum += __shfl_xor_sync(kAll, sum, 1);
  if (lane < 4 && chain == 0 && first + key < count) halves[first + key][half] = sum;
}

constexpr int kKeyLanes = 8, kKeysAtOnce = kRescoreThreads / kKeyLanes, kLaneCodes = kWidth / kKeyLanes;

/// Settles the `candidates` ambiguous candidates, which lie in the selection's lists: the best of them follow the first
/// `taken` entries of the output, which write_taken() writes.
template <class WriteTaken>
__device__ void settle_ambiguous(RescoreShared& s, const RescoreQueries& q, const TokenKeys& keys, const Choice& choice,
                                 int taken, int candidates, WriteTaken&& write_taken) {
  const auto& selection = s.row.selection;
  const int thread = static_cast<int>(threadIdx.x), part = thread % kKeyLanes, first = thread / kKeyLanes;
  const int top = choice.tile.p.top, places = top - taken, rounded = (candidates + 3) / 4 * 4;  // whole warps
  KeyPart read = load_key(keys, selection.candidate_entries[min(first, candidates - 1)], part);
  write_taken();
#pragma unroll 1
  for (int i = first; i < rounded; i += kKeysAtOnce) {
    const int at = min(i, candidates - 1);
    if (i >= kKeysAtOnce) read = load_key(keys, selection.candidate_entries[at], part);
    if (i < candidates) put_key(s, read, i, part);
    const std::uint32_t words[4] = {read.codes.x, read.codes.y, read.codes.z, read.codes.w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 x = values_of(words[j] & kMagnitudes);
      const float4 bounds = *reinterpret_cast<const float4*>(&q.channel_errors[kLaneCodes * part + 4 * j]);
      sum = codec::fused(bounds.x, x.x, sum), sum = codec::fused(bounds.y, x.y, sum);
      sum = codec::fused(bounds.z, x.z, sum), sum = codec::fused(bounds.w, x.w, sum);
    }
#pragma unroll
    for (int step = 1; step < kKeyLanes; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    // With a NaN code both scores are zero, and fmaxf turns the NaN sum into zero.
    const float fast = score_of(selection.candidate_keys[at]), error_bound = fmaxf(sum * read.scale, 0.0f) + kTiny;
    if (part == 0 && i < candidates) {
      s.low[i] = fast - error_bound;
      s.high[i] = fast + error_bound;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = first; i < rounded; i += kKeysAtOnce) {
    const int at = min(i, candidates - 1);
    const float low = s.low[at], high = s.high[at];
    int better = 0;  // candidates certainly better; in the upper half those possibly better or equal, itself included
#pragma unroll 4
    for (int j = part; j < candidates; j += kKeyLanes)
      better += (s.low[j] > high ? 1 : 0) + (s.high[j] >= low ? 1 << 16 : 0);
#pragma unroll
    for (int step = 1; step < kKeyLanes; step *= 2) better += __shfl_xor_sync(kAll, better, step);
    if (part > 0 || i >= candidates) continue;
    const bool is_in = (better >> 16) <= places, is_out = (better & 0xFFFF) >= places;
    s.are_in[i] = is_in;
    if (is_in) atomicAdd(&s.in, 1);
    if (!is_in && !is_out) s.undecided_at[atomicAdd(&s.undecided, 1)] = i;
  }
  __syncthreads();
  // Candidates that are in are written in the order of their entries, by warps that have hardly any rescoring to do.
  static_assert(2 * kMaxCandidates == kRescoreThreads);
  if (const int i = thread - kMaxCandidates; i >= 0 && i < candidates && s.are_in[i]) {
    const std::int32_t entry = selection.candidate_entries[i];
    int before = taken;
#pragma unroll 4
    for (int j = 0; j < candidates; ++j) before += s.are_in[j] && selection.candidate_entries[j] < entry;
    choice.indices()[before] = entry;
  }
  const int undecided = s.undecided;
  if (undecided == 0) return;
#pragma unroll 1
  for (int done = 0; done < undecided; done += RescoreShared::kPass)
    score_pass(s, q, min(undecided - done, RescoreShared::kPass), s.halves + done,
               [&](int i) { return s.undecided_at[done + i]; });
  __syncthreads();
  const auto key_of = [&](int i) { return ops::score_order(s.halves[i][0] + s.halves[i][1]); };
  if (thread >= undecided) return;
  const std::uint32_t key = key_of(thread);
  const std::int32_t entry = selection.candidate_entries[s.undecided_at[thread]];
  int place = taken + s.in;
#pragma unroll 1
  for (int j = 0; j < undecided; ++j) {
    const std::uint32_t other = key_of(j);
    place += other > key || (other == key && selection.candidate_entries[s.undecided_at[j]] < entry);
  }
  if (place < top) choice.indices()[place] = entry;
}

/// take_best by exact scores, from fast ones.
template <class Source>
__device__ bool take_best_rescored(RescoreShared& s, const RescoreQueries& q, const Source& source,
                                   const Bounds& bounds, const TokenKeys& keys, const Choice& choice,
                                   float error_bound) {
  return take_best(s.row, source, bounds, choice, 2.0f * error_bound,
                   [&](int taken, int candidates, auto&& write_taken) {
                     settle_ambiguous(s, q, keys, choice, taken, candidates, write_taken);
                   });
}

/// Goes over the whole row in memory and replaces the fast scores of ambiguous keys by exact ones, then selects.
__device__ inline __noinline__ void rescore_row(RescoreShared& s, const RescoreQueries& q, TokenKeys keys, float* row,
                                                int count, ErrorBound error_bound, Choice choice) {
  auto& selection = s.row.selection;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  float low = kNoScore, high = -kNoScore;
  if (error_bound.holds) {  // with a NaN bound there is no limit
    Scan scan(selection);
    const Cut cut = find_cut(selection, scan, RowSource<kRescoreThreads>{row, count}, Bounds(), choice.tile.p.top);
    low = fmaxf(score_of(cut.range.low) - 2.0f * error_bound.size, kNoScore);
    high = fminf(score_of(cut.range.high) + 2.0f * error_bound.size, -kNoScore);
  }
  for (int first = 0; first < count; first += kRescoreThreads) {
    if (thread == 0) s.undecided = 0;
    __syncthreads();
    const int entry = first + thread;
    const float fast = entry < count ? row[entry] : 0.0f;
    if (entry < count && !(fast < low) && !(fast > high))
      s.undecided_at[atomicAdd(&s.undecided, 1)] = entry;
    else if (entry < count)
      row[entry] = fast > high ? -kNoScore : kNoScore;
    __syncthreads();
    const int undecided = s.undecided;
    for (int done = 0; done < undecided; done += RescoreShared::kPass) {
      const int pass = min(undecided - done, RescoreShared::kPass);
      if (const int i = thread / kKeyLanes, part = thread % kKeyLanes; i < pass)
        put_key(s, load_key(keys, s.undecided_at[done + i], part), i, part);
      __syncthreads();
      score_pass(s, q, pass, s.halves, [](int i) { return i; });
      __syncthreads();
      if (thread < pass)
        row[s.undecided_at[done + thread]] = codec::canonical_nan(s.halves[thread][0] + s.halves[thread][1]);
    }
    __syncthreads();
  }
  if (thread == 0) selection.candidates = 0;
  select_from_row(selection, row, count, Bounds(), choice);
}

}  // namespace kv4::cuda
