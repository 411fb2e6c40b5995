// attend for rows of 512 channels in fp8_tile64 and bf16 queries, on Hopper. generic.cu takes everything else.
//
// A CTA takes 64 heads of a token and a range of its rows, in KV tiles of 64 rows. It has four warpgroups:
//   2 producers  load a tile's raw rows into registers, convert them to fp16 times their scale, and store them in
//                one of two shared tiles of 64 KB, right panels first. fp16 because one instruction converts e4m3 to
//                it and scales are powers of two. Rows that do not fit get an exponent, which goes into S and P.
//   softmax      S = Q K^T (m64n64k16, Q stays in shared memory as fp16 with an exponent per head), online softmax,
//                P as fp16 into shared memory, and O += P V for the left half of the channels (m64n128k16).
//   PV           O += P V for the right half, from the same tile: a row is loaded and converted once and serves as K
//                and as V. This warpgroup also locates the rows for the producers, three tiles ahead, and brings
//                them into L2: the producers' registers hold one tile, and about 25 KB must be in flight to keep
//                memory busy.
// 128 heads: a 2-CTA pair has 64 heads in each CTA and shares the rows. Each CTA converts half of a tile and copies it
// into the peer's shared memory.
//
// Few tokens: the rows of a token are split over the CTAs of a cluster (split-KV). If CTAs would be idle, the channels
// of V are split as well, which needs no combination: such CTAs compute the same S. The CTAs exchange (max, sum) of
// each head and keep their partial O in shared memory. Then each CTA reduces some heads and reads the other CTAs'
// partial outputs of them, in fp16 with a scale, through distributed shared memory (13 to 15 bytes per clock for every
// instruction): one launch, no traffic through global memory. If a cluster is too small (one token and a long list of
// entries), the splits are not a cluster and combine through a workspace: combine_in_memory.cuh. The grid depends on
// the params alone; the device reads the number of rows.
//
// More tokens than CTAs run at once, of few requests: persistent.cuh, whose consumers share the work differently. If a
// token sees all entries before it, a 2-CTA pair takes two consecutive tokens: token_pair.cuh. Windows only:
// persistent_window.cu, and for fewer tokens single_pass_window.cu.
//
// Bounds, per row of 584 bytes and 64 heads, in clocks of an SM: bytes 32, multiplies 32, shared memory and L1 54 (S
// 16, PV 12, converted rows 9, raw rows 9, prefetched lines about 5), conversion 12. Measured: 64; 58 if 128 heads
// share a row, 55 if two tokens of 64 heads do (H200, 2026-11-16; docs/performance.md). Without a pair the producers
// are the bottleneck, closely before shared memory and the softmax warpgroup: stores wait for multiplies that read
// shared memory, and between the conversions of two tiles the producers wait for loads, 18 clocks a row even out of L2.
// With a pair the bottleneck is the latency of one tile through S, softmax and PV, and the peer's copy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#pragma nv_diag_suppress 177  // the kernel has no body there, so its parts are not used
#endif

#include "backend/cuda/attend/combine_in_memory.cuh"
#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/generic.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/persistent.cuh"
#include "backend/cuda/attend/producer.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/rows/warp_row.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

// --- rows

/// Locates rows for the producers, three tiles ahead; one thread per row, in the PV warpgroup's first two warps. It
/// loads the index of a row two tiles before the row's address is needed, and the block one tile before.
class RowLocator {
 public:
  __device__ RowLocator(const AttendParams& p, Shared& s, const QueryRows& rows, const Job& job)
      : p_(p), s_(s), rows_(rows), job_(job) {}

  static constexpr int kLead = kAddressTiles - 1;

  /// Requests the names of the first tiles' rows. Called before queries are requested, because loads return in order.
  __device__ void ask(int (&keys)[kLead]) {
    if (!takes_part()) return;
#pragma unroll
    for (int i = 0; i < kLead; ++i) keys[i] = row(i) < job_.end ? rows_.key<true>(p_, job_.token, row(i)) : -1;
  }

  __device__ void begin(int (&keys)[kLead]) {
    if (!takes_part()) return;
    int blocks[kLead];
#pragma unroll
    for (int i = 0; i < kLead; ++i) keys[i] = rows_.seen<true>(p_, row(i), keys[i]);
#pragma unroll
    for (int i = 0; i < kLead; ++i) blocks[i] = rows_.block<true>(p_, row(i), keys[i]);
#pragma unroll
    for (int i = 0; i < kLead; ++i) locate(i, keys[i], blocks[i]);
    key_ = key(kLead);
    block_ = rows_.block<true>(p_, row(kLead), key_);
    next_key_ = key(kLead + 1);
  }

