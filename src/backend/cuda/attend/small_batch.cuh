// The CTAs of small_batch.cu: shared memory, S, PV and the combination. Only small_batch.cu includes it.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/mma_sync.cuh"
#include "backend/cuda/rows/warp_row.cuh"

namespace kv4::cuda::small_batch {

using ops::AttendParams;

inline constexpr int kWidth = kAttendWidth, kTile = kAttendTile;  // a tile: 64 rows, or the 64 channels of one scale
inline constexpr int kScales = kWidth / kTile - 1;                // of a row; its last 64 channels are bf16
inline constexpr int kSteps = kTile / 16;                         // steps of the mma instruction through a tile
inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
// A row in shared memory: the stored bytes, then its scales. The stride keeps 2 adjacent rows (S) and 4 (PV) apart in
// banks.
inline constexpr int kTailAt = kScales * kTile, kScaleAt = 576, kRowStride = 608;
inline constexpr int kPBits = 15;       // P is scaled by 2^15, as far as fp16 allows
inline constexpr int kQueryTop = 8;     // exponent of the largest query element of a head and 64 channels
inline constexpr int kPartialTop = 14;  // exponent of a partial output's largest channel
inline constexpr float kLn2 = 0.693147181f;
inline constexpr int kEightSplits = 8;  // the usual number for one token

/// The softmax of one head over some rows: the row maximum (logits times log2 e) and the sum of 2^(logit - maximum).
struct Stats {
  float row_max, sum;
};

/// The KV splits of a token. 2^log2 of the CTAs reduce pairs of a head and 64 channels. kFixed: kEightSplits or
/// kNineSplits; 0: any power of two.
template <int kFixed>
struct KvSplits {
  static constexpr bool kNine = kFixed == kNineSplits;
  int any_log2;
  __device__ int log2() const { return kFixed > 0 ? 3 : any_log2; }
  __device__ int reducers() const { return 1 << log2(); }
  __device__ int count() const { return kFixed > 0 ? kFixed : reducers(); }
  __device__ int over(int x) const { return kNine ? x / kNineSplits : x >> log2(); }
  __device__ int rest(int x) const { return kNine ? x % kNineSplits : x & (reducers() - 1); }
  __device__ bool unsplit() const { return kFixed == 0 && any_log2 == 0; }
};

template <int kHeads_, int kStages_, bool kNine>
struct Shared {
  static constexpr int kHeads = kHeads_, kStages = kStages_;
  static constexpr int kPairs = kWarps * kHeads;  // pairs of 64 channels and a head
  static constexpr bool kOneTile = kStages == 1;  // index [1] of two tiles then means the spread rows, see spreads
  static constexpr int kRows = kOneTile ? kOneStageRows : kTile;
  std::uint8_t rows[kStages][kRows * kRowStride];
  // [tile, half of the channels, 16 rows, head]: see score_word. Spread rows: [1, half, 64 channels of it, head]
  float scores[2][2][kSteps][kHeads][16];
  float exponents[2][kWarps][kTile];         // [tile, channels, row]: rows as in scores
  uint4 queries[kWarps][kHeads / 8][2][32];  // [channels, 8 heads, half of a thread's words, thread]: see Queries
  float query_factors[kWarps][kHeads];       // factors of the products with these queries
  float absent[kStages][kRows];              // -infinity for rows that do not exist
  float sink[kHeads];                        // times log2 e
  // Received from the CTAs of the cluster:
  static constexpr int kPartials = kNine ? kPairs / (kNineSplits - 1) * kNineSplits : kPairs;
  std::uint16_t partials[kPartials][kTile];  // [KV split, pair of this CTA]: fp16
  float logs[kPartials];                     // logarithms of the partial outputs' factors; then the factors
  Stats stats[kMaxCluster][kHeads];
  std::uint64_t arrived;  // counts the received bytes

