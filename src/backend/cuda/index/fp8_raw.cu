// Raw scores of fp8 keys of 128 channels on Hopper, near the defined ones (docs/formats.md has the bound), in one
// launch: products of codes as they are, whose sums the tensor cores keep about 14 bits of.
//
// Scales come off: a head's goes into its weight, a key's is applied to the total. What the bound does not hold for is
// scored as defined at once: a token with a head that is out of bounds, and after a warp's units those of its keys
// whose scale is.
//
// Units of keys are scored as in mxfp4.cu: a tile of 64 keys x 64 heads is 4 wgmma of m64n64k32. Lane c of a quad
// loads 16 bytes of each half of its row and supplies them as the k-steps' channels 4c .. 4c + 3 and 16 + 4c .. 16 + 4c
// + 3; queries lie in shared memory with their channels in that order. The second tile's products are under way while
// heads of the first are added up.
//
// Bound by bytes where rows are long: 132 of a key and 4 of its score, 98 to 100 % of the copy speed; a half crew alone
// has 98 % of that. Short rows are bound by what happens once. Clocks of a half crew on an H200, 2026-11-16, 16 tokens
// of 8,192 keys, queries encoded before: 8,300 before the wait, beside the launch before; since the wait keys are asked
// for after 2,000, queries in place after 2,900, the first unit begun after 5,800, four units of each warpgroup done
// after 11,400, the end after 11,800, and the next launch's wait is over 3,000 later. What counted there: loads come
// back in order, so that what is small must be asked for before keys (2,000 clocks); divisions and addresses before the
// wait; no value of the first share kept in registers behind it, for a load that is spilled at once is waited for.
#include <cstdint>

#include "backend/cuda/index/fp8_fast.cuh"
#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/rows/decode.cuh"

namespace kv4::cuda {
namespace {

constexpr int kKeyBytes = kWidth, kStages = 3, kSteps = kWidth / 32;

/// Of heads, so that no sum overflows: with the largest code, 64 heads and the largest scale of a key 2^121.
constexpr float kMostRawWeight = 0x1p60f;

template <class CrewOf>
struct Shared {
  using Crew = CrewOf;
  using Keys = KeyStream<Crew, kKeyBytes, kStages, true>;
  std::uint8_t q[kHeads * kWidth];  // a matrix operand, rows with swizzled chunks
  typename Keys::Ring ring;
  float weights[ops::kChains][ops::kChainHeads];  // a head's weight times its scale and 2^kDotShift
  float scales[kHeads], plain_weights[kHeads];    // as given, for keys that are scored as defined
  ShareRoom share;
};
template <class Crew>
constexpr bool kFits = offsetof(Shared<Crew>, q) == 0 && offsetof(Shared<Crew>, ring) % 16 == 0 &&
                       (sizeof(Shared<Crew>) + 1024) * (WholeCrew::kThreads / Crew::kThreads) <= 228 << 10;
static_assert(kFits<WholeCrew> && kFits<HalfCrew>);

// --- queries

/// Where a word of a query's codes lies, four channels from 4 * word on.
__device__ int word_at(int head, int word) {
  const int row = operand_row(head);
  return row * kWidth + 16 * ((word / 16 * 4 + word % 4) ^ (row % 8)) + 4 * (word % 16 / 4);
}

/// A lane's part of a token's queries into shared memory.
template <class Shared>
__device__ void prepare_queries(Shared& s, const QueryPart& q, int head, int part) {
  const std::uint32_t words[4] = {q.codes.x, q.codes.y, q.codes.z, q.codes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<std::uint32_t*>(&s.q[word_at(head, 4 * part + i)]) = words[i];
  if (part > 0) return;
  s.weights[head / ops::kChainHeads][head % ops::kChainHeads] = q.weight * q.scale * (1 << kDotShift);
  s.scales[head] = q.scale;
  s.plain_weights[head] = q.weight;
}

// --- products

template <bool kAdd>
__device__ void multiply(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, add, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
#endif
}

__device__ void wait_for_products(float (&d)[32]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

using Operand = std::uint32_t[kSteps][4];

/// A lane's part of a tile, half of a unit.
__device__ void load_tile(std::uint32_t stage, std::uint32_t chunk_at, int tile, Operand& a) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint4 codes = load_shared16(stage + 1024 * (2 * tile + k) + (chunk_at ^ (64 * part)));
      const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) a[2 * part + j / 2][j % 2 * 2 + k] = words[j];
    }
}

/// Neither products nor keys may be touched before wait_for_products.
__device__ void start_products(float (&d)[32], const Operand& a, std::uint64_t queries) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply<false>(d, a[0], queries);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) multiply<true>(d, a[i], queries + (32 >> 4) * i);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// The score of a lane's own key, but for the key's scale, of a warp's 32 whose codes lie at `stage`.
__device__ __forceinline__ float score_unit(std::uint32_t stage, std::uint32_t chunk_at, std::uint64_t queries,
                                            const float (&weights)[ops::kChainHeads], int c) {
  float sum[kRows], products[2][32];
  Operand a, b;
  load_tile(stage, chunk_at, 0, a);
  start_products(products[0], a, queries);
  load_tile(stage, chunk_at, 1, b);
  wait_for_products(products[0]);
  start_products(products[1], b, queries);
  add_heads(products[0], weights, sum[0], sum[1]);
  wait_for_products(products[1]);
  add_heads(products[1], weights, sum[2], sum[3]);
  return add_chains(sum, c);
}