  /// Called when `tile` has been filled.
  __device__ void advance(int tile) {
    if (!takes_part()) return;
    locate(tile + kLead, key_, block_);
    key_ = next_key_;
    block_ = rows_.block<true>(p_, row(tile + kLead + 1), key_);
    next_key_ = key(tile + kLead + 2);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kWarpgroupThreads; }
  __device__ bool takes_part() const { return lane() < kTile / job_.pair_size; }
  __device__ int place_in_tile() const { return job_.pair_rank * (kTile / 2) + lane(); }
  __device__ int row(int tile) const { return job_.begin + tile * kTile + place_in_tile(); }
  __device__ int key(int tile) const {
    return row(tile) < job_.end ? rows_.seen<true>(p_, row(tile), rows_.key<true>(p_, job_.token, row(tile))) : -1;
  }
  __device__ void locate(int tile, int key, int block) {
    if (tile >= job_.tiles()) return;
    const RowPlace place = rows_.place<true>(p_, row(tile), key, block);
    RowAddress address{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) {
      address = {place.payload, place.scale};
      prefetch_row(address);
    }
    s_.addresses[tile % kAddressTiles][place_in_tile()] = address;
    barrier_arrive(shared_address(&s_.located[tile % kAddressTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const QueryRows& rows_;
  const Job& job_;
  int key_, block_, next_key_;
};

/// The softmax (kWarpgroupIndex 0) or the PV warpgroup (1), up to the output.
template <int kChannelSplits, bool kCtaPair, bool kCombinesInMemory, bool kUnsplit, int kWarpgroupIndex>
__device__ void consume(const AttendParams& p, Shared& s, const Job& job, RowLocator& locator, std::uint32_t to_peer) {
  constexpr int kChannels = kWidth / kChannelSplits / 2, kWarpgroupPanels = kChannels / kTile;
  const int panel = (job.channel_split * 2 + kWarpgroupIndex) * kWarpgroupPanels;
  named_barrier(1, kThreads);  // queries are in place
  float o[kChannels / 2];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) o[i] = 0.0f;
  if constexpr (kWarpgroupIndex == 0) {
    SoftmaxWarpgroup softmax(p, s);
    softmax.run<kCtaPair, false>(o, 0, job.tiles(), panel, to_peer);
    if (!kUnsplit && job.in_cluster()) cluster_wait();  // all CTAs have begun
    for (int half = 0; half < 2; ++half) {
      const Stats mine = softmax.stats(half);
      // racecheck orders a CTA's own accesses by the CTA's barriers only if no access uses a cluster address.
      if (kUnsplit || job.combines_in_memory || (kEachArrives && job.kv_splits == 1)) {
        if (quad_of_thread() == 0) s.stats[0][head_of_thread() + 8 * half] = mine;
        continue;
      }
      const std::uint32_t at = shared_address(&s.stats[job.kv_split][head_of_thread() + 8 * half]);
      for (int to = quad_of_thread(); to < job.kv_splits; to += 4)
        cluster_store(in_block(at, job.rank_of(to)), mine.row_max, mine.sum);
    }
  } else {
    run_pv_warpgroup<kCtaPair>(o, s, locator, 0, job.tiles(), panel, to_peer);
    if (!kUnsplit && job.in_cluster()) cluster_wait();
  }
  named_barrier(1, 2 * kWarpgroupThreads);  // queries and rows are no longer needed
  if (kUnsplit || (!kCombinesInMemory && job.kv_splits == 1)) {
    const int head = head_of_thread();
    scale_heads(o, factor_of(s, job, head, 0), factor_of(s, job, head + 8, 0));
    store_lse(p, s, job);
    if (kWarpgroupIndex == 1 && job.channel_split == kChannelSplits - 1) inverse_rope_last(p, job, o);
    store_output(p, job, o, panel * kTile);
    if (!kUnsplit && job.in_cluster()) cluster_done_reading();
  } else {
    if (kCtaPair) cluster_done_reading();  // the peer has all rows
    store_partials<kChannelSplits, kWarpgroupIndex>(s, o);
    if constexpr (kCombinesInMemory)
      MemoryCombine(p, s, job).run();
    else
      finish_heads<kChannelSplits>(p, s, job);
  }
}

/// Speculative prefetch, before the preceding kernel has ended: queries, the first window rows, and the lists that
/// locate chosen entries.
__device__ void prefetch_inputs(const AttendParams& p, Job job) {
  const int thread = static_cast<int>(threadIdx.x), head = job.first_head + thread * kLine / (kWidth * 2);
  if (head < p.num_heads)
    prefetch_line(static_cast<const std::uint8_t*>(p.q.data) +
                  (job.token * p.q.row_stride + job.first_head * kWidth) * 2 + thread * kLine);
  const int lane = thread - kWarpgroupThreads;
  if (lane < 0 || lane >= kWarpgroupThreads) return;
  const QueryRows rows(p, job.token, speculative_record(p, job.token));
  job.take_rows(rows);
  const std::int32_t* blocks = p.step.block_table + std::int64_t{rows.at.row} * p.step.blocks_per_request;
  const int row = job.begin + lane;
  const bool listed = p.chosen.data != nullptr && rows.entries > 0;
  if (row < min(job.end, rows.window)) {
    const int key = rows.key(p, job.token, row);
    const RowPlace place = rows.place(p, row, key, rows.block(p, row, key));
    if (place.payload == nullptr) return;
    for (int at = 0; at < kWidth + kTail; at += kLine) prefetch_line(place.payload + at);
    prefetch_line(place.scale);
  }
  const int words = lane * (kLine / 4);
  if (listed && words < p.num_chosen)
    prefetch_line(static_cast<const std::int32_t*>(p.chosen.data) + job.token * p.chosen.row_stride + words);
  if (listed && words < p.step.blocks_per_request) prefetch_line(blocks + words);
}

/// kUnsplit: one KV split, and no code that combines several. The kernel runs once, so less code is faster (H200,
/// 2026-11-16, 128 tokens: 128 rows 14.3 to 13.4 us, 640 chosen rows 39.1 to 37.5). But its loop becomes slower (8,320
/// rows 323 to 340, then 348 to 353).
template <int kChannelSplits, bool kCtaPair, bool kCombinesInMemory, bool kUnsplit>
__global__ void __launch_bounds__(kThreads, 1)
    attend_split_kv(const __grid_constant__ AttendParams p, int kv_splits, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  constexpr int kPairSize = kCtaPair ? 2 : 1;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      constexpr Arrivals kFilled = kCtaPair ? Arrivals::of_group(kProducerThreads) : Arrivals::of_warps(kProducerWarps);
      barrier_init(shared_address(&s.full[stage][0]), kFilled);
      barrier_init(shared_address(&s.full[stage][1]), kFilled);
      constexpr int kReaders = (kOwnHalf<kWidth / kChannelSplits / 4> ? 1 : 2) * kPairSize * kWarpgroupWarps;
      barrier_init(shared_address(&s.empty[stage][0]), Arrivals::of_warps(kReaders));
      barrier_init(shared_address(&s.empty[stage][1]), Arrivals::of_warps(kReaders));
      barrier_init(shared_address(&s.p_full[stage]), Arrivals::of_group(kWarpgroupThreads));
    }
    for (int i = 0; i < kAddressTiles; ++i)
      barrier_init(shared_address(&s.located[i]), Arrivals::of_each(kTile / kPairSize));
    if (kCtaPair) publish_barriers();  // the peer's copies count at them
  }
  launch_dependents();
  touch(p);
  __syncthreads();
  if constexpr (kUnsplit) kv_splits = 1;
  const bool in_cluster = kCtaPair || (!kCombinesInMemory && kv_splits > 1);
  if (in_cluster) cluster_arrive();
  Job job(kv_splits, kChannelSplits, kPairSize, head_tiles, kCombinesInMemory);
  prefetch_inputs(p, job);
  grid_dependency_wait();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const std::uint32_t to_peer = kCtaPair ? in_block(shared_address(&s), job.peer_rank()) - shared_address(&s) : 0;
  const QueryRows rows(p, job.token);
  job.take_rows(rows);
  if (kCombinesInMemory && job.is_idle()) {  // the peer is idle, too
    if (in_cluster) cluster_wait();
    return;
  }
  const Queries<kThreads / 32, 4> queries(p, s, job);
  RowLocator locator(p, s, rows, job);
  int keys[RowLocator::kLead] = {};  // of the first tiles
  if (warpgroup == 1) locator.ask(keys);
  queries.begin();
  if (warpgroup == 1) locator.begin(keys);
  queries.finish();
  if (warpgroup == 0) {
    more_registers<kSoftmaxRegisters>();
    consume<kChannelSplits, kCtaPair, kCombinesInMemory, kUnsplit, 0>(p, s, job, locator, to_peer);
  } else if (warpgroup == 1) {
    more_registers<kPvRegisters>();
    consume<kChannelSplits, kCtaPair, kCombinesInMemory, kUnsplit, 1>(p, s, job, locator, to_peer);
  } else {
    fewer_registers<kProducerRegisters>();
    named_barrier_arrive(1, kThreads);
    if constexpr (kCtaPair) {
      cluster_wait();  // the peer has begun
      CtaPairProducer(s, job.pair_rank, to_peer).run(job.tiles());
    } else {
      Producer(s).run(job.tiles());
    }
    if (!kCombinesInMemory && kv_splits > 1) {
      job = Job(kv_splits, kChannelSplits, kPairSize, head_tiles,
                false);  // computed again: there are no registers to keep it in
      job.take_rows(QueryRows(p, job.token));
      if (kCtaPair)
        cluster_done_reading();
      else
        cluster_wait();
      finish_heads<kChannelSplits>(p, s, job);
    } else if (in_cluster) {
      cluster_done_reading();
    }
  }
#endif
}

/// Persistent CTAs, which take 64 heads of one token after another: see persistent.cuh.
__global__ void __launch_bounds__(kThreads, 1)
    attend_persistent(const __grid_constant__ AttendParams p, int head_tiles, bool prefetches) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        barrier_init(shared_address(&s.full[stage][half]), Arrivals::of_warps(kProducerWarps));
        barrier_init(shared_address(&s.empty[stage][half]), Arrivals::of_warps(kWarpgroupWarps));
      }
      barrier_init(shared_address(&s.p_full[stage]), Arrivals::of_warps(kWarpgroupWarps));
    }
    barrier_init(shared_address(&s.queries_empty), Arrivals::of_warps(2 * kWarpgroupWarps));
    barrier_init(shared_address(&s.queries_full), Arrivals::of_warps(kProducerWarps));
  }
  launch_dependents();
  touch(p);
  prefetch_inputs(p, Job(1, 1, 1, head_tiles, false));
  grid_dependency_wait();
  const TileScheduler<1> scheduler(p, s, head_tiles);
  scheduler.schedule_first();
  __syncthreads();
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

