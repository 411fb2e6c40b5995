// attend for rows of 512 channels in fp8_tile64 and bf16 queries, on Hopper. Everything else goes to generic.cu.
//
// A CTA takes 64 heads of a token and a run of its rows, in tiles of 64 rows. Four warpgroups:
//   2 loaders  bring a tile's raw rows into registers and convert them to fp16 times their scale, into one of two
//              shared tiles of 64 KB, right panels first. fp16 because e4m3 becomes it in one instruction and scales
//              are powers of two; rows that do not fit get an exponent, which goes into scores and weights.
//   scorer     S = Q K^T (m64n64k16, Q stays in shared memory as fp16 with an exponent per head), online softmax,
//              weights P as fp16 into shared memory, and O += P V for the left half of the channels (m64n128k16).
//   adder      O += P V for the right half, from the same tile: a row is loaded and converted once and serves as K
//              and as V. It also finds the rows for the loaders, three tiles ahead, and brings them into L2: the
//              loaders have registers for one tile, and about 25 KB must be under way to keep memory busy.
// 128 heads: two CTAs of a cluster have 64 each and share the rows. Each converts half of a tile and copies it
// into the other's shared memory.
// Few tokens: the rows of a token are split over the CTAs of a cluster, and where there are CTAs to
// spare also the channels of V, which needs no merging: such blocks score the same rows. Blocks exchange (max, sum) of
// each head and leave their part of O in shared memory; then each finishes some heads and reads the others' shares of
// them, in fp16 with a scale, through distributed shared memory (13 to 15 bytes per clock, whatever the instruction):
// one launch, nothing through global memory. Where a cluster is too small (one token and a long list of entries), parts
// are no cluster and merge through a workspace: combine_in_memory.cuh. The grid depends on the params alone; how many
// rows there are is read on the device. More tokens than CTAs run at once, of few requests: persistent.cuh, where
// scorer and adder share their work otherwise; of them, where a token sees all entries before it, two neighbours side
// by side: token_pair.cuh; windows alone: persistent_window.cu, and of fewer tokens single_pass_window.cu.
//
// Bounds, per row of 584 bytes and 64 heads, in clocks of an SM: bytes 32, multiplies 32, shared memory and
// first cache level 54 (scores 16, values 12, converted rows 9, raw rows 9, lines that are prefetched about 5),
// conversion 12. Measured: 64, of a row shared by 128 heads 58, by two tokens of 64 heads 55 (H200, 2026-11-16;
// docs/performance.md). Alone the loaders bound it, closely before shared memory and the scorer: stores wait for
// multiplies that read shared memory, and loads are waited for between one tile's conversion and the next, 18 clocks a
// row even out of L2. Paired, it is one tile's way through scores, weights and values, and the mate's copy.
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

/// Finds rows for the loaders, three tiles ahead; a thread per row, of the adder's first two warps. The index of a row
/// is loaded two tiles before its place is needed, its block one.
class Finder {
 public:
  __device__ Finder(const AttendParams& p, Shared& s, const QueryRows& rows, const Job& job)
      : p_(p), s_(s), rows_(rows), job_(job) {}

  static constexpr int kLead = kFoundTiles - 1;

  /// Asks for what names the first tiles' rows. Before queries are asked for, for loads come back in order.
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

  /// When `tile` has been filled.
  __device__ void advance(int tile) {
    if (!takes_part()) return;
    locate(tile + kLead, key_, block_);
    key_ = next_key_;
    block_ = rows_.block<true>(p_, row(tile + kLead + 1), key_);
    next_key_ = key(tile + kLead + 2);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) - kGroup; }
  __device__ bool takes_part() const { return lane() < kTile / job_.mates; }
  __device__ int place_in_tile() const { return job_.mate * (kTile / 2) + lane(); }
  __device__ int row(int tile) const { return job_.begin + tile * kTile + place_in_tile(); }
  __device__ int key(int tile) const {
    return row(tile) < job_.end ? rows_.seen<true>(p_, row(tile), rows_.key<true>(p_, job_.token, row(tile))) : -1;
  }
  __device__ void locate(int tile, int key, int block) {
    if (tile >= job_.tiles()) return;
    const RowPlace place = rows_.place<true>(p_, row(tile), key, block);
    Found found{kAbsentRow.payload, kAbsentRow.scale};
    if (place.payload != nullptr) {
      found = {place.payload, place.scale};
      prefetch(found);
    }
    s_.found[tile % kFoundTiles][place_in_tile()] = found;
    barrier_arrive(shared_address(&s_.located[tile % kFoundTiles]));
  }

  const AttendParams& p_;
  Shared& s_;
  const QueryRows& rows_;
  const Job& job_;
  int key_, block_, next_key_;
};

