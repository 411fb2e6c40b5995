// The best k of the defined scores of fp8 keys, from near ones (index/fp8.cu). Exact, whatever the keys.
//
// Near scores differ from the defined ones by at most a margin m. Let T be the k-th best near score. The k-th best
// defined score is at least T - m, so keys below T - 2m are out; fewer than k keys have a near score above T, so a key
// above T + 2m is in. Of T it is enough to know the bin of a histogram. Those between, a few dozen as a rule, are
// looked at: a key's own codes give it a margin of its own, several times smaller, and with those margins most are in
// or out whatever the defined scores. The rest, a few, are scored as defined.
//
// The margin of a key: with S_c = |q_c k_c|, in units u = 2^-24,
//   the defined dot     channel c's product is in 128 - c sums, each rounded: S_c (128 - c)
//   the tensor cores'   a step adds 16 products to the sum so far, in up to four parts: 20 numbers cut off at u/2 of
//                       the largest (two bits more than fp32 has: IndexKernel's fp8_near_cutoff sees to it), four
//                       results at 2u: S_c * 18 * (steps from the one that takes c on)
//   all the rest        scales that are no powers of two, weights, the sum over heads: less than 48 roundings
// added up over channels and heads times their weights: by channel, what |q_c| and weights give is the same for all
// keys. Of all keys: 448 times the largest scale in place of |k_c|. Denormals: less than kTiny. Where a scale, weight
// or sum is beyond what these bounds hold for, or more keys than kFew are near T, the row is scored again as far as
// need be.
//
// A block of 512 threads; bound by latency and instructions. Clocks for 8,192 keys of one token on an H200, 2026-11-16,
// since the wait, 9,800 in all: 1,300 until numbers are there and bounded, 1,300 the bin, 2,250 lists, 850 until what
// is in doubt (30 keys) has been asked for and the rest is written, 900 its margins, 950 who is in, 2,250 the defined
// scores of 1.7 keys and their places. Before margins were the keys' own all 30 were scored: 5,100 clocks of 16,500.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "backend/cuda/index/fp8_fast.cuh"
#include "backend/cuda/topk/exact_select.cuh"
#include "backend/cuda/topk/fast_select.cuh"

namespace kv4::cuda {

constexpr int kNearThreads = kScoreThreads, kNearWarps = kNearThreads / 32;
constexpr float kMostCode = 448.0f, kTiny = 0x1p-80f;
constexpr int kOtherRoundings = 48;
constexpr int kStepParts = 4;
constexpr float kStepRoundings = 0.5f * (kStepChannels + kStepParts) + 2.0f * kStepParts;
// The sums that margins are made of are rounded, too, and so are scores that margins are added to, by up to two
// 67ths of a margin: it counts at least 67 roundings of everything that is added up.
constexpr float kMarginFactor = 0x1p-24f * 1.03125f;

/// A token's queries as they are encoded, with what bounds come of them.
struct NearQueries {
  static constexpr int kRoom = kWidth + 16;  // no bank conflicts
  alignas(16) std::uint8_t codes[kHeads][kRoom];
  float scales[kHeads], weights[kHeads];
  alignas(16) float bounds[kWidth];     // a key's margin is its scale times the sum of these by its codes
  alignas(16) float sums[kWidth / 32];  // of the bounds

  /// A lane's part of a head. A barrier must follow.
  __device__ void put(const QueryPart& q, int head, int part) {
    *reinterpret_cast<uint4*>(&codes[head][kLaneChannels * part]) = q.codes;
    if (part > 0) return;
    scales[head] = q.scale;
    weights[head] = q.weight;
  }
};

/// What a block selects with, and what is known of keys in doubt.
struct NearShared {
  using Row = RowSelection<kNearThreads>;
  static constexpr int kPass = kNearWarps;  // keys scored again at a time
  Row row;
  std::uint32_t largest[kNearWarps];  // scales
  union {
    alignas(16) float parts[kNearWarps][kWidth];  // of the bounds, by a warp's heads
    alignas(16) float k[kNearWarps][2][kWidth];   // a warp's two keys
  };
  // By place in the selection's list of those in doubt.
  alignas(16) std::uint8_t codes[kFew][kWidth];
  float scales[kFew];
  float low[kFew], high[kFew];  // the defined score is between
  bool are_in[kFew];
  int in, undecided;                        // how many
  std::int32_t undecided_at[kNearThreads];  // places, or entries of a row that is gone over
  float dots[kNearWarps][2][32];
  float halves[kFew][2];  // of undecided ones: sums of the heads' first and second half

