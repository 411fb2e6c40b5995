// Persistent CTAs for many tokens of 64 heads, as in a prefill. There are as many CTAs as run at once, and each takes
// one work tile after another, so that the end of one token overlaps the beginning of the next. Tile numbers continue
// through all work tiles of a CTA. The producers locate their own rows. They go on to the next work tile while the
// consumers are at the last tiles of the current one, and they load the next queries after the last scores, while the
// consumers store their output. The consumers are symmetric (ping_pong.cuh). That leaves 64 registers to a producer
// thread, so the raw rows of the left panels wait in shared memory.
//
// H200, 2026-11-16, 1,024 tokens of 640 chosen rows: one CTA per token 257 us, persistent CTAs with a softmax and a PV
// warpgroup 241, with ping-pong consumers 213 (docs/performance.md). No warpgroup is busy all the time: a tile passes
// through conversion, S, softmax and PV in two stages, and the producers' stores wait behind multiplies that read
// shared memory. A spilled register comes back behind all loads in flight, which takes 350 clocks of a tile's 4,100.
#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/ping_pong.cuh"
#include "backend/cuda/attend/producer.cuh"
#include "backend/cuda/attend/prologue.cuh"
#include "backend/cuda/attend/tile_scheduler.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {
namespace attend_wgmma::persistent {

inline constexpr int kConsumerRegisters = 192, kPersistentProducerRegisters = 64;
static_assert(2 * (kConsumerRegisters + kPersistentProducerRegisters) <= 65536 / kWarpgroupThreads);

// --- producers

/// Locates the rows of all work tiles: a producer's lane locates one row of every four tiles, in the row of the tile
/// that it loads a part of.
class PersistentLocator {
 public:
  __device__ PersistentLocator(const AttendParams& p, Shared& s, const TileScheduler<1>& scheduler, bool prefetches)
      : p_(p), s_(s), scheduler_(scheduler), prefetches_(prefetches) {}

  __device__ void begin() {
    const unsigned lane = static_cast<unsigned>(thread_here()) % kProducerThreads;
    at_ = {0, 0};
    find_key(static_cast<int>(lane % kAddressTiles), lane);
    if (ended()) {  // so that there is something to load
      at_ = {0, 0};
      find_key(0, lane);
    }
    find_block(lane);
    locate(lane);
  }

  /// Called after the address of a row of the tile after `tile` has been read. Each load has one tile's time: its
  /// result is not used before.
  __device__ void advance(int tile, unsigned lane) {
    const int turn = tile % kAddressTiles;
    if (turn == 0) find_key(kAddressTiles, lane);
    if (turn == 1) find_block(lane);
    if (turn == kAddressTiles - 2) locate(lane);
  }

 private:
  struct TileNumber {
    int work, tile;  // tile: of the work tile; work -1: the end
  };

  __device__ bool ended() const { return at_.work < 0; }

  __device__ int row(unsigned lane) const { return at_.tile * kTile + static_cast<int>(lane / kAddressTiles); }

  /// Advances by some tiles.
  __device__ void find_key(int tiles, unsigned lane) {
    if (ended()) return;
    at_.tile += tiles;
    WorkTile work = scheduler_.copy_of(at_.work);
    while (at_.tile >= work.tiles) {
      at_ = {at_.work + 1, at_.tile - work.tiles};
      if (at_.work == scheduler_.count()) {
        at_.work = -1;
        return;
      }
      work = scheduler_.copy_of(at_.work);
    }
    key_ = work.rows.key<true>(p_, work.token, row(lane));
  }
  __device__ void find_block(unsigned lane) {
    if (ended()) return;
    const WorkTile work = scheduler_.copy_of(at_.work);
    key_ = work.rows.seen<true>(p_, row(lane), key_);
    block_ = work.rows.block<true>(p_, row(lane), key_);
  }
  __device__ void locate(unsigned lane) {
    __syncwarp();    // all of the previous addresses have been read
    if (!ended()) {  // otherwise the old row is loaded once more, and not used
      const RowPointers place = scheduler_.copy_of(at_.work).rows.place<true>(p_, row(lane), key_, block_);
      RowAddress address{kAbsentRow.payload, kAbsentRow.scale};
      if (place.payload != nullptr) {
        address = {place.payload, place.scale};
        if (prefetches_) prefetch_row(address);
      }
      s_.addresses[lane % kAddressTiles][lane / kAddressTiles] = address;
    }
    __syncwarp();
  }