/// The same for 2-CTA pairs, which take two consecutive tokens: see token_pair.cuh. If the number of tokens is odd,
/// both CTAs of the last pair take the last token.
__global__ void __launch_bounds__(kThreads, 1)
    attend_token_pair(const __grid_constant__ AttendParams p, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        barrier_init(shared_address(&s.full[stage][half]), Arrivals::of_group(kProducerThreads));
        barrier_init(shared_address(&s.empty[stage][half]), Arrivals::of_warps(2 * kWarpgroupWarps));
      }
      barrier_init(shared_address(&s.p_full[stage]), Arrivals::of_group(kWarpgroupThreads));
    }
    for (int i = 0; i < kAddressTiles; ++i) barrier_init(shared_address(&s.located[i]), Arrivals::of_each(kTile));
    barrier_init(shared_address(&s.queries_empty), Arrivals::of_warps(kWarpgroupWarps));
    barrier_init(shared_address(&s.queries_full), Arrivals::of_warps(kProducerWarps));
    publish_barriers();  // the peer's copies count at them
  }
  launch_dependents();
  touch(p);
  __syncthreads();
  cluster_arrive();
  const int pair_rank = static_cast<int>(blockIdx.x) % 2;
  prefetch_inputs(p, Job(2, head_tiles, p.step.num_tokens));
  grid_dependency_wait();
  const TileScheduler<2> scheduler(p, s, head_tiles);
  scheduler.schedule_first();
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const std::uint32_t to_peer = in_block(shared_address(&s), static_cast<unsigned>(pair_rank ^ 1)) - shared_address(&s);
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