  /// Bytes that a CTA receives.
  __device__ static int bytes_sent(int kv_splits) {
    return static_cast<int>(sizeof(partials) + sizeof(logs)) + kv_splits * kHeads * static_cast<int>(sizeof(Stats));
  }
};

/// The word of row r of 16: the four rows of a thread's P are adjacent; swizzled for the threads that write them.
__device__ inline int row_word(int r) { return r % 4 * 4 + r / 4; }
__device__ inline int score_word(int r, int head) { return row_word(r) ^ (head / 2 % 4 * 4); }

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / 32; }

/// The lower two e4m3 codes as fp16.
__device__ inline std::uint32_t codes_to_half2(std::uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xFFFFu), __NV_E4M3);
  std::uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

__device__ inline std::uint32_t half2_bits(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

/// A fragment of 16 x 16, with two elements per word: thread 4 g + q has, of rows g and g + 8, elements 2q, 2q + 1
/// (words 0, 1) and 2q + 8, 2q + 9 (words 2, 3).
using Fragment = std::uint32_t[4];

/// The work of a CTA.
struct Job {
  std::int64_t token;
  int first_head;
  int kv_split;
  int begin, end;  // rows

  template <int kFixed>
  __device__ Job(const KvSplits<kFixed>& kv_splits, int head_groups, int heads) {
    const int work_tile = kv_splits.over(static_cast<int>(blockIdx.x));
    kv_split = kv_splits.rest(static_cast<int>(blockIdx.x));
    token = work_tile / head_groups;
    first_head = work_tile % head_groups * heads;
  }

  template <int kFixed>
  __device__ void take_rows(const QueryRows& rows, const KvSplits<kFixed>& kv_splits) {
    const int split_rows = kv_splits.over(rows.count() + kv_splits.count() - 1);
    begin = min(kv_split * split_rows, rows.count());
    end = min(begin + split_rows, rows.count());
  }
  __device__ int tiles() const { return (end - begin + kTile - 1) / kTile; }
  /// Steps of 16 rows.
  __device__ int steps(int tile) const { return min((end - begin - tile * kTile + 15) / 16, kSteps); }
  /// The same with a single tile; a speculative record may have more rows.
  __device__ int steps() const { return min((end - begin + 15) / 16, kOneStageRows / 16); }
};

// --- speculative prefetch

/// Brings queries, the list of entries and the block table into L2 for all CTAs of the token, which share this work.
template <int kHeads, int kFixed>
__device__ void prefetch_inputs(const AttendParams& p, const Job& job, const KvSplits<kFixed>& kv_splits,
                                const QueryRows& rows, int head_groups) {
  constexpr int kLinesPerHead = kWidth * 2 / kLine, kLineWords = kLine / 4;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* q =
      static_cast<const std::uint8_t*>(p.q.data) + (job.token * p.q.row_stride + job.first_head * kWidth) * 2;
  if (thread < kHeads * kLinesPerHead && kv_splits.rest(thread) == job.kv_split &&
      job.first_head + thread / kLinesPerHead < p.num_heads)
    prefetch_l2(q + thread * kLine);
  if (rows.entries == 0 || p.chosen.data == nullptr) return;
  const int words = (job.first_head / kHeads + (job.kv_split + thread * kv_splits.count()) * head_groups) * kLineWords;
  if (words < p.num_chosen)
    prefetch_l2(static_cast<const std::int32_t*>(p.chosen.data) + job.token * p.chosen.row_stride + words);
  if (words < p.step.blocks_per_request)
    prefetch_l2(p.step.block_table + std::int64_t{rows.at.row} * p.step.blocks_per_request + words);
}

// --- S = Q K^T

/// Queries in the order of the mma instruction: words 2s, 2s + 1 of 64 channels are for step s. Each warp converts 64
/// channels for all warps.
template <class S>
class Queries {
 public:
  static constexpr int kGroups = S::kHeads / 8, kTiles = kWidth / kTile / 2;

  __device__ void load(const AttendParams& p, const Job& job) {
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4, tile = warp_of_thread();
    const bool tail = tile == kScales;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int head = job.first_head + 8 * n + g;
      const auto* from = static_cast<const std::uint16_t*>(p.q.data) + job.token * p.q.row_stride +
                         static_cast<std::int64_t>(head) * kWidth + tile * kTile + q * (tail ? 8 : 16);
      const uint4* at = reinterpret_cast<const uint4*>(from);
      own_[n][0] = own_[n][1] = make_uint4(0, 0, 0, 0);
      if (head >= p.num_heads) continue;
      own_[n][0] = at[0];
      own_[n][1] = at[tail ? 4 : 1];
    }
  }

  /// Converts to fp16 with a power of two per head, except for the bf16 channels.
  __device__ void convert(S& s) {
    const int lane = lane_of_thread(), tile = warp_of_thread();
    const bool tail = tile == kScales;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      std::uint32_t words[8] = {own_[n][0].x, own_[n][0].y, own_[n][0].z, own_[n][0].w,
                                own_[n][1].x, own_[n][1].y, own_[n][1].z, own_[n][1].w};
      std::uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = __vmaxu2(amax, words[i] & 0x7FFF7FFFu);
      amax = max(amax & 0xFFFFu, amax >> 16);
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 2));
      const std::uint32_t exponent = max(amax >> 7, kQueryTop + 1u);
      const float up = codec::bits_float((254u + kQueryTop - exponent) << 23);
      if (!tail) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = half2_bits(low_value(words[i]) * up, high_value(words[i]) * up);
      }
      s.queries[tile][n][0][lane] = make_uint4(words[0], words[1], words[2], words[3]);
      s.queries[tile][n][1][lane] = make_uint4(words[4], words[5], words[6], words[7]);
      if (lane % 4 == 0)
        s.query_factors[tile][8 * n + lane / 4] = tail ? 1.0f : codec::bits_float((exponent - kQueryTop) << 23);
    }
  }

  /// Loads a warp's half of the channels into registers.
  __device__ void take(const S& s, int half) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 x = s.queries[half * kTiles + t][n][i][lane_of_thread()];
          words_[n][t][4 * i] = x.x;
          words_[n][t][4 * i + 1] = x.y;
          words_[n][t][4 * i + 2] = x.z;
          words_[n][t][4 * i + 3] = x.w;
        }
  }

  __device__ std::uint32_t word(int warpgroup, int tile, int i) const { return words_[warpgroup][tile][i]; }

 private:
  uint4 own_[kGroups][2];
  std::uint32_t words_[kGroups][kTiles][8];
};