/// Scorer (kGroupIndex 0) or adder (1), up to the output.
template <int kChannelParts, bool kPaired, bool kThroughMemory, bool kAlone, int kGroupIndex>
__device__ void consume(const AttendParams& p, Shared& s, const Job& job, Finder& finder, std::uint32_t to_mate) {
  constexpr int kChannels = kWidth / kChannelParts / 2, kGroupPanels = kChannels / kTile;
  const int panel = (job.channel_part * 2 + kGroupIndex) * kGroupPanels;
  named_barrier(1, kThreads);  // queries are in place
  float o[kChannels / 2];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) o[i] = 0.0f;
  if constexpr (kGroupIndex == 0) {
    Scorer scorer(p, s);
    scorer.run<kPaired, false>(o, 0, job.tiles(), panel, to_mate);
    if (!kAlone && job.in_cluster()) cluster_wait();  // all blocks have begun
    for (int half = 0; half < 2; ++half) {
      const Stats mine = scorer.stats(half);
      // racecheck orders a block's own accesses by the block's barriers only if none is by an address in the cluster.
      if (kAlone || job.through_memory || (kEachArrives && job.parts == 1)) {
        if (quad_of_thread() == 0) s.stats[0][head_of_thread() + 8 * half] = mine;
        continue;
      }
      const std::uint32_t at = shared_address(&s.stats[job.part][head_of_thread() + 8 * half]);
      for (int to = quad_of_thread(); to < job.parts; to += 4)
        cluster_store(in_block(at, job.rank_of(to)), mine.most, mine.sum);
    }
  } else {
    run_adder<kPaired>(o, s, finder, 0, job.tiles(), panel, to_mate);
    if (!kAlone && job.in_cluster()) cluster_wait();
  }
  named_barrier(1, 2 * kGroup);  // queries and rows are no longer needed
  if (kAlone || (!kThroughMemory && job.parts == 1)) {
    const int head = head_of_thread();
    scale_heads(o, factor_of(s, job, head, 0), factor_of(s, job, head + 8, 0));
    store_lse(p, s, job);
    if (kGroupIndex == 1 && job.channel_part == kChannelParts - 1) inverse_rope_last(p, job, o);
    store_output(p, job, o, panel * kTile);
    if (!kAlone && job.in_cluster()) cluster_done_reading();
  } else {
    if (kPaired) cluster_done_reading();  // the mate has all rows
    store_shares<kChannelParts, kGroupIndex>(s, o);
    if constexpr (kThroughMemory)
      MemoryMerge(p, s, job).run();
    else
      finish_heads<kChannelParts>(p, s, job);
  }
}

/// Before the kernel before has ended: queries, the first window rows, and what chosen entries are found by.
__device__ void fetch_ahead(const AttendParams& p, Job job) {
  const int thread = static_cast<int>(threadIdx.x), head = job.first_head + thread * kLine / (kWidth * 2);
  if (head < p.num_heads)
    fetch(static_cast<const std::uint8_t*>(p.q.data) + (job.token * p.q.row_stride + job.first_head * kWidth) * 2 +
          thread * kLine);
  const int lane = thread - kGroup;
  if (lane < 0 || lane >= kGroup) return;
  const QueryRows rows(p, job.token, guess_record(p, job.token));
  job.take_rows(rows);
  const std::int32_t* blocks = p.step.block_table + std::int64_t{rows.at.row} * p.step.blocks_per_request;
  const int row = job.begin + lane;
  const bool listed = p.chosen.data != nullptr && rows.entries > 0;
  if (row < min(job.end, rows.window)) {
    const int key = rows.key(p, job.token, row);
    const RowPlace place = rows.place(p, row, key, rows.block(p, row, key));
    if (place.payload == nullptr) return;
    for (int at = 0; at < kWidth + kTail; at += kLine) fetch(place.payload + at);
    fetch(place.scale);
  }
  const int words = lane * (kLine / 4);
  if (listed && words < p.num_chosen)
    fetch(static_cast<const std::int32_t*>(p.chosen.data) + job.token * p.chosen.row_stride + words);
  if (listed && words < p.step.blocks_per_request) fetch(blocks + words);
}

