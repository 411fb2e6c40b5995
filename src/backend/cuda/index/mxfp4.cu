// Index scores of mxfp4 keys of 128 channels on Hopper. Integer matrix products are exact, so the scores have the bits
// of ops/score_row.h.
//
// A key's codes times 2 are whole numbers up to 12. The largest group scale of the key is the reference: a group d
// binades below it is shifted left by 3 - d, which gives even numbers up to 96. A query's head is shifted likewise, and
// its numbers may be odd. The products add up to less than 2^22 in integers. fp32 holds such sums exactly, so the group
// sums of ops/score_row.h in fp32 give the same. Powers of two are factored out: the power of a head goes into its
// weight, the power of a key multiplies the total. Groups of zeros fit any scale. A key is out of range if
// its groups span more than two binades, a token if its heads span more than three or its scales and weights are near
// the ends of fp32; score_out_of_range scores them after a warp's KV tiles of the token.
//
// A warpgroup takes a KV tile of 128 keys at a time, 32 of each warp, in two halves of 64 keys x 64 heads: 4 wgmma of
// m64n64k32 each. Keys are the register operand: lane c of a quad loads the 16 bytes of its row's group c and supplies
// them as channels 4c .. 4c + 3 and 16 + 4c .. 16 + 4c + 3 of the k-steps; queries lie in shared memory with their
// channels in that order. Two byte permutes look up four codes: the packed nibbles are the selector, and their top bit
// (the sign) turns the looked-up byte into zero. The order of heads makes the accumulators of a lane one chain of
// heads. The bits of an accumulator, read as a float, are its value times 2^-149, or NaN if the value is negative; one
// saturating addition of zero is the relu.
//
// Pipeline: one CTA of four warpgroups per SM; two warpgroups if rows are short and nothing is selected
// (warpgroups.cuh). Each warpgroup has its own keys. While the tensor cores multiply one half of a KV tile, the warps
// expand the codes of the next half, so a warpgroup hardly waits for the tensor cores. There is one set of accumulators
// and the weights stay in shared memory, because registers are short. Each warp copies keys of three KV tiles ahead
// into its own ring (cp.async) and needs no barrier but its own. All CTAs take equal ranges of the work tiles of all
// tokens.
//
// For wgmma in flight across loop iterations, the compiler must know that the trip count is the same in all lanes of a
// warp; otherwise it waits after each wgmma.
//
// Bound by power, at 1.72 GHz of 1.98 (docs/performance.md), and by no single pipe: about 235 instructions per warp and
// 16 keys at 2.5 per clock, of which 64 add heads and 72 look up codes; 7 % fewer instructions gave 0 to 3 %. Permutes
// and shifts share a pipe of 16 lanes, so complements and sums are multiplications, which use another pipe.
#include <cstdint>

#include "backend/cuda/index/epilogue.cuh"
#include "backend/cuda/index/grid.cuh"
#include "backend/cuda/index/kernels.h"
#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/index/mxfp4_codes.cuh"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/scheduler.cuh"
#include "backend/cuda/index/speculative_record.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/topk/radix_select.cuh"
#include "backend/cuda/topk/single_pass_select.cuh"

namespace kv4::cuda {
namespace {

using namespace mxfp4;

constexpr int kStages = 4;
template <class Cta>
using Keys = KeyPipeline<Cta, kKeyBytes, kStages, true>;
using FewKeys = KeyPipeline<FourWarpgroups, kKeyBytes, kStages, false>;

// --- shared memory

template <class Cta>
struct alignas(16) Shared : Queries {
  alignas(16) typename Keys<Cta>::Ring ring;
  SchedulerShared scheduler;
};

// --- products

using Products = std::int32_t[32];

/// Starts the wgmma of half a KV tile. Neither products nor keys may be touched before wait_for_products.
__device__ void start_products(Products& d, const Operand& a, std::uint64_t queries) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_fence();
  wgmma<MmaType::s8, 64>(d, a[0], queries, false);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) wgmma<MmaType::s8, 64>(d, a[i], queries + (32 >> 4) * i, true);
  wgmma_commit();
#endif
}

__device__ void wait_for_products(Products& d) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait<0>();
  keep_behind_wait(d);
#endif
}

