// Near scores of fp8 keys of 128 channels on Hopper, by matrix products, for a top-k that makes up for what they lack
// (topk/rescore.cuh): the defined sums are fp32 fma in the order of channels, which a tensor core does not follow.
//
// Every e4m3 is exact in fp16, and so are products of two in fp32; what differs from the defined score are roundings of
// sums, bounded in topk/rescore.cuh. Scales come off: a head's goes into its weight, a key's is applied to the total. A
// key of a code that is NaN scores 0 here as there, for NaN is no product above 0. A key whose scale is no normal
// number of ordinary size makes its token one that is scored again key by key: kOddScale in place of the largest scale.
//
// Queries are encoded as keys are, eight lanes per head. Units of keys are scored as in mxfp4.cu, but with fp16
// operands: a tile of 64 keys x 64 heads is 8 wgmma of m64n64k16. Lane c of a quad loads 16 bytes of each half of its
// row and supplies them as the k-steps' channels 2c, 2c + 1 and 8 + 2c, 9 + 2c; queries lie in shared memory with their
// channels in that order.
//
// Bound by power, then by bytes: 132 per key are 7.3 clocks of an SM; the tensor cores takes 4.8, conversions
// 4. A profile on an H200, 2026-11-16, 32,768 keys of each of 128 requests: 149 us, of which keys and scores take 137;
// L2 86 % busy, the tensor cores 51 %, a quarter of the warps' time is waiting for it; 1.59 GHz of 1.98, because the
// GPU is at its power limit (docs/performance.md): 262,144 keys of 128 requests take 1,146 us after rests, else 1,226.
#include <cstdint>

#include "backend/cuda/index/fp8_fast.cuh"
#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/topk/rescore.cuh"

namespace kv4::cuda {
namespace {

constexpr int kKeyBytes = kWidth, kStages = 3, kSteps = kWidth / 16;
using Keys = KeyStream<WholeCrew, kKeyBytes, kStages, true>;
using FewKeys = KeyStream<WholeCrew, kKeyBytes, kStages, false>;

struct Shared {
  std::uint8_t q[2][kHeads * 128];  // matrix operands: halves of the channels, fp16, rows with swizzled chunks
  Keys::Ring ring;
  float weights[ops::kChains][ops::kChainHeads];  // a head's weight times its scale and 2^kDotShift
  ShareRoom share;
  std::uint32_t largest;  // scale of the block's keys of a token
  int ordinal;            // which of the token's shares they are
};
static_assert(offsetof(Shared, q) == 0 && offsetof(Shared, ring) % 16 == 0 && sizeof(Shared) <= 227 << 10);

// --- queries

/// A token's queries into shared memory.
__device__ void prepare_queries(Shared& s, const QueryPart& q, int head, int part) {
  const int row = operand_row(head);
  const std::uint32_t words[4] = {q.codes.x, q.codes.y, q.codes.z, q.codes.w};
  const auto put = [&](int i, std::uint32_t pair) {
    *reinterpret_cast<std::uint32_t*>(&s.q[part / 4][row * 128 + 16 * (i ^ (row % 8)) + 4 * (part % 4)]) = pair;
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t low, high;
    half_pairs(words[i], low, high);
    put(2 * i, low);
    put(2 * i + 1, high);
  }
  if (part == 0) {
    const float weight = fmaxf(fminf(q.weight * q.scale, kMostWeight), -kMostWeight);
    s.weights[head / ops::kChainHeads][head % ops::kChainHeads] = weight * (1 << kDotShift);
  }
}

// --- products

template <bool kAdd>
__device__ void multiply(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
#endif
}

__device__ void multiply_tile(float (&d)[32], const std::uint32_t (&a)[kSteps][4], const std::uint64_t (&queries)[2]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply<false>(d, a[0], queries[0]);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) multiply<true>(d, a[i], queries[i / 4] + (32 >> 4) * (i % 4));
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

/// The score of a lane's own key, but for the key's scale, of a warp's 32 whose codes lie at `stage`.
__device__ __forceinline__ float score_unit(std::uint32_t stage, std::uint32_t chunk_at,
                                            const std::uint64_t (&queries)[2], const float (&weights)[ops::kChainHeads],
                                            int c) {
  float sum[kRows];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t a[kSteps][4];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 codes = load_shared16(stage + 1024 * (2 * half + k) + (chunk_at ^ (64 * part)));
        const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) half_pairs(words[j], a[4 * part + j][k], a[4 * part + j][2 + k]);
      }
    float products[32] = {};  // no instruction: the first step does not read them
    multiply_tile(products, a, queries);
    add_heads(products, weights, sum[2 * half], sum[2 * half + 1]);
  }
  return add_chains(sum, c);
}

