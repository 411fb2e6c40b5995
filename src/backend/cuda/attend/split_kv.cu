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
// More tokens than CTAs run at once, of few requests: persistent.cu, whose consumers share the work differently. If a
// token sees all entries before it, a 2-CTA pair takes two consecutive tokens: token_pair.cu. Windows only:
// persistent_window.cu, and for fewer tokens single_pass_window.cu.
//
// Bounds, per row of 584 bytes and 64 heads, in clocks of an SM: bytes 32, multiplies 32, shared memory and L1 54 (S
// 16, PV 12, converted rows 9, raw rows 9, prefetched lines about 5), conversion 12. Measured: 64; 58 if 128 heads
// share a row, 55 if two tokens of 64 heads do (H200, 2026-11-16; docs/performance.md). Without a pair the producers
// are the bottleneck, closely before shared memory and the softmax warpgroup: stores wait for multiplies that read
// shared memory, and between the conversions of two tiles the producers wait for loads, 18 clocks a row even out of L2.
// With a pair the bottleneck is the latency of one tile through S, softmax and PV, and the peer's copy.
#include "backend/cuda/attend/combine_in_memory.cuh"
#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/producer.cuh"
#include "backend/cuda/attend/prologue.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {
namespace attend_wgmma::split_kv {

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
    const RowPointers place = rows_.place<true>(p_, row(tile), key, block);
    RowAddress address{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) {
      address = {place.payload, place.scale};
      prefetch_row(address);
    }
    s_.addresses[tile % kAddressTiles][place_in_tile()] = address;
    mbarrier_arrive(shared_address(&s_.located[tile % kAddressTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const QueryRows& rows_;
  const Job& job_;
  int key_, block_, next_key_;
};

// --- consumers

/// The softmax (kWarpgroupIndex 0) or the PV warpgroup (1), up to the output.
template <int kChannelSplits, bool kCtaPair, bool kCombinesInMemory, bool kUnsplit, int kWarpgroupIndex>
__device__ void consume(const AttendParams& p, Shared& s, const Job& job, RowLocator& locator, std::uint32_t to_peer) {
  constexpr int kChannels = kWidth / kChannelSplits / 2, kWarpgroupPanels = kChannels / kTile;
  constexpr bool kHasWaited = kCtaPair && kClusterWaitsTogether;
  const int panel = (job.channel_split * 2 + kWarpgroupIndex) * kWarpgroupPanels;
  named_barrier_sync_with_arrivals(1, kThreads);  // queries are in place
  float o[kChannels / 2];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) o[i] = 0.0f;
  if constexpr (kWarpgroupIndex == 0) {
    SoftmaxWarpgroup softmax(p, s);
    softmax.run<kCtaPair, false>(o, 0, job.tiles(), panel, to_peer);
    if (!kUnsplit && !kHasWaited && job.in_cluster()) cluster_wait();  // all CTAs have begun
    for (int half = 0; half < 2; ++half) {
      const Stats mine = softmax.stats(half);
      // racecheck orders a CTA's own accesses by the CTA's barriers only if no access uses a cluster address.
      if (kUnsplit || job.combines_in_memory || (kEachArrives && job.kv_splits == 1)) {
        if (quad_of_thread() == 0) s.stats[0][head_of_thread() + 8 * half] = mine;
        continue;
      }
      const std::uint32_t at = shared_address(&s.stats[job.kv_split][head_of_thread() + 8 * half]);
      for (int to = quad_of_thread(); to < job.kv_splits; to += 4)
        cluster_store(map_to_cta(at, job.rank_of(to)), mine.row_max, mine.sum);
    }
  } else {
    run_pv_warpgroup<kCtaPair>(o, s, locator, 0, job.tiles(), panel, to_peer);
    if (!kUnsplit && !kHasWaited && job.in_cluster()) cluster_wait();
  }
  named_barrier_sync(1, 2 * kWarpgroupThreads);  // queries and rows are no longer needed
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

// --- kernel

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
      mbarrier_init(shared_address(&s.full[stage][0]), kFilled);
      mbarrier_init(shared_address(&s.full[stage][1]), kFilled);
      constexpr int kReaders = (kOwnHalf<kWidth / kChannelSplits / 4> ? 1 : 2) * kPairSize * kWarpgroupWarps;
      mbarrier_init(shared_address(&s.empty[stage][0]), Arrivals::of_warps(kReaders));
      mbarrier_init(shared_address(&s.empty[stage][1]), Arrivals::of_warps(kReaders));
      mbarrier_init(shared_address(&s.p_full[stage]), Arrivals::of_group(kWarpgroupThreads));
    }
    for (int i = 0; i < kAddressTiles; ++i)
      mbarrier_init(shared_address(&s.located[i]), Arrivals::of_each(kTile / kPairSize));
    if (kCtaPair) fence_mbarrier_init();  // the peer's copies count at them
  }
  launch_dependents();
  touch(p);
  cta_sync();
  if constexpr (kUnsplit) kv_splits = 1;
  const bool in_cluster = kCtaPair || (!kCombinesInMemory && kv_splits > 1);
  if (in_cluster) cluster_arrive();
  Job job(kv_splits, kChannelSplits, kPairSize, head_tiles, kCombinesInMemory);
  prefetch_inputs(p, job);
  grid_dependency_wait();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const std::uint32_t to_peer = kCtaPair ? map_to_cta(shared_address(&s), job.peer_rank()) - shared_address(&s) : 0;
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
  if (kCtaPair && kClusterWaitsTogether) cluster_wait();
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
      if (!kClusterWaitsTogether) cluster_wait();  // the peer has begun
      CtaPairProducer(s, job.pair_rank, to_peer).run(job.tiles());
    } else {
      Producer(s).run(job.tiles());
    }
    if (!kCombinesInMemory && kv_splits > 1) {
      // Computed again: there are no registers to keep it in.
      job = Job(kv_splits, kChannelSplits, kPairSize, head_tiles, false);
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

template <int kChannelSplits, bool kCtaPair, bool kCombinesInMemory = false, bool kUnsplit = false>
cudaError_t launch_variant(const AttendParams& p, int kv_splits, cudaStream_t stream) {
  const auto kernel = attend_split_kv<kChannelSplits, kCtaPair, kCombinesInMemory, kUnsplit>;
  constexpr int kPairSize = kCtaPair ? 2 : 1;
  const int head_tiles = head_tiles_of(p), work_tiles = p.step.num_tokens * head_tiles / kPairSize;
  const int split_ctas = kChannelSplits * kPairSize;
  return launch_clusters<kSharedBytes>(
      kernel, static_cast<unsigned>(kCombinesInMemory ? kPairSize : kv_splits * split_ctas),
      static_cast<unsigned>(work_tiles * kv_splits * split_ctas), kThreads, stream, p, kv_splits, head_tiles);
}

}  // namespace attend_wgmma::split_kv

