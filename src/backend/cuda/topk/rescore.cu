// Selection from near scores of fp8 keys (rescore.cuh) by a kernel of its own, a CTA per token. While the
// scorer ends it encodes the token's queries as that one does, and makes bounds of them: 4,900 clocks, hidden for up to
// 64 tokens of 32,768 keys (an H200, 2026-11-16). Of 128 most blocks begin when the scorer has ended; codes that the
// scorer had left for them took as long, since the bounds then came after the wait.
#include <cstdint>

#include "backend/cuda/runtime/launch.cuh"
#include "backend/cuda/topk/rescore.cuh"

namespace kv4::cuda {
namespace {

constexpr int kMostTable = 8192;  // blocks of a request whose part of the table fits
struct Shared {
  NearShared near;
  NearQueries queries;
  std::int32_t table[kMostTable];
};
static_assert(sizeof(Shared) <= 227 << 10);

/// A request's keys, of which there are `count`: their table from shared memory if it fits. A barrier must follow.
__device__ TokenKeys copy_table(Shared& s, const IndexTile& tile, int request, int count) {
  const std::int32_t* const from = tile.p.step.block_table + std::int64_t{request} * tile.p.step.blocks_per_request;
  const int rows = tile.kind().rows_per_block, used = (count + rows - 1) / rows;
  if (used > kMostTable) return {tile, from};
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < used; i += kNearThreads) s.table[i] = from[i];
  return {tile, s.table};
}

/// Of a warp's part of a token's shares.
__device__ std::uint32_t largest_scale(const LargestScales& scales) {
  static_assert(LargestScales::kMostShares <= kNearThreads);
  const int i = static_cast<int>(threadIdx.x);
  const std::uint32_t mine = i < LargestScales::kMostShares ? scales.of_share[i] : 0;
  return __reduce_max_sync(kAll, i < scales.shares ? mine : 0);
}

/// A token whose scores or maxima are there.
struct NearToken {
  const TokenKeys& keys;
  Choice choice;
  int count;
  float* row;
};

/// Loads numbers, finds their bounds, calls select(source, bounds, margin) if the margin holds.
template <class Select>
__device__ Margin with_numbers(Shared& s, const NearToken& token, const float* from, int numbers, Select&& select) {
  const IndexTile& tile = token.choice.tile;
  const int thread = static_cast<int>(threadIdx.x);
  float held[NearShared::Row::kHeld];
  load_fours<kNearThreads>(from, numbers, true, held);
  const std::uint32_t largest_of_warp = largest_scale(*tile.largest_scales(token.choice.token));
  if (thread % 32 == 0) s.near.largest[thread / 32] = largest_of_warp;
  if (numbers % 4 != 0) leave_out_rest_of_fours<NearShared::Row>(numbers, held);
  const FoursSource<NearShared::Row> source{held, numbers};
  const Bounds bounds = find_top_bounds(s.near.row, source, tile.p.top);
  const Margin margin = margin_of(s.queries, __reduce_max_sync(kAll, s.near.largest[thread % kNearWarps]));
  if (margin.holds) select(source, bounds, margin.size);
  return margin;
}

__device__ __forceinline__ void select_whole(Shared& s, const NearToken& token) {
  bool is_done = false;
  const Margin margin =
      with_numbers(s, token, token.row, token.count, [&](const auto& source, const Bounds& bounds, float margin) {
        is_done = take_near(s.near, s.queries, source, bounds, token.keys, token.choice, margin);
      });
  if (!is_done) select_slowly(s.near, s.queries, token.keys, token.row, token.count, margin, token.choice);
}
__device__ __noinline__ void select_short(Shared& s, NearToken token) { select_whole(s, token); }

/// kByGroups: rows may be longer than kRowNumbers.
template <bool kByGroups>
__global__ void __launch_bounds__(kNearThreads, 1) select_near_row(const __grid_constant__ IndexTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const int at = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), top = tile.p.top;
  // The scorer has itself waited before it let this kernel start: queries, record and block table are there.
  RawChannels<kLaneChannels> raw[1];
  NearPlace(tile, at, thread / kHeadLanes, thread % kHeadLanes).load(tile.p, raw);
  TokenRow seen(tile, at);
  s.near.clear();
  touch(tile);
  asm volatile("" : "+r"(seen.request), "+r"(seen.count));  // not after the wait
  const TokenKeys keys = copy_table(s, tile, seen.request, seen.count);
  QueryPart query[1];
  make_queries(tile, raw, query);
  s.queries.put(query[0], thread / kHeadLanes, thread % kHeadLanes);
  __syncthreads();
  make_bounds(s.near, s.queries, tile.p.num_heads);
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();
  const NearToken token{keys, {tile, at, seen.request}, seen.count, tile.row(at)};
  if (token.count <= top) return take_whole(token.choice, token.count);
  if constexpr (!kByGroups) return select_whole(s, token);
  if (token.count <= kRowNumbers) return select_short(s, token);
  const int numbers = groups_of(token.count);
  bool is_done = false;
  const Margin margin =
      with_numbers(s, token, tile.maxima(at), numbers, [&](const auto& source, const Bounds& bounds, float margin) {
        if (numbers <= top) return;
        select_by_groups(s.near.row, source, bounds,
                         {token.row, token.count, group_size(token.count), top, 2.0f * margin},
                         [&](const auto& lists, const Bounds& of_lists) {
                           is_done = take_near(s.near, s.queries, lists, of_lists, keys, token.choice, margin);
                         });
      });
  if (!is_done) select_slowly(s.near, s.queries, keys, token.row, token.count, margin, token.choice);
}

}  // namespace

cudaError_t select_near(const IndexTile& tile, cudaStream_t stream) {
  const auto kernel = max_entries(tile.p) > kRowNumbers ? select_near_row<true> : select_near_row<false>;
  constexpr int kBytes = sizeof(Shared);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  return launch<kBytes>(kernel, static_cast<unsigned>(tile.count), kNearThreads, stream, tile);
}

}  // namespace kv4::cuda
