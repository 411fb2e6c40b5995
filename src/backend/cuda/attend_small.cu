// attend for few tokens: rows of 512 channels in fp8_tile64 and bf16 queries on Hopper, bound by latency. Heads and
// rows are both split, so that even one token fills the GPU.
// A thread block takes 8 or 16 heads of a token and a part of its rows, in tiles of 64 rows; the parts are the thread
// blocks of a cluster. Raw rows are copied into shared memory and never stored converted: an e4m3 code is exact in
// fp16, and its scale, a power of two per row and 64 channels, can wait until codes have been multiplied. A tile is
// scored while the one before it is added up and the next one is on its way.
//   scores   S^T = K Q^T (m16n8k16, rows times heads): warps take 16 rows and half of the channels, each 64 channels'
//            products are multiplied by their scale in fp32. Q stays in registers, in fp16 with a power of two per
//            head.
//   values   O^T += V^T P^T (channels times heads): warps take 64 channels, all of one scale, and all rows. The scale's
//            exponent is added to the logit, so a weight is 2^(logit + exponent - the largest such sum). Each warp has
//            its own running maximum therefore; the one of the bf16 channels has the softmax's.
// Channels and rows are assigned to the multiplies' indices so that a thread's fragments are what lies side by side in
// a row (scores) or what byte permutes of four rows give (values). Merging: each thread block sends its shares of O, in
// fp16 with an exponent per head and 64 channels, straight to the one that finishes them: one exchange, one launch.
//
// What the token's record points at is brought into L2 before the kernel before has ended, and the first rows are asked
// for by that record while it is read again.
// H200, 2026-11-15, one token, 64 heads: 128 rows in 4.9 us (7,200 clocks: 1,200 until rows are asked for, 1,000 until
// they and the queries are there, 1,100 scores, 1,350 weights and values, 900 exchange, then the end), 640 chosen rows
// in 7.6. Bound by the latency of code that runs once; a further tile takes 4,100 clocks (8 heads) or 5,400 (16).
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <array>
#include <bit>
#include <cstdint>
#include <optional>

#include "backend/cuda/attend_ahead.cuh"
#include "backend/cuda/attend_mma.cuh"
#include "backend/cuda/attend_rows.cuh"
#include "backend/cuda/attend_split.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/warp_row.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#pragma nv_diag_suppress 177  // the kernel has no body there, so its parts are not used
#endif

namespace kv4::cuda {
namespace {

using ops::AttendParams;

constexpr int kWidth = 512, kTile = 64;      // a tile: so many rows, or channels of one scale
constexpr int kScales = kWidth / kTile - 1;  // of a row; its last tile is bf16
constexpr int kSteps = kTile / 16;           // of the multiplies, through a tile
constexpr int kWarps = 8, kThreads = 32 * kWarps;
// A row in shared memory: as stored, then its scales. The stride keeps 2 neighbour rows (scores) and 4 (values) apart
// in banks.
constexpr int kTailAt = kScales * kTile, kScaleAt = 576, kRowStride = 608;
constexpr int kWeightBits = 15;  // weights are as large as fp16 allows: times 2^15
constexpr int kQueryTop = 8;     // exponent of the largest query element of a head and 64 channels
constexpr int kShareTop = 14;    // of a share's largest channel
constexpr float kLn2 = 0.693147181f;
constexpr int kNineParts = 9;  // of which eight finish: of 9 x 128 rows two tiles each instead of three

/// Of one head over some rows: the largest logit (times log2 e) and the sum of 2^(logit - largest).
struct Stats {
  float most, sum;
};

/// Of a token's rows: 2^log2, whose thread blocks finish pairs of a head and 64 channels; kMore: one more.
template <bool kMore>
struct Parts {
  int log2;
  __device__ int finishers() const { return 1 << log2; }
  __device__ int count() const { return kMore ? kNineParts : finishers(); }
  __device__ int over(int x) const { return kMore ? x / kNineParts : x >> log2; }
  __device__ int rest(int x) const { return kMore ? x % kNineParts : x & (finishers() - 1); }
  __device__ bool alone() const { return !kMore && log2 == 0; }
};

template <int kHeads_, int kStages_, bool kMore>
struct Shared {
  static constexpr int kHeads = kHeads_, kStages = kStages_;
  static constexpr int kPairs = kWarps * kHeads;  // of 64 channels and a head
  std::uint8_t rows[kStages][kTile * kRowStride];
  float scores[2][2][kSteps][kHeads][16];    // [tile, half of the channels, 16 rows, head]: see score_word
  float exponents[2][kWarps][kTile];         // [tile, channels, row]: rows as in scores
  uint4 queries[kWarps][kHeads / 8][2][32];  // [channels, 8 heads, half of a thread's words, thread]: see Queries
  float query_factors[kWarps][kHeads];       // what products with them are multiplied by
  float absent[kStages][kTile];              // -infinity for rows that are not there
  float sink[kHeads];                        // times log2 e
  // From the thread blocks of the cluster:
  static constexpr int kShares = kMore ? kPairs / (kNineParts - 1) * kNineParts : kPairs;
  std::uint16_t shares[kShares][kTile];  // [part, pair of this block]: fp16
  float logs[kShares];                   // of what shares are multiplied by; then that itself
  Stats stats[kMaxCluster][kHeads];
  std::uint64_t arrived;  // of these