/// Adds one chain of heads for two keys.
__device__ void add_heads(const Products& d, std::uint32_t shared, int chain, float& first, float& second) {
  const std::uint32_t from = shared + offsetof(Queries, weights) + sizeof(Queries::weights[0]) * chain;

  const auto add = [](float& sum, std::int32_t product, float weight) {
    sum = codec::fused(weight, saturate(__int_as_float(product)), sum);
  };
  first = second = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; i += 4) {
    const uint4 four = load_shared16(from + sizeof(float) * i);
    const float weights[4] = {codec::bits_float(four.x), codec::bits_float(four.y), codec::bits_float(four.z),
                              codec::bits_float(four.w)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = (i + j) / 2 * 4 + j % 2;
      add(first, d[at], weights[j]);
      add(second, d[at + 2], weights[j]);
    }
  }
}

/// Expands a lane's part of one half of a KV tile; the lane's codes begin at `stage`. is_wanted is always true, but the
/// compiler takes it for a branch and therefore does not move the code behind the next wait for products.
__device__ void expand_tile(std::uint32_t shared, std::uint32_t stage, const KVTileScales& scales, int tile,
                            bool is_wanted, Operand& a) {
  if (is_wanted) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = 2 * tile + k;
      const uint4 codes = load_shared16(stage + 512 * row);
      const Lookup lookup(
          load_shared16(shared + offsetof(Queries, lookups) + permute_bytes(scales.lookups, 0, 0x4440u + row)));
      expand(lookup, codes.x, a[0][k], a[0][2 + k]);
      expand(lookup, codes.y, a[1][k], a[1][2 + k]);
      expand(lookup, codes.z, a[2][k], a[2][2 + k]);
      expand(lookup, codes.w, a[3][k], a[3][2 + k]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) asm volatile("" : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3]));
  }
}

/// Goes over a warp's keys in `kv_tiles` KV tiles, kStep keys apart from first_key on. If a group with nonzero codes is
/// out of range, or `everywhere`, it writes exact sums; otherwise the score stays. Keys of zeros score zero whatever
/// their scales.
template <class Cta>
__device__ void score_out_of_range(const Queries& s, const TokenTile& tile, const Pages& pages,
                                   const Assignment& assignment, float* scores, int first_key, int kv_tiles,
                                   bool everywhere) {
  const int scored = assignment.scored;
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane % kGroups;
  const int own = static_cast<int>(Keys<Cta>::own_key());
  const std::int32_t* table = pages.table + std::int64_t{assignment.request} * pages.blocks_per_request;
  const std::uint32_t row = pages.row_of(first_key);
  float* const maxima = maxima_of(tile, assignment.token, scored);
  for (; kv_tiles > 0 && first_key < scored; --kv_tiles, first_key += Cta::kStep) {
    const std::int32_t block = table[first_key >> pages.block_shift];
    if (block < 0) continue;
    const std::uint8_t* keys = pages.payload_of(static_cast<std::uint32_t>(block)) + kKeyBytes * row;
    const std::uint8_t* scales = pages.scale_of(static_cast<std::uint32_t>(block)) + kGroups * row;
    const auto largest_of = [&](int key) {
      return largest_byte(*reinterpret_cast<const std::uint32_t*>(scales + kGroups * key));
    };
    bool out_of_range = everywhere;
    for (int key = lane / kGroups; key < min(scored - first_key, kWarpKeys); key += 8) {
      const std::uint32_t largest = largest_of(key);
      out_of_range |= (largest - scales[kGroups * key + c] > kKeyShift || is_extreme(largest)) &&
                      any_code(*reinterpret_cast<const uint4*>(keys + kKeyBytes * key + 16 * c));
    }
    const bool is_seen = first_key + own < scored;
    float* const to = scores + first_key + own;
    float total = 0.0f;
    if (__any_sync(kAllLanes, out_of_range)) {
      float sum[kKeysPerQuad];
      for (int i = 0; i < kKeysPerQuad; ++i) {
        const int key = lane / kGroups + 8 * i;
        sum[i] = exact_chain(s, keys + kKeyBytes * key, scales + kGroups * key, c, tile.p.num_heads);
      }
      total = codec::canonical_nan(add_chains(sum, c));
    } else if (is_seen && !is_extreme(largest_of(own))) {
      total = *to;
    }
    if (is_seen) *to = total;
    if (maxima != nullptr) write_maxima(maxima, first_key, group_size(scored), is_seen ? total : kNoScore);
  }
}

