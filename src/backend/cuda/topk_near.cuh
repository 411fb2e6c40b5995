// The best k of the defined scores of fp8 keys, from near ones (index_fp8.cu). Exact, whatever the keys.
//
// Near scores differ from the defined ones by at most a margin m. Let T be the k-th best near score. The k-th best
// defined score is at least T - m, so keys below T - 2m are out; fewer than k keys have a near score above T, so a key
// above T + 2m is in. Those between, a few dozen as a rule, are scored again as defined. Of T it is enough to know the
// bin of a histogram.
//
// The margin: with S_c = |q_c| * 448 * (the largest scale of the token's keys) >= |q_c k_c|, in units u = 2^-24,
//   the defined dot     channel c's product is in 128 - c sums, each rounded: S_c (128 - c)
//   the matrix unit's   a step adds 16 products to the sum so far, in up to four parts: 20 numbers cut off at u/2 of
//                       the largest (two bits more than fp32 has: IndexKernel's fp8_near_cutoff sees to it), four
//                       results at 2u: S_c * 18 * (steps from the one that takes c on)
//   all the rest        scales that are no powers of two, weights, the sum over heads: less than 48 roundings
// added up over channels and heads times their weights. Denormals: less than kTiny. Where a scale, weight or sum is
// beyond what these bounds hold for, or more keys than kFew are near T, the row is scored again as far as need be.
//
// Selection as in topk.cu. Scoring again: 64 keys at a time, decoded into shared memory; a thread makes the dots of
// two heads and four keys, four threads per key add up the chains. Bound by latency, and by 64 clocks per key:
// about 17,000 clocks for 8,192 keys and one token on an H200, 2026-11-16, of which the dots of 27 keys take 5,100.
#pragma once

#include <cstdint>

#include "backend/cuda/cluster.cuh"
#include "backend/cuda/index_near.cuh"
#include "backend/cuda/index_units.cuh"
#include "backend/cuda/row_decode.cuh"
#include "backend/cuda/topk_select.cuh"

namespace kv4::cuda {

constexpr int kOctets = kWidth / kOctet;
constexpr int kBatch = 64, kEachKeys = 4;  // keys scored again at a time, by a warp
constexpr float kMostCode = 448.0f, kTiny = 0x1p-80f;
constexpr int kOtherRoundings = 48;
constexpr int kStepParts = 4;
constexpr float kStepRoundings = 0.5f * (kStepChannels + kStepParts) + 2.0f * kStepParts;

/// What a block of so many threads, which may be one of a cluster, selects with.
template <int kBlockThreads, bool kOfCluster>
struct NearShared {
  static constexpr int kThreads = kBlockThreads;
  static constexpr bool kInCluster = kOfCluster;
  static_assert(kHeads * kOctets % kThreads == 0 && kThreads % kHeads == 0 && kThreads >= kBatch * ops::kChains);
  using Row = RowSelection<kThreads>;
  Row row;
  float4 q[kWidth / 4][kHeads];
  float weights[kHeads];
  float k[kBatch][kWidth];
  float dots[kBatch][kHeads + 1];
  float sums[Row::kWarps];
  std::uint32_t largest[Row::kWarps];
  // Near T, and their defined scores.
  std::int32_t entries[kFew];
  std::uint32_t keys[kFew];
  int listed;  // of entries, in a block that helps another
};

/// A token's keys.
struct TokenKeys {
  const IndexTile& tile;
  const std::int32_t* table;  // of its request
};

/// Queries and weights into shared memory. Returns the margin per unit of the largest scale, to be added up over the
/// block; infinite where bounds do not hold.
template <class S>
__device__ float load_queries(S& s, const IndexTile& tile, int token) {
  constexpr int kStepOctets = S::kThreads / kHeads;
  const int head = static_cast<int>(threadIdx.x) % kHeads, first = static_cast<int>(threadIdx.x) / kHeads;
  if (head >= tile.p.num_heads) {
    for (int octet = first; octet < kOctets; octet += kStepOctets) s.q[2 * octet][head] = s.q[2 * octet + 1][head] = {};
    if (first == 0) s.weights[head] = 0.0f;
    return 0.0f;
  }
  const QueryRows from = query_rows<codec::Fp8Key>(tile, token);
  uint2 codes[kOctets / kStepOctets];
#pragma unroll
  for (int i = 0; i < kOctets / kStepOctets; ++i)
    codes[i] =
        *reinterpret_cast<const uint2*>(from.payload + head * from.payload_stride + kOctet * (first + i * kStepOctets));
  const float scale = *reinterpret_cast<const float*>(from.scale + head * from.scale_stride);
  const float weight =
      static_cast<const float*>(tile.p.weights.data)[(tile.first + token) * tile.p.weights.row_stride + head];
  if (first == 0) s.weights[head] = weight;
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kOctets / kStepOctets; ++i) {
    const int octet = first + i * kStepOctets;
    float q[kOctet], sum = 0.0f;
    scaled_e4m3(codes[i], scale, q);
    s.q[2 * octet][head] = {q[0], q[1], q[2], q[3]};
    s.q[2 * octet + 1][head] = {q[4], q[5], q[6], q[7]};
    // Of its first channel, which has the most of them.
    const float roundings = static_cast<float>(kWidth - kOctet * octet + kOtherRoundings) +
                            kStepRoundings * static_cast<float>(kMatrixSteps - matrix_step(kOctet * octet));
#pragma unroll
    for (int j = 0; j < kOctet; ++j) sum += fabsf(q[j]);
    all += sum * roundings * fabsf(weight) * (kMostCode * 0x1p-24f * 1.001f);  // 1.001: these sums are rounded, too
  }
  const std::uint32_t bits = codec::float_bits(scale);
  return bits < kLeastScale || bits > kMostScale ? __builtin_huge_valf() : all;
}