// --- on the host

/// Row planes that are never read have no data.
bool can_read(const ops::RowPlanes& rows) {
  return rows.payload.data == nullptr ||
         (rows.format == Format::fp8_tile64 && rows.shape.width == kWidth && rows.shape.tail == kTail &&
          is_aligned(rows.payload, 16) && is_aligned(rows.scale, 8));
}

bool is_supported(const AttendParams& p) {
  return width_of(p) == kWidth && can_read(p.layer.window.ring) && can_read(p.layer.window.scratch) &&
         (p.layer.num_kinds == 0 || can_read(p.layer.kinds[0].page)) && p.q.dtype == DType::bf16 &&
         is_aligned(p.q.data, 16) && p.q.row_stride % 8 == 0 && is_aligned(p.out.data, 16) &&
         p.inverse_rope.rope_dim <= kTail && p.softmax_scale > 0.0f;
}

template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  return error != cudaSuccess ? error : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

cudaLaunchConfig_t cluster_config(int clusters, int blocks, cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(clusters * blocks);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return config;
}

int head_tiles_of(const AttendParams& p) { return (p.num_heads + kTile - 1) / kTile; }

template <int kChannelSplits, bool kCtaPair, bool kCombinesInMemory = false, bool kUnsplit = false>
cudaError_t launch_split_kv(const AttendParams& p, int kv_splits, cudaStream_t stream) {
  const auto kernel = attend_split_kv<kChannelSplits, kCtaPair, kCombinesInMemory, kUnsplit>;
  constexpr int kPairSize = kCtaPair ? 2 : 1;
  const int head_tiles = head_tiles_of(p), work_tiles = p.step.num_tokens * head_tiles / kPairSize;
  const int blocks = kv_splits * kChannelSplits * kPairSize;
  if (const cudaError_t error = allow_shared_memory(kernel); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = kCombinesInMemory ? cluster_config(work_tiles * kv_splits, kPairSize, attributes[1])
                                                : cluster_config(work_tiles, blocks, attributes[1]);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs += 1;
  return cudaLaunchKernelEx(&config, kernel, p, kv_splits, head_tiles);
}

/// L2 already holds most rows that several tokens of a request share.
bool shares_rows(const ops::StepDesc& step) {
  constexpr int kSharers = 8;
  return step.num_items > 0 && step.num_tokens / step.num_items >= kSharers;
}

cudaError_t launch_persistent(const AttendParams& p, cudaStream_t stream) {
  const int head_tiles = head_tiles_of(p), work_tiles = p.step.num_tokens * head_tiles;
  if (const cudaError_t error = allow_shared_memory(attend_persistent); error != cudaSuccess) return error;
  return launch<kSharedBytes>(attend_persistent, static_cast<unsigned>(std::min(work_tiles, num_sms())), kThreads,
                              stream, p, head_tiles, !shares_rows(p.step));
}

/// Whether the step alone determines the rows of a query.
bool sees_all(const AttendParams& p) {
  return p.step.tokens != nullptr && p.window_slots.slots == nullptr && p.entry_slots.slots == nullptr &&
         p.chosen.data == nullptr;
}

bool has_tiled_window(const AttendParams& p) {
  return p.layer.num_kinds == 0 && p.layer.window_tokens >= 1 && p.layer.window_tokens <= kMaxWindowRows;
}

/// An upper bound of the rows of any query.
std::int64_t max_rows(const AttendParams& p) {
  std::int64_t rows = p.window_slots.slots != nullptr ? p.window_slots.stride : p.layer.window_tokens;
  if (p.entry_slots.slots != nullptr)
    rows += p.entry_slots.stride;
  else if (p.layer.num_kinds > 0)
    rows += p.chosen.data != nullptr ? p.num_chosen
                                     : std::int64_t{p.step.blocks_per_request} * p.layer.kinds[0].rows_per_block;
  return rows;
}

/// The number of clusters that run at once, by the number of their CTAs. A CTA takes an SM, and a cluster must fit into
/// one GPC. [kMaxCluster + 1]
std::array<int, kMaxCluster + 1> count_clusters() {
  std::array<int, kMaxCluster + 1> counts{};
  if (allow_shared_memory(attend_split_kv<1, false, false, false>) != cudaSuccess) return counts;
  counts[1] = num_sms();  // without a cluster; the runtime would count 0
  for (int blocks = 2; blocks <= kMaxCluster; ++blocks) {
    cudaLaunchAttribute cluster{};
    const cudaLaunchConfig_t config = cluster_config(1, blocks, cluster);
    if (cudaOccupancyMaxActiveClusters(&counts[static_cast<std::size_t>(blocks)],
                                       attend_split_kv<1, false, false, false>, &config) != cudaSuccess)
      counts[static_cast<std::size_t>(blocks)] = 0;
  }
  static_cast<void>(cudaGetLastError());  // of sizes that the GPU does not support
  return counts;
}

const std::array<int, kMaxCluster + 1>& clusters_at_once() {
  static const std::array<int, kMaxCluster + 1> at_once = count_clusters();
  return at_once;
}

cudaError_t launch_token_pair(const AttendParams& p, bool persistent, cudaStream_t stream) {
  const int head_tiles = head_tiles_of(p), work_tiles = (p.step.num_tokens + 1) / 2 * head_tiles;
  const int clusters = persistent ? std::min(work_tiles, std::max(clusters_at_once()[2], 1)) : work_tiles;
  if (const cudaError_t error = allow_shared_memory(attend_token_pair); error != cudaSuccess) return error;
  return launch_clusters<kSharedBytes>(attend_token_pair, 2, static_cast<unsigned>(2 * clusters), kThreads, stream, p,
                                       head_tiles);
}

/// CTAs that have a place in the workspace.
std::int64_t workspace_ctas(const AttendParams& p) {
  if (p.workspace == nullptr || !is_aligned(p.workspace, 16)) return 0;
  const std::int64_t partials = (p.workspace_bytes - ops::kAttendMeetingBytes) / ops::kAttendShareBytes;
  return std::clamp<std::int64_t>(partials, 0, kMaxArrivalCounters);
}

struct TimedSplit {
  AttendSplit split;
  std::int64_t time;  // in hundredths of a microsecond
};

/// For CTAs that all run at once; at_once: clusters of one and of two CTAs. Each KV split has the same number of tiles,
/// and there are no more splits than that needs.
TimedSplit split_combined_in_memory(const AttendParams& p, std::int64_t tiles, const int (&at_once)[2]) {
  struct Cost {
    bool cta_pair;
    int start, tile;
  };
  constexpr Cost kCosts[] = {{true, 1300, 210}, {false, 1320, 245}};
  constexpr std::int64_t kMaxUsefulSplits = 96;  // 130 splits of a tile each took longer than 65 of two
  static_assert(kMaxUsefulSplits <= kMaxMemorySplits);
  TimedSplit best{{}, std::numeric_limits<std::int64_t>::max()};
  const std::int64_t work_tiles = std::int64_t{p.step.num_tokens} * head_tiles_of(p);
  for (const Cost& cost : kCosts) {
    const int pair_size = cost.cta_pair ? 2 : 1;
    if (head_tiles_of(p) % pair_size != 0) continue;
    const std::int64_t blocks = std::min<std::int64_t>(workspace_ctas(p), at_once[pair_size - 1] * pair_size);
    const std::int64_t max_splits = std::min(blocks / work_tiles, kMaxUsefulSplits);
    if (max_splits < 2) continue;
    const std::int64_t own = (tiles + max_splits - 1) / max_splits, kv_splits = (tiles + own - 1) / own;
    const std::int64_t time = cost.start + own * cost.tile;
    if (kv_splits < 2 || time >= best.time) continue;
    best = {{static_cast<int>(kv_splits), 1, cost.cta_pair, true}, time};
  }
  return best;
}

/// The split with the least estimated time, among those whose CTAs all run at once: a constant that depends on how O is
/// combined, and a time per tile. Fitted to an H200, 2026-11-15; combination in memory: 2026-11-16.
TimedSplit best_split(const AttendParams& p) {
  const std::array<int, kMaxCluster + 1>& at_once = clusters_at_once();
  const std::int64_t work_tiles = std::int64_t{p.step.num_tokens} * head_tiles_of(p);
  const std::int64_t tiles = std::max<std::int64_t>((max_rows(p) + kTile - 1) / kTile, 1);
  struct Cost {
    int channels;
    bool cta_pair;
    int unsplit, tile_alone, merged, per_part, tile_merged;
  };
  constexpr Cost kCosts[] = {{1, true, 800, 240, 980, 28, 190},
                             {1, false, 800, 278, 980, 28, 220},
                             {2, false, 660, 260, 760, 30, 220},
                             {4, false, 560, 275, 600, 50, 220}};
  if (sees_all(p) && has_tiled_window(p) && (work_tiles <= at_once[1] || !shares_rows(p.step))) {
    const bool divided = 4 * work_tiles <= at_once[1];  // so that the next launch fits beside this one
    return {{.rows = 1, .channels = divided ? 2 : 1, .single_pass_window = true}, divided ? 750 : 930};
  }
  TimedSplit best = split_combined_in_memory(p, tiles, {at_once[1], at_once[2]});
  for (const Cost& cost : kCosts) {
    const int pair_size = cost.cta_pair ? 2 : 1, blocks = cost.channels * pair_size;  // of a KV split
    if (head_tiles_of(p) % pair_size != 0) continue;
    for (int rows = 1; rows * blocks <= kMaxCluster; ++rows) {
      const std::int64_t own = (tiles + rows - 1) / rows;
      const std::int64_t time = rows == 1 ? cost.unsplit + own * cost.tile_alone
                                          : cost.merged + rows * cost.per_part + own * cost.tile_merged;
      const bool fits = work_tiles / pair_size <= at_once[static_cast<std::size_t>(rows * blocks)];
      if ((!fits && rows * cost.channels > 1) || time >= best.time) continue;
      best = {{rows, cost.channels, cost.cta_pair}, time};
    }
  }
  AttendSplit& split = best.split;
  if (split.rows * split.channels > 1) return best;
  // Measured with 1,024 tokens of one request. 128 requests of one token each are slower with persistent CTAs.
  if (work_tiles <= at_once[1] || !shares_rows(p.step)) {
    constexpr std::int64_t kMaxUnsplitTiles = 20;
    split.unsplit = !split.cta_pair && tiles <= kMaxUnsplitTiles;
    return best;
  }
  if (sees_all(p) && p.layer.num_kinds > 0)
    split = {.rows = 1, .channels = 1, .persistent = true, .token_pair = true};
  else if (sees_all(p) && has_tiled_window(p) && !split.cta_pair)
    split.persistent_window = true;
  else
    split.persistent = !split.cta_pair;
  return best;
}

}  // namespace