  /// Bytes that a block gets.
  __device__ static int bytes_sent(int parts) {
    return static_cast<int>(sizeof(shares) + sizeof(logs)) + parts * kHeads * static_cast<int>(sizeof(Stats));
  }
};

/// Word of row r of 16: the four rows of a thread's weights lie side by side; swizzled for whoever writes them.
__device__ int row_word(int r) { return r % 4 * 4 + r / 4; }
__device__ int score_word(int r, int head) { return row_word(r) ^ (head / 2 % 4 * 4); }

__device__ int lane_of_thread() { return static_cast<int>(threadIdx.x) % 32; }
__device__ int warp_of_thread() { return static_cast<int>(threadIdx.x) / 32; }

/// 2^x; 0 for -infinity.
__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The lower two e4m3 codes as fp16.
__device__ std::uint32_t codes_to_half2(std::uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xFFFFu), __NV_E4M3);
  std::uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

__device__ std::uint32_t half2_bits(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

__device__ uint4 shared_load16(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
  return x;
}
__device__ uint2 shared_load8(std::uint32_t at) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}

/// A fragment of 16 x 16, of two elements per word: thread 4 g + q has, of rows g and g + 8, elements 2q, 2q + 1 (words
/// 0, 1) and 2q + 8, 2q + 9 (words 2, 3).
using Fragment = std::uint32_t[4];

/// d += a b: d [16, 8] fp32, a [16, 16], b [16, 8] (its two words are elements 2q, 2q + 1 and 2q + 8, 2q + 9 of column
/// g).
template <bool kBf16>
__device__ void multiply(float (&d)[4], const Fragment& a, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kBf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// What a thread block does.
struct Job {
  std::int64_t token;
  int first_head;
  int part;
  int begin, end;  // rows

  template <bool kMore>
  __device__ Job(const Parts<kMore>& parts, int head_groups, int heads) {
    const int unit = parts.over(static_cast<int>(blockIdx.x));
    part = parts.rest(static_cast<int>(blockIdx.x));
    token = unit / head_groups;
    first_head = unit % head_groups * heads;
  }

  template <bool kMore>
  __device__ void take_rows(const QueryRows& rows, const Parts<kMore>& parts) {
    const int share = parts.over(rows.count() + parts.count() - 1);
    begin = min(part * share, rows.count());
    end = min(begin + share, rows.count());
  }
  __device__ int tiles() const { return (end - begin + kTile - 1) / kTile; }
  /// Of 16 rows.
  __device__ int steps(int tile) const { return min((end - begin - tile * kTile + 15) / 16, kSteps); }
};

// --- before the kernel before has ended

/// Brings into L2 what the token's thread blocks will ask for: queries, the list of entries and the block table. They
/// share the work.
template <int kHeads, bool kMore>
__device__ void fetch_ahead(const AttendParams& p, const Job& job, const Parts<kMore>& parts, const QueryRows& rows,
                            int head_groups) {
  constexpr int kLinesPerHead = kWidth * 2 / kLine, kLineWords = kLine / 4;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* q =
      static_cast<const std::uint8_t*>(p.q.data) + (job.token * p.q.row_stride + job.first_head * kWidth) * 2;
  if (thread < kHeads * kLinesPerHead && parts.rest(thread) == job.part &&
      job.first_head + thread / kLinesPerHead < p.num_heads)
    fetch(q + thread * kLine);
  if (rows.entries == 0 || p.chosen.data == nullptr) return;
  const int words = (job.first_head / kHeads + (job.part + thread * parts.count()) * head_groups) * kLineWords;
  if (words < p.num_chosen)
    fetch(static_cast<const std::int32_t*>(p.chosen.data) + job.token * p.chosen.row_stride + words);
  if (words < p.step.blocks_per_request)
    fetch(p.step.block_table + std::int64_t{rows.at.row} * p.step.blocks_per_request + words);
}

// --- rows

/// Four threads copy a row: of each 64 bytes a thread has 16. Each finds the row of every fourth tile, one step (see
/// QueryRows) per tile, and gives its place to the others.
class RowCopier {
 public:
  static constexpr int kAhead = 2;  // tiles on their way or being scored while one is added up

  __device__ RowCopier(const AttendParams& p, const QueryRows& rows, const Job& job)
      : p_(p),
        rows_(rows),
        job_(job),
        row_(static_cast<int>(threadIdx.x) / 4),
        unit_(static_cast<int>(threadIdx.x) % 4) {}

  /// Before the kernel before has ended: finds those of the first four tiles that no list names, and brings every n-th
  /// line of them into L2.
  __device__ void guess(int line, int lines) {
    known_ = row(0) >= job_.end || row(0) < rows_.window || p_.chosen.data == nullptr;
    if (!known_ || row(0) >= job_.end) return;
    name(0);
    block_ = row(0) < rows_.window ? rows_.block(p_, row(0), key_) : __ldcg(entry_block());  // it may change yet
    place_ = placed(0);
    if (place_.payload == nullptr) return;
    for (int at = line * kLine; at < kScaleAt + kLine; at += lines * kLine)
      fetch(at < kScaleAt ? place_.payload + at : place_.scale);
  }

  /// Asks for what tells where those rows are that are not known yet; all of them if the guess was wrong.
  __device__ void begin(bool guessed) {
    known_ = known_ && guessed;
    if (!known_) name(0);
  }

  /// Copies the first tiles.
  template <class S>
  __device__ void copy_first(S& s) {
    if (!known_) {
      find_block(0);
      place_ = placed(0);
    }
#pragma unroll
    for (int tile = 0; tile < kAhead; ++tile) copy(s, tile);
  }

  /// The guess, once the record has proved right.
  __device__ bool was_right() const {
    return !known_ || row(0) >= job_.end || row(0) < rows_.window || *entry_block() == block_;
  }

  /// When the tile before has been used: copies another one into its place.
  template <class S>
  __device__ void advance(S& s, int tile) {
    prepare(tile);
    copy(s, tile + kAhead);
  }

 private:
  /// The four tiles after this one's.
  __device__ void prepare(int tile) {
    const int next = tile / 4 * 4 + 4;
    if (next >= job_.tiles()) return;
    if (tile % 4 == 0) name(next);
    if (tile % 4 == 1) find_block(next);
    if (tile % 4 == 2) next_ = placed(next);
  }

  /// A batch of copies, which may be empty.
  template <class S>
  __device__ void copy(S& s, int tile) {
    ask(s, tile);
    close_batch();
  }
  template <class S>
  __device__ void ask(S& s, int tile) {
    if (tile % 4 == 0 && tile > 0) place_ = next_;
    const int from = static_cast<int>(threadIdx.x) % 32 / 4 * 4 + tile % 4;
    const auto give = [&](const std::uint8_t* mine) {
      return reinterpret_cast<const std::uint8_t*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), from));
    };
    const std::uint8_t *payload = give(place_.payload), *scale = give(place_.scale);
    if (tile >= job_.tiles() || row_ >= job_.steps(tile) * 16) return;
    const bool there = payload != nullptr;
    if (!there) payload = scale = static_cast<const std::uint8_t*>(p_.q.data);  // an address: nothing is read
    const int bytes = there ? 16 : 0, stage = tile % S::kStages;
    const std::uint32_t to = shared_address(s.rows[stage]) + row_ * kRowStride;
#pragma unroll
    for (int at = 0; at < kScaleAt; at += 64)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + at + unit_ * 16),
                   "l"(payload + at + unit_ * 16), "r"(bytes)
                   : "memory");
    if (unit_ != 0) return;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + kScaleAt), "l"(scale), "r"(bytes / 2)
                 : "memory");
    s.absent[stage][row_] = there ? 0.0f : -INFINITY;
  }

  __device__ int row(int tile) const { return job_.begin + (tile + unit_) * kTile + row_; }
  __device__ void name(int tile) { key_ = row(tile) < job_.end ? rows_.key(p_, job_.token, row(tile)) : -1; }
  __device__ void find_block(int tile) { block_ = rows_.block(p_, row(tile), key_); }
  __device__ const std::int32_t* entry_block() const {
    return p_.step.block_table + std::int64_t{rows_.at.row} * p_.step.blocks_per_request +
           key_ / p_.layer.kinds[0].rows_per_block;
  }
  __device__ RowPlace placed(int tile) const { return rows_.place(p_, row(tile), key_, block_); }

  const AttendParams& p_;
  const QueryRows& rows_;
  const Job& job_;
  const int row_, unit_;
  bool known_ = false;
  int key_, block_;
  RowPlace place_, next_;
};