// --- what does not fit

/// The defined score, in every lane. Lanes have two heads each, then a chain of them.
template <class Shared>
__device__ float defined_score(const Shared& s, const std::uint8_t* codes, float scale) {
  const int lane = static_cast<int>(threadIdx.x % 32), chain = lane % ops::kChains;
  float dots[2] = {};
#pragma unroll 1
  for (int channel = 0; channel < kWidth; ++channel) {
    const float k = codec::e4m3_value(codes[channel]) * scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = lane + 32 * i;
      const float q = codec::e4m3_value(s.q[word_at(head, channel / 4) + channel % 4]) * s.scales[head];
      dots[i] = codec::fused(q, k, dots[i]);
    }
  }
  float sum = 0.0f;
#pragma unroll 1
  for (int i = 0; i < ops::kChainHeads; ++i) {
    const int head = chain * ops::kChainHeads + i;
    const float low = __shfl_sync(kAllLanes, dots[0], head % 32), high = __shfl_sync(kAllLanes, dots[1], head % 32);
    sum = codec::fused(s.plain_weights[head], ops::relu(head < 32 ? low : high), sum);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  return codec::canonical_nan(sum + __shfl_xor_sync(kAllLanes, sum, 2));
}

/// Of a warp's keys of `units` units, from first_key on: those whose scale is out of bounds, or all.
template <class Shared>
__device__ __noinline__ void score_odd(const Shared& s, const Pages& pages, int request, int scored, float* row,
                                       int first_key, int units, bool everywhere) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int32_t* table = pages.table + std::int64_t{request} * pages.blocks_per_request;
  const std::uint32_t in_block = pages.row_of(first_key);
#pragma unroll 1
  for (; units > 0 && first_key < scored; --units, first_key += Shared::Crew::kStep) {
    const std::int32_t block = table[first_key >> pages.block_shift];
    if (block < 0) continue;
    const std::uint8_t* keys = pages.payload_of(static_cast<std::uint32_t>(block)) + kKeyBytes * in_block;
    const std::uint32_t scale = reinterpret_cast<const std::uint32_t*>(
        pages.scale_of(static_cast<std::uint32_t>(block)) + kKeyScaleBytes * in_block)[lane];
    unsigned todo = __ballot_sync(kAllLanes, first_key + lane < scored && (everywhere || is_odd(scale)));
    for (; todo != 0; todo &= todo - 1) {
      const int key = __ffs(static_cast<int>(todo)) - 1;
      const float score =
          defined_score(s, keys + kKeyBytes * key, codec::bits_float(__shfl_sync(kAllLanes, scale, key)));
      // By the lane that wrote it before.
      if (static_cast<int>(Shared::Keys::own_key()) == key) row[first_key + key] = score;
    }
  }
}

// --- the kernel