/// How far near scores may be from the defined ones.
struct Margin {
  float size;
  bool holds;  // or nothing is known
};

/// From each thread's part per unit of scale, and the largest scale of what each warp knows of. A barrier comes
/// between the two calls.
template <class S>
__device__ void put_margin(S& s, float per_scale, std::uint32_t largest_of_warp) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) per_scale += __shfl_xor_sync(kAll, per_scale, step);
  if (threadIdx.x % 32 == 0) {
    s.sums[threadIdx.x / 32] = per_scale;
    s.largest[threadIdx.x / 32] = largest_of_warp;
  }
}
template <class S>
__device__ Margin join_margin(const S& s) {
  constexpr int kWarps = S::Row::kWarps;
  static_assert(kWarps <= 32 && 32 % kWarps == 0);
  float per_scale = s.sums[threadIdx.x % kWarps];
  const std::uint32_t largest = __reduce_max_sync(kAll, s.largest[threadIdx.x % kWarps]);
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) per_scale += __shfl_xor_sync(kAll, per_scale, step);
  const float size = per_scale * codec::bits_float(largest) + kTiny;
  return {size, largest <= kMostScale && per_scale < 0x1p70f && size < 0x1p60f};
}

/// Of the first `count` keys. A thread has two heads and kEachKeys keys, a warp all heads. With enough registers the
/// next channels are under way while these are multiplied.
template <int kEachKeys, class S>
__device__ void make_dots(S& s, int count) {
  constexpr int kEachHeads = 2, kLanes = kHeads / kEachHeads, kSteps = kWidth / 4;
  constexpr int kAhead = S::kThreads <= 512 || kEachKeys <= 2 ? 1 : 0, kBuffers = 2;
  static_assert(kLanes == 32 && kSteps % kBuffers == 0);
  const int head = static_cast<int>(threadIdx.x) % kLanes, first = static_cast<int>(threadIdx.x) / kLanes * kEachKeys;
  if (first >= count) return;
  float dots[kEachKeys][kEachHeads] = {};
  float4 k[kBuffers][kEachKeys], q[kBuffers][kEachHeads];
  const auto load = [&](int i, int to) {
#pragma unroll
    for (int j = 0; j < kEachKeys; ++j) k[to][j] = *reinterpret_cast<const float4*>(&s.k[first + j][4 * i]);
#pragma unroll
    for (int h = 0; h < kEachHeads; ++h) q[to][h] = s.q[i][head + kLanes * h];
  };
  if constexpr (kAhead > 0) load(0, 0);
#pragma unroll 1
  for (int i = 0; i < kSteps; i += kBuffers)
#pragma unroll
    for (int at = 0; at < kBuffers; ++at) {
      load((i + at + kAhead) % kSteps, (at + kAhead) % kBuffers);
#pragma unroll
      for (int j = 0; j < kEachKeys; ++j)
#pragma unroll
        for (int h = 0; h < kEachHeads; ++h) {
          float& dot = dots[j][h];
          dot = codec::fused(q[at][h].x, k[at][j].x, dot);
          dot = codec::fused(q[at][h].y, k[at][j].y, dot);
          dot = codec::fused(q[at][h].z, k[at][j].z, dot);
          dot = codec::fused(q[at][h].w, k[at][j].w, dot);
        }
    }
#pragma unroll
  for (int j = 0; j < kEachKeys; ++j)
#pragma unroll
    for (int h = 0; h < kEachHeads; ++h) s.dots[first + j][head + kLanes * h] = dots[j][h];
}