/// Units of one token, its scores into `row`: the queries' part of Shared is written anew. Then s.largest is known to
/// all threads. Where the share was guessed, keys and place are of it. note() is called by one thread while keys and
/// queries are on their way, keep(part of a head, head, part) by all. Where the guess is not right, renew(share) makes
/// the share right, or returns false: its token is another one, too.
template <bool kMaxima, class Keys, class Note, class Keep, class Renew>
__device__ bool score_units(Shared& s, const IndexTile& tile, const Pages& pages, Share& share, const Guess& guess,
                            Keys& keys, NearPlace& place, float* row, Note&& note, Keep&& keep, Renew&& renew) {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // or addresses would be kept in registers from token to token
  const int warpgroup = thread / 128, lane = thread % 32, c = lane % kQuad;
  if (!guess.is_there) {
    keys = keys_of<Keys>(s.ring, pages, share, warpgroup);
    place = NearPlace(tile, share.token, thread / kHeadLanes, thread % kHeadLanes);
  }
  // What is small is asked for before keys, or it would come after them.
  RawChannels<kLaneChannels> raw[1];
  place.load(tile.p, raw);
  place.drop();
  SecondLook look(tile, keys, guess);
  keys.begin(guess.is_there ? guess.ids : keys.first_ids());
  if (threadIdx.x == 0) {
    s.largest = 0;
    note();
  }
  const bool holds = look.confirms(guess);
  QueryPart query[1];
  make_queries(tile, raw, query);
  prepare_queries(s, query[0], thread / kHeadLanes, thread % kHeadLanes);
  keep(query[0], thread / kHeadLanes, thread % kHeadLanes);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  if (!__syncthreads_and(holds)) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (!renew(share)) return false;
    keys = keys_of<Keys>(s.ring, pages, share, warpgroup);
    keys.begin(keys.first_ids());
  }
  const int scored = share.scored, units = units_of_warpgroup<WholeCrew>(share, warpgroup);
  const std::uint64_t queries[2] = {operand_of(s.q[0]), operand_of(s.q[1])};
  float weights[ops::kChainHeads];
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) weights[i] = s.weights[c][i];
  int key = keys.first_key(0) + static_cast<int>(Keys::own_key());  // whose score this lane writes
  float* to = row + key;
  float* const maxima = kMaxima ? maxima_of(tile, share.token, scored) : nullptr;
  const int group = group_size(scored);
  const std::uint32_t chunk_at = first_chunk(lane);
  std::uint32_t largest = 0;

  for (int i = 0; i < units; ++i, key += WholeCrew::kStep, to += WholeCrew::kStep) {
    const std::uint32_t stage = keys.take(), scale = keys.scales();
    keys.refill(i);
    const float total = score_unit(stage, chunk_at, queries, weights, c) * codec::bits_float(scale);
    if (key < scored) {
      *to = total;
      largest = max(largest, is_odd(scale) ? kOddScale : scale);
    }
    if (maxima != nullptr) write_maxima(maxima, keys.first_key(i), group, key < scored ? total : kNoScore);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  largest = __reduce_max_sync(kAllLanes, largest);
  if (lane == 0) atomicMax(&s.largest, largest);
  __syncthreads();  // the queries may change
  return true;
}