/// kAlone: one part, and no code that merges several. It runs once, so less of it is faster (H200, 2026-11-16, 128
/// tokens: 128 rows 14.3 to 13.4 us, 640 chosen ones 39.1 to 37.5); but the loop comes out slower (8,320 rows 323 to
/// 340, then 348 to 353).
template <int kChannelParts, bool kPaired, bool kThroughMemory, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1)
    attend_tiles(const __grid_constant__ AttendParams p, int row_parts, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  constexpr int kMates = kPaired ? 2 : 1;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      constexpr Arrivals kFilled = kPaired ? Arrivals::of_group(kLoaders) : Arrivals::of_warps(kLoaderWarps);
      barrier_init(shared_address(&s.full[stage][0]), kFilled);
      barrier_init(shared_address(&s.full[stage][1]), kFilled);
      constexpr int kReaders = (kOwnHalf<kWidth / kChannelParts / 4> ? 1 : 2) * kMates * kGroupWarps;
      barrier_init(shared_address(&s.empty[stage][0]), Arrivals::of_warps(kReaders));
      barrier_init(shared_address(&s.empty[stage][1]), Arrivals::of_warps(kReaders));
      barrier_init(shared_address(&s.weighted[stage]), Arrivals::of_group(kGroup));
    }
    for (int i = 0; i < kFoundTiles; ++i)
      barrier_init(shared_address(&s.located[i]), Arrivals::of_each(kTile / kMates));
    if (kPaired) publish_barriers();  // the mate's copies count at them
  }
  launch_dependents();
  touch(p);
  __syncthreads();
  if constexpr (kAlone) row_parts = 1;
  const bool in_cluster = kPaired || (!kThroughMemory && row_parts > 1);
  if (in_cluster) cluster_arrive();
  Job job(row_parts, kChannelParts, kMates, head_tiles, kThroughMemory);
  fetch_ahead(p, job);
  grid_dependency_wait();

  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const std::uint32_t to_mate = kPaired ? in_block(shared_address(&s), job.mate_rank()) - shared_address(&s) : 0;
  const QueryRows rows(p, job.token);
  job.take_rows(rows);
  if (kThroughMemory && job.left_over()) {  // so is the mate
    if (in_cluster) cluster_wait();
    return;
  }
  const Queries<kThreads / 32, 4> queries(p, s, job);
  Finder finder(p, s, rows, job);
  int keys[Finder::kLead] = {};  // of the first tiles
  if (group == 1) finder.ask(keys);
  queries.begin();
  if (group == 1) finder.begin(keys);
  queries.finish();
  if (group == 0) {
    more_registers<kScorerRegisters>();
    consume<kChannelParts, kPaired, kThroughMemory, kAlone, 0>(p, s, job, finder, to_mate);
  } else if (group == 1) {
    more_registers<kAdderRegisters>();
    consume<kChannelParts, kPaired, kThroughMemory, kAlone, 1>(p, s, job, finder, to_mate);
  } else {
    fewer_registers<kLoaderRegisters>();
    named_barrier_arrive(1, kThreads);
    if constexpr (kPaired) {
      cluster_wait();  // the mate has begun
      PairLoader(s, job.mate, to_mate).run(job.tiles());
    } else {
      Loader(s).run(job.tiles());
    }
    if (!kThroughMemory && row_parts > 1) {
      job = Job(row_parts, kChannelParts, kMates, head_tiles, false);  // again: no registers to keep it in
      job.take_rows(QueryRows(p, job.token));
      if (kPaired)
        cluster_done_reading();
      else
        cluster_wait();
      finish_heads<kChannelParts>(p, s, job);
    } else if (in_cluster) {
      cluster_done_reading();
    }
  }
