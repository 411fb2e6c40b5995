// Fast scores of fp8 keys of 128 channels on Hopper's tensor cores, for a top-k that rescores ambiguous candidates
// (topk/rescore.cuh). Exact scores are fp32 fma in the order of channels; the tensor cores add in another order.
//
// Every e4m3 value is exact in fp16, and every product of two is exact in fp32. Fast and exact scores differ only by
// the roundings of sums; topk/rescore.cuh bounds them. Scales are factored out: the scale of a head goes into its
// weight, the scale of a key multiplies the total. A key with a NaN code scores 0 in both modes, because relu drops
// NaN. A key whose scale is out of range writes kOutOfRangeScale in place of the largest scale, and all keys of its
// token are then rescored.
//
// Queries are encoded like keys, eight lanes per head. KV tiles are scored as in mxfp4.cu, but with fp16 operands: 64
// keys x 64 heads are 8 wgmma of m64n64k16. Lane c of a quad loads 16 bytes of each half of its row and supplies them
// as channels 2c, 2c + 1 and 8 + 2c, 9 + 2c of the k-steps; queries lie in shared memory with their channels in that
// order.
//
// Bound by power, then by bytes: the 132 bytes of a key are 7.3 clocks of an SM; the tensor cores take 4.8, conversions
// 4. A profile on an H200, 2026-11-16, 32,768 keys of each of 128 requests: 149 us, of which keys and scores take 137;
// L2 is 86 % busy, the tensor cores 51 %; warps wait for the tensor cores a quarter of the time. The clock is 1.59 GHz
// of 1.98, because the GPU is at its power limit (docs/performance.md): 262,144 keys of 128 requests take 1,146 us
// after pauses, else 1,226.
#include <cstdint>

#include "backend/cuda/index/epilogue.cuh"
#include "backend/cuda/index/fp8_fast.cuh"
#include "backend/cuda/index/grid.cuh"
#include "backend/cuda/index/kernels.h"
#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/scheduler.cuh"
#include "backend/cuda/index/speculative_record.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/topk/rescore.cuh"

namespace kv4::cuda {
namespace {

constexpr int kKeyBytes = kWidth, kStages = 3, kSteps = kWidth / 16;
using Keys = KeyPipeline<FourWarpgroups, kKeyBytes, kStages, true>;
using FewKeys = KeyPipeline<FourWarpgroups, kKeyBytes, kStages, false>;

struct Shared {
  std::uint8_t q[2][kHeads * 128];  // wgmma operands: halves of the channels, fp16, rows with swizzled chunks
  Keys::Ring ring;
  float weights[ops::kChains][ops::kChainHeads];  // a head's weight times its scale and 2^kDotShift
  SchedulerShared scheduler;
  std::uint32_t largest;  // largest scale of the CTA's keys of a token, as bits
  int split;              // the index of the CTA's split among the token's splits
};
static_assert(offsetof(Shared, q) == 0 && offsetof(Shared, ring) % 16 == 0 && sizeof(Shared) <= 227 << 10);

// --- products

__device__ void multiply_tile(float (&d)[32], const std::uint32_t (&a)[kSteps][4], const std::uint64_t (&queries)[2]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_fence();
  wgmma<MmaType::fp16, 64, false>(d, a[0], queries[0], false);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) wgmma<MmaType::fp16, 64, false>(d, a[i], queries[i / 4] + (32 >> 4) * (i % 4), true);
  wgmma_commit();
  wgmma_wait<0>();
  keep_behind_wait(d);
#endif
}

/// The score of the lane's own key without the key's scale. The codes of the warp's 32 keys lie at `stage`.
__device__ __forceinline__ float score_kv_tile(std::uint32_t stage, std::uint32_t chunk_at,
                                               const std::uint64_t (&queries)[2],
                                               const float (&weights)[ops::kChainHeads], int c) {
  float sum[kKeysPerQuad];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t a[kSteps][4];
    load_fp16_keys(stage, chunk_at, half, a);
    float products[32] = {};  // costs no instruction: the first k-step does not read them
    multiply_tile(products, a, queries);
    add_heads(products, weights, sum[2 * half], sum[2 * half + 1]);
  }
  return add_chains(sum, c);
}