/// Half crews begin with the share and the blocks of keys that records and table give before the wait, fetch what they
/// will need into L2, and look at both again while keys and queries are on their way. Seldom has either changed, and
/// then they begin anew. Whole crews have nothing to hide that behind: they begin after the wait.
template <class Crew>
__global__ void __launch_bounds__(Crew::kThreads, WholeCrew::kThreads / Crew::kThreads)
    raw_scores_of_fp8_keys(const __grid_constant__ IndexTile tile, const __grid_constant__ Pages pages) {
  using Shared = Shared<Crew>;
  using Keys = typename Shared::Keys;
  constexpr bool kGuesses = Crew::kThreads < WholeCrew::kThreads;
  constexpr int kPasses = kHeads * kHeadLanes / Crew::kThreads, kPassHeads = kHeads / kPasses;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const auto place_of = [&](int token) {
    return NearPlace(tile, token, static_cast<int>(threadIdx.x / kHeadLanes),
                     static_cast<int>(threadIdx.x % kHeadLanes));
  };
  Guess guess;
  Share first{};
  int token;  // whose queries are asked for first
  if constexpr (kGuesses) {
    first = guess_share<Crew>(s.share, tile, guess);
    token = first.token;
  } else {
    touch(tile);
    touch(pages);
    for (int i = static_cast<int>(threadIdx.x); i < tile.count; i += Crew::kThreads) fetch_ahead(record_of(tile, i));
    token = likely_token(tile);
  }
  Keys keys = keys_of<Keys>(s.ring, pages, first, static_cast<int>(threadIdx.x / 128));
  if constexpr (kGuesses) {
    guess.ids = keys.guess_ids();
    touch(tile);
    touch(pages);
  }
  fetch_queries(tile, token);
  if constexpr (kGuesses) keys.template fetch<kStages - 1>(guess.ids);
  Rest rest(tile);
  const NearPlace place = place_of(token);
  grid_dependency_wait_after(place.made() ^ rest.made());
  launch_dependents();
  if (!guess.is_there) first = find_share_anew<Crew>(s.share, tile);
  // What is small is asked for before keys, or it would come after them.
  RawChannels<kLaneChannels> raw[kPasses];
  place.load(tile.p, raw);
  SecondLook look(tile, keys, guess);
  if (tile.fill) rest.look(tile);
  if (guess.is_there) keys.begin(guess.ids);
  bool has_queries = true, is_filled = !tile.fill;
  for_each_share<Crew>(
      s.share, tile, first, guess, [&](int next) { fetch_queries(tile, next); },
      [&](const Share& share, const Guess& guess) {
        int thread = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(thread));  // or addresses would be kept in registers from token to token
        const int head = thread / kHeadLanes, part = thread % kHeadLanes, warpgroup = thread / 128;
        const int lane = thread % 32, c = lane % kQuad;
        if (!guess.is_there) {
          keys = keys_of<Keys>(s.ring, pages, share, warpgroup);
          keys.begin(keys.first_ids());
        }
        if (!has_queries || share.token != token) place_of(share.token).load(tile.p, raw);
        QueryPart parts[kPasses];
        make_queries(tile, raw, parts);
        has_queries = false;
        for (RawChannels<kLaneChannels>& of_head : raw) of_head = {};  // no registers are needed any more
        bool fits = true;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          prepare_queries(s, parts[i], head + kPassHeads * i, part);
          fits &=
              head + kPassHeads * i >= tile.p.num_heads ||
              (!is_odd(codec::float_bits(parts[i].scale)) && fabsf(parts[i].weight) * parts[i].scale <= kMostRawWeight);
        }
        if (!is_filled) rest.fill(tile, thread, Crew::kThreads);
        is_filled = true;
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        const bool holds = !guess.is_there || look.confirms(guess), fast = __syncthreads_and(fits && holds);
        if (kGuesses && !fast && !__syncthreads_and(holds)) {
          asm volatile("cp.async.wait_all;" ::: "memory");
          return false;
        }
        const int scored = share.scored, units = units_of_warpgroup<Crew>(share, warpgroup);
        const int fast_units = fast ? units : 0;
        const std::uint64_t queries = operand_of(s.q);
        float weights[ops::kChainHeads];
#pragma unroll
        for (int i = 0; i < ops::kChainHeads; ++i) weights[i] = s.weights[c][i];
        int key = keys.first_key(0) + static_cast<int>(Keys::own_key());  // whose score this lane writes
        float* to = tile.row(share.token) + key;
        const std::uint32_t chunk_at = first_chunk(lane);
        int first_odd = fast_units;
        for (int i = 0; i < fast_units; ++i, key += Crew::kStep, to += Crew::kStep) {
          const std::uint32_t stage = keys.take(), scale = keys.scales();
          keys.refill(i);
          const float total = score_unit(stage, chunk_at, queries, weights, c) * codec::bits_float(scale);
          if (key < scored) {
            *to = total;
            if (is_odd(scale)) first_odd = min(first_odd, i);
          }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        first_odd = __reduce_min_sync(kAllLanes, first_odd);
        if (first_odd < units)
          score_odd(s, pages, share.request, scored, tile.row(share.token), keys.first_key(first_odd),
                    units - first_odd, !fast);
        __syncthreads();  // the queries may change
        return true;
      });
  if (!is_filled) rest.fill(tile, static_cast<int>(threadIdx.x), Crew::kThreads);
}

template <class Crew>
cudaError_t start(const IndexTile& tile, cudaStream_t stream) {
  return launch_scorer<Shared<Crew>>(raw_scores_of_fp8_keys<Crew>, score_blocks(tile), Crew::kThreads, tile,
                                     make_pages(tile), stream);
}

}  // namespace

cudaError_t score_near_raw(const IndexTile& tile, cudaStream_t stream) {
  // 128 units a block and more, H200, 2026-11-16: 128 x 32,768 keys 143 us by half crews, 138 by whole ones; 64 x
  // 262,144 561 and 552.
  return can_halve(tile, 64) ? start<HalfCrew>(tile, stream) : start<WholeCrew>(tile, stream);
}

}  // namespace kv4::cuda
