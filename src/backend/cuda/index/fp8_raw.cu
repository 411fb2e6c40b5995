// Raw fast scores of fp8 keys of 128 channels on Hopper, in one launch, for a caller that takes scores within an error
// bound (docs/formats.md). The tensor cores multiply the e4m3 codes and keep about 14 bits of the sums.
//
// Scales are factored out: the scale of a head goes into its weight, the scale of a key multiplies the total. The
// kernel itself computes exact scores where the error bound does not hold: for all keys of a token with a head out of
// range, and, after a warp's KV tiles, for its keys whose scale is out of range.
//
// KV tiles are scored as in mxfp4.cu: 64 keys x 64 heads are 4 wgmma of m64n64k32. Lane c of a quad loads 16 bytes of
// each half of its row and supplies them as channels 4c .. 4c + 3 and 16 + 4c .. 16 + 4c + 3 of the k-steps; queries
// lie in shared memory with their channels in that order. While the tensor cores multiply the second half of a KV tile,
// the heads of the first half are added.
//
// Long rows are bound by bytes: 132 of a key and 4 of its score, 98 to 100 % of the copy speed; one CTA of two
// warpgroups per SM reaches 98 % of that. Short rows are bound by prologue and epilogue. Clocks of a 2-warpgroup CTA on
// an H200, 2026-11-16, 16 tokens of 8,192 keys, encoded queries: 8,300 before the grid dependency wait, beside the
// launch before. After the wait: key loads are issued at 2,000, queries are in place at 2,900, the first KV tile begins
// at 5,800, four KV tiles of each warpgroup are done at 11,400, the end is at 11,800, and the wait of the next launch
// ends 3,000 later. Three things mattered. Loads return in order, so small ones are issued before the keys (2,000
// clocks). Divisions and addresses come before the wait. No value of the first assignment stays in registers behind the
// wait, because a load that is spilled at once is waited for.
#include <cstdint>

#include "backend/cuda/index/epilogue.cuh"
#include "backend/cuda/index/fp8_codes.cuh"
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
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/rows/decode.cuh"

namespace kv4::cuda {
namespace {

using namespace fp8;

constexpr int kStages = 3;

template <class CtaOf>
struct Shared {
  using Cta = CtaOf;
  using Keys = KeyPipeline<Cta, kKeyBytes, kStages, true>;
  std::uint8_t q[kHeads * kWidth];  // wgmma operand, rows with swizzled chunks
  typename Keys::Ring ring;
  float weights[ops::kChains][ops::kChainHeads];  // a head's weight times its scale and 2^kDotShift
  float scales[kHeads], plain_weights[kHeads];    // as given, for exact scores
  SchedulerShared scheduler;
};
template <class Cta>
constexpr bool kFits = offsetof(Shared<Cta>, q) == 0 && offsetof(Shared<Cta>, ring) % 16 == 0 &&
                       (sizeof(Shared<Cta>) + 1024) * (FourWarpgroups::kThreads / Cta::kThreads) <= 228 << 10;
static_assert(kFits<FourWarpgroups> && kFits<TwoWarpgroups>);

// --- queries

/// Writes a lane's part of a token's queries to shared memory.
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

__device__ void wait_for_products(float (&d)[32]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait<0>();
  keep_behind_wait(d);
#endif
}

/// Starts the wgmma of half a KV tile. Neither products nor keys may be touched before wait_for_products.
__device__ void start_products(float (&d)[32], const Operand& a, std::uint64_t queries) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_fence();
  wgmma<MmaType::e4m3, 64>(d, a[0], queries, false);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) wgmma<MmaType::e4m3, 64>(d, a[i], queries + (32 >> 4) * i, true);
  wgmma_commit();
#endif
}

