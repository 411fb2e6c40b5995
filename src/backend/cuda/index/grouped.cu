// Scores of token groups on Hopper, in two launches: chunks of prompts and draft tokens, which read the same keys. The
// arithmetic is that of mxfp4.cu and fp8_raw.cu, to the bit.
//
// The kernels for single tokens load and expand each key again for every token. Here a CTA keeps the queries of up to
// 16 tokens in shared memory, and a warpgroup loads and expands a KV tile, 128 keys, once into registers for all of
// them. A product is 64 keys x 2 tokens of 64 heads, 4 wgmma of m64n128k32. While the tensor cores multiply one half of
// a KV tile, the heads of the half before are added up.
//
// The preparation encodes the queries of every token once, as operands, and divides the work (token_groups.cuh). Each
// CTA of the score kernel takes an equal range of the work tiles of all groups; its two warpgroups take KV tiles in
// turn, with key pipelines of their own.
//
// Bound by issue and registers, not by power (H200, 2026-11-20, 1.80 of 1.98 GHz, 1,024 tokens x 131,072 keys): a
// product alone takes 262 clocks of an SM, adding up alone 202, both 430. It made no difference whether keys came from
// shared memory, and it was worse to issue the four wgmma of a product at once (474), to have three or four warpgroups
// with one set of accumulators each (450 to 494), or to keep weights in registers (455).
//
// For wgmma in flight across loop iterations, the compiler must know that the trip count is the same in all lanes of a
// warp; otherwise it waits after each wgmma.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/index/epilogue.cuh"
#include "backend/cuda/index/fp8_codes.cuh"
#include "backend/cuda/index/grid.cuh"
#include "backend/cuda/index/kernels.h"
#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/index/mxfp4_codes.cuh"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/token_groups.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/bulk_copy.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace kv4::cuda {
namespace {

using Cta = TwoWarpgroups;
constexpr int kTokenNumbers = 32;  // accumulators of one token
using Weights = float[ops::kChains][ops::kChainHeads + 4];  // [chain]: no bank conflicts

/// The pipeline of a format's keys, with as many stages as there is shared memory for.
template <int kKeyBytes>
using GroupKeys = KeyPipeline<Cta, kKeyBytes, kKeyBytes == kWidth ? 2 : 4, true>;

// --- mxfp4

struct Mxfp4 {
  using Queries = mxfp4::Queries;
  using Keys = GroupKeys<mxfp4::kKeyBytes>;
  using Number = std::int32_t;
  using Operand = mxfp4::Operand;
  static constexpr int kHeadLanes = mxfp4::kGroups;
  static constexpr MmaType kMma = MmaType::s8;
  static constexpr bool kMendsOutOfRange = true;  // by exact scores

  struct Tables {
    mxfp4::Lookup lookups[mxfp4::kLookups];
    __device__ void init() {
      if (threadIdx.x < mxfp4::kLookups)
        lookups[threadIdx.x] = mxfp4::Lookup((1u << mxfp4::kKeyShift) >> threadIdx.x);
    }
  };

  /// Encodes a lane's part of a head into `to`. Returns whether it is in range.
  __device__ static bool prepare(Queries& to, const TokenTile& tile, int token, int head, int part) {
    mxfp4::RawPart<kHeadLanes> raw[1];
    QueryAddress<mxfp4::kKeyBytes, kWidth / kHeadLanes>(tile, token, head, part).load(tile.p, raw);
    return mxfp4::prepare_head<kHeadLanes>(to, tile, raw[0], head, part);
  }

  /// The scales of a warp's keys in a KV tile.
  struct Scales {
    mxfp4::KVTileScales scales;
    Scales() = default;
    __device__ explicit Scales(std::uint32_t of_own_key) : scales(of_own_key, static_cast<int>(threadIdx.x % kQuad)) {}
    __device__ bool are_out_of_range() const { return scales.are_out_of_range(); }
    /// The factor of the own key of another lane.
    __device__ float factor_of(int lane) const {
      const std::uint32_t largest = __shfl_sync(kAllLanes, scales.largest, lane);
      return codec::bits_float((largest + (mxfp4::kSumShift - mxfp4::kKeyShift - 2)) << 23);
    }
  };