cudaError_t launch_split_kv(const ops::AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  using namespace attend_wgmma;
  using namespace attend_wgmma::split_kv;
  if (split.cta_pair) return launch_variant<1, true>(p, split.kv_splits, stream);
  switch (split.channel_splits) {
    case 1: return launch_variant<1, false>(p, split.kv_splits, stream);
    case 2: return launch_variant<2, false>(p, split.kv_splits, stream);
    default: return launch_variant<4, false>(p, split.kv_splits, stream);
  }
}

cudaError_t launch_split_kv_in_memory(const ops::AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  using namespace attend_wgmma;
  using namespace attend_wgmma::split_kv;
  return split.cta_pair ? launch_variant<1, true, true>(p, split.kv_splits, stream)
                        : launch_variant<1, false, true>(p, split.kv_splits, stream);
}

cudaError_t launch_unsplit(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  return attend_wgmma::split_kv::launch_variant<1, false, false, true>(p, 1, stream);
}

AttendGpu::Clusters count_wgmma_clusters() {
  using namespace attend_wgmma;
  using namespace attend_wgmma::split_kv;
  AttendGpu::Clusters counts{};
  counts[1] = num_sms();  // without a cluster; the runtime would count 0
  for (unsigned ctas = 2; ctas <= kMaxCluster; ++ctas)
    counts[ctas] = clusters_at_once<kSharedBytes>(attend_split_kv<1, false, false, false>, ctas, kThreads);
  return counts;
}

}  // namespace kv4::cuda
