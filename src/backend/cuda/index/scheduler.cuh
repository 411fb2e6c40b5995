// The tile scheduler of the score kernels: each CTA takes an equal range of the work tiles of all tokens. A work tile
// is one KV tile, 128 keys, of one token. A cluster takes the work tiles of one token instead.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/index/speculative_record.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/cluster.cuh"

namespace kv4::cuda {

/// The work tiles of a CTA that are left to do: `count` from KV tile `kv_tile` of `token` on.
struct Assignment {
  int token, kv_tile, count;
  int request, scored;  // the token's request, and how many of its keys are scored
  int before, total;    // work tiles before the token's first one, and of all tokens
};

struct SchedulerShared {
  std::uint32_t sums[kScoreWarps];
  Assignment first;
};

__device__ inline int kv_tiles_of(int keys) { return (keys + kBlockKV - 1) / kBlockKV; }

/// Inclusive prefix sum over the lanes of a warp.
__device__ inline int scan_warp(int sum) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) sum += other;
  }
  return sum;
}

/// The range of `total` work tiles that this CTA takes.
struct TileRange {
  int begin, count;

  __device__ explicit TileRange(int total) : begin(0), count(0) {
    const unsigned ctas = min(gridDim.x, static_cast<unsigned>(total)), cta = blockIdx.x;
    if (cta >= ctas) return;
    const unsigned each = static_cast<unsigned>(total) / ctas, rest = static_cast<unsigned>(total) % ctas;
    begin = static_cast<int>(cta * each + min(cta, rest));
    count = static_cast<int>(each + (cta < rest ? 1 : 0));
  }

  /// The CTA that takes a work tile of `total`.
  __device__ static int cta_of(int kv_tile, int total) {
    const int ctas = min(static_cast<int>(gridDim.x), total), each = total / ctas, rest = total % ctas;
    return kv_tile < rest * (each + 1) ? kv_tile / (each + 1) : rest + (kv_tile - rest * (each + 1)) / each;
  }
};

/// The index of this CTA's split among the splits of its token.
__device__ inline int split_index(const Assignment& assignment) {
  return assignment.kv_tile == 0
             ? 0
             : static_cast<int>(blockIdx.x) - TileRange::cta_of(assignment.before, assignment.total);
}

/// The assignment for up to 32 tokens; each warp computes it alone. load(address) gives records.
constexpr int kFewTokens = 32;
template <class Load>
__device__ Assignment assign_few_tokens(const TokenTile& tile, Load&& load) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int request = 0, scored = 0;
  if (lane < tile.count) {
    const ops::StepRecord record = load(record_of(tile, lane));
    request = record.row;
    scored = tile.scored(record);
  }
  const int mine = kv_tiles_of(scored), sum = scan_warp(mine);
  const int total = __shfl_sync(kAllLanes, sum, 31);
  const TileRange range(total);
  const int at = range.begin - (sum - mine);
  const int token = __ffs(static_cast<int>(__ballot_sync(kAllLanes, at >= 0 && at < mine))) - 1;
  if (range.count == 0) return {};
  return {token,
          __shfl_sync(kAllLanes, at, token),
          range.count,
          __shfl_sync(kAllLanes, request, token),
          __shfl_sync(kAllLanes, scored, token),
          range.begin - __shfl_sync(kAllLanes, at, token),
          total};
}

template <class Cta, class Load>
__device__ Assignment assign_tiles(SchedulerShared& s, const TokenTile& tile, Load&& load) {
  if (tile.count <= kFewTokens) return assign_few_tokens(tile, load);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int each = (tile.count + Cta::kThreads - 1) / Cta::kThreads, first = static_cast<int>(threadIdx.x) * each;
  const int end = min(first + each, tile.count);
  int mine = 0;
  for (int token = first; token < end; ++token) mine += kv_tiles_of(tile.scored(load(record_of(tile, token))));
  const int sum = scan_warp(mine);
  if (lane == 31) s.sums[warp] = static_cast<std::uint32_t>(sum);
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int w = 0; w < Cta::kWarps; ++w) {
    const int of_warp = static_cast<int>(s.sums[w]);
    if (w < warp) before += of_warp;
    total += of_warp;
  }
  const TileRange range(total);
  if (range.count == 0) return {};
  if (before <= range.begin && range.begin < before + mine) {
    for (int token = first, at = range.begin - before;; ++token) {
      const ops::StepRecord record = load(record_of(tile, token));
      const int scored = tile.scored(record), kv_tiles = kv_tiles_of(scored);
      if (at < kv_tiles) {
        s.first = {token, at, range.count, record.row, scored, range.begin - at, total};
        break;
      }
      at -= kv_tiles;
    }
  }
  __syncthreads();
  return s.first;
}