/// The score of the lane's own key without the key's scale. The codes of the warp's 32 keys lie at `stage`.
__device__ __forceinline__ float score_kv_tile(std::uint32_t stage, std::uint32_t chunk_at, std::uint64_t queries,
                                               const float (&weights)[ops::kChainHeads], int c) {
  float sum[kKeysPerQuad], products[2][32];
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

// --- out of range

/// Writes exact scores of a warp's keys in `kv_tiles` KV tiles from first_key on: of keys whose scale is out of range,
/// or of all keys.
template <class Shared>
__device__ __noinline__ void score_out_of_range(const Shared& s, const Pages& pages, int request, int scored,
                                                float* row, int first_key, int kv_tiles, bool everywhere) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int32_t* table = pages.table + std::int64_t{request} * pages.blocks_per_request;
  const std::uint32_t in_block = pages.row_of(first_key);
#pragma unroll 1
  for (; kv_tiles > 0 && first_key < scored; --kv_tiles, first_key += Shared::Cta::kStep) {
    const std::int32_t block = table[first_key >> pages.block_shift];
    if (block < 0) continue;
    const std::uint8_t* keys = pages.payload_of(static_cast<std::uint32_t>(block)) + kKeyBytes * in_block;
    const std::uint32_t scale = reinterpret_cast<const std::uint32_t*>(
        pages.scale_of(static_cast<std::uint32_t>(block)) + kKeyScaleBytes * in_block)[lane];
    unsigned todo = __ballot_sync(kAllLanes, first_key + lane < scored && (everywhere || is_out_of_range(scale)));
    for (; todo != 0; todo &= todo - 1) {
      const int key = __ffs(static_cast<int>(todo)) - 1;
      const float score = exact_score(s, keys + kKeyBytes * key, codec::bits_float(__shfl_sync(kAllLanes, scale, key)));
      // The lane that wrote the fast score writes the exact one.
      if (static_cast<int>(Shared::Keys::own_key()) == key) row[first_key + key] = score;
    }
  }
}

// --- the kernel