// --- scores

/// Queries as the multiplies want them: words 2s, 2s + 1 of 64 channels are for step s. A warp converts one tile of the
/// channels for all of them.
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

  /// To fp16, but for the bf16 channels, with a power of two per head.
  __device__ void convert(S& s) {
    const int lane = lane_of_thread(), tile = warp_of_thread();
    const bool tail = tile == kScales;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      std::uint32_t words[8] = {own_[n][0].x, own_[n][0].y, own_[n][0].z, own_[n][0].w,
                                own_[n][1].x, own_[n][1].y, own_[n][1].z, own_[n][1].w};
      std::uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = __vmaxu2(most, words[i] & 0x7FFF7FFFu);
      most = max(most & 0xFFFFu, most >> 16);
      most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      const std::uint32_t exponent = max(most >> 7, kQueryTop + 1u);
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

  /// A warp's half of the channels.
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

  __device__ std::uint32_t word(int group, int tile, int i) const { return words_[group][tile][i]; }

 private:
  uint4 own_[kGroups][2];
  std::uint32_t words_[kGroups][kTiles][8];
};

__device__ float scale_value(std::uint32_t scales, int i) {
  return codec::ue8m0_value(static_cast<std::uint8_t>(scales >> (8 * i)));
}

/// Logits of 16 rows over half of the channels; a thread's rows are 2g and 2g + 1.
template <class S>
__device__ void score_rows(S& s, int tile, int step, int half, const Queries<S>& queries, float logit_scale) {
  constexpr int kGroups = Queries<S>::kGroups, kTiles = Queries<S>::kTiles;
  const int g = lane_of_thread() / 4, q = lane_of_thread() % 4, row = step * 16 + 2 * g;
  const int stage = tile % S::kStages, buffer = tile % 2;
  const std::uint32_t at = shared_address(s.rows[stage]) + row * kRowStride;
  std::uint32_t scales[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales[r]) : "r"(at + r * kRowStride + kScaleAt + 4 * half));
  float sum[kGroups][4] = {};
  const auto add_codes = [&](int t) {
    const uint4 a = shared_load16(at + (half * kTiles + t) * kTile + q * 16);
    const uint4 b = shared_load16(at + kRowStride + (half * kTiles + t) * kTile + q * 16);
    const std::uint32_t upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
    float product[kGroups][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const Fragment rows = {codes_to_half2(upper[i]), codes_to_half2(lower[i]), codes_to_half2(upper[i] >> 16),
                             codes_to_half2(lower[i] >> 16)};
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
        multiply<false>(product[n], rows, queries.word(n, t, 2 * i), queries.word(n, t, 2 * i + 1));
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(&s.query_factors[half * kTiles + t][8 * n + 2 * q]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[n][i] =
            codec::fused(product[n][i], scale_value(scales[i / 2], t) * (i % 2 == 0 ? factor.x : factor.y), sum[n][i]);
    }
  };
#pragma unroll
  for (int t = 0; t < kTiles - 1; ++t) add_codes(t);
  float tail[kGroups][4] = {};
  if (half == 0) {
    add_codes(kTiles - 1);
  } else {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4 a = shared_load16(at + kTailAt + u * 64 + q * 16);
      const uint4 b = shared_load16(at + kRowStride + kTailAt + u * 64 + q * 16);
      const Fragment first = {a.x, b.x, a.y, b.y};
      const Fragment second = {a.z, b.z, a.w, b.w};
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        multiply<true>(tail[n], first, queries.word(n, kTiles - 1, 4 * u), queries.word(n, kTiles - 1, 4 * u + 1));
        multiply<true>(tail[n], second, queries.word(n, kTiles - 1, 4 * u + 2), queries.word(n, kTiles - 1, 4 * u + 3));
      }
    }
  }
  const float absent[2] = {s.absent[stage][row], s.absent[stage][row + 1]};
