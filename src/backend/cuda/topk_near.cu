// Selection from near scores of fp8 keys (topk_near.cuh) by a kernel of its own: a thread block per token, or a cluster
// whose first block selects while all score again what is in doubt. To hand keys out and collect their scores takes as
// long as it saves for one token, but where tokens wait for multiprocessors it pays (an H200, 2026-11-16, in us, 8,192
// keys of 8 tokens 18.5 to 17.8, 32,768 of 16 38.2 to 36.9; of one 13.0 to 13.4).
#include <cstdint>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/topk_near.cuh"

namespace kv4::cuda {
namespace {

constexpr int kThreads = 1024;
template <bool kInCluster>
using Near = NearShared<kThreads, kInCluster>;

constexpr int kMostTable = 8192;  // blocks of a request whose part of the table fits
struct ClusterShared {
  Near<true> near;
  std::int32_t table[kMostTable];
};
static_assert(sizeof(ClusterShared) <= 227 << 10 && offsetof(ClusterShared, near) == 0);
template <bool kInCluster>
constexpr int kSharedBytes = kInCluster ? sizeof(ClusterShared) : sizeof(Near<false>);

/// Those of up to `count` keys, from shared memory if they fit. A barrier must follow.
__device__ TokenKeys copy_table(ClusterShared& s, TokenKeys keys, int count) {
  const int rows = keys.tile.kind().rows_per_block, used = (count + rows - 1) / rows;
  if (used > kMostTable) return keys;
  for (int i = static_cast<int>(threadIdx.x); i < used; i += kThreads) s.table[i] = keys.table[i];
  return {keys.tile, s.table};
}

/// Of a warp's part of a token's shares.
__device__ std::uint32_t largest_scale(const LargestScales& scales) {
  static_assert(LargestScales::kMostShares <= kThreads);
  const int i = static_cast<int>(threadIdx.x);
  const std::uint32_t mine = i < LargestScales::kMostShares ? scales.of_share[i] : 0;
  return __reduce_max_sync(kAll, i < scales.shares ? mine : 0);
}

/// blocks: of a cluster.
template <bool kInCluster>
__global__ void __launch_bounds__(kThreads, 1) select_near_row(const __grid_constant__ IndexTile tile, int blocks) {
  extern __shared__ __align__(16) unsigned char bytes[];
  using Shared = Near<kInCluster>;
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  if (kInCluster) arrive_cluster();
  Selection<kThreads>& selection = s.row.selection;
  selection.clear();
  touch(tile);
  if (!kInCluster) blocks = 1;
  const int token = static_cast<int>(blockIdx.x) / blocks, rank = kInCluster ? block_in_cluster() : 0;
  // The scorer has itself waited before it let this kernel start: record and block table are there.
  TokenRow seen(tile, token);
  asm volatile("" : "+r"(seen.request), "+r"(seen.count));  // not after the wait
  const int count = seen.count, top = tile.p.top;
  const TokenKeys in_memory{tile,
                            tile.p.step.block_table + std::int64_t{seen.request} * tile.p.step.blocks_per_request};
  const TokenKeys keys =
      kInCluster ? copy_table(*reinterpret_cast<ClusterShared*>(bytes), in_memory, count) : in_memory;
  wait_for_previous();
  let_next_start();
  const Choice choice{tile, token, seen.request};
  if (count <= top) {
    if (rank == 0) take_whole(choice, count);
    return;
  }

  float* const row = tile.row(token);
  const bool whole = count <= kRowNumbers;
  const int group = group_size(count), numbers = whole ? count : groups_of(count);
  float held[Shared::Row::kHeld];
  if (rank == 0) load_numbers(whole ? row : tile.maxima(token), numbers, held);
  const std::uint32_t largest_of_warp = largest_scale(*tile.largest_scales(token));
  const float per_scale = load_queries(s, tile, token);
  if (kInCluster) wait_cluster();  // all have started
  if (rank > 0) return help_first(s, keys, blocks, rank);
  put_margin(s, per_scale, largest_of_warp);
  const HeldSource<typename Shared::Row> source{held, numbers};
  Scan scan(selection);
  const Bounds all = find_bounds(s.row, source);
  const Margin margin = join_margin(s);

  Doubt doubt;
  bool found = false, written = false;
  const auto select = [&](const auto& from, const Bounds& bounds) {
    doubt = find_doubt(selection, scan, from, bounds, top, margin.size);
    found = true;
    written = write_best(s, scan, from, doubt, choice, [&](int listed) { score_together(s, keys, blocks, listed); });
  };
  if (margin.holds && whole)
    select(source, all);
  else if (margin.holds && numbers > top)
    select_by_groups(s.row, scan, source, all, {row, count, group, top, 2.0f * margin.size}, select);
  if (written) return;
  __syncthreads();
  if (blocks > 1) call_help(s, blocks, 0);  // for write_best has not
  if (margin.holds && !found)
    doubt = Doubt(find_cut(selection, scan, RowSource<kThreads>{row, count}, Bounds(), top), margin.size);
  select_slowly(s, keys, row, count, doubt, choice);
}

/// Of clusters, where tokens are neither so few that the scorer leaves them multiprocessors nor so many that there are
/// none for helpers.
int select_blocks(const IndexTile& tile) {
  constexpr int kBlocks = 4, kFewest = 8, kMost = 28, kOf = 132;
  return tile.count >= kFewest && tile.count * kOf <= kMost * multiprocessors() ? kBlocks : 1;
}

template <bool kInCluster>
cudaError_t launch_select(const IndexTile& tile, int blocks, cudaStream_t stream) {
  constexpr int kBytes = kSharedBytes<kInCluster>;
  const auto kernel = select_near_row<kInCluster>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const unsigned size = static_cast<unsigned>(blocks);
  return launch_clusters<kBytes>(kernel, size, size * static_cast<unsigned>(tile.count), kThreads, stream, tile,
                                 blocks);
}

}  // namespace

cudaError_t select_near(const IndexTile& tile, cudaStream_t stream) {
  const int blocks = select_blocks(tile);
  return blocks > 1 ? launch_select<true>(tile, blocks, stream) : launch_select<false>(tile, blocks, stream);
}

}  // namespace kv4::cuda