__global__ void __launch_bounds__(kScoreThreads, 1)
    score_fp8_keys(const __grid_constant__ IndexTile tile, const __grid_constant__ Pages pages) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const int thread = static_cast<int>(threadIdx.x);
  Guess guess;
  Share first = guess_share<WholeCrew>(s.share, tile, guess);
  Keys keys = keys_of<Keys>(s.ring, pages, first, thread / 128);
  guess.ids = keys.guess_ids();
  touch(tile);
  touch(pages);
  fetch_queries(tile, first.token);
  keys.fetch<kStages - 1>(guess.ids);
  NearPlace place(tile, first.token, thread / kHeadLanes, thread % kHeadLanes);
  grid_dependency_wait_after(place.made());
  launch_dependents();
  if (!guess.is_there) first = find_share_anew<WholeCrew>(s.share, tile);
  for_each_share<WholeCrew>(
      s.share, tile, first, guess, [&](int token) { fetch_queries(tile, token); },
      [&](Share& share, const Guess& guess) {
        if (!score_units<true>(
                s, tile, pages, share, guess, keys, place, tile.row(share.token),
                [&] { s.ordinal = ordinal_of(share); }, [](const QueryPart&, int, int) {},
                [](Share&) { return false; }))
          return false;
        if (threadIdx.x > 0) return true;
        const int ordinal = s.ordinal;
        LargestScales& scales = *tile.largest_scales(share.token);
        scales.of_share[ordinal] = s.largest;
        if (share.unit + share.count == units_of(share.scored)) scales.shares = ordinal + 1;
        return true;
      });
}

// --- scores and selection

// A cluster takes a token of up to kRowNumbers keys, as in mxfp4.cu; its first block selects. Keys on their way
// leave no room for scores in shared memory: they go by L2. 8,192 keys on an H200, 2026-11-16, in us: of 16
// tokens 16.3, of 64 27.8, of 128 45.8; of 16, when they took 17.8, the scores were 14,400 clocks, the selection
// 13,300.

constexpr int kMostBlocks = kRowNumbers / kWarpKeys;  // of a row of the block table
struct TopkShared {
  union {
    Shared scorer;
    struct {
      std::uint8_t operands[sizeof(Shared::q)];
      NearShared near;  // in place of keys
    };
  };
  NearQueries queries;
  std::uint32_t largest[kMostClusterBlocks];  // scales of the cluster's blocks, in the first one
  std::int32_t table[kMostBlocks];            // of the token's request
};
static_assert(offsetof(TopkShared, near) + sizeof(NearShared) <= offsetof(Shared, weights));
static_assert(sizeof(TopkShared) <= 227 << 10);