__device__ inline float scale_value(std::uint32_t scales, int i) {
  return codec::ue8m0_value(static_cast<std::uint8_t>(scales >> (8 * i)));
}

/// Adds the products of 16 rows (a thread has rows 2g and 2g + 1) and 64 channels of codes. at: the thread's address in
/// the first row; factors: [head]; query(n, i): word i of 8 heads.
template <int kGroups, class Query>
__device__ void add_codes(std::uint32_t at, const std::uint32_t (&scales)[2], int byte, const float* factors,
                          const Query& query, float (&sum)[kGroups][4]) {
  const int q = lane_of_thread() % 4;
  const uint4 a = load_shared16(at), b = load_shared16(at + kRowStride);
  const std::uint32_t upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
  float product[kGroups][4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const Fragment rows = {codes_to_half2(upper[i]), codes_to_half2(lower[i]), codes_to_half2(upper[i] >> 16),
                           codes_to_half2(lower[i] >> 16)};
#pragma unroll
    for (int n = 0; n < kGroups; ++n) mma_m16n8k16<false>(product[n], rows, query(n, 2 * i), query(n, 2 * i + 1));
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * n + 2 * q);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[n][i] =
          codec::fused(product[n][i], scale_value(scales[i / 2], byte) * (i % 2 == 0 ? factor.x : factor.y), sum[n][i]);
  }
}

