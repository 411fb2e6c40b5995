// A 2-CTA pair takes two consecutive tokens, 64 heads each. The CTAs share the conversion of rows, as those with
// different heads of one token do. Window rows are ordered by position modulo the window, so that two tokens with
// consecutive positions differ in one window row, and among the entries at most in the last. The pair shares the tiles
// that are the same for both tokens. Each CTA converts a tile that differs by itself, both halves one after the other:
// no row is masked, and no token's tile ever contains a row that the token does not see.
//
// Bound by the latency of a tile and by the copy to the peer, like every 2-CTA pair (split_kv.cu). H200, 2026-11-16,
// 1,024 tokens of 64 heads, by persistent.cu and in pairs: 1,152 rows 388 and 339 us, 8,320 rows 2,457 and 2,124.
#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/producer.cuh"
#include "backend/cuda/attend/prologue.cuh"
#include "backend/cuda/attend/tile_scheduler.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {
namespace attend_wgmma::token_pair {

inline constexpr int kTokenPairPvRegisters = 176, kTokenPairProducerRegisters = 72;
static_assert(kSoftmaxRegisters + kTokenPairPvRegisters + 2 * kTokenPairProducerRegisters <= 65536 / kWarpgroupThreads);

// --- producers

/// Locates the rows of all work tiles, as PersistentLocator does; it locates all rows of a tile, including those that
/// the peer converts. The facts about a work tile that entries need are kept in registers: each read of shared memory
/// waits behind the producers' stores.
template <class Scheduler>
class TokenPairLocator {
 public:
  __device__ TokenPairLocator(const AttendParams& p, Shared& s, const Scheduler& scheduler)
      : p_(p), s_(s), scheduler_(scheduler) {}

  __device__ void begin() {
    if (!takes_part()) return;
    enter(0);
    find_block();
    for (int tile = 0; tile < kLead; ++tile) advance(tile - kLead);
  }

  /// Called when `tile` has been filled.
  __device__ void advance(int tile) {
    if (!takes_part() || tiles_ == kEnded) return;
    locate(tile + kLead);
    if (++tile_ == tiles_) enter(work_ + 1);
    if (tiles_ != kEnded) find_block();
  }

 private:
  static constexpr int kLead = kAddressTiles - 1, kEnded = -1;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kWarpgroupThreads; }
  __device__ static bool takes_part() { return lane() < kTile; }
  __device__ int row() const { return tile_ * kTile + lane(); }