  /// A barrier must follow.
  __device__ void clear() {
    row.selection.clear();
    if (threadIdx.x == 0) in = undecided = 0;
  }
};

/// A token's keys.
struct TokenKeys {
  const IndexTile& tile;
  const std::int32_t* table;  // of its request
};

__device__ inline float2 floats_of(std::uint32_t pair) {
  __half2 halves;
  memcpy(&halves, &pair, sizeof(halves));
  return __half22float2(halves);
}
/// Four codes' values.
__device__ inline float4 values_of(std::uint32_t codes) {
  std::uint32_t low, high;
  half_pairs(codes, low, high);
  const float2 a = floats_of(low), b = floats_of(high);
  return {a.x, a.y, b.x, b.y};
}
constexpr std::uint32_t kMagnitudes = 0x7F7F7F7Fu;  // of four codes

/// Bounds of the queries that are there. One barrier; another must follow.
__device__ inline void make_bounds(NearShared& s, NearQueries& q, int num_heads) {
  constexpr int kEach = kHeads / kNearWarps;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  float4 sum = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int head = warp * kEach + i;
    const std::uint32_t bits = codec::float_bits(q.scales[head]);
    const bool is_odd = head < num_heads && (bits < kLeastScale || bits > kMostScale);
    const float by = is_odd ? __builtin_huge_valf() : fabsf(q.weights[head]) * q.scales[head];
    const float4 x = values_of(reinterpret_cast<const std::uint32_t*>(q.codes[head])[lane] & kMagnitudes);
    sum.x = codec::fused(x.x, by, sum.x), sum.y = codec::fused(x.y, by, sum.y);
    sum.z = codec::fused(x.z, by, sum.z), sum.w = codec::fused(x.w, by, sum.w);
  }
  reinterpret_cast<float4*>(s.parts[warp])[lane] = sum;
  __syncthreads();
  if (thread >= kWidth) return;
  const float roundings = static_cast<float>(kWidth - thread + kOtherRoundings) +
                          kStepRoundings * static_cast<float>(kMatrixSteps - matrix_step(thread));
  float bound = 0.0f;
#pragma unroll
  for (int w = 0; w < kNearWarps; ++w) bound += s.parts[w][thread];
  bound *= roundings * kMarginFactor;
  q.bounds[thread] = bound;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) bound += __shfl_xor_sync(kAll, bound, step);
  if (lane == 0) q.sums[warp] = bound;
}

/// How far near scores may be from the defined ones.
struct Margin {
  float size;
  bool holds;  // or nothing is known
};

/// Of all keys. largest: bits of the largest scale.
__device__ inline Margin margin_of(const NearQueries& q, std::uint32_t largest) {
  const float4 sums = *reinterpret_cast<const float4*>(q.sums);
  const float per_scale = ((sums.x + sums.y) + (sums.z + sums.w)) * kMostCode;
  const float size = per_scale * codec::bits_float(largest) + kTiny;
  return {size, largest <= kMostScale && per_scale < 0x1p70f && size < 0x1p60f};
}

/// 16 of a key's codes, its scale.
struct KeyPart {
  uint4 codes;
  float scale;
};