/// CTAs of two warpgroups are speculative. Before the grid dependency wait they compute the assignment from the records
/// and block table of that moment and prefetch keys and queries into L2; they validate both while keys and queries are
/// in flight, and start again in the rare case of a change. CTAs of four warpgroups have no launch to hide this behind,
/// so they start after the wait.
template <class Cta>
__global__ void __launch_bounds__(Cta::kThreads, FourWarpgroups::kThreads / Cta::kThreads)
    raw_scores_of_fp8_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages) {
  using Shared = Shared<Cta>;
  using Keys = typename Shared::Keys;
  constexpr bool kSpeculates = Cta::kThreads < FourWarpgroups::kThreads;
  constexpr int kPasses = kHeads * kHeadLanes / Cta::kThreads, kPassHeads = kHeads / kPasses;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const auto address_of = [&](int token) {
    return Fp8QueryAddress(tile, token, static_cast<int>(threadIdx.x / kHeadLanes),
                           static_cast<int>(threadIdx.x % kHeadLanes));
  };
  SpeculativeRecord speculative;
  Assignment first{};
  int token;  // the token whose queries are loaded first
  if constexpr (kSpeculates) {
    first = assign_tiles_speculatively<Cta>(s.scheduler, tile, speculative);
    token = first.token;
  } else {
    touch(tile);
    touch(pages);
    for (int i = static_cast<int>(threadIdx.x); i < tile.count; i += Cta::kThreads) prefetch_l2(record_of(tile, i));
    token = expected_token(tile);
  }
  Keys keys = keys_of<Keys>(s.ring, pages, first, static_cast<int>(threadIdx.x / 128));
  if constexpr (kSpeculates) {
    speculative.ids = keys.speculative_ids();
    touch(tile);
    touch(pages);
  }
  prefetch_queries(tile, token);
  if constexpr (kSpeculates) keys.template prefetch<kStages - 1>(speculative.ids);
  RowTail tail(tile);
  const Fp8QueryAddress address = address_of(token);
  grid_dependency_wait_after(address.made() ^ tail.made());
  launch_dependents();
  if (!speculative.is_there) first = assign_tiles_after_wait<Cta>(s.scheduler, tile);
  // Loads return in order, so small ones are issued before the keys.
  RawChannels<kLaneChannels> raw[kPasses];
  address.load(tile.p, raw);
  Validation validation(tile, keys, speculative);
  if (tile.fill) tail.load_record(tile);
  if (speculative.is_there) keys.begin(speculative.ids);
  bool has_queries = true, is_filled = !tile.fill;
  for_each_assignment<Cta>(
      s.scheduler, tile, first, speculative, [&](int next) { prefetch_queries(tile, next); },
      [&](const Assignment& assignment, const SpeculativeRecord& speculative) {
        int thread = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(thread));  // keeps addresses out of registers from token to token
        const int head = thread / kHeadLanes, part = thread % kHeadLanes, warpgroup = thread / 128;
        const int lane = thread % 32, c = lane % kQuad;
        if (!speculative.is_there) {
          keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
          keys.begin(keys.first_ids());
        }
        if (!has_queries || assignment.token != token) address_of(assignment.token).load(tile.p, raw);
        QueryPart parts[kPasses];
        make_queries(tile, raw, parts);
        has_queries = false;
        for (RawChannels<kLaneChannels>& of_head : raw) of_head = {};  // frees the registers
        bool fits = true;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          prepare_queries(s, parts[i], head + kPassHeads * i, part);
          fits &=
              head + kPassHeads * i >= tile.p.num_heads || (!is_out_of_range(codec::float_bits(parts[i].scale)) &&
                                                            fabsf(parts[i].weight) * parts[i].scale <= kMaxRawWeight);
        }
        if (!is_filled) tail.fill(tile, thread, Cta::kThreads);
        is_filled = true;
#if __CUDA_ARCH__ >= 900
        fence_async_proxy();
#endif
        const bool holds = !speculative.is_there || validation.holds(speculative),
                   in_range = __syncthreads_and(fits && holds);
        if (kSpeculates && !in_range && !__syncthreads_and(holds)) {
          wait_for_all_copies();
          return false;
        }
        const int scored = assignment.scored, kv_tiles = kv_tiles_of_warpgroup<Cta>(assignment, warpgroup);
        const int in_range_tiles = in_range ? kv_tiles : 0;
        const std::uint64_t queries = operand_of(s.q);
        float weights[ops::kChainHeads];
#pragma unroll
        for (int i = 0; i < ops::kChainHeads; ++i) weights[i] = s.weights[c][i];
        int key = keys.first_key(0) + static_cast<int>(Keys::own_key());  // the lane's own key
        float* to = tile.row(assignment.token) + key;
        const std::uint32_t chunk_at = first_chunk(lane);
        int first_out_of_range = in_range_tiles;
        for (int i = 0; i < in_range_tiles; ++i, key += Cta::kStep, to += Cta::kStep) {
          const std::uint32_t stage = keys.wait_next(), scale = keys.scales();
          keys.refill(i);
          const float total = score_kv_tile(stage, chunk_at, queries, weights, c) * codec::bits_float(scale);
          if (key < scored) {
            *to = total;
            if (is_out_of_range(scale)) first_out_of_range = min(first_out_of_range, i);
          }
        }
        wait_for_all_copies();
        first_out_of_range = __reduce_min_sync(kAllLanes, first_out_of_range);
        if (first_out_of_range < kv_tiles)
          score_out_of_range(s, pages, assignment.request, scored, tile.row(assignment.token),
                             keys.first_key(first_out_of_range), kv_tiles - first_out_of_range, !in_range);
        __syncthreads();  // queries may be overwritten
        return true;
      });
  if (!is_filled) tail.fill(tile, static_cast<int>(threadIdx.x), Cta::kThreads);
}

template <class Cta>
cudaError_t launch_variant(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_score_kernel<Shared<Cta>>(raw_scores_of_fp8_keys<Cta>, score_ctas(tile, device), Cta::kThreads, tile,
                                          make_pages(tile), stream);
}

}  // namespace

cudaError_t score_fp8_raw(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  // From 128 KV tiles per CTA on, four warpgroups are faster. H200, 2026-11-16: 128 x 32,768 keys take 143 us with two
  // warpgroups and 138 with four; 64 x 262,144 keys 561 and 552 (`kv4_gpu_bench --only index`).
  return can_use_two_warpgroups(tile, device, 64) ? launch_variant<TwoWarpgroups>(tile, device, stream)
                                                  : launch_variant<FourWarpgroups>(tile, device, stream);
}

}  // namespace kv4::cuda