  /// Expands a lane's part of 64 keys. is_wanted is always true, but the compiler takes it for a branch and therefore
  /// does not move the code behind the next wait for products.
  template <int kHalf>
  __device__ static void load_keys(const Tables& tables, std::uint32_t stage, const Scales& s, bool is_wanted,
                                   Operand& a) {
    if (is_wanted) {
      const std::uint32_t lookups = shared_address(tables.lookups);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int row = 2 * kHalf + k;
        const uint4 codes = load_shared16(stage + 16 * (threadIdx.x % 32) + 512 * row);
        const mxfp4::Lookup lookup(load_shared16(lookups + permute_bytes(s.scales.lookups, 0, 0x4440u + row)));
        mxfp4::expand(lookup, codes.x, a[0][k], a[0][2 + k]);
        mxfp4::expand(lookup, codes.y, a[1][k], a[1][2 + k]);
        mxfp4::expand(lookup, codes.z, a[2][k], a[2][2 + k]);
        mxfp4::expand(lookup, codes.w, a[3][k], a[3][2 + k]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < mxfp4::kSteps; ++i)
        asm volatile("" : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3]));
    }
  }

  /// relu of a product as the weights take it.
  __device__ static float relu(std::int32_t product) { return saturate(__int_as_float(product)); }

  /// The score of the lane's own key among the warp's 32 keys: exact if any of them is out of range, or `everywhere`;
  /// else `score` stays. Keys of zeros score zero whatever their scales.
  __device__ static float exact_score(const Queries& q, const std::uint8_t* keys, const std::uint8_t* scales,
                                      int keys_left, int num_heads, bool everywhere, float score) {
    const int lane = static_cast<int>(threadIdx.x % 32), c = lane % mxfp4::kGroups;
    const int own = static_cast<int>(Keys::own_key());
    const auto largest_of = [&](int key) {
      return mxfp4::largest_byte(*reinterpret_cast<const std::uint32_t*>(scales + kKeyScaleBytes * key));
    };
    bool out_of_range = everywhere;
    for (int key = lane / mxfp4::kGroups; key < min(keys_left, kWarpKeys); key += 8) {
      const std::uint32_t largest = largest_of(key);
      out_of_range |= (largest - scales[kKeyScaleBytes * key + c] > mxfp4::kKeyShift || mxfp4::is_extreme(largest)) &&
                      mxfp4::any_code(*reinterpret_cast<const uint4*>(keys + mxfp4::kKeyBytes * key + 16 * c));
    }
    if (!__any_sync(kAllLanes, out_of_range))
      return own < keys_left && !mxfp4::is_extreme(largest_of(own)) ? score : 0.0f;
    float sum[kKeysPerQuad];
    for (int i = 0; i < kKeysPerQuad; ++i) {
      const int key = lane / mxfp4::kGroups + 8 * i;
      sum[i] = mxfp4::exact_chain(q, keys + mxfp4::kKeyBytes * key, scales + kKeyScaleBytes * key, c, num_heads);
    }
    return codec::canonical_nan(add_chains(sum, c));
  }
};

// --- fp8

/// What both kinds of fp8 scores have.
struct Fp8Keys {
  using Keys = GroupKeys<fp8::kKeyBytes>;
  using Number = float;
  static constexpr int kHeadLanes = kv4::cuda::kHeadLanes;

  struct Tables {
    __device__ void init() {}
  };
  struct Scales {
    std::uint32_t of_own_key;
    Scales() = default;
    __device__ explicit Scales(std::uint32_t of_own_key) : of_own_key(of_own_key) {}
    __device__ bool are_out_of_range() const { return is_out_of_range(of_own_key); }
    __device__ float factor_of(int lane) const { return codec::bits_float(__shfl_sync(kAllLanes, of_own_key, lane)); }
  };
  __device__ static float relu(float product) { return kv4::cuda::relu(product); }

  /// A lane's part of a head, encoded as keys are.
  __device__ static QueryPart make_query(const TokenTile& tile, int token, int head, int part) {
    RawChannels<kLaneChannels> raw[1];
    Fp8QueryAddress(tile, token, head, part).load(tile.p, raw);
    QueryPart query[1];
    make_queries(tile, raw, query);
    return query[0];
  }
};

/// Raw fast scores, as of fp8_raw.cu.
struct Fp8 : Fp8Keys {
  struct Queries {
    std::uint8_t q[kHeads * kWidth];
    Weights weights;  // a head's weight times its scale and 2^kDotShift
    float scales[kHeads], plain_weights[kHeads];
  };
  using Operand = fp8::Operand;
  static constexpr MmaType kMma = MmaType::e4m3;
  static constexpr bool kMendsOutOfRange = true;