/// The same for the bf16 channels.
template <int kGroups, class Query>
__device__ void add_tail(std::uint32_t at, const Query& query, float (&sum)[kGroups][4]) {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint4 a = load_shared16(at + u * 64), b = load_shared16(at + kRowStride + u * 64);
    const Fragment first = {a.x, b.x, a.y, b.y};
    const Fragment second = {a.z, b.z, a.w, b.w};
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      mma_m16n8k16<true>(sum[n], first, query(n, 4 * u), query(n, 4 * u + 1));
      mma_m16n8k16<true>(sum[n], second, query(n, 4 * u + 2), query(n, 4 * u + 3));
    }
  }
}

/// Stores the logits of 16 rows over some channels. absent: added to the logits of a thread's rows.
template <int kHeads>
__device__ void store_logits(const float (&sum)[kHeads / 8][4], float logit_scale, const float (&absent)[2],
                             float (&to)[kHeads][16]) {
  const int g = lane_of_thread() / 4, q = lane_of_thread() % 4;
#pragma unroll
  for (int n = 0; n < kHeads / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = 8 * n + 2 * q + i % 2;
      to[head][score_word(2 * g + i / 2, head)] = codec::fused(sum[n][i], logit_scale, absent[i / 2]);
    }
}

__device__ inline float scale_exponent(std::uint32_t scales, int i) {
  return static_cast<float>(static_cast<int>(scales >> (8 * i) & 0xFFu) - 127);
}

