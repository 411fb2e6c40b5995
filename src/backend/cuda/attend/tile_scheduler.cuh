// The tile scheduler of persistent CTAs (persistent.cu, token_pair.cu), and the queries and the epilogue of a work
// tile.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/prologue.cuh"
#include "backend/cuda/attend/speculative.cuh"

namespace kv4::cuda::attend_wgmma {

/// A token's rows, with a place for each row of the window.
__device__ inline QueryRows ring_rows(const AttendParams& p, std::int64_t token) {
  QueryRows rows(p, token);
  if (!rows.at.padded()) rows.window = p.layer.window_tokens;
  return rows;
}

__device__ inline CommonTiles common_tiles(const QueryRows& one, const QueryRows& other) {
  const int apart = one.at.position - other.at.position, late = max(one.at.position, other.at.position);
  if (one.at.padded() || one.at.row != other.at.row || abs(apart) > 1) return {0};
  CommonTiles common;
  if (apart != 0 && one.window > 0)
    common.differing = 0xFFFF0000u | static_cast<unsigned>(late % one.window / kTile + 1);
  if (one.entries != other.entries) {
    const auto last = static_cast<unsigned>(min(one.count(), other.count()) / kTile + 1);
    common.differing = (common.differing & 0xFFFFu) | last << 16;
  }
  return common;
}

/// The tile scheduler: the work tiles of a CTA, or of a 2-CTA pair with consecutive tokens, by a fixed assignment. It
/// prepares half of Shared::work_tiles at a time, after all threads have left that half and before any thread looks for
/// work in it.
template <int kPairSize>
class TileScheduler {
 public:
  __device__ TileScheduler(const AttendParams& p, Shared& s, int head_tiles) : p_(p), s_(s), head_tiles_(head_tiles) {}

  __device__ int count() const { return s_.num_work_tiles; }  // there are no registers to keep it in
  __device__ const WorkTile& at(int work) const { return s_.work_tiles[work % kKnownWork]; }
  __device__ int tiles(int work) const { return at(work).tiles; }
  /// Copies a work tile into registers by whole words: each read of shared memory waits behind the producers' stores.
  __device__ WorkTile copy_of(int work) const {
    const auto* from = reinterpret_cast<const uint4*>(&at(work));
    const uint4 a = from[0], b = from[1], c = from[2], d = from[3];
    WorkTile x;
    x.rows.at = {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z), static_cast<int>(a.w),
                 static_cast<int>(b.x), static_cast<int>(b.y), static_cast<int>(b.z), static_cast<int>(b.w)};
    x.rows.first = static_cast<int>(c.x);
    x.rows.begin = static_cast<int>(c.y);
    x.rows.window = static_cast<int>(c.z);
    x.rows.entries = static_cast<int>(c.w);
    x.token = static_cast<int>(d.x);
    x.first_head = static_cast<int>(d.y);
    x.tiles = static_cast<int>(d.z);
    x.common = {d.w};
    return x;
  }

  /// One thread per work tile.
  __device__ void schedule_first() const {
    const int work_tiles = (p_.step.num_tokens + kPairSize - 1) / kPairSize * head_tiles_;
    const int count = (work_tiles - first_work_tile() + at_once() - 1) / at_once();
    if (threadIdx.x == 0) s_.num_work_tiles = count;
    if (static_cast<int>(threadIdx.x) < min(kHalf, count)) schedule(static_cast<int>(threadIdx.x));
  }
  /// Called by the producer warp that is about to fill the first tile of `work`. The other warps and the consumers are
  /// at most three tiles away, and rows are located up to seven tiles ahead. In a token pair, the warp that is about to
  /// locate rows of `work` calls it; that warp is ahead of all others.
  __device__ void schedule_more(int work, int lane) const {
    const int next = work - kSpread + kHalf + lane;
    if (work % kHalf == kSpread && lane < kHalf && next < count()) schedule(next);
  }

 private:
  static constexpr int kHalf = kKnownWork / 2, kSpread = kPairSize == 1 ? 3 : 8;
  static_assert(kPairSize == 1 ? 2 * kSpread + 2 * kAddressTiles - 1 <= kHalf
                               : kSpread < kHalf && kAddressTiles + 3 < kSpread);  // key, block and end: three more

  __device__ static int first_work_tile() { return static_cast<int>(blockIdx.x) / kPairSize; }
  __device__ static int at_once() { return static_cast<int>(gridDim.x) / kPairSize; }

  __device__ void schedule(int work) const {
    const int work_tile = first_work_tile() + work * at_once(), first = work_tile / head_tiles_ * kPairSize;
    WorkTile& to = s_.work_tiles[work % kKnownWork];
    to.first_head = work_tile % head_tiles_ * kTile;
    if constexpr (kPairSize == 1) {
      to.token = first;
      to.rows = QueryRows(p_, first);
      to.tiles = tiles_of(to.rows.count());
    } else {
      const int last = p_.step.num_tokens - 1, pair_rank = static_cast<int>(blockIdx.x) % kPairSize;
      to.token = min(first + pair_rank, last);
      to.rows = ring_rows(p_, to.token);
      const QueryRows peer_rows = ring_rows(p_, min(first + (pair_rank ^ 1), last));
      to.tiles = tiles_of(max(to.rows.count(), peer_rows.count()));
      to.common = common_tiles(to.rows, peer_rows);
    }
  }
  __device__ static int tiles_of(int rows) { return max((rows + kTile - 1) / kTile, 1); }

  const AttendParams& p_;
  Shared& s_;
  const int head_tiles_;
};

// --- queries

using ProducerQueries = Queries<kProducerWarps, 2>;

__device__ inline void wait_for_queries_empty(const Shared& s, int work) {
  mbarrier_wait(shared_address(&s.queries_empty), (work - 1) & 1);
}
__device__ inline void announce_queries(const Shared& s) {
  if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(shared_address(&s.queries_full));
}

/// Prefetches the next work tile's queries into L2.
template <int kPairSize>
__device__ void prefetch_queries(const AttendParams& p, const TileScheduler<kPairSize>& scheduler, int work) {
  if (work + 1 == scheduler.count()) return;
  const WorkTile& next = scheduler.at(work + 1);
  const auto* q = static_cast<const std::uint8_t*>(p.q.data) +
                  (std::int64_t{next.token} * p.q.row_stride + next.first_head * kWidth) * 2;
  const int bytes = min(kTile, p.num_heads - next.first_head) * kWidth * 2;
  const int line = thread_here() % kProducerThreads * kLine;
  if (line < bytes) prefetch_l2(q + line);
  if (line + kProducerThreads * kLine < bytes) prefetch_l2(q + line + kProducerThreads * kLine);
}

// --- epilogue

/// The epilogue of a work tile, by a thread that has the left (0) or the right half of the channels.
template <int kPairSize>
__device__ void store_work_tile(const AttendParams& p, Shared& s, const TileScheduler<kPairSize>& scheduler, int work,
                                float (&o)[kWidth / 4], int half) {
  named_barrier_sync(1, 2 * kWarpgroupThreads);
  const Job job(scheduler.at(work), work, kPairSize == 1);
  const int head = head_of_thread();
  scale_heads(o, factor_of(s, job, head, 0), factor_of(s, job, head + 8, 0));
  if (half == 0) store_lse(p, s, job);
  if (half == 1) inverse_rope_last(p, job, o);
  store_output(p, job, o, half * (kWidth / 2));
}

}  // namespace kv4::cuda::attend_wgmma