  const AttendParams& p_;
  Shared& s_;
  const TileScheduler<1>& scheduler_;
  const bool prefetches_;
  TileNumber at_;  // of the row that is located next
  int key_, block_;
};

/// A producer with few registers: the chunks of the left panels are copied into shared memory and wait there, so no
/// register waits for these loads. After the last tile it loads something once more.
class PersistentProducer {
 public:
  __device__ PersistentProducer(Shared& s, PersistentLocator& locator)
      : s_(s), locator_(locator), lane_(static_cast<unsigned>(thread_here()) % kProducerThreads) {}

  /// Loads the first tile.
  __device__ void begin() {
    start(0);
    close_copies();
#pragma unroll
    for (int i = 0; i < kRightChunks; ++i) load(chunk_at(i));
    copy_left();
  }

  /// Converts the loaded tile, and loads the next tile into the same place. `between` the right and the left panels, a
  /// batch of other copies may begin.
  template <class Between>
  __device__ void fill(int tile, Between between) {
    const unsigned stage = static_cast<unsigned>(tile) % kStages, warp = lane() / 32;
    wait_for_copies();
    __syncwarp();
    const uint2 scales = *reinterpret_cast<const uint2*>(&s_.scales[tile % 2][row()]);
    const unsigned present = quads_of_four_lanes(is_present());
    start(tile + 1);
    wait_for_loads();
    const int exponent = exponent_of_rows(scales);
    close_copies();
    mbarrier_wait(shared_address(&s_.empty[stage][1]), (tile / kStages + 1) & 1);
    if (lane() % 32 == 0) store_quads(s_.quads[stage][warp / 4], warp % 4, exponent, present);
    const std::uint32_t tile_at = shared_address(s_.rows[stage]), tail_to = tail_at(tile_at);
    std::uint32_t codes_to = codes_at(tile_at);
#pragma unroll
    for (int i = 0; i < kRightChunks; ++i) {
      const int j = chunk_at(i);
      if (i == kRightChunks - 1) branch_on_ordered(scales.x);  // there are no registers for more chunks at once
      if (j < kCodeChunks)
        store_codes(codes_to, codes_to ^ 16, j, raw(j), scales, exponent);
      else
        store_shared16(j == kCodeChunks ? tail_to : tail_to ^ 64, to_fp16(raw(j), power_of_two(-exponent)));
      load(j);
    }
    announce(stage, 1);
    wait_for_copies();
    between();
    // Two chunks are in flight, and rows are located meanwhile: reads wait behind the stores of all producers.
    uint4 even = load_shared16_ordered(staged(chunk_at(kRightChunks))),
          odd = load_shared16_ordered(staged(chunk_at(kRightChunks + 1)));
    locator_.advance(tile, lane());
    mbarrier_wait(shared_address(&s_.empty[stage][0]), (tile / kStages + 1) & 1);
    codes_to = codes_at(tile_at);
#pragma unroll
    for (int i = kRightChunks; i < kChunks; ++i) {
      uint4& raw = (i - kRightChunks) % 2 == 0 ? even : odd;
      store_codes(codes_to, codes_to ^ 16, chunk_at(i), raw, scales, exponent);
      if (i + 2 < kChunks) raw = load_shared16_ordered(staged(chunk_at(i + 2)));
    }
    announce(stage, 0);
    copy_left();
  }

  __device__ static void close_copies() { commit_copies(); }
  /// Waits for all copies except the youngest batch. The batches alternate between the next tile's scales and its left
  /// panels, sometimes with a batch of other copies between these.
  __device__ static void wait_for_copies() { cuda::wait_for_copies<1>(); }
  /// No copies are in flight any more.
  __device__ void end() const { wait_for_all_copies(); }