/// Logits of 16 rows over half of the channels.
template <class S>
__device__ void score_rows(S& s, int tile, int step, int half, const Queries<S>& queries, float logit_scale) {
  constexpr int kGroups = Queries<S>::kGroups, kTiles = Queries<S>::kTiles;
  const int g = lane_of_thread() / 4, q = lane_of_thread() % 4, row = step * 16 + 2 * g;
  const int stage = tile % S::kStages, buffer = tile % 2;
  const std::uint32_t at = shared_address(s.rows[stage]) + row * kRowStride;
  std::uint32_t scales[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) scales[r] = load_shared4(at + r * kRowStride + kScaleAt + 4 * half);
  float sum[kGroups][4] = {};
  const auto add = [&](int t) {
    add_codes(
        at + (half * kTiles + t) * kTile + q * 16, scales, t, s.query_factors[half * kTiles + t],
        [&](int n, int i) { return queries.word(n, t, i); }, sum);
  };
#pragma unroll
  for (int t = 0; t < kTiles - 1; ++t) add(t);
  float tail[kGroups][4] = {};
  if (half == 0)
    add(kTiles - 1);
  else
    add_tail(
        at + kTailAt + q * 16, [&](int n, int i) { return queries.word(n, kTiles - 1, i); }, tail);
#pragma unroll
  for (int n = 0; n < kGroups; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += tail[n][i];
  const float absent[2] = {s.absent[stage][row], s.absent[stage][row + 1]};
  store_logits<S::kHeads>(sum, logit_scale, {half == 0 ? absent[0] : 0.0f, half == 0 ? absent[1] : 0.0f},
                          s.scores[buffer][half][step]);
  const int scale_tile = half * kTiles + q;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    s.exponents[buffer][scale_tile][step * 16 + row_word(2 * g + r)] =
        scale_tile == kScales ? 0.0f : scale_exponent(scales[r], q);
}

/// Whether the last of some steps of 16 rows is spread over all warps, 64 channels each: an additional step for two
/// warps would take as long as all their other steps.
__device__ inline bool spreads(int steps) { return steps % kSteps == 1; }

/// Logits of the 16 spread rows over a warp's 64 channels.
template <class S>
__device__ void score_spread(S& s, int step, float logit_scale) {
  constexpr int kGroups = S::kHeads / 8;
  const int lane = lane_of_thread(), g = lane / 4, q = lane % 4, row = step * 16 + 2 * g;
  const int tile = warp_of_thread(), half = tile / kSteps, rest = tile % kSteps;
  const std::uint32_t at = shared_address(s.rows[0]) + row * kRowStride;
  std::uint32_t words[kGroups][8];
#pragma unroll
  for (int n = 0; n < kGroups; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = s.queries[tile][n][i][lane];
      words[n][4 * i] = x.x;
      words[n][4 * i + 1] = x.y;
      words[n][4 * i + 2] = x.z;
      words[n][4 * i + 3] = x.w;
    }
  const auto query = [&](int n, int i) { return words[n][i]; };
  float sum[kGroups][4] = {};
  float exponents[2] = {0.0f, 0.0f};
  if (tile == kScales) {
    add_tail(at + kTailAt + q * 16, query, sum);
  } else {
    std::uint32_t scales[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = load_shared4(at + r * kRowStride + kScaleAt + 4 * half);
      exponents[r] = scale_exponent(scales[r], rest);
    }
    add_codes(at + tile * kTile + q * 16, scales, rest, s.query_factors[tile], query, sum);
  }
  store_logits<S::kHeads>(sum, logit_scale,
                          {tile == 0 ? s.absent[0][row] : 0.0f, tile == 0 ? s.absent[0][row + 1] : 0.0f},
                          s.scores[1][half][rest]);
  if (q != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) s.exponents[1][tile][row_word(2 * g + r)] = exponents[r];
}

// --- softmax and PV

/// A CTA of the cluster (or this one) whose barrier counts the bytes that arrive.
class Remote {
 public:
  template <int kFixed>
  __device__ Remote(const std::uint64_t& arrived, int rank, const KvSplits<kFixed>& kv_splits)
      : unsplit_(kv_splits.unsplit()),
        rank_(static_cast<std::uint32_t>(rank)),
        arrived_(map_to_cta(shared_address(&arrived), rank_)) {}

  template <class T, int kWords>
  __device__ void store(const T& place, const std::uint32_t (&x)[kWords]) const {
    const std::uint32_t here = shared_address(&place), to = map_to_cta(here, rank_);
    if (unsplit_) {  // there are no asynchronous stores without a cluster
#pragma unroll
      for (int i = 0; i < kWords; ++i) store_shared4(here + 4 * i, x[i]);
    } else {
      cluster_store_async(to, x, arrived_);
    }
  }

 private:
  const bool unsplit_;
  const std::uint32_t rank_, arrived_;
};

/// A warp's part of O: 64 channels of all heads. A thread has channels 8g to 8g + 7 of heads 2q and 2q + 1 of every 8.
template <class S>
class PvAccumulator {
 public:
  static constexpr int kHeads = S::kHeads, kGroups = kHeads / 8, kPairsLog2 = kHeads == 8 ? 6 : 7;
  static constexpr int kMaxSteps = S::kRows / 16;
  static_assert(1 << kPairsLog2 == S::kPairs);

  __device__ PvAccumulator() {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      row_max_[n] = -INFINITY;
      sum_[n] = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[n][j][i] = 0.0f;
    }
  }

  /// kTail: the warp of the bf16 channels.
  template <bool kTail>
  __device__ void add(const S& s, int tile, int steps) {
    std::uint32_t p_words[kGroups][kMaxSteps][2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) softmax_tile<kTail>(s, n, tile % 2, steps, p_words[n]);
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4;
    const std::uint32_t at = shared_address(s.rows[tile % S::kStages]) + q * kRowStride +
                             (kTail ? kTailAt + g * 16 : warp_of_thread() * kTile + g * 8);
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) {
      if (step >= steps) break;
      Fragment channels[4];
      load_step<kTail>(at + step * 16 * kRowStride, channels);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
          mma_m16n8k16<kTail>(o_[n][j], channels[j], p_words[n][step][0], p_words[n][step][1]);
    }
  }

  /// Sends the partial outputs to the CTAs that reduce them, and the softmax's statistics to all reducers.
  template <int kFixed>
  __device__ void send(S& s, const Job& job, const KvSplits<kFixed>& kv_splits) const {
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4;
    const bool tail = warp_of_thread() == kWarps - 1;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float amax = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) amax = fmaxf(amax, fmaxf(fabsf(o_[n][j][i]), fabsf(o_[n][j][i + 2])));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
        const std::uint32_t exponent = max(codec::float_bits(amax) >> 23, kPartialTop + 1u);
        const float up = codec::bits_float((254u + kPartialTop - exponent) << 23);
        const float log = __shfl_sync(kAllLanes, row_max_[n], (2 * q + i) * 4) - (tail ? 0.0f : float{kPBits}) +
                          static_cast<float>(static_cast<int>(exponent) - 127 - kPartialTop);
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = half2_bits(o_[n][j][i] * up, o_[n][j][i + 2] * up);
        const int pair = warp_of_thread() * kHeads + 8 * n + 2 * q + i, own_log2 = kPairsLog2 - kv_splits.log2();
        const int slot = (job.kv_split << own_log2) + (pair & ((1 << own_log2) - 1));
        const Remote to(s.arrived, pair >> own_log2, kv_splits);
        to.store(s.partials[slot][8 * g], words);
        if (g == 0) to.store(s.logs[slot], {codec::float_bits(log)});
      }
      float sum = sum_[n];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (!tail) continue;
      for (int to = q; to < kv_splits.reducers(); to += 4)
        Remote(s.arrived, to, kv_splits)
            .store(s.stats[job.kv_split][8 * n + g], {codec::float_bits(row_max_[n]), codec::float_bits(sum)});
    }
  }

 private:
  /// Logits of rows q, q + 4, q + 8 and q + 12 of 16, plus their exponents.
  __device__ static void load_logits(const S& s, int buffer, int step, int head, float (&z)[4]) {
    const int q = lane_of_thread() % 4, word = score_word(q, head);
    const float4 a = *reinterpret_cast<const float4*>(&s.scores[buffer][0][step][head][word]);
    const float4 b = *reinterpret_cast<const float4*>(&s.scores[buffer][1][step][head][word]);
    const float4 e = *reinterpret_cast<const float4*>(&s.exponents[buffer][warp_of_thread()][step * 16 + row_word(q)]);
    z[0] = a.x + b.x + e.x;
    z[1] = a.y + b.y + e.y;
    z[2] = a.z + b.z + e.z;
    z[3] = a.w + b.w + e.w;
  }
  /// The same of the 16 spread rows.
  __device__ static void load_spread(const S& s, int head, float (&z)[4]) {
    const int q = lane_of_thread() % 4, word = score_word(q, head);
    float4 sum = *reinterpret_cast<const float4*>(&s.exponents[1][warp_of_thread()][row_word(q)]);
#pragma unroll
    for (int tile = 0; tile < kWarps; ++tile) {
      const float4 a = *reinterpret_cast<const float4*>(&s.scores[1][tile / kSteps][tile % kSteps][head][word]);
      sum = make_float4(sum.x + a.x, sum.y + a.y, sum.z + a.z, sum.w + a.w);
    }
    z[0] = sum.x;
    z[1] = sum.y;
    z[2] = sum.z;
    z[3] = sum.w;
  }

  /// Converts logits to P, as the second operand of the mma instruction: rows q, q + 4, q + 8 and q + 12 of every 16,
  /// head g.
  template <bool kTail>
  __device__ void softmax_tile(const S& s, int n, int buffer, int steps, std::uint32_t (&p_words)[kMaxSteps][2]) {
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4, head = 8 * n + g;
    float z[kMaxSteps][4];
    float row_max = -INFINITY;
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) z[step][i] = -INFINITY;
      if (step >= steps) continue;
      if (S::kOneTile && step % kSteps == 0 && step + 1 == steps)
        load_spread(s, head, z[step]);
      else
        load_logits(s, buffer, step, head, z[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) row_max = fmaxf(row_max, z[step][i]);
    }
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, 2));
    row_max = fmaxf(row_max, row_max_[n]);
    const float base = row_max == -INFINITY ? 0.0f : row_max;
    const float rescale = exp2_approx(row_max_[n] - base);
    row_max_[n] = row_max;
    const float offset = kTail ? -base : float{kPBits} - base;
    if constexpr (kTail) sum_[n] *= rescale;
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        z[step][i] = exp2_approx(z[step][i] + offset);
        if constexpr (kTail) sum_[n] += z[step][i];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        p_words[step][i] =
            kTail ? bf16_pair(z[step][2 * i], z[step][2 * i + 1]) : half2_bits(z[step][2 * i], z[step][2 * i + 1]);
    }
    if (S::kOneTile || !__any_sync(kAllLanes, rescale != 1.0f)) return;  // with a single tile, O is still empty
    const float even = __shfl_sync(kAllLanes, rescale, 8 * q), odd = __shfl_sync(kAllLanes, rescale, 8 * q + 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      o_[n][j][0] *= even;
      o_[n][j][1] *= odd;
      o_[n][j][2] *= even;
      o_[n][j][3] *= odd;
    }
  }

  /// 16 rows, 64 channels: rows of fragment j are channels 8g + 2j (for g) and 8g + 2j + 1 (for g + 8).
  template <bool kTail>
  __device__ static void load_step(std::uint32_t at, Fragment (&channels)[4]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // rows q, q + 4; rows q + 8, q + 12
      const std::uint32_t first = at + pair * 8 * kRowStride, second = first + 4 * kRowStride;
      if constexpr (kTail) {
        const uint4 a = load_shared16(first), b = load_shared16(second);
        const std::uint32_t upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          channels[j][2 * pair] = permute_bytes(upper[j], lower[j], 0x5410);
          channels[j][2 * pair + 1] = permute_bytes(upper[j], lower[j], 0x7632);
        }
      } else {
        const uint2 a = load_shared8(first), b = load_shared8(second);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t upper = j < 2 ? a.x : a.y, lower = j < 2 ? b.x : b.y;
          channels[j][2 * pair] = codes_to_half2(permute_bytes(upper, lower, j % 2 == 0 ? 0x40u : 0x62u));
          channels[j][2 * pair + 1] = codes_to_half2(permute_bytes(upper, lower, j % 2 == 0 ? 0x51u : 0x73u));
        }
      }
    }
  }

  float o_[kGroups][4][4];
  float row_max_[kGroups], sum_[kGroups];  // of head g
};