#pragma unroll
  for (int n = 0; n < kGroups; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = 8 * n + 2 * q + i % 2;
      const float logit = sum[n][i] + tail[n][i];
      s.scores[buffer][half][step][head][score_word(2 * g + i / 2, head)] =
          codec::fused(logit, logit_scale, half == 0 ? absent[i / 2] : 0.0f);
    }
  const int scale_tile = half * kTiles + q;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    s.exponents[buffer][scale_tile][step * 16 + row_word(2 * g + r)] =
        scale_tile == kScales ? 0.0f : static_cast<float>(static_cast<int>(scales[r] >> (8 * q) & 0xFFu) - 127);
}

// --- values

/// Another block of the cluster, or this one, whose barrier counts the bytes that arrive.
class Remote {
 public:
  template <bool kMore>
  __device__ Remote(const std::uint64_t& arrived, int rank, const Parts<kMore>& parts)
      : alone_(parts.alone()),
        rank_(static_cast<std::uint32_t>(rank)),
        arrived_(in_block(shared_address(&arrived), rank_)) {}

  template <class T, int kWords>
  __device__ void store(const T& place, const std::uint32_t (&x)[kWords]) const {
    const std::uint32_t here = shared_address(&place), to = in_block(here, rank_);
    if (alone_) {  // without a cluster there are no asynchronous stores
#pragma unroll
      for (int i = 0; i < kWords; ++i) shared_store(here + 4 * i, x[i]);
    } else if constexpr (kWords == 1) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                   "r"(x[0]), "r"(arrived_)
                   : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                   "r"(x[0]), "r"(x[1]), "r"(arrived_)
                   : "memory");
    } else {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
          "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(arrived_)
          : "memory");
    }
  }

 private:
  const bool alone_;
  const std::uint32_t rank_, arrived_;
};