 private:
  static_assert(kStagedChunks == kChunks - kRightChunks);

  __device__ std::uint32_t staged(int j) const {
    return shared_address(s_.staged()) + (static_cast<unsigned>(j) * kProducerThreads + lane()) * 16;
  }
  __device__ void copy_left() const {
#pragma unroll
    for (int j = 0; j < kStagedChunks; ++j)
      copy_async<16>(staged(j), reinterpret_cast<const void*>(__cvta_generic_to_global(from_ + j * 64)));
    close_copies();
  }

  // Values that depend on the lane are computed anew each time: there is no register to keep them in, and a spilled
  // register comes back behind all loads in flight.
  __device__ unsigned lane() const {
    unsigned lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }
  __device__ unsigned row() const { return lane() / 4; }
  __device__ unsigned chunk() const { return lane() % 4; }

  __device__ void start(int tile) {
    const RowAddress address = s_.addresses[tile % kAddressTiles][row()];
    if (chunk() == 0) copy_scales(s_.scales[tile % 2][row()], address.scale);
    from_ = address.payload + chunk() * 16;
  }
  __device__ bool is_present() const { return from_ != kAbsentRow.payload + chunk() * 16; }

  __device__ void load(int j) {
    load_chunk(raw(j), from_, j, [this] { return row(); });
  }

  __device__ uint4& raw(int j) { return raw_[j - kStagedChunks]; }
  __device__ const uint4& raw(int j) const { return raw_[j - kStagedChunks]; }

  /// Waits for all loads in flight; see Producer.
  __device__ void wait_for_loads() const {
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < kRightChunks; ++i) any |= raw_[i].x;
    branch_on_ordered(any);
  }

  /// The exponent that the warp's rows share.
  __device__ int exponent_of_rows(uint2 scales) const {
    return exponent_for_warp(top_of_codes(scales), top_of_pairs(raw(kCodeChunks), raw(kCodeChunks + 1)));
  }

  /// Addresses of this thread's chunks in a tile: codes of the first panel, and bf16 of the last panel.
  __device__ std::uint32_t codes_at(std::uint32_t to) const {
    const unsigned lane = this->lane();
    return to + panel_offset(lane / 4, 2 * (lane % 4));
  }
  __device__ std::uint32_t tail_at(std::uint32_t to) const {
    const unsigned lane = this->lane(), row = lane / 4;
    return to + kCodeChunks * kPanelBytes + panel_offset(row, row % 2 * 4 + lane % 4);
  }

  // Without a fence; see Producer.
  __device__ void announce(int stage, int half) {
    if (arrives_for_warp(lane() % 32)) mbarrier_arrive(shared_address(&s_.full[stage][half]));
  }

  Shared& s_;
  PersistentLocator& locator_;
  const unsigned lane_;
  const std::uint8_t* from_;  // the row whose chunks are being loaded
  uint4 raw_[kRightChunks];
};

/// The producers request the queries of a work tile while they fill its first tile, and convert them after it;
/// meanwhile the consumers are still at the previous work tile.
__device__ inline void produce_persistent(const AttendParams& p, Shared& s, const TileScheduler<1>& scheduler,
                                          PersistentLocator& locator) {
  PersistentProducer producer(s, locator);
  producer.begin();
  for (int work = 0, tile = 0; work < scheduler.count(); ++work) {
    if (static_cast<int>(threadIdx.x) < kThreads - kProducerThreads + 32)
      scheduler.schedule_more(work, thread_here() % 32);
    // Twice the number of tiles left, plus one at the first tile: this saves a register. There are no registers either
    // for values that depend on these two variables, hence the empty statements.
    for (int more = 2 * scheduler.tiles(work) + 1; more > 1; more = (more - 2) & ~1) {
      producer.fill(tile++, [&] {
        asm volatile("" : "+r"(more), "+r"(work));
        if (more % 2 == 0 || work == 0) return;
        const Job job(scheduler.at(work), work, true);
        wait_for_queries_empty(s, work);
        ProducerQueries(p, s, job).begin();
        producer.close_copies();
      });
      asm volatile("" : "+r"(more), "+r"(work));
      if (more % 2 == 0) continue;
      if (work > 0) {
        producer.wait_for_copies();
        const Job job(scheduler.at(work), work, true);
        ProducerQueries(p, s, job).convert();
        announce_queries(s);
      }
      asm volatile("" : "+r"(work));
      prefetch_queries(p, scheduler, work);
    }
  }
  producer.end();
}

