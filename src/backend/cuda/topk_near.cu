// Selection from near scores of fp8 keys (topk_near.cuh) by a kernel of its own, a thread block per token.
#include <cstdint>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/topk_near.cuh"

namespace kv4::cuda {
namespace {

constexpr int kThreads = 1024;
using Near = NearShared<kThreads>;

/// Of a warp's part of a token's shares.
__device__ std::uint32_t largest_scale(const LargestScales& scales) {
  static_assert(LargestScales::kMostShares <= kThreads);
  const int i = static_cast<int>(threadIdx.x);
  const std::uint32_t mine = i < LargestScales::kMostShares ? scales.of_share[i] : 0;
  return __reduce_max_sync(kAll, i < scales.shares ? mine : 0);
}

__global__ void __launch_bounds__(kThreads, 1) select_near_row(const __grid_constant__ IndexTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Near& s = *reinterpret_cast<Near*>(bytes);
  Selection<kThreads>& selection = s.row.selection;
  selection.clear();
  touch(tile);
  const int token = static_cast<int>(blockIdx.x);
  const TokenRow seen = row_and_wait(tile, token);
  const int count = seen.count, top = tile.p.top;
  const Choice choice{tile, token, seen.request};
  if (count <= top) return take_whole(choice, count);

  float* const row = tile.row(token);
  const bool whole = count <= kRowNumbers;
  const int group = group_size(count), numbers = whole ? count : groups_of(count);
  const TokenKeys keys{tile, tile.p.step.block_table + std::int64_t{seen.request} * tile.p.step.blocks_per_request};
  float held[Near::Row::kHeld];
  load_numbers(whole ? row : tile.maxima(token), numbers, held);
  const std::uint32_t largest_of_warp = largest_scale(*tile.largest_scales(token));
  put_margin(s, load_queries(s, tile, token), largest_of_warp);
  const HeldSource<Near::Row> source{held, numbers};
  Scan scan(selection);
  const Bounds all = find_bounds(s.row, source);
  const Margin margin = join_margin(s);
  if (!margin.holds) return select_slowly(s, keys, row, count, Doubt(), choice);

  Doubt doubt;
  bool found = false, written = false;
  const auto select = [&](const auto& from, const Bounds& bounds) {
    doubt = find_doubt(selection, scan, from, bounds, top, margin.size);
    found = true;
    written = write_best(s, scan, from, doubt, choice, [&](int listed) {
      score_listed(s, keys, listed, 1, [&](int i, std::uint32_t key) { s.keys[i] = key; });
    });
  };
  if (whole)
    select(source, all);
  else if (numbers > top)
    select_by_groups(s.row, scan, source, all, {row, count, group, top, 2.0f * margin.size}, select);
  if (written) return;
  __syncthreads();
  if (!found) doubt = Doubt(find_cut(selection, scan, RowSource<kThreads>{row, count}, Bounds(), top), margin.size);
  select_slowly(s, keys, row, count, doubt, choice);
}

}  // namespace

cudaError_t select_near(const IndexTile& tile, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(select_near_row, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(Near)));
  if (status != cudaSuccess) return status;
  return launch<sizeof(Near)>(select_near_row, static_cast<unsigned>(tile.count), kThreads, stream, tile);
}

}  // namespace kv4::cuda