/// Scores the assigned KV tiles of one token into `row`, and overwrites the queries in Shared. If the validation of a
/// speculative assignment fails, renew(assignment) corrects it, or returns false because the token has changed too.
template <class Keys, int kLanes, class Renew>
__device__ bool score_kv_tiles(Shared<typename Keys::Cta>& s, const TokenTile& tile, const Pages& pages,
                               Assignment& assignment, const SpeculativeRecord& speculative, float* row,
                               Renew&& renew) {
  using Cta = typename Keys::Cta;
  static_assert(Cta::kThreads >= kHeads * kLanes && kHeads * kLanes % 32 == 0);
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // keeps addresses out of registers from token to token
  const int warpgroup = thread / 128, lane = thread % 32, c = lane % kGroups, head = thread / kLanes;
  Keys keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
  // Loads return in order. Small loads first are faster with two warpgroups (16 tokens of 8,192 keys went from 8.1 to
  // 7.4 us) and slower with four and a selection (32,768 keys went from 25.2 to 25.9).
  constexpr bool kSmallFirst = Cta::kThreads < FourWarpgroups::kThreads;
  RawPart<kLanes> raw[1];
  QueryAddress<kKeyBytes, kWidth / kLanes>(tile, assignment.token, head, thread % kLanes).load(tile.p, raw);
  if constexpr (!kSmallFirst) keys.begin(speculative.is_there ? speculative.ids : keys.first_ids());
  Validation validation(tile, keys, speculative);
  if constexpr (kSmallFirst) keys.begin(speculative.is_there ? speculative.ids : keys.first_ids());
  const bool fits = head >= kHeads || prepare_head<kLanes>(s, tile, raw[0], head, thread % kLanes);
#if __CUDA_ARCH__ >= 900
  fence_async_proxy();
#endif
  const bool holds = validation.holds(speculative);
  bool in_range = __syncthreads_and(fits && holds);
  if (speculative.is_there && !in_range) {
    in_range = __syncthreads_and(fits);
    if (!__syncthreads_and(holds)) {
      wait_for_all_copies();
      if (!renew(assignment)) return false;
      keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
      keys.begin(keys.first_ids());
    }
  }
  const int scored = assignment.scored, kv_tiles = kv_tiles_of_warpgroup<Cta>(assignment, warpgroup);
  std::uint32_t shared = shared_address(&s);
  asm("" : "+r"(shared));  // kept in a register, not recomputed at each use
  const std::uint64_t queries = operand_at(shared);
  float* const maxima = maxima_of(tile, assignment.token, scored);
  const int in_range_tiles = __shfl_sync(kAllLanes, in_range ? kv_tiles : 0, 0);
  int first_out_of_range = in_range_tiles;  // the first KV tile with keys out of range
  // While the tensor cores multiply half a KV tile, the codes of the next half are expanded.
  Products products = {};
  std::uint32_t largest = 0;
  float sum[kKeysPerQuad];
  const auto finish_kv_tile = [&](int i) {
    add_heads(products, shared, c, sum[2], sum[3]);
    const float total = add_chains(sum, c) * codec::bits_float((largest + (kSumShift - kKeyShift - 2)) << 23);
    const int key = keys.first_key(i) + static_cast<int>(Keys::own_key());
    if (key < scored) row[key] = total;
    if (maxima != nullptr) write_maxima(maxima, keys.first_key(i), group_size(scored), key < scored ? total : kNoScore);
  };
  for (int i = 0; i < in_range_tiles; ++i) {
    Operand a, b;
    const std::uint32_t stage = keys.wait_next() + 16 * lane;
    const KVTileScales scales(keys.scales(), c);
    keys.refill(i);
    if (__any_sync(kAllLanes,
                   scales.are_out_of_range() && keys.first_key(i) + static_cast<int>(Keys::own_key()) < scored))
      first_out_of_range = min(first_out_of_range, i);
    expand_tile(shared, stage, scales, 0, pages.block_shift >= 0, a);
    wait_for_products(products);
    if (i > 0) finish_kv_tile(i - 1);
    largest = scales.largest;
    start_products(products, a, queries);
    expand_tile(shared, stage, scales, 1, pages.block_shift >= 0, b);
    wait_for_products(products);
    add_heads(products, shared, c, sum[0], sum[1]);
    start_products(products, b, queries);
  }
  wait_for_products(products);
  if (in_range_tiles > 0) finish_kv_tile(in_range_tiles - 1);
  wait_for_all_copies();
  if (first_out_of_range < kv_tiles)
    score_out_of_range<Cta>(s, tile, pages, assignment, row, keys.first_key(first_out_of_range),
                            kv_tiles - first_out_of_range, !in_range);
  __syncthreads();  // queries may be overwritten
  return true;
}