/// A warp's share of O: 64 channels of all heads. A thread has channels 8g to 8g + 7 of heads 2q and 2q + 1 of every 8.
template <class S>
class Values {
 public:
  static constexpr int kHeads = S::kHeads, kGroups = kHeads / 8, kPairsLog2 = kHeads == 8 ? 6 : 7;
  static_assert(1 << kPairsLog2 == S::kPairs);

  __device__ Values() {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      most_[n] = -INFINITY;
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
    std::uint32_t weights[kGroups][kSteps][2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) weigh<kTail>(s, n, tile % 2, steps, weights[n]);
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4;
    const std::uint32_t at = shared_address(s.rows[tile % S::kStages]) + q * kRowStride +
                             (kTail ? kTailAt + g * 16 : warp_of_thread() * kTile + g * 8);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= steps) break;
      Fragment channels[4];
      load_step<kTail>(at + step * 16 * kRowStride, channels);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
          multiply<kTail>(o_[n][j], channels[j], weights[n][step][0], weights[n][step][1]);
    }
  }

  /// Shares to the blocks that finish them, the softmax's numbers to all of those.
  template <bool kMore>
  __device__ void send(S& s, const Job& job, const Parts<kMore>& parts) const {
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4;
    const bool tail = warp_of_thread() == kWarps - 1;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) most = fmaxf(most, fmaxf(fabsf(o_[n][j][i]), fabsf(o_[n][j][i + 2])));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
        const std::uint32_t exponent = max(codec::float_bits(most) >> 23, kShareTop + 1u);
        const float up = codec::bits_float((254u + kShareTop - exponent) << 23);
        const float log = __shfl_sync(kAllLanes, most_[n], (2 * q + i) * 4) - (tail ? 0.0f : float{kWeightBits}) +
                          static_cast<float>(static_cast<int>(exponent) - 127 - kShareTop);
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = half2_bits(o_[n][j][i] * up, o_[n][j][i + 2] * up);
        const int pair = warp_of_thread() * kHeads + 8 * n + 2 * q + i, own_log2 = kPairsLog2 - parts.log2;
        const int slot = (job.part << own_log2) + (pair & ((1 << own_log2) - 1));
        const Remote to(s.arrived, pair >> own_log2, parts);
        to.store(s.shares[slot][8 * g], words);
        if (g == 0) to.store(s.logs[slot], {codec::float_bits(log)});
      }
      float sum = sum_[n];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (!tail) continue;
      for (int to = q; to < parts.finishers(); to += 4)
        Remote(s.arrived, to, parts)
            .store(s.stats[job.part][8 * n + g], {codec::float_bits(most_[n]), codec::float_bits(sum)});
    }
  }

 private:
  /// Logits to weights, as a multiply's second operand: of rows q, q + 4, q + 8 and q + 12 of every 16, head g.
  template <bool kTail>
  __device__ void weigh(const S& s, int n, int buffer, int steps, std::uint32_t (&weights)[kSteps][2]) {
    const int g = lane_of_thread() / 4, q = lane_of_thread() % 4, head = 8 * n + g;
    float z[kSteps][4];
    float most = -INFINITY;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) z[step][i] = -INFINITY;
      if (step >= steps) continue;
      const int word = score_word(q, head);
      const float4 a = *reinterpret_cast<const float4*>(&s.scores[buffer][0][step][head][word]);
      const float4 b = *reinterpret_cast<const float4*>(&s.scores[buffer][1][step][head][word]);
      const float4 e =
          *reinterpret_cast<const float4*>(&s.exponents[buffer][warp_of_thread()][step * 16 + row_word(q)]);
      z[step][0] = a.x + b.x + e.x;
      z[step][1] = a.y + b.y + e.y;
      z[step][2] = a.z + b.z + e.z;
      z[step][3] = a.w + b.w + e.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) most = fmaxf(most, z[step][i]);
    }
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
    most = fmaxf(most, most_[n]);
    const float base = most == -INFINITY ? 0.0f : most;
    const float past = exp2_fast(most_[n] - base);
    most_[n] = most;
    const float offset = kTail ? -base : float{kWeightBits} - base;
    if constexpr (kTail) sum_[n] *= past;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        z[step][i] = exp2_fast(z[step][i] + offset);
        if constexpr (kTail) sum_[n] += z[step][i];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        weights[step][i] =
            kTail ? bf16_pair(z[step][2 * i], z[step][2 * i + 1]) : half2_bits(z[step][2 * i], z[step][2 * i + 1]);
    }
    if (!__any_sync(kAllLanes, past != 1.0f)) return;
    const float even = __shfl_sync(kAllLanes, past, 8 * q), odd = __shfl_sync(kAllLanes, past, 8 * q + 4);
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
        const uint4 a = shared_load16(first), b = shared_load16(second);
        const std::uint32_t upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          channels[j][2 * pair] = permute(upper[j], lower[j], 0x5410);
          channels[j][2 * pair + 1] = permute(upper[j], lower[j], 0x7632);
        }
      } else {
        const uint2 a = shared_load8(first), b = shared_load8(second);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t upper = j < 2 ? a.x : a.y, lower = j < 2 ? b.x : b.y;
          channels[j][2 * pair] = codes_to_half2(permute(upper, lower, j % 2 == 0 ? 0x40u : 0x62u));
          channels[j][2 * pair + 1] = codes_to_half2(permute(upper, lower, j % 2 == 0 ? 0x51u : 0x73u));
        }
      }
    }
  }

  float o_[kGroups][4][4];
  float most_[kGroups], sum_[kGroups];  // of head g
};