// --- combination and output

/// Stores two channels of a head, after inverse RoPE where it applies. to: the index of the first one.
__device__ inline void store_channels(const AttendParams& p, const Rotation& rotation, std::int64_t to, int tile,
                                      float x, float y) {
  if (tile == kScales && rotation.active) {
    const float a = x, b = y;
    x = codec::fused(a, rotation.cos, b * rotation.sin);
    y = codec::fused(b, rotation.cos, -(a * rotation.sin));
  }
  if (p.out.dtype == DType::f32)
    *reinterpret_cast<float2*>(static_cast<float*>(p.out.data) + to) = make_float2(x, y);
  else
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(p.out.data) + to) = bf16_pair(x, y);
}
__device__ inline std::int64_t channels_at(const AttendParams& p, const Job& job, int head, int tile) {
  return (job.token * p.num_heads + head) * kWidth + tile * kTile + 2 * lane_of_thread();
}

/// Reduces this CTA's partial outputs, one pair per warp: a lane has the statistics of one KV split, so no barrier is
/// needed. wait: waits for the data that the other CTAs send.
template <class S, int kFixed, class Wait>
__device__ void reduce_one(const AttendParams& p, const S& s, const Job& job, const KvSplits<kFixed>& kv_splits,
                           const Rotation& rotation, Wait&& wait) {
  constexpr int kHeads = S::kHeads, kLanes = kFixed == kEightSplits ? kFixed : kMaxCluster;
  const int own = S::kPairs >> kv_splits.log2(), slot = warp_of_thread(), pair = job.kv_split * own + slot;
  const int local = pair % kHeads, head = job.first_head + local, tile = pair / kHeads, count = kv_splits.count();
  std::int64_t to = channels_at(p, job, head, tile);
  asm volatile("" : "+l"(to));  // not moved behind the wait
  wait();
  if (slot >= own || head >= p.num_heads) return;
  const int lane = lane_of_thread(), kv_split = min(lane % kLanes, count - 1);
  const bool is_split = lane % kLanes < count;
  const Stats stats = s.stats[kv_split][local];
  const float sink = s.sink[local], log = s.logs[kv_split * own + slot];
  float row_max = fmaxf(stats.row_max, sink);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, step));
  const float base = row_max == -INFINITY ? 0.0f : row_max;
  float sum = is_split ? stats.sum * exp2_approx(stats.row_max - base) : 0.0f;
  const float rescale = is_split ? exp2_approx(log - base) : 0.0f;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  sum += exp2_approx(sink - base);
  const float factor = sum == 0.0f ? 0.0f : __fdividef(rescale, sum);
  float x = 0.0f, y = 0.0f;
  constexpr int kBatch = kFixed == kEightSplits ? kFixed : 4;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int from = min(first + i, count - 1);  // the factor of a repeated split is 0
      const float2 partial = __half22float2(reinterpret_cast<const __half2*>(s.partials[from * own + slot])[lane]);
      const float by = __shfl_sync(kAllLanes, factor, first + i);
      x = codec::fused(partial.x, by, x);
      y = codec::fused(partial.y, by, y);
    }
  }
  store_channels(p, rotation, to, tile, x, y);
  if (p.lse != nullptr && pair < kHeads && lane == 0)
    p.lse[job.token * p.num_heads + head] = sum == 0.0f ? -INFINITY : (row_max + log2f(sum)) * kLn2;
}