// Warps that prepare queries. With four lanes per head the other warps would wait for them.
constexpr int kPreparing = kHeads * kGroups / 32;

template <class Cta, int kLanes>
__global__ void __launch_bounds__(Cta::kThreads, FourWarpgroups::kThreads / Cta::kThreads)
    score_mxfp4_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages) {
  constexpr int kHelpers = Cta::kWarps - kPreparing;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared<Cta>& s = *reinterpret_cast<Shared<Cta>*>(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  SpeculativeRecord speculative;
  Assignment first = assign_tiles_speculatively<Cta>(s.scheduler, tile, speculative);
  const Keys<Cta> keys = keys_of<Keys<Cta>>(s.ring, pages, first, warp / 4);
  if constexpr (kHelpers == 0) speculative.ids = keys.speculative_ids();
  touch(tile);
  touch(pages);
  prefetch_queries(tile, first.token);
  if constexpr (kHelpers == 0) {
    keys.template prefetch<kStages - 1>(speculative.ids);
  } else {
    if (warp >= kPreparing) prefetch_first_keys<Cta, kKeyBytes, kStages - 1, kHelpers>(first, pages, warp - kPreparing);
    speculative.ids = keys.speculative_ids();
  }
  if (thread < kLookups) s.lookups[thread] = Lookup((1u << kKeyShift) >> thread);
  grid_dependency_wait();
  launch_dependents();
  // Warps that do not prepare queries have nothing else to do now.
  if (kHelpers > 0 && tile.fill && warp >= kPreparing) fill_tail(tile, thread - 32 * kPreparing, 32 * kHelpers);
  if (!speculative.is_there) first = assign_tiles_after_wait<Cta>(s.scheduler, tile);
  for_each_assignment<Cta>(
      s.scheduler, tile, first, speculative, [&](int token) { prefetch_queries(tile, token); },
      [&](Assignment& assignment, const SpeculativeRecord& speculative) {
        return score_kv_tiles<Keys<Cta>, kLanes>(s, tile, pages, assignment, speculative, tile.row(assignment.token),
                                                 [](Assignment&) { return false; });
      });
  if (kHelpers == 0 && tile.fill) fill_tail(tile, thread, Cta::kThreads);
}

// --- scores and selection

// A cluster takes a token of up to kRowNumbers keys. Scores go straight to the shared memory of its first CTA, which
// selects from them: there is no second launch, and nothing waits for memory between scoring and selection. It is used
// for as many tokens as keep more than half of the SMs busy; the keys of fewer tokens are better split over all SMs.
// 8,192 keys on an H200, 2026-11-16, us of two launches and of one: 12 tokens 15.1 and 12.0, 24 tokens 19.4 and 15.0,
// 40 tokens 23.6 and 20.4, 64 tokens 26.0 and 22.2, 128 tokens 39.5 and 34.8; but 8 tokens 10.8 and 11.8, and one token
// by 16 CTAs 8.8 and 9.5.

struct TopkShared {
  static constexpr int kThreads = kScoreThreads, kHeld = kRowNumbers / kThreads;
  Shared<FourWarpgroups> scoring;
  Selection<kThreads> selection;
  alignas(16) float row[kRowNumbers];
};
static_assert(sizeof(TopkShared) <= 227 << 10);

/// The memory that take_best works in; its lists overlay the memory of scoring.
struct TopkLists {
  static constexpr int kThreads = kScoreThreads, kHeld = TopkShared::kHeld, kWarpRoom = kListRoom / kScoreWarps;
  using Scores = float[kScoreWarps][kWarpRoom];
  using Entries = std::int32_t[kScoreWarps][kWarpRoom];
  static_assert(sizeof(Scores) + sizeof(Entries) <= sizeof(Shared<FourWarpgroups>));
  Selection<kThreads>& selection;
  Scores& scores;
  Entries& entries;

  __device__ explicit TopkLists(TopkShared& s)
      : selection(s.selection),
        scores(*reinterpret_cast<Scores*>(&s.scoring)),
        entries(*reinterpret_cast<Entries*>(reinterpret_cast<unsigned char*>(&s.scoring) + sizeof(Scores))) {}
};

__global__ void __launch_bounds__(kScoreThreads, 1)
    topk_of_mxfp4_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages, int ctas) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  TopkShared& s = *reinterpret_cast<TopkShared*>(bytes);
  cluster_arrive_relaxed();
  const int token = static_cast<int>(blockIdx.x) / ctas, warp = static_cast<int>(threadIdx.x / 32);
  SpeculativeRecord speculative;
  Assignment assignment = assign_cluster_tiles_speculatively(tile, ctas, token, speculative);
  touch(tile);
  touch(pages);
  prefetch_queries(tile, token);
  if (warp >= kPreparing)
    prefetch_first_keys<FourWarpgroups, kKeyBytes, kStages - 1, kScoreWarps - kPreparing>(assignment, pages,
                                                                                          warp - kPreparing);
  speculative.ids = keys_of<FewKeys>(s.scoring.ring, pages, assignment, warp / 4).speculative_ids();
  s.selection.clear();
  if (threadIdx.x < kLookups) s.scoring.lookups[threadIdx.x] = Lookup((1u << kKeyShift) >> threadIdx.x);
  grid_dependency_wait();
  launch_dependents();
  cluster_wait_diverged();
  if (!speculative.is_there) assignment = assign_cluster_tiles_after_wait(tile, ctas, token);
  if (assignment.count > 0)
    score_kv_tiles<FewKeys, kGroups>(s.scoring, tile, pages, assignment, speculative, shared_of_cta(s, 0).row,
                                     [&](Assignment& anew) {
                                       anew = assign_cluster_tiles_after_wait(tile, ctas, token);
                                       return true;
                                     });
  cluster_arrive_diverged();
  if (cta_rank() > 0) return;
  cluster_wait_diverged();

  if (assignment.scored == 0) return take_whole_after_wait(tile, token);
  const int count = assignment.scored, top = tile.p.top;
  const Choice choice{tile, token, assignment.request};
  float held[TopkShared::kHeld];
  load_fours<kScoreThreads>(s.row, count, true, held);
  if (count % 4 != 0) mask_last_four<TopkLists>(count, held);
  TopkLists lists(s);
  const FoursSource<TopkLists> source{held, count};
  if (take_best(lists, source, find_top_bounds(lists, source, top), choice)) return;
  select_from_row(s.selection, s.row, count, Bounds(), choice);
}