  __device__ void enter(int work) {
    work_ = work;
    tile_ = 0;
    tiles_ = kEnded;
    if (work >= scheduler_.count()) return;
    if (lane() < 32) {
      scheduler_.schedule_more(work, lane());
      __syncwarp();
    }
    const WorkTile& r = scheduler_.at(work);
    tiles_ = r.tiles;
    window_ = r.rows.window;
    count_ = r.rows.count();
    table_row_ = r.rows.at.row;
  }
  __device__ void find_block() {
    if (row() < window_) {
      const QueryRows& rows = scheduler_.at(work_).rows;
      key_ = RingSlots(p_, rows).position(row());
      block_ = rows.block(p_, row(), key_);
      return;
    }
    key_ = row() - window_;
    block_ = -1;
    if (row() < count_)
      block_ = p_.step.block_table[std::int64_t{table_row_} * p_.step.blocks_per_request +
                                   key_ / p_.layer.kinds[0].rows_per_block];
  }
  __device__ void locate(int tile) {
    RowPointers place;
    if (row() < window_)
      place = scheduler_.at(work_).rows.place(p_, row(), key_, block_);
    else if (block_ >= 0)
      place = pointers_of(p_.layer.kinds[0].page, block_, key_ % p_.layer.kinds[0].rows_per_block);
    RowAddress address{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) address = {place.payload, place.scale};
    s_.addresses[tile % kAddressTiles][lane()] = address;
    mbarrier_arrive(shared_address(&s_.located[tile % kAddressTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const Scheduler& scheduler_;
  int work_, tile_, tiles_, window_, count_, table_row_;  // of the row that is located next
  int key_, block_;
};

/// A 2-CTA pair with consecutive tokens.
__device__ inline void produce_token_pair(const AttendParams& p, Shared& s, const TileScheduler<2>& scheduler,
                                          int pair_rank, std::uint32_t to_peer) {
  CtaPairProducer producer(s, pair_rank, to_peer);
  producer.begin();
  for (int work = 0, tile = 0; work < scheduler.count(); ++work) {
    const int first = tile, end = tile + scheduler.tiles(work);
    const CommonTiles common = scheduler.at(work).common;
    for (; tile < end; ++tile) {
      producer.fill(tile, common.has(tile - first), tile + 1 < end || work + 1 < scheduler.count());
      if (tile != first) continue;
      if (work > 0) {
        const Job job(scheduler.at(work), work, false);
        const ProducerQueries queries(p, s, job);
        wait_for_queries_empty(s, work);
        queries.begin();
        queries.finish();
        announce_queries(s);
      }
      prefetch_queries(p, scheduler, work);
    }
  }
}

// --- consumers

/// A 2-CTA pair with consecutive tokens: the softmax (0) and the PV warpgroup (1).
template <int kWarpgroupIndex, class Locator>
__device__ void consume_token_pair(const AttendParams& p, Shared& s, const TileScheduler<2>& scheduler,
                                   Locator& locator, std::uint32_t to_peer) {
  constexpr int kPanel = kWarpgroupIndex * kPanels / 2;
  named_barrier_sync_with_arrivals(1, kThreads);  // the first queries are in place
  for (int work = 0, tile = 0; work < scheduler.count(); ++work) {
    const int end = tile + scheduler.tiles(work);
    float o[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) o[i] = 0.0f;
    if constexpr (kWarpgroupIndex == 0) {
      if (work > 0) mbarrier_wait(shared_address(&s.queries_full), (work - 1) & 1);
      SoftmaxWarpgroup softmax(p, s);
      softmax.run<true, true>(o, tile, end, kPanel, to_peer);
      for (int half = 0; half < 2; ++half) {
        const Stats mine = softmax.stats(half);
        if (quad_of_thread() == 0) s.work_stats[work % 2][head_of_thread() + 8 * half] = mine;
      }
    } else {
      run_pv_warpgroup<true>(o, s, locator, tile, end, kPanel, to_peer);
    }
    store_work_tile(p, s, scheduler, work, o, kWarpgroupIndex);
    tile = end;
  }
}

// --- kernel

/// The same for 2-CTA pairs, which take two consecutive tokens: see token_pair.cu. If the number of tokens is odd,
/// both CTAs of the last pair take the last token.
__global__ void __launch_bounds__(kThreads, 1)
    attend_token_pair(const __grid_constant__ AttendParams p, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        mbarrier_init(shared_address(&s.full[stage][half]), Arrivals::of_group(kProducerThreads));
        mbarrier_init(shared_address(&s.empty[stage][half]), Arrivals::of_warps(2 * kWarpgroupWarps));
      }
      mbarrier_init(shared_address(&s.p_full[stage]), Arrivals::of_group(kWarpgroupThreads));
    }
    for (int i = 0; i < kAddressTiles; ++i) mbarrier_init(shared_address(&s.located[i]), Arrivals::of_each(kTile));
    mbarrier_init(shared_address(&s.queries_empty), Arrivals::of_warps(kWarpgroupWarps));
    mbarrier_init(shared_address(&s.queries_full), Arrivals::of_warps(kProducerWarps));
    fence_mbarrier_init();  // the peer's copies count at them
  }
  launch_dependents();
  touch(p);
  cta_sync();
  cluster_arrive();
  const int pair_rank = static_cast<int>(blockIdx.x) % 2;
  prefetch_inputs(p, Job(2, head_tiles, p.step.num_tokens));
  grid_dependency_wait();
  const TileScheduler<2> scheduler(p, s, head_tiles);
  scheduler.schedule_first();
  cta_sync();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const std::uint32_t to_peer =
      map_to_cta(shared_address(&s), static_cast<unsigned>(pair_rank ^ 1)) - shared_address(&s);
  TokenPairLocator locator(p, s, scheduler);
  {
    const Job job(scheduler.at(0), 0, false);
    const Queries<kThreads / 32, 4> queries(p, s, job);
    queries.begin();
    if (warpgroup == 1) locator.begin();
    queries.finish();
  }
  cluster_wait();  // the peer has begun
  if (warpgroup == 0) {
    more_registers<kSoftmaxRegisters>();
    consume_token_pair<0>(p, s, scheduler, locator, to_peer);
  } else if (warpgroup == 1) {
    more_registers<kTokenPairPvRegisters>();
    consume_token_pair<1>(p, s, scheduler, locator, to_peer);
  } else {
    fewer_registers<kTokenPairProducerRegisters>();
    named_barrier_arrive(1, kThreads);
    produce_token_pair(p, s, scheduler, pair_rank, to_peer);
  }
  cluster_done_reading();
#endif
}

}  // namespace attend_wgmma::token_pair

cudaError_t launch_token_pair(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  using namespace attend_wgmma;
  using namespace attend_wgmma::token_pair;
  const int head_tiles = head_tiles_of(p), work_tiles = (p.step.num_tokens + 1) / 2 * head_tiles;
  const int clusters = std::min(work_tiles, std::max(attend_gpu().wgmma[2], 1));
  return launch_clusters<kSharedBytes>(attend_token_pair, 2, static_cast<unsigned>(2 * clusters), kThreads, stream, p,
                                       head_tiles);
}

}  // namespace kv4::cuda