/// Calls put(i, score) for the defined scores of `count` keys, of which the i-th is entry_of(i): at most kBatch.
template <class S, class EntryOf, class Put>
__device__ void score_again(S& s, const TokenKeys& keys, int count, EntryOf&& entry_of, Put&& put) {
#pragma unroll
  for (int first = 0; first < kBatch; first += S::kThreads / kOctets) {
    const int i = first + static_cast<int>(threadIdx.x) / kOctets, octet = static_cast<int>(threadIdx.x) % kOctets;
    const ops::KindDesc& kind = keys.tile.kind();
    float x[kOctet] = {};
    if (i < count) {
      const int entry = entry_of(i), in_block = entry % kind.rows_per_block;
      const std::int32_t block = keys.table[entry / kind.rows_per_block];
      if (block >= 0) {
        const std::uint8_t* payload = kind.page.payload.at(block, in_block) + kOctet * octet;
        const float scale = *reinterpret_cast<const float*>(kind.page.scale.at(block, in_block));
        scaled_e4m3(*reinterpret_cast<const uint2*>(payload), scale, x);
      }
    }
    float4* to = reinterpret_cast<float4*>(&s.k[i][kOctet * octet]);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
  }
  __syncthreads();
  static_assert(S::kThreads / 32 * kEachKeys >= kBatch);
  if (S::kInCluster && count <= 2 * kEachKeys)  // each block has few
    make_dots<kEachKeys / 2>(s, count);
  else
    make_dots<kEachKeys>(s, count);
  __syncthreads();
  const int key = static_cast<int>(threadIdx.x) / ops::kChains, chain = static_cast<int>(threadIdx.x) % ops::kChains;
  if (key >= (count + 7) / 8 * 8) return;  // whole warps
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) {  // heads that are not there add zero
    const int h = chain * ops::kChainHeads + i;
    sum = codec::fused(s.weights[h], ops::relu(s.dots[key][h]), sum);
  }
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  if (chain == 0 && key < count) put(key, codec::canonical_nan(sum));
}

/// Near scores from low to high are in doubt: above they are in, below out.
struct Doubt {
  float low = kNoScore, high = -kNoScore;

  __device__ Doubt() {}
  /// cut: of near scores. Where it is no number there is no limit.
  __device__ Doubt(const Cut& cut, float margin)
      : low(fmaxf(score_of(cut.range.low) - 2.0f * margin, kNoScore)),
        high(fminf(score_of(cut.range.high) + 2.0f * margin, -kNoScore)) {}
  /// The interval that the cut lies in; the first and the last have no end.
  __device__ Doubt(const Intervals& intervals, int bin, float margin) {
    if (bin > 0) low = intervals.edge_below(bin) - 2.0f * margin;
    if (bin < kBins - 1) high = intervals.edge_above(bin) + 2.0f * margin;
  }
};

/// What is in doubt about the best `top` of a source's near scores.
template <class S, class Source>
__device__ Doubt find_doubt(S& s, Scan<S>& scan, const Source& source, const Bounds& bounds, int top, float margin) {
  constexpr int kInBin = 64;  // not worth a closer look
  if (const Intervals intervals(bounds); intervals.are_finite()) {
    const Found found = find_bin(
        s, scan, top, [&](auto&& f) { source.for_each([&](float near, std::int32_t) { f(intervals.bin_of(near)); }); });
    if (found.inside <= kInBin) return {intervals, static_cast<int>(found.bin), margin};
  }
  return {find_cut(s, scan, source, bounds, top), margin};
}

/// Goes over the whole row: in doubt, the defined score takes the near one's place.
template <class S>
__device__ __noinline__ void select_slowly(S& s, const TokenKeys& keys, float* row, int count, Doubt doubt,
                                           const Choice& choice) {
  for (int first = 0; first < count; first += kBatch) {
    const int batch = min(kBatch, count - first), i = static_cast<int>(threadIdx.x);
    const float near = i < batch ? row[first + i] : 0.0f;
    const bool in_doubt = i < batch && !(near < doubt.low) && !(near > doubt.high);
    if (__syncthreads_or(in_doubt))
      score_again(
          s, keys, batch, [&](int at) { return first + at; },
          [&](int at, float score) { s.keys[at] = __float_as_uint(score); });
    __syncthreads();
    if (i < batch) row[first + i] = in_doubt ? __uint_as_float(s.keys[i]) : near > doubt.high ? -kNoScore : kNoScore;
  }
  if (threadIdx.x == 0) s.row.selection.few = 0;
  select_from_row(s.row.selection, row, count, Bounds(), choice);
}