/// The part-th. Loads are under way when it returns.
__device__ inline KeyPart load_key(const TokenKeys& keys, int entry, int part) {
  const ops::KindDesc& kind = keys.tile.kind();
  const int shift = 31 - __clz(kind.rows_per_block), in_block = entry & (kind.rows_per_block - 1);
  const std::int32_t block = keys.table[entry >> shift];
  if (block < 0) return {};
  return {reinterpret_cast<const uint4*>(kind.page.payload.at(block, in_block))[part],
          *reinterpret_cast<const float*>(kind.page.scale.at(block, in_block))};
}

/// To a place in the list of those in doubt.
__device__ inline void put_key(NearShared& s, const KeyPart& key, int place, int part) {
  *reinterpret_cast<uint4*>(&s.codes[place][16 * part]) = key.codes;
  if (part == 0) s.scales[place] = key.scale;
}

/// Scores as defined of up to kPass keys, by halves of the heads, into halves. Key i is that of place place_of(i). A
/// warp has two keys and half of the heads, one a lane.
template <class PlaceOf>
__device__ void score_pass(NearShared& s, const NearQueries& q, int count, float (*halves)[2], PlaceOf&& place_of) {
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
  // Lanes: a key, a chain of heads; heads that are not there add zero.
  const int key = lane / 2 % 2, chain = lane % 2;
  const float* const from = &s.dots[warp][key][chain * ops::kChainHeads];
  const float* const weights = &q.weights[32 * half + chain * ops::kChainHeads];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) sum = codec::fused(weights[i], from[i], sum);
  sum += __shfl_xor_sync(kAll, sum, 1);
  if (lane < 4 && chain == 0 && first + key < count) halves[first + key][half] = sum;
}

constexpr int kKeyLanes = 8, kKeysAtOnce = kNearThreads / kKeyLanes, kLaneCodes = kWidth / kKeyLanes;

