// Token groups: up to 4, 8 or 16 consecutive tokens of a step that read the same keys, because they belong to one
// request. A CTA loads and expands a KV tile once for all of them. The preparation (grouped.cu) encodes the queries of
// each token, divides the step into groups and gives each CTA of the score kernel an equal range of the work; all of
// that lies in the token's part of the workspace.
#pragma once

#include <cstdint>

#include "backend/cuda/index/scheduler.cuh"
#include "backend/cuda/index/speculative_record.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"

namespace kv4::cuda {

constexpr int kProductTokens = 2;                // of one product: 64 keys x 2 tokens of 64 heads
constexpr int kStepTokens = 2 * kProductTokens;  // of two products, one of which is added up while the other runs
constexpr int kMaxGroupTokens = 16;
constexpr int kMaxGroupCtas = 159;
constexpr std::int64_t kMaxGroupTiles = 0xFFFFFFFFu / (kMaxGroupCtas + 1);  // work tiles of a token tile
// Room for a PreparedToken: with exact or raw scores, and for a rescoring selection.
constexpr std::int64_t kPreparedTokenBytes = 15 << 10, kPreparedCandidateBytes = 71 << 8;

/// Tokens of a step that share their keys. A work tile is one KV tile of a group.
struct TokenGroup {
  std::int32_t first, count;  // tokens of the token tile
  std::int32_t request, scored;  // scored: keys that the last of them sees
};

/// Where the work of a CTA begins. It ends where that of the next CTA begins.
struct GroupStart {
  std::int32_t group, kv_tile;
};

/// What the preparation leaves in a token's part of the workspace.
template <class Queries>
struct alignas(16) PreparedToken {
  Queries queries;  // begins with the operand and the weights
  std::int32_t scored, in_range;
  alignas(16) TokenGroup group;            // the token's index counts groups here
  GroupStart starts[kMaxGroupCtas + 1];    // in the first token: of each CTA, and the end
};

template <class Queries>
__device__ PreparedToken<Queries>& prepared_token(const TokenTile& tile, int token) {
  return *reinterpret_cast<PreparedToken<Queries>*>(tile.queries + token * tile.query_stride);
}

/// Inclusive sums over the threads of a CTA; `total` becomes the sum over all.
template <int kWarps>
__device__ std::uint32_t scan_cta(std::uint32_t mine, std::uint32_t (&of_warps)[kWarps], std::uint32_t& total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  std::uint32_t sum = static_cast<std::uint32_t>(scan_warp(static_cast<int>(mine)));
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  const std::uint32_t of_lane = lane < kWarps ? of_warps[lane] : 0;
  sum += __reduce_add_sync(kAllLanes, lane < warp ? of_lane : 0);
  total = __reduce_add_sync(kAllLanes, of_lane);
  return sum;
}

/// The requests of a window of kGroupTokens tokens, and how many keys each token scores.
template <int kGroupTokens>
struct TokenWindow {
  int first, count;
  std::int32_t requests[kGroupTokens], scored[kGroupTokens];

  __device__ TokenWindow(const TokenTile& tile, int window)
      : first(window * kGroupTokens), count(min(tile.count - first, kGroupTokens)) {
#pragma unroll
    for (int i = 0; i < kGroupTokens; ++i) {
      requests[i] = -1, scored[i] = 0;
      if (i >= count) continue;
      const ops::StepRecord record = load_record(record_of(tile, first + i));
      requests[i] = record.row;
      scored[i] = tile.scored(record);
    }
  }

  /// Calls f with its groups, in order. Groups without keys are left out.
  template <class F>
  __device__ void for_each_group(F&& f) const {
    TokenGroup group{first, 0, -1, 0};
#pragma unroll
    for (int i = 0; i < kGroupTokens; ++i) {
      if (i >= count) break;
      if (requests[i] != group.request) {
        if (group.scored > 0) f(group);
        group = {first + i, 0, requests[i], 0};
      }
      ++group.count;
      group.scored = max(group.scored, scored[i]);
    }
    if (group.scored > 0) f(group);
  }
};

/// Divides the tokens into groups and their work into equal ranges for `ctas` CTAs. All threads of one CTA call it.
template <class Queries, int kGroupTokens, int kThreads>
__device__ void plan_groups(const TokenTile& tile, std::uint32_t ctas, std::uint32_t (&of_warps)[kThreads / 32]) {
  using Window = TokenWindow<kGroupTokens>;
  const int windows = (tile.count + kGroupTokens - 1) / kGroupTokens, each = (windows + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, windows), end = min(begin + each, windows);
  const Window mine(tile, begin);  // of the window `begin`, which is the only one as a rule
  const auto for_each_group = [&](auto&& f) {
    if (begin < end) mine.for_each_group(f);
    for (int window = begin + 1; window < end; ++window) Window(tile, window).for_each_group(f);
  };
  std::uint32_t groups = 0, kv_tiles = 0, all_groups, all;
  for_each_group([&](const TokenGroup& g) {
    ++groups;
    kv_tiles += static_cast<std::uint32_t>(kv_tiles_of(g.scored));
  });
  std::uint32_t group = scan_cta(groups, of_warps, all_groups) - groups;
  std::uint32_t before = scan_cta(kv_tiles, of_warps, all) - kv_tiles;
  GroupStart* const starts = prepared_token<Queries>(tile, 0).starts;
  for_each_group([&](const TokenGroup& g) {
    prepared_token<Queries>(tile, static_cast<int>(group)).group = g;
    const std::uint32_t after = before + static_cast<std::uint32_t>(kv_tiles_of(g.scored));
    // CTA c begins at work tile c * all / ctas.
    const std::uint32_t last = (after * ctas + all - 1) / all;
    for (std::uint32_t cta = (before * ctas + all - 1) / all; cta < last; ++cta)
      starts[cta] = {static_cast<std::int32_t>(group), static_cast<std::int32_t>(cta * all / ctas - before)};
    ++group;
    before = after;
  });
  const GroupStart none{static_cast<std::int32_t>(all_groups), 0};
  if (threadIdx.x == 0) starts[ctas] = none;
  if (all == 0)
    for (std::uint32_t cta = threadIdx.x; cta < ctas; cta += kThreads) starts[cta] = none;
}

}  // namespace kv4::cuda