// --- the end

/// Adds up the shares that this block finishes.
template <class S, bool kMore>
__device__ void finish(const AttendParams& p, S& s, const Job& job, const Parts<kMore>& parts, const Turn& turn) {
  constexpr int kHeads = S::kHeads;
  const int own = S::kPairs >> parts.log2, first = job.part * own;
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(S::kShares <= kThreads);
  if (thread < S::kShares) {  // what a share is multiplied by, a thread each
    const int pair = first + thread % own, local = pair % kHeads, head = job.first_head + local;
    const float sink = s.sink[local];
    float most = sink;
#pragma unroll 4
    for (int part = 0; part < parts.count(); ++part) most = fmaxf(most, s.stats[part][local].most);
    const float base = most == -INFINITY ? 0.0f : most;
    float sum = exp2_fast(sink - base);
#pragma unroll 4
    for (int part = 0; part < parts.count(); ++part)
      sum += s.stats[part][local].sum * exp2_fast(s.stats[part][local].most - base);
    s.logs[thread] = sum == 0.0f ? 0.0f : __fdividef(exp2_fast(s.logs[thread] - base), sum);
    if (p.lse != nullptr && pair < kHeads && thread < own && head < p.num_heads)
      p.lse[job.token * p.num_heads + head] = sum == 0.0f ? -INFINITY : (most + log2f(sum)) * kLn2;
  }
  __syncthreads();
  const int lane = lane_of_thread();
#pragma unroll 1
  for (int slot = warp_of_thread(); slot < own; slot += kWarps) {  // a warp per head and 64 channels, a lane has two
    const int tile = (first + slot) / kHeads, head = job.first_head + (first + slot) % kHeads;
    if (head >= p.num_heads) continue;
    float x = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int part = 0; part < parts.count(); ++part) {
      const float2 share = __half22float2(reinterpret_cast<const __half2*>(s.shares[part * own + slot])[lane]);
      const float factor = s.logs[part * own + slot];
      x = codec::fused(share.x, factor, x);
      y = codec::fused(share.y, factor, y);
    }
    if (tile == kScales && turn.active) {
      const float a = x, b = y;
      x = codec::fused(a, turn.cos, b * turn.sin);
      y = codec::fused(b, turn.cos, -(a * turn.sin));
    }
    const std::int64_t to = (job.token * p.num_heads + head) * kWidth + tile * kTile + 2 * lane;
    if (p.out.dtype == DType::f32)
      *reinterpret_cast<float2*>(static_cast<float*>(p.out.data) + to) = make_float2(x, y);
    else
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(p.out.data) + to) = bf16_pair(x, y);
  }
}