AttendSplit split_of(const AttendParams& p) { return best_split(p).split; }

cudaError_t attend_split(const AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  if (split.combines_in_memory) {
    const std::int64_t blocks = std::int64_t{p.step.num_tokens} * head_tiles_of(p) * split.rows;
    if (split.channels != 1 || split.rows > kMaxMemorySplits || blocks > workspace_ctas(p))
      return cudaErrorInvalidValue;
    return split.cta_pair ? launch_split_kv<1, true, true>(p, split.rows, stream)
                          : launch_split_kv<1, false, true>(p, split.rows, stream);
  }
  if ((split.persistent_window || split.single_pass_window || split.token_pair) && !sees_all(p))
    return cudaErrorInvalidValue;
  if (split.single_pass_window)
    return has_tiled_window(p) ? launch_single_pass_window(p, split.channels, stream) : cudaErrorInvalidValue;
  if (split.persistent_window) return has_tiled_window(p) ? launch_persistent_window(p, stream) : cudaErrorInvalidValue;
  if (split.token_pair) return launch_token_pair(p, split.persistent, stream);
  if (split.persistent) return launch_persistent(p, stream);
  if (split.unsplit) return launch_split_kv<1, false, false, true>(p, 1, stream);
  const auto launch = [&](auto cta_pair) {
    switch (split.channels) {
      case 1: return launch_split_kv<1, cta_pair>(p, split.rows, stream);
      case 2: return launch_split_kv<2, cta_pair>(p, split.rows, stream);
      default: return launch_split_kv<4, cta_pair>(p, split.rows, stream);
    }
  };
  return split.cta_pair ? launch(std::true_type{}) : launch(std::false_type{});
}

cudaError_t attend(const AttendParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch attend", true);
  if (p.step.num_tokens <= 0 || p.num_heads <= 0) return cudaSuccess;
  if (!is_sm90() || !is_supported(p)) return attend_generic(p, stream);
  const TimedSplit best = best_split(p);
  const double time = static_cast<double>(best.time);
  const double in_cluster = 1050 + 0.36 * static_cast<double>(max_rows(p));  // of few tokens, in the same unit
  const double other = best.split.single_pass_window   ? time
                       : best.split.combines_in_memory ? std::min(in_cluster, time)
                                                       : in_cluster;
  if (const auto small = small_batch_split_of(p, max_rows(p), other)) return launch_small_batch(p, *small, stream);
  return attend_split(p, best.split, stream);
}

}  // namespace kv4::cuda