/// What is in doubt by the margin of all keys, `few` that lie in the selection's lists: the best go behind the first
/// `taken` of the choice, which write_taken() writes.
template <class WriteTaken>
__device__ void settle_near(NearShared& s, const NearQueries& q, const TokenKeys& keys, const Choice& choice, int taken,
                            int few, WriteTaken&& write_taken) {
  const auto& selection = s.row.selection;
  const int thread = static_cast<int>(threadIdx.x), part = thread % kKeyLanes, first = thread / kKeyLanes;
  const int top = choice.tile.p.top, places = top - taken, rounded = (few + 3) / 4 * 4;  // whole warps
  KeyPart read = load_key(keys, selection.few_entries[min(first, few - 1)], part);
  write_taken();
#pragma unroll 1
  for (int i = first; i < rounded; i += kKeysAtOnce) {
    const int at = min(i, few - 1);
    if (i >= kKeysAtOnce) read = load_key(keys, selection.few_entries[at], part);
    if (i < few) put_key(s, read, i, part);
    const std::uint32_t words[4] = {read.codes.x, read.codes.y, read.codes.z, read.codes.w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 x = values_of(words[j] & kMagnitudes);
      const float4 bounds = *reinterpret_cast<const float4*>(&q.bounds[kLaneCodes * part + 4 * j]);
      sum = codec::fused(bounds.x, x.x, sum), sum = codec::fused(bounds.y, x.y, sum);
      sum = codec::fused(bounds.z, x.z, sum), sum = codec::fused(bounds.w, x.w, sum);
    }
#pragma unroll
    for (int step = 1; step < kKeyLanes; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    // Where a code is NaN both scores are zero.
    const float near = score_of(selection.few_keys[at]), margin = fmaxf(sum * read.scale, 0.0f) + kTiny;
    if (part == 0 && i < few) {
      s.low[i] = near - margin;
      s.high[i] = near + margin;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = first; i < rounded; i += kKeysAtOnce) {
    const int at = min(i, few - 1);
    const float low = s.low[at], high = s.high[at];
    int better = 0;  // certainly; and what may be, this one too, in the upper half
#pragma unroll 4
    for (int j = part; j < few; j += kKeyLanes) better += (s.low[j] > high ? 1 : 0) + (s.high[j] >= low ? 1 << 16 : 0);
#pragma unroll
    for (int step = 1; step < kKeyLanes; step *= 2) better += __shfl_xor_sync(kAll, better, step);
    if (part > 0 || i >= few) continue;
    const bool is_in = (better >> 16) <= places, is_out = (better & 0xFFFF) >= places;
    s.are_in[i] = is_in;
    if (is_in) atomicAdd(&s.in, 1);
    if (!is_in && !is_out) s.undecided_at[atomicAdd(&s.undecided, 1)] = i;
  }
  __syncthreads();
  // Those that are in, in the order of their entries, by warps that will hardly be needed for others.
  static_assert(2 * kFew == kNearThreads);
  if (const int i = thread - kFew; i >= 0 && i < few && s.are_in[i]) {
    const std::int32_t entry = selection.few_entries[i];
    int before = taken;
#pragma unroll 4
    for (int j = 0; j < few; ++j) before += s.are_in[j] && selection.few_entries[j] < entry;
    choice.indices()[before] = entry;
  }
  const int undecided = s.undecided;
  if (undecided == 0) return;
#pragma unroll 1
  for (int done = 0; done < undecided; done += NearShared::kPass)
    score_pass(s, q, min(undecided - done, NearShared::kPass), s.halves + done,
               [&](int i) { return s.undecided_at[done + i]; });
  __syncthreads();
  const auto key_of = [&](int i) { return ops::score_order(s.halves[i][0] + s.halves[i][1]); };
  if (thread >= undecided) return;
  const std::uint32_t key = key_of(thread);
  const std::int32_t entry = selection.few_entries[s.undecided_at[thread]];
  int place = taken + s.in;
#pragma unroll 1
  for (int j = 0; j < undecided; ++j) {
    const std::uint32_t other = key_of(j);
    place += other > key || (other == key && selection.few_entries[s.undecided_at[j]] < entry);
  }
  if (place < top) choice.indices()[place] = entry;
}

/// take_best by the defined scores, from near ones.
template <class Source>
__device__ bool take_near(NearShared& s, const NearQueries& q, const Source& source, const Bounds& bounds,
                          const TokenKeys& keys, const Choice& choice, float margin) {
  return take_best(s.row, source, bounds, choice, 2.0f * margin, [&](int taken, int few, auto&& write_taken) {
    settle_near(s, q, keys, choice, taken, few, write_taken);
  });
}

/// Goes over the whole row: in doubt, the defined score takes the near one's place.
__device__ inline __noinline__ void select_slowly(NearShared& s, const NearQueries& q, TokenKeys keys, float* row,
                                                  int count, Margin margin, Choice choice) {
  auto& selection = s.row.selection;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  float low = kNoScore, high = -kNoScore;
  if (margin.holds) {  // where a bound is no number there is no limit
    Scan scan(selection);
    const Cut cut = find_cut(selection, scan, RowSource<kNearThreads>{row, count}, Bounds(), choice.tile.p.top);
    low = fmaxf(score_of(cut.range.low) - 2.0f * margin.size, kNoScore);
    high = fminf(score_of(cut.range.high) + 2.0f * margin.size, -kNoScore);
  }
  for (int first = 0; first < count; first += kNearThreads) {
    if (thread == 0) s.undecided = 0;
    __syncthreads();
    const int entry = first + thread;
    const float near = entry < count ? row[entry] : 0.0f;
    if (entry < count && !(near < low) && !(near > high))
      s.undecided_at[atomicAdd(&s.undecided, 1)] = entry;
    else if (entry < count)
      row[entry] = near > high ? -kNoScore : kNoScore;
    __syncthreads();
    const int undecided = s.undecided;
    for (int done = 0; done < undecided; done += NearShared::kPass) {
      const int pass = min(undecided - done, NearShared::kPass);
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
  if (thread == 0) selection.few = 0;
  select_from_row(selection, row, count, Bounds(), choice);
}

}  // namespace kv4::cuda