/// The same if a warp has several pairs.
template <class S, int kFixed>
__device__ void reduce_several(const AttendParams& p, S& s, const Job& job, const KvSplits<kFixed>& kv_splits,
                               const Rotation& rotation) {
  constexpr int kHeads = S::kHeads;
  const int own = S::kPairs >> kv_splits.log2(), first = job.kv_split * own;
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(S::kPartials <= kThreads);
  if (thread < S::kPartials) {  // the factor of a partial output, one per thread
    const int pair = first + thread % own, local = pair % kHeads, head = job.first_head + local;
    const float sink = s.sink[local];
    float row_max = sink;
#pragma unroll 4
    for (int kv_split = 0; kv_split < kv_splits.count(); ++kv_split)
      row_max = fmaxf(row_max, s.stats[kv_split][local].row_max);
    const float base = row_max == -INFINITY ? 0.0f : row_max;
    float sum = exp2_approx(sink - base);
#pragma unroll 4
    for (int kv_split = 0; kv_split < kv_splits.count(); ++kv_split)
      sum += s.stats[kv_split][local].sum * exp2_approx(s.stats[kv_split][local].row_max - base);
    s.logs[thread] = sum == 0.0f ? 0.0f : __fdividef(exp2_approx(s.logs[thread] - base), sum);
    if (p.lse != nullptr && pair < kHeads && thread < own && head < p.num_heads)
      p.lse[job.token * p.num_heads + head] = sum == 0.0f ? -INFINITY : (row_max + log2f(sum)) * kLn2;
  }
  cta_sync();
  const int lane = lane_of_thread();
#pragma unroll 1
  for (int slot = warp_of_thread(); slot < own;
       slot += kWarps) {  // one warp per head and 64 channels, two channels per lane
    const int head = job.first_head + (first + slot) % kHeads;
    if (head >= p.num_heads) continue;
    float x = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int kv_split = 0; kv_split < kv_splits.count(); ++kv_split) {
      const float2 partial = __half22float2(reinterpret_cast<const __half2*>(s.partials[kv_split * own + slot])[lane]);
      const float factor = s.logs[kv_split * own + slot];
      x = codec::fused(partial.x, factor, x);
      y = codec::fused(partial.y, factor, y);
    }
    const int tile = (first + slot) / kHeads;
    store_channels(p, rotation, channels_at(p, job, head, tile), tile, x, y);
  }
}

}  // namespace kv4::cuda::small_batch