/// Scores the assigned KV tiles of one token into `row`. It overwrites the queries in Shared and leaves s.largest
/// visible to all threads. If the assignment is speculative, keys and address belong to it. While keys and queries are
/// in flight, one thread calls note(), and all threads call keep(part of a head, head, part). If the validation fails,
/// renew(assignment) corrects the assignment, or returns false because the token has changed too.
template <bool kMaxima, class Keys, class Note, class Keep, class Renew>
__device__ bool score_kv_tiles(Shared& s, const TokenTile& tile, const Pages& pages, Assignment& assignment,
                               const SpeculativeRecord& speculative, Keys& keys, Fp8QueryAddress& address, float* row,
                               Note&& note, Keep&& keep, Renew&& renew) {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // keeps addresses out of registers from token to token
  const int warpgroup = thread / 128, lane = thread % 32, c = lane % kQuad;
  if (!speculative.is_there) {
    keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
    address = Fp8QueryAddress(tile, assignment.token, thread / kHeadLanes, thread % kHeadLanes);
  }
  // Loads return in order, so small ones are issued before the keys.
  RawChannels<kLaneChannels> raw[1];
  address.load(tile.p, raw);
  address.drop();
  Validation validation(tile, keys, speculative);
  keys.begin(speculative.is_there ? speculative.ids : keys.first_ids());
  if (threadIdx.x == 0) {
    s.largest = 0;
    note();
  }
  const bool holds = validation.holds(speculative);
  QueryPart query[1];
  make_queries(tile, raw, query);
  put_fp16_query(s, query[0], thread / kHeadLanes, thread % kHeadLanes);
  keep(query[0], thread / kHeadLanes, thread % kHeadLanes);
#if __CUDA_ARCH__ >= 900
  fence_async_proxy();
#endif
  if (!__syncthreads_and(holds)) {
    wait_for_all_copies();
    if (!renew(assignment)) return false;
    keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
    keys.begin(keys.first_ids());
  }
  const int scored = assignment.scored, kv_tiles = kv_tiles_of_warpgroup<FourWarpgroups>(assignment, warpgroup);
  const std::uint64_t queries[2] = {operand_of(s.q[0]), operand_of(s.q[1])};
  float weights[ops::kChainHeads];
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) weights[i] = s.weights[c][i];
  int key = keys.first_key(0) + static_cast<int>(Keys::own_key());  // the lane's own key
  float* to = row + key;
  float* const maxima = kMaxima ? maxima_of(tile, assignment.token, scored) : nullptr;
  const int group = group_size(scored);
  const std::uint32_t chunk_at = first_chunk(lane);
  std::uint32_t largest = 0;

  for (int i = 0; i < kv_tiles; ++i, key += FourWarpgroups::kStep, to += FourWarpgroups::kStep) {
    const std::uint32_t stage = keys.wait_next(), scale = keys.scales();
    keys.refill(i);
    const float total = score_kv_tile(stage, chunk_at, queries, weights, c) * codec::bits_float(scale);
    if (key < scored) {
      *to = total;
      largest = max(largest, is_out_of_range(scale) ? kOutOfRangeScale : scale);
    }
    if (maxima != nullptr) write_maxima(maxima, keys.first_key(i), group, key < scored ? total : kNoScore);
  }
  wait_for_all_copies();
  largest = __reduce_max_sync(kAllLanes, largest);
  if (lane == 0) atomicMax(&s.largest, largest);
  __syncthreads();  // queries may be overwritten
  return true;
}

__global__ void __launch_bounds__(kScoreThreads, 1)
    score_fp8_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const int thread = static_cast<int>(threadIdx.x);
  SpeculativeRecord speculative;
  Assignment first = assign_tiles_speculatively<FourWarpgroups>(s.scheduler, tile, speculative);
  Keys keys = keys_of<Keys>(s.ring, pages, first, thread / 128);
  speculative.ids = keys.speculative_ids();
  touch(tile);
  touch(pages);
  prefetch_queries(tile, first.token);
  keys.prefetch<kStages - 1>(speculative.ids);
  Fp8QueryAddress address(tile, first.token, thread / kHeadLanes, thread % kHeadLanes);
  grid_dependency_wait_after(address.made());
  launch_dependents();
  if (!speculative.is_there) first = assign_tiles_after_wait<FourWarpgroups>(s.scheduler, tile);
  for_each_assignment<FourWarpgroups>(
      s.scheduler, tile, first, speculative, [&](int token) { prefetch_queries(tile, token); },
      [&](Assignment& assignment, const SpeculativeRecord& speculative) {
        if (!score_kv_tiles<true>(
                s, tile, pages, assignment, speculative, keys, address, tile.row(assignment.token),
                [&] { s.split = split_index(assignment); }, [](const QueryPart&, int, int) {},
                [](Assignment&) { return false; }))
          return false;
        if (threadIdx.x > 0) return true;
        const int split = s.split;
        LargestScales& scales = *tile.largest_scales(assignment.token);
        scales.of_split[split] = s.largest;
        if (assignment.kv_tile + assignment.count == kv_tiles_of(assignment.scored)) scales.splits = split + 1;
        return true;
      });
}

// --- scores and selection

// A cluster takes a token of up to kRowNumbers keys, as in mxfp4.cu; its first CTA selects. The key pipeline leaves no
// room for scores in shared memory, so scores pass through L2. 8,192 keys on an H200, 2026-11-16: 16.3 us for 16
// tokens, 27.8 for 64, 45.8 for 128. When 16 tokens took 17.8, the scores were 14,400 clocks and the selection 13,300.