#endif
}

/// As many CTAs as run at once, which take 64 heads of a token in turn: see persistent.cuh.
__global__ void __launch_bounds__(kThreads, 1)
    attend_rounds(const __grid_constant__ AttendParams p, int head_tiles, bool fetches) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        barrier_init(shared_address(&s.full[stage][half]), Arrivals::of_warps(kLoaderWarps));
        barrier_init(shared_address(&s.empty[stage][half]), Arrivals::of_warps(kGroupWarps));
      }
      barrier_init(shared_address(&s.weighted[stage]), Arrivals::of_warps(kGroupWarps));
    }
    barrier_init(shared_address(&s.queries_used), Arrivals::of_warps(2 * kGroupWarps));
    barrier_init(shared_address(&s.queries_there), Arrivals::of_warps(kLoaderWarps));
  }
  launch_dependents();
  touch(p);
  fetch_ahead(p, Job(1, 1, 1, head_tiles, false));
  grid_dependency_wait();
  const Rounds<1> rounds(p, s, head_tiles);
  rounds.learn_first();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  RoundFinder finder(p, s, rounds, fetches);
  {
    const Job job(rounds.at(0), 0, true);
    const Queries<kThreads / 32, 4> queries(p, s, job);
    queries.begin();
    if (group >= 2) finder.begin();
    queries.finish();
  }
  if (group < 2) {
    more_registers<kConsumerRegisters>();
    consume_rounds(p, s, rounds);
  } else {
    fewer_registers<kRoundLoaderRegisters>();
    named_barrier_arrive(1, kThreads);
    load_rounds(p, s, rounds, finder);
  }
#endif
}

/// The same of pairs of CTAs, which have neighbouring tokens: see token_pair.cuh. Of an odd number the
/// last one is done twice.
__global__ void __launch_bounds__(kThreads, 1)
    attend_neighbours(const __grid_constant__ AttendParams p, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        barrier_init(shared_address(&s.full[stage][half]), Arrivals::of_group(kLoaders));
        barrier_init(shared_address(&s.empty[stage][half]), Arrivals::of_warps(2 * kGroupWarps));
      }
      barrier_init(shared_address(&s.weighted[stage]), Arrivals::of_group(kGroup));
    }
    for (int i = 0; i < kFoundTiles; ++i) barrier_init(shared_address(&s.located[i]), Arrivals::of_each(kTile));
    barrier_init(shared_address(&s.queries_used), Arrivals::of_warps(kGroupWarps));
    barrier_init(shared_address(&s.queries_there), Arrivals::of_warps(kLoaderWarps));
    publish_barriers();  // the mate's copies count at them
  }
  launch_dependents();
  touch(p);
  __syncthreads();
  cluster_arrive();
  const int mate = static_cast<int>(blockIdx.x) % 2;
  fetch_ahead(p, Job(2, head_tiles, p.step.num_tokens));
  grid_dependency_wait();
  const Rounds<2> rounds(p, s, head_tiles);
  rounds.learn_first();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const std::uint32_t to_mate = in_block(shared_address(&s), static_cast<unsigned>(mate ^ 1)) - shared_address(&s);
  NeighbourFinder finder(p, s, rounds);
  {
    const Job job(rounds.at(0), 0, false);
    const Queries<kThreads / 32, 4> queries(p, s, job);
    queries.begin();
    if (group == 1) finder.begin();
    queries.finish();
  }
  cluster_wait();  // the mate has begun
  if (group == 0) {
    more_registers<kScorerRegisters>();
    consume_neighbours<0>(p, s, rounds, finder, to_mate);
  } else if (group == 1) {
    more_registers<kNeighbourAdderRegisters>();
    consume_neighbours<1>(p, s, rounds, finder, to_mate);
  } else {
    fewer_registers<kNeighbourLoaderRegisters>();
    named_barrier_arrive(1, kThreads);
    load_neighbours(p, s, rounds, mate, to_mate);
  }
  cluster_done_reading();
#endif
}

// --- on the host