// --- consumers

/// Two symmetric consumers, which run the same instructions.
__device__ inline void consume_persistent(const AttendParams& p, Shared& s, const TileScheduler<1>& scheduler) {
  // All lanes of a warp agree, and the compiler knows it: the value lives in uniform registers.
  const int half = static_cast<int>(__reduce_max_sync(kAllLanes, threadIdx.x / kWarpgroupThreads));
  named_barrier_sync_with_arrivals(1, kThreads);  // the first queries are in place
  for (int work = 0, tile = 0; work < scheduler.count(); ++work) {
    const int end = tile + scheduler.tiles(work);
    float o[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) o[i] = 0.0f;
    if (work > 0) mbarrier_wait(shared_address(&s.queries_full), (work - 1) & 1);
    PingPongConsumer consumer(p, s, half);
    consumer.run(o, tile, end);
    for (int below = 0; below < 2; ++below) {
      const Stats mine = consumer.stats(below);
      const int head = head_of_thread() + 8 * below;
      if (quad_of_thread() != 0) continue;
      if (half == 0)
        s.work_stats[work % 2][head] = mine;
      else
        s.sink[kSinks / 2 + work % 2][head] = mine.sum;
    }
    store_work_tile(p, s, scheduler, work, o, half);
    tile = end;
  }
}

// --- kernel

/// Persistent CTAs, which take 64 heads of one token after another: see persistent.cu.
__global__ void __launch_bounds__(kThreads, 1)
    attend_persistent(const __grid_constant__ AttendParams p, int head_tiles, bool prefetches) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        mbarrier_init(shared_address(&s.full[stage][half]), Arrivals::of_warps(kProducerWarps));
        mbarrier_init(shared_address(&s.empty[stage][half]), Arrivals::of_warps(kWarpgroupWarps));
      }
      mbarrier_init(shared_address(&s.p_full[stage]), Arrivals::of_warps(kWarpgroupWarps));
    }
    mbarrier_init(shared_address(&s.queries_empty), Arrivals::of_warps(2 * kWarpgroupWarps));
    mbarrier_init(shared_address(&s.queries_full), Arrivals::of_warps(kProducerWarps));
  }
  launch_dependents();
  touch(p);
  prefetch_inputs(p, Job(1, 1, 1, head_tiles, false));
  grid_dependency_wait();
  const TileScheduler<1> scheduler(p, s, head_tiles);
  scheduler.schedule_first();
  cta_sync();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  PersistentLocator locator(p, s, scheduler, prefetches);
  {
    const Job job(scheduler.at(0), 0, true);
    const Queries<kThreads / 32, 4> queries(p, s, job);
    queries.begin();
    if (warpgroup >= 2) locator.begin();
    queries.finish();
  }
  if (warpgroup < 2) {
    more_registers<kConsumerRegisters>();
    consume_persistent(p, s, scheduler);
  } else {
    fewer_registers<kPersistentProducerRegisters>();
    named_barrier_arrive(1, kThreads);
    produce_persistent(p, s, scheduler, locator);
  }
#endif
}

}  // namespace attend_wgmma::persistent

cudaError_t launch_persistent(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  using namespace attend_wgmma;
  using namespace attend_wgmma::persistent;
  const int head_tiles = head_tiles_of(p), work_tiles = p.step.num_tokens * head_tiles;
  return launch<kSharedBytes>(attend_persistent, static_cast<unsigned>(std::min(work_tiles, num_sms())), kThreads,
                              stream, p, head_tiles, !shares_rows(p.step));
}

}  // namespace kv4::cuda