constexpr int kMaxTableBlocks = kRowNumbers / kWarpKeys;  // in the part of the block table that a token needs
struct TopkShared {
  union {
    Shared scoring;
    struct {
      std::uint8_t operands[sizeof(Shared::q)];
      RescoreShared rescore;  // overlays the key ring
    };
  };
  RescoreQueries queries;
  std::uint32_t largest[kMaxClusterCtas];  // largest scales of the cluster's CTAs, in the first CTA
  std::int32_t table[kMaxTableBlocks];     // block table of the token's request
};
static_assert(offsetof(TopkShared, rescore) + sizeof(RescoreShared) <= offsetof(Shared, weights));
static_assert(sizeof(TopkShared) <= 227 << 10);

__global__ void __launch_bounds__(kScoreThreads, 1)
    topk_of_fp8_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages, int ctas) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  TopkShared& s = *reinterpret_cast<TopkShared*>(bytes);
  cluster_arrive_relaxed();
  const int token = static_cast<int>(blockIdx.x) / ctas, rank = cta_rank();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, top = tile.p.top;
  SpeculativeRecord speculative;
  Assignment assignment = assign_cluster_tiles_speculatively(tile, ctas, token, speculative);
  FewKeys keys = keys_of<FewKeys>(s.scoring.ring, pages, assignment, warp / 4);
  speculative.ids = keys.speculative_ids();
  touch(tile);
  touch(pages);
  prefetch_queries(tile, token);
  keys.prefetch<kStages - 1>(speculative.ids);
  Fp8QueryAddress address(tile, token, thread / kHeadLanes, thread % kHeadLanes);
  grid_dependency_wait_after(address.made());
  launch_dependents();
  const auto copy_table = [&] {
    const int table_blocks = tile.p.step.blocks_per_request;
    static_assert(kMaxTableBlocks <= kScoreThreads);
    if (rank == 0 && thread < table_blocks)
      copy_async<4>(shared_address(&s.table[thread]),
                    tile.p.step.block_table + std::int64_t{assignment.request} * table_blocks + thread);
  };
  if (!speculative.is_there) assignment = assign_cluster_tiles_after_wait(tile, ctas, token);
  if (assignment.count > 0) {
    copy_table();  // in one cp.async group with the first keys
    score_kv_tiles<false>(
        s.scoring, tile, pages, assignment, speculative, keys, address, tile.row(token), [] {},
        [&](const QueryPart& query, int head, int part) { s.queries.put(query, head, part); },
        [&](Assignment& anew) {
          anew = assign_cluster_tiles_after_wait(tile, ctas, token);
          if (anew.count > 0) copy_table();
          return true;
        });
  }
  if (assignment.scored == 0) {
    if (rank == 0) take_whole_after_wait(tile, token);
    return;
  }
  cluster_wait_diverged();
  if (thread == 0) shared_of_cta(s, 0).largest[rank] = assignment.count > 0 ? s.scoring.largest : 0;
  cluster_arrive_diverged();
  if (rank > 0) return;

  // The error bounds are made while the other CTAs finish.
  RescoreShared& rescore = s.rescore;
  rescore.clear();
  make_error_bounds(rescore, s.queries, tile.p.num_heads);
  cluster_wait_diverged();
  const int count = assignment.scored;
  const Choice choice{tile, token, assignment.request};
  float* const row = tile.row(token);
  float held[RescoreShared::Row::kHeld];
  load_fours<kScoreThreads>(row, count, true, held);
  if (count % 4 != 0) mask_last_four<RescoreShared::Row>(count, held);
  const std::uint32_t largest = __reduce_max_sync(kAllLanes, thread % 32 < ctas ? s.largest[thread % 32] : 0);
  const FoursSource<RescoreShared::Row> source{held, count};
  const Bounds bounds = find_top_bounds(rescore.row, source, top);
  const ErrorBound error_bound = error_bound_of(s.queries, largest);
  const TokenKeys token_keys{tile, s.table};
  if (error_bound.holds && take_best_rescored(rescore, s.queries, source, bounds, token_keys, choice, error_bound.size))
    return;
  rescore_row(rescore, s.queries, token_keys, row, count, error_bound, choice);
}

/// Ambiguous candidates are read a second time. If all keys fit into L2, they are kept there: 16 x 8,192 keys went from
/// 18.35 to 17.5 us; 64 tokens would go from 29.4 to 31.4. H200, 2026-11-16, `kv4_gpu_bench --only index`.
Pages make_rescored_pages(const TokenTile& tile) {
  constexpr std::int64_t kSmall = std::int64_t{24} << 20;
  Pages pages = make_pages(tile);
  if (total_kv_tiles(tile) * kBlockKV * kKeyBytes <= kSmall) pages.policy = kEvictNormal;
  return pages;
}

}  // namespace

cudaError_t score_fp8(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  const unsigned ctas = std::min(score_ctas(tile, device), static_cast<unsigned>(LargestScales::kMaxSplits));
  return launch_score_kernel<Shared>(score_fp8_keys, ctas, kScoreThreads, tile, make_rescored_pages(tile), stream);
}

cudaError_t topk_fp8(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_topk<TopkShared>(topk_of_fp8_keys, cluster_ctas(tile, device), tile, make_rescored_pages(tile), stream);
}

}  // namespace kv4::cuda