__device__ bool same(const ops::StepRecord& a, const ops::StepRecord& b) {
  return a.row == b.row && a.length == b.length && a.count == b.count && a.first_token == b.first_token &&
         a.read_slot == b.read_slot && a.write_slot == b.write_slot && a.position == b.position;
}

template <int kHeads, int kStages, bool kMore>
__global__ void __launch_bounds__(kThreads, kStages == 2 ? 2 : 1)
    attend_parts(const __grid_constant__ AttendParams p, Parts<kMore> parts, int head_groups) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(16) std::uint8_t base[];
  auto& s = *reinterpret_cast<Shared<kHeads, kStages, kMore>*>(base);
  if (threadIdx.x == 0) {
    const std::uint32_t arrived = shared_address(&s.arrived);
    barrier_init(arrived, 1);
    publish_barriers();
    barrier_arrive_expecting(arrived, s.bytes_sent(parts.count()));
  }
  touch(p);
  __syncwarp();
  cluster_arrive();
  Job job(parts, head_groups, kHeads);
  QueryRows rows(p, job.token, guess_record(p, job.token));
  job.take_rows(rows, parts);
  RowCopier copier(p, rows, job);
  copier.guess(job.first_head / kHeads, head_groups);
  fetch_ahead<kHeads>(p, job, parts, rows, head_groups);
  float sink = -INFINITY;
  if (p.sink != nullptr && threadIdx.x < kHeads && job.first_head + static_cast<int>(threadIdx.x) < p.num_heads)
    sink = p.sink[job.first_head + threadIdx.x] * codec::kLog2e;
  wait_for_previous();
  let_next_start();

  const int warp = warp_of_thread(), half = warp / kSteps;
  const int step = (warp + half) % kSteps;  // the two halves of 16 rows in different quarters of the multiprocessor
  Queries<Shared<kHeads, kStages, kMore>> queries;
  ops::StepRecord record;
  record.row = 0;
  if (p.step.tokens != nullptr) record = load_record_again(p.step.tokens + job.token);
  copier.begin(true);
  queries.load(p, job);
  copier.copy_first(s);
  queries.convert(s);
  const bool same_query =
      same(record, rows.at) && (p.step.tokens == nullptr || window_begin(p.step, record) == rows.begin);
  if (__syncthreads_or(!same_query || !copier.was_right())) {
    wait_for_batch<0>();
    __syncthreads();
    rows = QueryRows(p, job.token, record);
    job.take_rows(rows, parts);
    copier.begin(false);
    copier.copy_first(s);
  }
  if (threadIdx.x < kHeads) s.sink[threadIdx.x] = rows.at.padded() ? -INFINITY : sink;
  Turn turn{};
  if (p.turn_back.rope_dim > 0 && !rows.at.padded() && (job.part + 1) * kWarps > kScales << parts.log2)
    turn = load_turn(p.turn_back, rows.at.position, kTailAt + 2 * lane_of_thread(), kWidth);
  queries.take(s, half);

  // A tile is scored while the one before it is added up: one barrier each.
  Values<Shared<kHeads, kStages, kMore>> values;
  for (int tile = -1; tile < job.tiles(); ++tile) {
    if (tile < 0)
      wait_for_batch<RowCopier::kAhead - 1>();
    else
      wait_for_batch<0>();
    __syncthreads();
    if (tile >= 0) {
      copier.advance(s, tile);
      if (warp == kWarps - 1)
        values.template add<true>(s, tile, job.steps(tile));
      else
        values.template add<false>(s, tile, job.steps(tile));
    }
    if (tile + 1 < job.tiles() && step < job.steps(tile + 1))
      score_rows(s, tile + 1, step, half, queries, p.softmax_scale * codec::kLog2e);
  }
  cluster_wait();  // all blocks have begun
  values.send(s, job, parts);
  if (kMore && job.part >= parts.finishers()) return;  // nothing is sent here
  if (!parts.alone()) barrier_wait(shared_address(&s.arrived), 0);
  __syncthreads();  // and what this block stored for itself
  finish(p, s, job, parts, turn);
#endif
}

// --- on the host

// Not between nine and 16: such clusters do not lie in pairs in the parts of an H200.
constexpr int kPartCounts[] = {1, 2, 4, 8, kNineParts, 16};
constexpr std::size_t kNumPartCounts = std::size(kPartCounts);
int log2_of(int parts) { return static_cast<int>(std::bit_width(static_cast<unsigned>(parts))) - 1; }

/// One of the kernels.
template <int kHeads, int kStages>
struct Variant {
  static constexpr int kSharedBytes = sizeof(Shared<kHeads, kStages, true>);
  static_assert(kSharedBytes <= (kStages == 2 ? 113 : 227) * 1024);