  __device__ static bool prepare(Queries& to, const TokenTile& tile, int token, int head, int part) {
    const QueryPart q = make_query(tile, token, head, part);
    const std::uint32_t words[4] = {q.codes.x, q.codes.y, q.codes.z, q.codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<std::uint32_t*>(&to.q[fp8::word_at(head, 4 * part + i)]) = words[i];
    if (part == 0) {
      to.weights[head / ops::kChainHeads][head % ops::kChainHeads] = q.weight * q.scale * (1 << kDotShift);
      to.scales[head] = q.scale;
      to.plain_weights[head] = q.weight;
    }
    return head >= tile.p.num_heads ||
           (!is_out_of_range(codec::float_bits(q.scale)) && fabsf(q.weight) * q.scale <= fp8::kMaxRawWeight);
  }

  template <int kHalf>
  __device__ static void load_keys(const Tables&, std::uint32_t stage, const Scales&, bool, Operand& a) {
    fp8::load_tile(stage, first_chunk(static_cast<int>(threadIdx.x % 32)), kHalf, a);
  }

  __device__ static float exact_score(const Queries& q, const std::uint8_t* keys, const std::uint8_t* scales,
                                      int keys_left, int, bool everywhere, float score) {
    const int lane = static_cast<int>(threadIdx.x % 32), own = static_cast<int>(Keys::own_key());
    const std::uint32_t scale = reinterpret_cast<const std::uint32_t*>(scales)[lane];
    unsigned todo = __ballot_sync(kAllLanes, lane < keys_left && (everywhere || is_out_of_range(scale)));
    for (; todo != 0; todo &= todo - 1) {
      const int key = __ffs(static_cast<int>(todo)) - 1;
      const float exact = fp8::exact_score(q, keys + fp8::kKeyBytes * key,
                                           codec::bits_float(__shfl_sync(kAllLanes, scale, key)));
      if (key == own) score = exact;
    }
    return score;
  }
};

/// Fast scores for a rescoring selection, as of fp8.cu.
struct Fp8Candidates : Fp8Keys {
  struct Queries {
    std::uint8_t q[2][kHeads * 128];  // halves of the channels, fp16
    Weights weights;
  };
  using Operand = std::uint32_t[kMatrixSteps][4];
  static constexpr MmaType kMma = MmaType::fp16;
  static constexpr bool kMendsOutOfRange = false;  // the selection does

  __device__ static bool prepare(Queries& to, const TokenTile& tile, int token, int head, int part) {
    put_fp16_query(to, make_query(tile, token, head, part), head, part);
    return true;
  }

  template <int kHalf>
  __device__ static void load_keys(const Tables&, std::uint32_t stage, const Scales&, bool, Operand& a) {
    load_fp16_keys(stage, first_chunk(static_cast<int>(threadIdx.x % 32)), kHalf, a);
  }
};

// --- the preparation

constexpr int kPrepareThreads = 512;

template <class Format, int kGroupTokens>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_groups(const __grid_constant__ TokenTile tile, std::uint32_t score_ctas) {
  using Queries = typename Format::Queries;
  __shared__ __align__(16) unsigned char bytes[sizeof(Queries)];
  __shared__ std::uint32_t of_warps[kPrepareThreads / 32];
  Queries& queries = *reinterpret_cast<Queries*>(bytes);
  touch(tile);
  grid_dependency_wait();
  launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), token = static_cast<int>(blockIdx.x) - 1;
  if (token < 0) return plan_groups<Queries, kGroupTokens, kPrepareThreads>(tile, score_ctas, of_warps);
  const ops::StepRecord record = load_record(record_of(tile, token));
  PreparedToken<Queries>& to = prepared_token<Queries>(tile, token);
  bool fits = true;
  if (const int head = thread / Format::kHeadLanes; head < kHeads)  // whole warps
    fits = Format::prepare(queries, tile, token, head, thread % Format::kHeadLanes);
  const bool in_range = __syncthreads_and(fits);
  static_assert(sizeof(Queries) % 16 == 0);
  for (int i = thread; i < static_cast<int>(sizeof(Queries) / 16); i += kPrepareThreads)
    reinterpret_cast<uint4*>(&to.queries)[i] = reinterpret_cast<const uint4*>(&queries)[i];
  if (thread == 0) {
    to.scored = tile.scored(record);
    to.in_range = in_range;
    if constexpr (!Format::kMendsOutOfRange) {
      tile.largest_scales(token)->of_split[0] = 0;
      tile.largest_scales(token)->splits = 1;
    }
  }
  if (tile.fill)
    for (std::int64_t j = tile.visible(record) + thread; j < tile.score_stride; j += kPrepareThreads)
      tile.row(token)[j] = kNoScore;
}

