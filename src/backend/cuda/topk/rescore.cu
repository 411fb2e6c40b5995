// Rescoring selection from fast scores of fp8 keys (rescore.cuh) in a kernel of its own, one CTA per token. While the
// score kernel ends, it encodes the token's queries as the score kernel does and computes their error bounds: 4,900
// clocks, hidden for up to 64 tokens of 32,768 keys (an H200, 2026-11-16). With 128 tokens most CTAs begin after the
// score kernel has ended. Codes that the score kernel kept for them took as long, because the error bounds then came
// after the wait.
#include <cstdint>

#include "backend/cuda/runtime/launch.cuh"
#include "backend/cuda/topk/kernels.h"
#include "backend/cuda/topk/rescore.cuh"

namespace kv4::cuda {
namespace {

constexpr int kMaxTable = 8192;  // block ids of a request that fit in shared memory
struct Shared {
  RescoreShared rescore;
  RescoreQueries queries;
  std::int32_t table[kMaxTable];
};
static_assert(sizeof(Shared) <= 227 << 10);

/// The `count` keys of a request, with their block table in shared memory if it fits. A barrier must follow.
__device__ TokenKeys copy_table(Shared& s, const TokenTile& tile, int request, int count) {
  const std::int32_t* const from = tile.p.step.block_table + std::int64_t{request} * tile.p.step.blocks_per_request;
  const int rows = tile.kind().rows_per_block, used = (count + rows - 1) / rows;
  if (used > kMaxTable) return {tile, from};
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < used; i += kRescoreThreads) s.table[i] = from[i];
  return {tile, s.table};
}

/// The largest scale of a warp's part of a token's splits.
__device__ std::uint32_t largest_scale(const LargestScales& scales) {
  static_assert(LargestScales::kMaxSplits <= kRescoreThreads);
  const int i = static_cast<int>(threadIdx.x);
  const std::uint32_t mine = i < LargestScales::kMaxSplits ? scales.of_split[i] : 0;
  return __reduce_max_sync(kAll, i < scales.splits ? mine : 0);
}

/// A token whose scores, or group maxima, are complete.
struct RescoreToken {
  const TokenKeys& keys;
  Choice choice;
  int count;
  float* row;
};

/// Loads numbers, finds their bounds, and calls select(source, bounds, error) if the error bound holds.
template <class Select>
__device__ ErrorBound with_numbers(Shared& s, const RescoreToken& token, const float* from, int numbers,
                                   Select&& select) {
  const TokenTile& tile = token.choice.tile;
  const int thread = static_cast<int>(threadIdx.x);
  float held[RescoreShared::Row::kHeld];
  load_fours<kRescoreThreads>(from, numbers, true, held);
  const std::uint32_t largest_of_warp = largest_scale(*tile.largest_scales(token.choice.token));
  if (thread % 32 == 0) s.rescore.largest[thread / 32] = largest_of_warp;
  if (numbers % 4 != 0) mask_last_four<RescoreShared::Row>(numbers, held);
  const FoursSource<RescoreShared::Row> source{held, numbers};
  const Bounds bounds = find_top_bounds(s.rescore.row, source, tile.p.top);
  const ErrorBound error_bound =
      error_bound_of(s.queries, __reduce_max_sync(kAll, s.rescore.largest[thread % kRescoreWarps]));
  if (error_bound.holds) select(source, bounds, error_bound.size);
  return error_bound;
}

__device__ __forceinline__ void select_whole(Shared& s, const RescoreToken& token) {
  bool is_done = false;
  const ErrorBound error_bound =
      with_numbers(s, token, token.row, token.count, [&](const auto& source, const Bounds& bounds, float error_bound) {
        is_done = take_best_rescored(s.rescore, s.queries, source, bounds, token.keys, token.choice, error_bound);
      });
  if (!is_done) rescore_row(s.rescore, s.queries, token.keys, token.row, token.count, error_bound, token.choice);
}
__device__ __noinline__ void select_short(Shared& s, RescoreToken token) { select_whole(s, token); }

/// kByGroups: rows may be longer than kRowNumbers.
template <bool kByGroups>
__global__ void __launch_bounds__(kRescoreThreads, 1) select_rescored_row(const __grid_constant__ TokenTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const int at = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), top = tile.p.top;
  // The score kernel waits before it launches dependents, so queries, record and block table are complete.
  RawChannels<kLaneChannels> raw[1];
  Fp8QueryAddress(tile, at, thread / kHeadLanes, thread % kHeadLanes).load(tile.p, raw);
  TokenRow seen(tile, at);
  s.rescore.clear();
  touch(tile);
  asm volatile("" : "+r"(seen.request), "+r"(seen.count));  // loaded before the wait
  const TokenKeys keys = copy_table(s, tile, seen.request, seen.count);
  QueryPart query[1];
  make_queries(tile, raw, query);
  s.queries.put(query[0], thread / kHeadLanes, thread % kHeadLanes);
  __syncthreads();
  make_error_bounds(s.rescore, s.queries, tile.p.num_heads);
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();
  const RescoreToken token{keys, {tile, at, seen.request}, seen.count, tile.row(at)};
  if (token.count <= top) return take_whole(token.choice, token.count);
  if constexpr (!kByGroups) return select_whole(s, token);
  if (token.count <= kRowNumbers) return select_short(s, token);
  const int numbers = groups_of(token.count);
  bool is_done = false;
  const ErrorBound error_bound = with_numbers(
      s, token, tile.maxima(at), numbers, [&](const auto& source, const Bounds& bounds, float error_bound) {
        if (numbers <= top) return;
        select_by_groups(
            s.rescore.row, source, bounds, {token.row, token.count, group_size(token.count), top, 2.0f * error_bound},
            [&](const auto& lists, const Bounds& of_lists) {
              is_done = take_best_rescored(s.rescore, s.queries, lists, of_lists, keys, token.choice, error_bound);
            });
      });
  if (!is_done) rescore_row(s.rescore, s.queries, keys, token.row, token.count, error_bound, token.choice);
}

template <bool kByGroups>
cudaError_t launch_select(const TokenTile& tile, cudaStream_t stream) {
  return launch<sizeof(Shared)>(select_rescored_row<kByGroups>, static_cast<unsigned>(tile.count), kRescoreThreads,
                                stream, tile);
}

}  // namespace

cudaError_t select_rescored_grouped_rows(const TokenTile& tile, const DeviceFacts&, cudaStream_t stream) {
  return launch_select<true>(tile, stream);
}

cudaError_t select_rescored_rows(const TokenTile& tile, const DeviceFacts&, cudaStream_t stream) {
  return launch_select<false>(tile, stream);
}

}  // namespace kv4::cuda