/// Calls put(i, key) with the order of the defined scores of s.entries[i], for every step-th i of `listed`. There is a
/// barrier before.
template <class S, class Put>
__device__ void score_listed(S& s, const TokenKeys& keys, int listed, int step, Put&& put) {
  const int mine = (listed + step - 1) / step;
  for (int first = 0; first < mine; first += kBatch) {
    __syncthreads();
    score_again(
        s, keys, min(kBatch, mine - first), [&](int i) { return s.entries[(first + i) * step]; },
        [&](int i, float score) { put((first + i) * step, ops::score_order(score)); });
  }
}

// A cluster's blocks share what is in doubt. Its barriers are those of these functions.

/// Scores every blocks-th key that the cluster's first block has listed, from the rank-th on, for it.
template <class S>
__device__ void help_first(S& s, const TokenKeys& keys, int blocks, int rank) {
  arrive_cluster();
  wait_cluster();  // the list is there
  S& first = shared_of(s, 0);
  score_listed(s, keys, s.listed, 1, [&](int i, std::uint32_t key) { first.keys[i * blocks + rank] = key; });
  arrive_cluster();
}

/// Shares the first `listed` of s.entries out; there is a barrier before. 0: no help is needed.
template <class S>
__device__ void call_help(S& s, int blocks, int listed) {
  const int i = static_cast<int>(threadIdx.x);
  static_assert(kFew <= S::kThreads);
  if (i < listed && i % blocks > 0) shared_of(s, i % blocks).entries[i / blocks] = s.entries[i];
  if (i > 0 && i < blocks) shared_of(s, i).listed = (listed - i + blocks - 1) / blocks;
  arrive_cluster();
}

/// score_listed by all blocks of the cluster, into s.keys of its first, which calls it.
template <class S>
__device__ void score_together(S& s, const TokenKeys& keys, int blocks, int listed) {
  if (blocks > 1) {
    __syncthreads();
    call_help(s, blocks, listed);
    wait_cluster();
  }
  score_listed(s, keys, listed, blocks, [&](int i, std::uint32_t key) { s.keys[i] = key; });
  if (blocks > 1) sync_cluster();
}

/// What is in, and the best of what is in doubt. False: too much is. score(listed) puts the orders of the defined
/// scores of s.entries into s.keys; barriers come before and after.
template <class S, class Source, class Score>
__device__ bool write_best(S& s, Scan<Selection<S::kThreads>>& scan, const Source& source, const Doubt& doubt,
                           const Choice& choice, Score&& score) {
  std::uint32_t in = 0, in_doubt = 0, at = 1;
  source.for_each([&](float near, std::int32_t) {  // absent ones are NaN
    if (near > doubt.high) in |= at;
    if (near >= doubt.low) in_doubt |= at;
    at += at;
  });
  in_doubt &= ~in;
  constexpr int kHalf = 16;  // of a word, for either count
  int total, place = scan.before(__popc(in) | __popc(in_doubt) << kHalf, total);
  const int certain = total & ((1 << kHalf) - 1), listed = total >> kHalf, top = choice.tile.p.top;
  static_assert(kRowNumbers < 1 << (kHalf - 1) && kListRoom <= kRowNumbers);
  if (listed > kFew) return false;
  std::int32_t(&chosen)[ops::kMaxTopk] = s.row.selection.chosen;
  int listed_place = place >> kHalf;
  place &= (1 << kHalf) - 1;
  for (; in != 0; in &= in - 1) chosen[place++] = source.entry(__ffs(static_cast<int>(in)) - 1);
  for (; in_doubt != 0; in_doubt &= in_doubt - 1)
    s.entries[listed_place++] = source.entry(__ffs(static_cast<int>(in_doubt)) - 1);
  score(listed);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = static_cast<int>(threadIdx.x / 32); i < listed; i += S::Row::kWarps) {
    const std::uint32_t key = s.keys[i];
    const std::int32_t entry = s.entries[i];
    int better = 0;
    for (int j = lane; j < listed; j += 32) better += s.keys[j] > key || (s.keys[j] == key && s.entries[j] < entry);
    better = __reduce_add_sync(kAll, better);
    if (lane == 0 && certain + better < top) chosen[certain + better] = entry;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < top; i += S::kThreads) choice.put(i, chosen[i]);
  return true;
}

}  // namespace kv4::cuda