// --- the scores

template <class FormatOf, int kGroupTokensOf>
struct Shared {
  using Format = FormatOf;
  static constexpr int kGroupTokens = kGroupTokensOf, kSteps = kGroupTokens / kStepTokens;
  static constexpr int kPairs = kGroupTokens / kProductTokens;
  static constexpr int kTokenBytes = kHeads * 128, kParts = sizeof(Format::Queries::q) / kTokenBytes;
  static constexpr int kPairBytes = kProductTokens * kParts * kTokenBytes;
  std::uint8_t q[kPairs][kParts][kProductTokens][kTokenBytes];  // wgmma operands
  alignas(16) typename Format::Keys::Ring ring;
  alignas(16) Weights weights[kGroupTokens];
  alignas(16) typename Format::Tables tables;
  std::int32_t scored[kGroupTokens], in_range[kGroupTokens];
  alignas(8) std::uint64_t loaded[kSteps];  // barriers of queries
};

template <class Number>
__device__ void wait_for_product(Number (&d)[64]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait<0>();
  keep_behind_wait(d);
#endif
}

/// Starts the product of 64 keys and two tokens. Neither accumulators nor keys may be touched until it is waited for.
/// Operands of two tokens follow each other, in parts of 128 bytes per head.
template <class Format>
__device__ void start_product(typename Format::Number (&d)[64], const typename Format::Operand& a,
                              std::uint64_t queries) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kSteps = static_cast<int>(std::extent_v<typename Format::Operand>), kPartSteps = 128 / 32;
  constexpr int kPartBytes = kProductTokens * kHeads * 128;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const std::uint64_t at = queries + (i / kPartSteps * kPartBytes + i % kPartSteps * 32 >> 4);
    if constexpr (Format::kMma == MmaType::fp16)
      wgmma<MmaType::fp16, 128, false>(d, a[i], at, i > 0);
    else
      wgmma<Format::kMma, 128>(d, a[i], at, i > 0);
  }
  wgmma_commit();
#endif
}

/// Adds up the heads of a product. Lane c of a quad gets the score, without the key's factor, of token c / 2 of the two
/// and, of the warp's 16 keys, of its own row's if c is even, or else of the key 8 behind it. `weights`: the lane's
/// chain of the first token.
template <class Format>
__device__ float add_product(const typename Format::Number (&d)[64], std::uint32_t weights, int c) {
  float sum[kKeysPerQuad] = {};
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; i += 4)
#pragma unroll
    for (int t = 0; t < kProductTokens; ++t) {
      const uint4 four = load_shared16(weights + static_cast<std::uint32_t>(sizeof(Weights) * t + sizeof(float) * i));
      const float by[4] = {codec::bits_float(four.x), codec::bits_float(four.y), codec::bits_float(four.z),
                           codec::bits_float(four.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = kTokenNumbers * t + (i + j) / 2 * 4 + j % 2;
        sum[2 * t] = codec::fused(by[j], Format::relu(d[at]), sum[2 * t]);
        sum[2 * t + 1] = codec::fused(by[j], Format::relu(d[at + 2]), sum[2 * t + 1]);
      }
    }
  return add_chains(sum, c);
}

/// The scores of a lane of the two products of a pair of tokens.
struct LaneScores {
  __device__ explicit LaneScores(int token) : token(token) {}
  float* to = nullptr;      // the score of the first half's key
  float* maxima = nullptr;  // of the token
  int key = 0x7FFFFF00;     // the first half's; none so far
  int token;                // of the group
  float factors[2] = {};    // of the keys
  float score = kNoScore;   // of the first half's key
};