/// Rows that are never read have no planes.
bool can_read(const ops::RowPlanes& rows) {
  return rows.payload.data == nullptr ||
         (rows.format == Format::fp8_tile64 && rows.shape.width == kWidth && rows.shape.tail == kTail &&
          is_aligned(rows.payload, 16) && is_aligned(rows.scale, 8));
}

bool can_tile(const AttendParams& p) {
  return width_of(p) == kWidth && can_read(p.layer.window.ring) && can_read(p.layer.window.scratch) &&
         (p.layer.num_kinds == 0 || can_read(p.layer.kinds[0].page)) && p.q.dtype == DType::bf16 &&
         is_aligned(p.q.data, 16) && p.q.row_stride % 8 == 0 && is_aligned(p.out.data, 16) &&
         p.inverse_rope.rope_dim <= kTail && p.softmax_scale > 0.0f;
}

template <class Kernel>
cudaError_t allow_tiles(Kernel kernel) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  return error != cudaSuccess ? error : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

cudaLaunchConfig_t tiles_config(int clusters, int blocks, cudaLaunchAttribute& cluster) {
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

template <int kChannelParts, bool kPaired, bool kThroughMemory = false, bool kAlone = false>
cudaError_t launch_tiles(const AttendParams& p, int row_parts, cudaStream_t stream) {
  const auto kernel = attend_tiles<kChannelParts, kPaired, kThroughMemory, kAlone>;
  constexpr int kMates = kPaired ? 2 : 1;
  const int head_tiles = head_tiles_of(p), units = p.step.num_tokens * head_tiles / kMates;
  const int blocks = row_parts * kChannelParts * kMates;
  if (const cudaError_t error = allow_tiles(kernel); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = kThroughMemory ? tiles_config(units * row_parts, kMates, attributes[1])
                                             : tiles_config(units, blocks, attributes[1]);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs += 1;
  return cudaLaunchKernelEx(&config, kernel, p, row_parts, head_tiles);
}

/// Rows that tokens of the same request share come from L2 anyway, most of them.
bool shares_rows(const ops::StepDesc& step) {
  constexpr int kSharers = 8;
  return step.num_items > 0 && step.num_tokens / step.num_items >= kSharers;
}

cudaError_t launch_rounds(const AttendParams& p, cudaStream_t stream) {
  const int head_tiles = head_tiles_of(p), units = p.step.num_tokens * head_tiles;
  if (const cudaError_t error = allow_tiles(attend_rounds); error != cudaSuccess) return error;
  return launch<kSharedBytes>(attend_rounds, static_cast<unsigned>(std::min(units, num_sms())), kThreads, stream, p,
                              head_tiles, !shares_rows(p.step));
}

/// Whether the step alone says which rows a query has.
bool sees_all(const AttendParams& p) {
  return p.step.tokens != nullptr && p.window_slots.slots == nullptr && p.entry_slots.slots == nullptr &&
         p.chosen.data == nullptr;
}

bool has_run_window(const AttendParams& p) {
  return p.layer.num_kinds == 0 && p.layer.window_tokens >= 1 && p.layer.window_tokens <= kMostRunWindow;
}

/// As many rows as any query may have.
std::int64_t most_rows(const AttendParams& p) {
  std::int64_t rows = p.window_slots.slots != nullptr ? p.window_slots.stride : p.layer.window_tokens;
  if (p.entry_slots.slots != nullptr)
    rows += p.entry_slots.stride;
  else if (p.layer.num_kinds > 0)
    rows += p.chosen.data != nullptr ? p.num_chosen
                                     : std::int64_t{p.step.blocks_per_request} * p.layer.kinds[0].rows_per_block;
  return rows;
}

/// Clusters of so many blocks that run at once; a block takes an SM, and a cluster must fit into a part of
/// the chip. [kMaxCluster + 1]
std::array<int, kMaxCluster + 1> count_clusters() {
  std::array<int, kMaxCluster + 1> most{};
  if (allow_tiles(attend_tiles<1, false, false, false>) != cudaSuccess) return most;
  most[1] = num_sms();  // no clusters: the runtime would count none
  for (int blocks = 2; blocks <= kMaxCluster; ++blocks) {
    cudaLaunchAttribute cluster{};
    const cudaLaunchConfig_t config = tiles_config(1, blocks, cluster);
    if (cudaOccupancyMaxActiveClusters(&most[static_cast<std::size_t>(blocks)], attend_tiles<1, false, false, false>,
                                       &config) != cudaSuccess)
      most[static_cast<std::size_t>(blocks)] = 0;
  }
  static_cast<void>(cudaGetLastError());  // of sizes that the chip does not have
  return most;
}

const std::array<int, kMaxCluster + 1>& clusters_at_once() {
  static const std::array<int, kMaxCluster + 1> at_once = count_clusters();
  return at_once;
}

cudaError_t launch_neighbours(const AttendParams& p, bool in_rounds, cudaStream_t stream) {
  const int head_tiles = head_tiles_of(p), units = (p.step.num_tokens + 1) / 2 * head_tiles;
  const int clusters = in_rounds ? std::min(units, std::max(clusters_at_once()[2], 1)) : units;
  if (const cudaError_t error = allow_tiles(attend_neighbours); error != cudaSuccess) return error;
  return launch_clusters<kSharedBytes>(attend_neighbours, 2, static_cast<unsigned>(2 * clusters), kThreads, stream, p,
                                       head_tiles);
}

/// CTAs that find a place in the workspace.
std::int64_t places_of(const AttendParams& p) {
  if (p.workspace == nullptr || !is_aligned(p.workspace, 16)) return 0;
  const std::int64_t shares = (p.workspace_bytes - ops::kAttendMeetingBytes) / ops::kAttendShareBytes;
  return std::clamp<std::int64_t>(shares, 0, kMostMeetings);
}

struct TimedSplit {
  AttendSplit split;
  std::int64_t time;  // in hundredths of a microsecond
};

/// Of blocks that all run at once, with at_once of one and of two in a cluster. Each part has the same number of tiles,
/// and no more parts than that takes.
TimedSplit through_memory(const AttendParams& p, std::int64_t tiles, const int (&at_once)[2]) {
  struct Cost {
    bool paired;
    int start, tile;
  };
  constexpr Cost kCosts[] = {{true, 1300, 210}, {false, 1320, 245}};
  constexpr std::int64_t kMostWorthwhile = 96;  // parts: 130 of a tile each took longer than 65 of two
  static_assert(kMostWorthwhile <= kMostMemoryParts);
  TimedSplit best{{}, std::numeric_limits<std::int64_t>::max()};
  const std::int64_t units = std::int64_t{p.step.num_tokens} * head_tiles_of(p);
  for (const Cost& cost : kCosts) {
    const int mates = cost.paired ? 2 : 1;
    if (head_tiles_of(p) % mates != 0) continue;
    const std::int64_t blocks = std::min<std::int64_t>(places_of(p), at_once[mates - 1] * mates);
    const std::int64_t most = std::min(blocks / units, kMostWorthwhile);
    if (most < 2) continue;
    const std::int64_t own = (tiles + most - 1) / most, parts = (tiles + own - 1) / own;
    const std::int64_t time = cost.start + own * cost.tile;
    if (parts < 2 || time >= best.time) continue;
    best = {{static_cast<int>(parts), 1, cost.paired, true}, time};
  }
  return best;
}

/// The split that should take the least time, of those whose blocks all run at once: a start and an end that depend on
/// how O is merged, and a time per tile. Fitted to an H200, 2026-11-15; through memory: 2026-11-16.
TimedSplit best_split(const AttendParams& p) {
  const std::array<int, kMaxCluster + 1>& at_once = clusters_at_once();
  const std::int64_t units = std::int64_t{p.step.num_tokens} * head_tiles_of(p);
  const std::int64_t tiles = std::max<std::int64_t>((most_rows(p) + kTile - 1) / kTile, 1);
  struct Cost {
    int channels;
    bool paired;
    int alone, tile_alone, merged, per_part, tile_merged;
  };
  constexpr Cost kCosts[] = {{1, true, 800, 240, 980, 28, 190},
                             {1, false, 800, 278, 980, 28, 220},
                             {2, false, 660, 260, 760, 30, 220},
                             {4, false, 560, 275, 600, 50, 220}};
  if (sees_all(p) && has_run_window(p) && (units <= at_once[1] || !shares_rows(p.step))) {
    const bool divided = 4 * units <= at_once[1];  // so that the next launch finds room beside this one
    return {{.rows = 1, .channels = divided ? 2 : 1, .in_one_go = true}, divided ? 750 : 930};
  }
  TimedSplit best = through_memory(p, tiles, {at_once[1], at_once[2]});
  for (const Cost& cost : kCosts) {
    const int mates = cost.paired ? 2 : 1, blocks = cost.channels * mates;  // of a row part
    if (head_tiles_of(p) % mates != 0) continue;
    for (int rows = 1; rows * blocks <= kMaxCluster; ++rows) {
      const std::int64_t own = (tiles + rows - 1) / rows;
      const std::int64_t time =
          rows == 1 ? cost.alone + own * cost.tile_alone : cost.merged + rows * cost.per_part + own * cost.tile_merged;
      const bool fits = units / mates <= at_once[static_cast<std::size_t>(rows * blocks)];
      if ((!fits && rows * cost.channels > 1) || time >= best.time) continue;
      best = {{rows, cost.channels, cost.paired}, time};
    }
  }
  AttendSplit& split = best.split;
  if (split.rows * split.channels > 1) return best;
  // As measured: 1,024 tokens of one request. 128 requests of a token each are slower so.
  if (units <= at_once[1] || !shares_rows(p.step)) {
    constexpr std::int64_t kMostAloneTiles = 20;
    split.alone = !split.paired && tiles <= kMostAloneTiles;
    return best;
  }
  if (sees_all(p) && p.layer.num_kinds > 0)
    split = {.rows = 1, .channels = 1, .in_rounds = true, .neighbours = true};
  else if (sees_all(p) && has_run_window(p) && !split.paired)
    split.in_runs = true;
  else
    split.in_rounds = !split.paired;
  return best;
}

}  // namespace

AttendSplit split_of(const AttendParams& p) { return best_split(p).split; }

cudaError_t attend_split(const AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  if (split.through_memory) {
    const std::int64_t blocks = std::int64_t{p.step.num_tokens} * head_tiles_of(p) * split.rows;
    if (split.channels != 1 || split.rows > kMostMemoryParts || blocks > places_of(p)) return cudaErrorInvalidValue;
    return split.paired ? launch_tiles<1, true, true>(p, split.rows, stream)
                        : launch_tiles<1, false, true>(p, split.rows, stream);
  }
  if ((split.in_runs || split.in_one_go || split.neighbours) && !sees_all(p)) return cudaErrorInvalidValue;
  if (split.in_one_go) return has_run_window(p) ? attend_window(p, split.channels, stream) : cudaErrorInvalidValue;
  if (split.in_runs) return has_run_window(p) ? attend_runs(p, stream) : cudaErrorInvalidValue;
  if (split.neighbours) return launch_neighbours(p, split.in_rounds, stream);
  if (split.in_rounds) return launch_rounds(p, stream);
  if (split.alone) return launch_tiles<1, false, false, true>(p, 1, stream);
  const auto launch = [&](auto paired) {
    switch (split.channels) {
      case 1: return launch_tiles<1, paired>(p, split.rows, stream);
      case 2: return launch_tiles<2, paired>(p, split.rows, stream);
      default: return launch_tiles<4, paired>(p, split.rows, stream);
    }
  };
  return split.paired ? launch(std::true_type{}) : launch(std::false_type{});
}

cudaError_t attend(const AttendParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch attend", true);
  if (p.step.num_tokens <= 0 || p.num_heads <= 0) return cudaSuccess;
  if (!is_sm90() || !can_tile(p)) return attend_plain(p, stream);
  const TimedSplit best = best_split(p);
  const double time = static_cast<double>(best.time);
  const double in_cluster = 1050 + 0.36 * static_cast<double>(most_rows(p));  // of few tokens, in the same unit
  const double other = best.split.in_one_go        ? time
                       : best.split.through_memory ? std::min(in_cluster, time)
                                                   : in_cluster;
  if (const auto small = small_split_of(p, most_rows(p), other)) return attend_small(p, *small, stream);
  return attend_split(p, best.split, stream);
}

}  // namespace kv4::cuda