  template <class Kernel>
  static cudaError_t allow(Kernel kernel) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    return error != cudaSuccess ? error
                                : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  template <bool kMore>
  static cudaError_t launch(const AttendParams& p, int parts, cudaStream_t stream) {
    const auto kernel = attend_parts<kHeads, kStages, kMore>;
    if (const cudaError_t error = allow(kernel); error != cudaSuccess) return error;
    const int head_groups = (p.num_heads + kHeads - 1) / kHeads;
    return launch_clusters<sizeof(Shared<kHeads, kStages, kMore>)>(
        kernel, static_cast<unsigned>(parts), static_cast<unsigned>(p.step.num_tokens * head_groups * parts), kThreads,
        stream, p, Parts<kMore>{log2_of(parts)}, head_groups);
  }
  static cudaError_t launch(const AttendParams& p, int parts, cudaStream_t stream) {
    return parts == kNineParts ? launch<true>(p, parts, stream) : launch<false>(p, parts, stream);
  }
  /// Clusters that run at once, by their size. [kPartCounts]
  static std::array<int, kNumPartCounts> count_clusters() {
    std::array<int, kNumPartCounts> most{};
    if (allow(attend_parts<kHeads, kStages, false>) != cudaSuccess) return most;
    for (std::size_t i = 0; i < most.size(); ++i) {
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(kPartCounts[i]), 1, 1};
      const cudaLaunchConfig_t config{cluster.val.clusterDim.x, kThreads, kSharedBytes, nullptr, &cluster, 1};
      if (cudaOccupancyMaxActiveClusters(&most[i], attend_parts<kHeads, kStages, false>, &config) != cudaSuccess)
        most[i] = 0;
    }
    static_cast<void>(cudaGetLastError());  // of sizes that the chip does not have
    return most;
  }
};

}  // namespace

/// What should take the least time, of splits whose blocks all run at once: a start, and a time per row of a part. In
/// hundredths of a microsecond, fitted to an H200, 2026-11-15.
std::optional<SmallSplit> small_split_of(const AttendParams& p, std::int64_t most_rows, double other) {
  static const std::array<int, kNumPartCounts> at_once[] = {
      Variant<8, 2>::count_clusters(), Variant<8, 3>::count_clusters(), Variant<16, 3>::count_clusters()};
  struct Kernel {
    int heads;
    bool few_rows;
    double start, per_row;
  };
  constexpr Kernel kKernels[] = {{8, true, 420, 3.8}, {8, false, 420, 3.8}, {16, false, 620, 5.0}};
  constexpr double kRound = 15;          // of heads that a warp finishes
  constexpr double kLargeCluster = 300;  // more for 16 blocks of 8 heads, which crowd a part of the chip
  double least = other;
  std::optional<SmallSplit> best;
  const auto rows_of = [&](int parts) { return (most_rows + parts - 1) / parts; };
  const auto tiles_of = [&](int parts) { return (rows_of(parts) + kTile - 1) / kTile; };
  for (std::size_t k = 0; k < std::size(kKernels); ++k)
    for (std::size_t i = 0; i < kNumPartCounts; ++i) {
      const Kernel& kernel = kKernels[k];
      const int parts = kPartCounts[i], finishers = 1 << log2_of(parts);
      const std::int64_t clusters = std::int64_t{p.step.num_tokens} * ((p.num_heads + kernel.heads - 1) / kernel.heads);
      if (clusters > at_once[k][i] || (kernel.few_rows && rows_of(parts) > 2 * kTile)) continue;
      if (parts > finishers && tiles_of(parts) == tiles_of(finishers)) continue;  // 640 rows: 7.6 to 8.0 us
      const bool shared = clusters * parts > multiprocessors();                   // two blocks on one multiprocessor
      const double time = kernel.start + kRound * kernel.heads / finishers +
                          kernel.per_row * static_cast<double>(rows_of(parts)) * (shared ? 2 : 1) +
                          (parts == kMaxCluster && kernel.heads == 8 ? kLargeCluster : 0);
      if (time >= least) continue;
      least = time;
      best = SmallSplit{kernel.heads, parts, kernel.few_rows};
    }
  return best;
}

cudaError_t attend_small(const AttendParams& p, const SmallSplit& split, cudaStream_t stream) {
  if (split.heads == 16) return Variant<16, 3>::launch(p, split.parts, stream);
  return split.few_rows ? Variant<8, 2>::launch(p, split.parts, stream) : Variant<8, 3>::launch(p, split.parts, stream);
}

}  // namespace kv4::cuda