template <class Cta, int kLanes>
cudaError_t launch_variant(const TokenTile& tile, unsigned ctas, cudaStream_t stream) {
  return launch_score_kernel<Shared<Cta>>(score_mxfp4_keys<Cta, kLanes>, ctas, Cta::kThreads, tile, make_pages(tile),
                                          stream);
}

}  // namespace

// The thresholds were chosen on an H200, 2026-11-15 and 16; to check them, change one and compare
// `kv4_gpu_bench --only index`.
cudaError_t score_mxfp4(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  const unsigned ctas = score_ctas(tile, device);
  constexpr int kFewTokens = 4;
  const std::int64_t kv_tiles = total_kv_tiles(tile),
                     few_kv_tiles = tile.fill ? 1 : 32;  // per CTA; filling delays helpers
  if (tile.count <= kFewTokens && kv_tiles <= few_kv_tiles * ctas && tile.p.step.num_items == tile.p.step.num_tokens)
    return launch_variant<FourWarpgroups, 2 * kGroups>(tile, ctas, stream);
  // Two warpgroups only without a selection, which would leave room for two such CTAs on some SMs and for none on
  // others. From 16 KV tiles per CTA on, four warpgroups are as fast or faster.
  if (tile.fill && can_use_two_warpgroups(tile, device, 8))
    return launch_variant<TwoWarpgroups, kGroups>(tile, ctas, stream);
  return launch_variant<FourWarpgroups, kGroups>(tile, ctas, stream);
}

cudaError_t topk_mxfp4(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_topk<TopkShared>(topk_of_mxfp4_keys, cluster_ctas(tile, device), tile, make_pages(tile), stream);
}

}  // namespace kv4::cuda