/// The assignment by the records as they are after the grid dependency wait.
template <class Cta>
__device__ __noinline__ Assignment assign_tiles_after_wait(SchedulerShared& s, const TokenTile& tile) {
  return assign_tiles<Cta>(s, tile, load_record);
}

/// The first token of this CTA if all tokens see equally many keys.
__device__ inline int expected_token(const TokenTile& tile) {
  return static_cast<int>(blockIdx.x * static_cast<unsigned>(tile.count) / gridDim.x);
}

/// The assignment by the records as they are before the wait. It has no work tiles if there are more tokens than
/// threads.
template <class Cta>
__device__ Assignment assign_tiles_speculatively(SchedulerShared& s, const TokenTile& tile,
                                                 SpeculativeRecord& speculative) {
  if (tile.count > Cta::kThreads) return {};
  const Assignment assignment = assign_tiles<Cta>(s, tile, [&](const ops::StepRecord* at) {  // each thread loads one
    return speculative.load(tile, static_cast<int>(at - record_of(tile, 0)));
  });
  speculative.is_there = __syncthreads_and(assignment.count > 0);  // a record may change while warps read it
  return assignment;
}

/// The loop over the CTA's tokens. Calls prefetch(next token) if another token follows, then score(assignment,
/// speculative) with the work tiles of one token. Only the first assignment is speculative. If its validation fails,
/// score returns false and has written nothing, and the loop starts again with the assignment after the wait.
template <class Cta, class Prefetch, class Score>
__device__ void for_each_assignment(SchedulerShared& s, const TokenTile& tile, Assignment assignment,
                                    SpeculativeRecord speculative, Prefetch&& prefetch, Score&& score) {
  while (assignment.count > 0) {
    const int left = max(assignment.count - (kv_tiles_of(assignment.scored) - assignment.kv_tile), 0),
              next = assignment.token + 1;
    assignment.count -= left;
    if (left > 0) prefetch(next);
    const bool is_done = assignment.count == 0 || score(assignment, speculative);
    speculative = {};
    if (!is_done) {
      assignment = assign_tiles_after_wait<Cta>(s, tile);
      continue;
    }
    if (left == 0) break;
    const ops::StepRecord record = load_record(record_of(tile, next));
    assignment = {next, 0, left, record.row, tile.scored(record), 0, 0};
  }
}

/// The work tiles of this CTA, of the token that its cluster takes.
static_assert(kRowNumbers <= 32 * FourWarpgroups::kStep);
__device__ inline Assignment cluster_assignment(const TokenTile& tile, int ctas, int token,
                                                const ops::StepRecord& record) {
  const int scored = tile.scored(record), kv_tiles = kv_tiles_of(scored), rank = cta_rank();
  const int each = kv_tiles / ctas, rest = kv_tiles % ctas;
  return {token, rank * each + min(rank, rest), each + (rank < rest ? 1 : 0), record.row, scored, 0, 0};
}

/// The same by the record as it is after the wait.
__device__ inline __noinline__ Assignment assign_cluster_tiles_after_wait(const TokenTile& tile, int ctas, int token) {
  return cluster_assignment(tile, ctas, token, load_record(record_of(tile, token)));
}

__device__ inline Assignment assign_cluster_tiles_speculatively(const TokenTile& tile, int ctas, int token,
                                                                SpeculativeRecord& speculative) {
  const Assignment assignment = cluster_assignment(tile, ctas, token, speculative.load(tile, token));
  speculative.is_there = __syncthreads_and(assignment.count > 0);
  return assignment;
}

}  // namespace kv4::cuda