__global__ void __launch_bounds__(kScoreThreads, 1)
    topk_of_fp8_keys(const __grid_constant__ IndexTile tile, const __grid_constant__ Pages pages, int blocks) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  TopkShared& s = *reinterpret_cast<TopkShared*>(bytes);
  arrive_first();
  const int token = static_cast<int>(blockIdx.x) / blocks, rank = block_in_cluster();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, top = tile.p.top;
  Guess guess;
  Share share = guess_share_of_cluster(tile, blocks, token, guess);
  FewKeys keys = keys_of<FewKeys>(s.scorer.ring, pages, share, warp / 4);
  guess.ids = keys.guess_ids();
  touch(tile);
  touch(pages);
  fetch_queries(tile, token);
  keys.fetch<kStages - 1>(guess.ids);
  NearPlace place(tile, token, thread / kHeadLanes, thread % kHeadLanes);
  grid_dependency_wait_after(place.made());
  launch_dependents();
  const auto copy_table = [&] {
    const int table_blocks = tile.p.step.blocks_per_request;
    static_assert(kMostBlocks <= kScoreThreads);
    if (rank == 0 && thread < table_blocks)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                       static_cast<std::uint32_t>(__cvta_generic_to_shared(&s.table[thread]))),
                   "l"(tile.p.step.block_table + std::int64_t{share.request} * table_blocks + thread)
                   : "memory");
  };
  if (!guess.is_there) share = find_share_of_cluster(tile, blocks, token);
  if (share.count > 0) {
    copy_table();  // with the first keys
    score_units<false>(
        s.scorer, tile, pages, share, guess, keys, place, tile.row(token), [] {},
        [&](const QueryPart& query, int head, int part) { s.queries.put(query, head, part); },
        [&](Share& anew) {
          anew = find_share_of_cluster(tile, blocks, token);
          if (anew.count > 0) copy_table();
          return true;
        });
  }
  if (share.scored == 0) {
    if (rank == 0) take_whole_anew(tile, token);
    return;
  }
  wait_cluster();
  if (thread == 0) shared_of(s, 0).largest[rank] = share.count > 0 ? s.scorer.largest : 0;
  arrive_cluster();
  if (rank > 0) return;

  // While the others end.
  NearShared& near = s.near;
  near.clear();
  make_bounds(near, s.queries, tile.p.num_heads);
  wait_cluster();
  const int count = share.scored;
  const Choice choice{tile, token, share.request};
  float* const row = tile.row(token);
  float held[NearShared::Row::kHeld];
  load_fours<kScoreThreads>(row, count, true, held);
  if (count % 4 != 0) leave_out_rest_of_fours<NearShared::Row>(count, held);
  const std::uint32_t largest = __reduce_max_sync(kAllLanes, thread % 32 < blocks ? s.largest[thread % 32] : 0);
  const FoursSource<NearShared::Row> source{held, count};
  const Bounds bounds = find_top_bounds(near.row, source, top);
  const Margin margin = margin_of(s.queries, largest);
  const TokenKeys token_keys{tile, s.table};
  if (margin.holds && take_near(near, s.queries, source, bounds, token_keys, choice, margin.size)) return;
  select_slowly(near, s.queries, token_keys, row, count, margin, choice);
}

/// Keys in doubt are read a second time: where all keys fit into L2, they stay there (16 x 8,192 keys 18.35 to 17.5 us;
/// of 64 tokens it would be 29.4 to 31.4).
Pages make_near_pages(const IndexTile& tile) {
  constexpr std::int64_t kSmall = std::int64_t{24} << 20;
  Pages pages = make_pages(tile);
  if (units_of(tile) * kUnitKeys * kKeyBytes <= kSmall) pages.policy = kEvictNormal;
  return pages;
}

}  // namespace

bool can_score_near(const ops::IndexParams& p) {
  return p.layer.kinds[p.kind].page.format == Format::fp8 && can_stream_keys(p, kKeyBytes) &&
         is_aligned(p.workspace, 0, 16) &&
         (p.q.dtype != DType::u8 || is_aligned(p.q_scale.data, p.q_scale.row_stride, 4));
}

cudaError_t score_near(const IndexTile& tile, cudaStream_t stream) {
  const unsigned blocks = std::min(score_blocks(tile), static_cast<unsigned>(LargestScales::kMostShares));
  return launch_scorer<Shared>(score_fp8_keys, blocks, kScoreThreads, tile, make_near_pages(tile), stream);
}

int near_topk_blocks(const IndexTile& tile) { return cluster_blocks(tile); }

cudaError_t topk_near(const IndexTile& tile, int blocks, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(topk_of_fp8_keys, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(TopkShared)));
  if (status != cudaSuccess) return status;
  const unsigned size = static_cast<unsigned>(blocks);
  return launch_clusters<sizeof(TopkShared)>(topk_of_fp8_keys, size, size * static_cast<unsigned>(tile.count),
                                             kScoreThreads, stream, tile, make_near_pages(tile), blocks);
}

}  // namespace kv4::cuda