/// Writes exact scores of what is out of range in a warp's `kv_tiles` KV tiles from first_key on: of all keys of tokens
/// out of range, and of KV tiles with keys out of range, which begin at first_out_of_range.
template <class Shared>
__device__ __noinline__ void score_out_of_range(const Shared& s, const TokenTile& tile, const Pages& pages,
                                                const TokenGroup& group, int first_key, int kv_tiles,
                                                int first_out_of_range) {
  using Format = typename Shared::Format;
  using Keys = typename Format::Keys;
  const int own = static_cast<int>(Keys::own_key());
  const std::int32_t* const table = pages.table + std::int64_t{group.request} * pages.blocks_per_request;
  const std::uint32_t in_block = pages.row_of(first_key);
#pragma unroll 1
  for (int t = 0; t < group.count; ++t) {
    const int token = group.first + t, scored = s.scored[t];
    const bool everywhere = s.in_range[t] == 0;
    float* const row = tile.row(token);
    float* const maxima = maxima_of(tile, token, scored);
#pragma unroll 1
    for (int i = everywhere ? 0 : first_out_of_range; i < kv_tiles; ++i) {
      const int first = first_key + i * Cta::kStep;
      if (first >= scored) break;
      const std::int32_t block = table[first >> pages.block_shift];
      if (block < 0) continue;
      const bool is_seen = first + own < scored;
      const float score = Format::exact_score(
          prepared_token<typename Format::Queries>(tile, token).queries,
          pages.payload_of(static_cast<std::uint32_t>(block)) + Keys::kPayloadBytes / kWarpKeys * in_block,
          pages.scale_of(static_cast<std::uint32_t>(block)) + kKeyScaleBytes * in_block, scored - first,
          tile.p.num_heads, everywhere, is_seen ? row[first + own] : 0.0f);
      if (is_seen) row[first + own] = score;
      if (maxima != nullptr) write_maxima(maxima, first, group_size(scored), is_seen ? score : kNoScore);
    }
  }
}

template <class Shared>
__global__ void __launch_bounds__(Cta::kThreads, 1)
    score_groups(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages) {
  using Format = typename Shared::Format;
  using Keys = typename Format::Keys;
  using Number = typename Format::Number;
  using Queries = typename Format::Queries;
  constexpr int kGroupTokens = Shared::kGroupTokens, kSteps = Shared::kSteps, kPairs = Shared::kPairs;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, c = lane % kQuad;
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) mbarrier_init(shared_address(&s.loaded[i]), Arrivals::of_copies());
    fence_mbarrier_init();
  }
  s.tables.init();
  touch(tile);
  touch(pages);
  grid_dependency_wait();
  launch_dependents();
  const PreparedToken<Queries>& plan = prepared_token<Queries>(tile, 0);
  const GroupStart start = plan.starts[blockIdx.x], end = plan.starts[blockIdx.x + 1];
  const bool always = pages.block_shift >= 0;
  const std::uint64_t queries = operand_of(s.q[0][0][0]);
  const std::uint32_t weights = shared_address(s.weights) + static_cast<std::uint32_t>(sizeof(Weights) / 4) * c;
  const std::int64_t pair_stride = kProductTokens * tile.score_stride;  // from the rows of a product to the next's
  const std::int64_t pair_bytes = kProductTokens * tile.query_stride;   // the same of their maxima
  int phase = 0;
#pragma unroll 1
  for (int index = start.group; index < end.group || (index == end.group && end.kv_tile > 0); ++index) {
    const TokenGroup group = prepared_token<Queries>(tile, index).group;
    const int begin = index == start.group ? start.kv_tile : 0;
    const int count = (index == end.group ? end.kv_tile : kv_tiles_of(group.scored)) - begin;
    const Assignment assignment{group.first, begin, count, group.request, group.scored, 0, 0};
    Keys keys = keys_of<Keys>(s.ring, pages, assignment, warp / 4);
    keys.begin(keys.first_ids());
    __syncthreads();  // queries of the group before are not read any more
    if (thread < kGroupTokens) {
      const bool is_there = thread < group.count;
      const PreparedToken<Queries>& from = prepared_token<Queries>(tile, group.first + (is_there ? thread : 0));
      const std::uint32_t barrier = shared_address(&s.loaded[thread / kStepTokens]);
      constexpr int kBytes = static_cast<int>(sizeof(Queries::q) + sizeof(Weights));
      if (thread % kStepTokens == 0) {
        const int tokens = max(0, min(group.count - thread, kStepTokens));
        if (tokens > 0)
          mbarrier_arrive_expect_tx(barrier, tokens * kBytes);
        else
          mbarrier_arrive(barrier);
      }
      if (is_there) {
#pragma unroll
        for (int part = 0; part < Shared::kParts; ++part)
          bulk_load(shared_address(s.q[thread / kProductTokens][part][thread % kProductTokens]),
                    reinterpret_cast<const std::uint8_t*>(&from.queries.q) + part * Shared::kTokenBytes,
                    Shared::kTokenBytes, barrier);
        bulk_load(shared_address(&s.weights[thread]), &from.queries.weights, sizeof(Weights), barrier);
      }
      s.scored[thread] = is_there ? from.scored : 0;
      s.in_range[thread] = is_there && from.scored > 0 ? from.in_range : 1;
    }
    __syncthreads();
    bool has_small_groups = false, has_large_groups = false, in_range = true;
    for (int t = 0; t < kGroupTokens; ++t) {
      const int scored = tile.has_maxima ? s.scored[t] : 0;
      has_small_groups |= scored > kRowNumbers && group_size(scored) == kSmallGroup;
      has_large_groups |= scored > kRowNumbers && group_size(scored) == kLargeGroup;
      in_range &= s.in_range[t] != 0;
    }

    const int kv_tiles = __shfl_sync(kAllLanes, kv_tiles_of_warpgroup<Cta>(assignment, warp / 4), 0);
    int first_out_of_range = kv_tiles;
    Number first[64], second[64] = {};   // products of the halves of a KV tile
    typename Format::Operand low, high;  // the halves
    std::uint32_t largest = 0;           // scale, as bits
    typename Format::Scales scales;
    std::uint32_t stage = 0;
    // The lane's token of a product, and its key of the warp's 16.
    const int own = lane / kQuad + 8 * (c % 2);
    LaneScores pending(c / 2), current(c / 2);

    const auto next_tile = [&](int i) {
      stage = keys.wait_next();
      scales = typename Format::Scales(keys.scales());
      const bool is_seen = keys.first_key(i) + static_cast<int>(Keys::own_key()) < group.scored;
      if constexpr (!Format::kMendsOutOfRange) {
        if (is_seen) largest = max(largest, scales.are_out_of_range() ? kOutOfRangeScale : scales.of_own_key);
      } else if (__any_sync(kAllLanes, is_seen && scales.are_out_of_range())) {
        first_out_of_range = min(first_out_of_range, i);
      }
    };
    const auto weights_of = [&](const LaneScores& scores) {
      return weights + static_cast<std::uint32_t>(sizeof(Weights)) * (scores.token - c / 2);
    };
    // Writes the scores of the first half, then of the second.
    const auto write_first = [&] {
      const float score = add_product<Format>(first, weights_of(current), c) * current.factors[0];
      const bool is_seen = current.key < s.scored[current.token];
      if (is_seen) *current.to = score;
      current.score = is_seen ? score : kNoScore;
    };
    const auto write_second = [&] {
      const float score = add_product<Format>(second, weights_of(pending), c) * pending.factors[1];
      const int scored = s.scored[pending.token], key = pending.key + kWarpKeys / 2;
      const bool is_seen = key < scored;
      if (is_seen) pending.to[kWarpKeys / 2] = score;
      if (!has_small_groups && !has_large_groups) return;
      const auto largest_of_lanes = [](float x) {  // of the lanes with the same c
        x = fmaxf(x, kNoScore);                    // no NaN
#pragma unroll
        for (int step = kQuad; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
        return x;
      };
      const float low_score = pending.score, high_score = is_seen ? score : kNoScore;
      if (has_large_groups) {
        float largest = largest_of_lanes(fmaxf(low_score, high_score));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        if (lane < kQuad && scored > kSmallGroupKeys && pending.key < scored)
          pending.maxima[static_cast<unsigned>(key) / kLargeGroup] = largest;
      }
      if (has_small_groups) {
        const float low_largest = largest_of_lanes(low_score), high_largest = largest_of_lanes(high_score);
        if (lane < kQuad && scored > kRowNumbers && scored <= kSmallGroupKeys) {
          if (pending.key < scored) pending.maxima[static_cast<unsigned>(pending.key) / kSmallGroup] = low_largest;
          if (key < scored) pending.maxima[static_cast<unsigned>(key) / kSmallGroup] = high_largest;
        }
      }
    };
    if (kv_tiles > 0) {
      next_tile(0);
      Format::template load_keys<0>(s.tables, stage, scales, always, low);
    }
    // While the tensor cores multiply one half, the heads of the half before are added up.
#pragma unroll 1
    for (int i = 0; i < kv_tiles; ++i) {
      current.key = keys.first_key(i) + own;
      current.to = tile.row(group.first + c / 2) + current.key;
      current.maxima = tile.maxima(group.first + c / 2);
      current.token = c / 2;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        current.factors[half] = scales.factor_of((lane & ~(kQuad - 1)) | (2 * half + c % 2));
      keys.refill(i);
#pragma unroll 1
      for (int pair = 0; pair < kPairs; ++pair) {
        if (i == 0 && pair % 2 == 0) mbarrier_wait(shared_address(&s.loaded[pair / 2]), phase);
        const std::uint64_t of_pair = queries + static_cast<std::uint64_t>(pair * (Shared::kPairBytes >> 4));
        wait_for_product(second);
        start_product<Format>(first, low, of_pair);
        write_second();
        if (pair == 0) Format::template load_keys<1>(s.tables, stage, scales, always, high);
        wait_for_product(first);
        start_product<Format>(second, high, of_pair);
        write_first();
        pending = current;
        current.token += kProductTokens;
        current.to += pair_stride;
        current.maxima = reinterpret_cast<float*>(reinterpret_cast<std::uint8_t*>(current.maxima) + pair_bytes);
      }
      if (i + 1 < kv_tiles) {
        next_tile(i + 1);
        Format::template load_keys<0>(s.tables, stage, scales, always, low);
      }
    }
    wait_for_product(second);
    if (kv_tiles > 0) write_second();
    wait_for_all_copies();
    phase ^= 1;
    __syncwarp();
    if constexpr (Format::kMendsOutOfRange) {
      if (first_out_of_range < kv_tiles || !in_range)
        score_out_of_range(s, tile, pages, group, keys.first_key(0), kv_tiles, first_out_of_range);
    } else {
      largest = __reduce_max_sync(kAllLanes, largest);
      if (lane < group.count) atomicMax(&tile.largest_scales(group.first + lane)->of_split[0], largest);
    }
  }
}

template <class Format, int kGroupTokens>
cudaError_t launch_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  using Shared = Shared<Format, kGroupTokens>;
  const unsigned ctas = static_cast<unsigned>(std::min(device.num_sms, kMaxGroupCtas));
  static_assert(sizeof(Shared) <= 227 << 10);
  static_assert(sizeof(PreparedToken<typename Format::Queries>) <=
                (Format::kMendsOutOfRange ? kPreparedTokenBytes : kPreparedCandidateBytes));
  const cudaError_t status = launch(prepare_groups<Format, kGroupTokens>, static_cast<unsigned>(tile.count) + 1,
                                    kPrepareThreads, stream, tile, ctas);
  if (status != cudaSuccess) return status;
  return launch_score_kernel<Shared>(score_groups<Shared>, ctas, Cta::kThreads, tile, make_pages(tile), stream);
}

/// Groups as large as requests have tokens. For few work tiles they are smaller: queries of 16 tokens take longer to
/// load. H200, 2026-11-20: 256 x 8,192 keys take 47.7 us in groups of 8 and 55.3 in groups of 16; 1,024 x 32,768 keys
/// take 528 and 507.
template <class Format>
cudaError_t launch_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  constexpr std::int64_t kFewTiles = 48;  // of a CTA
  const std::int32_t tokens = std::min(tile.p.step.num_tokens / tile.p.step.num_items, tile.count);
  if (tokens <= 6) return launch_groups<Format, 4>(tile, device, stream);
  constexpr int kMost = Format::kMma == MmaType::fp16 ? 8 : kMaxGroupTokens;  // shared memory has no room for more
  if (tokens <= 12 || total_kv_tiles(tile) < kFewTiles * 16 * device.num_sms)
    return launch_groups<Format, 8>(tile, device, stream);
  return launch_groups<Format, kMost>(tile, device, stream);
}

}  // namespace

cudaError_t score_mxfp4_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_groups<Mxfp4>(tile, device, stream);
}

cudaError_t score_fp8_candidate_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_groups<Fp8Candidates>(tile, device, stream);
}

cudaError_t score_fp8_groups(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_groups<Fp8>(tile, device, stream);
}

}  // namespace kv4::cuda
