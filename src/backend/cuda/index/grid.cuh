// Grid sizes of the score kernels, and their launch. The constants were chosen on an H200, 2026-11-16; to check them,
// change one and compare `kv4_gpu_bench --only index`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/index/device_facts.cuh"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {

constexpr int kMaxClusterCtas = 6;
// With up to this many KV tiles per CTA, equal counts of CTAs per token are worth a few idle SMs.
constexpr int kEvenKVTiles = 256;

/// The number of work tiles if all tokens see as many keys as the block table has room for.
inline std::int64_t total_kv_tiles(const TokenTile& tile) {
  return (max_entries(tile.p) + kBlockKV - 1) / kBlockKV * tile.count;
}

/// The number of CTAs that score a tile: as many as run at once. For very few tokens it leaves SMs to the selection,
/// whose prologue then runs beside the scoring. If tokens are few and not long, each gets equally many CTAs: a CTA that
/// goes on to a second token prepares queries twice.
inline unsigned score_ctas(const TokenTile& tile, const DeviceFacts& device) {
  constexpr int kVeryFew = 2;
  const std::int64_t kv_tiles = total_kv_tiles(tile);
  const int selecting = tile.is_scored && tile.count <= kVeryFew ? tile.count : 0;
  const std::int64_t all = std::clamp<std::int64_t>(kv_tiles, 1, std::max(device.num_sms - selecting, 1));
  const std::int64_t even = all / tile.count * tile.count;
  return static_cast<unsigned>(20 * even >= 19 * all && kv_tiles <= kEvenKVTiles * all ? even : all);
}

/// Launches a score kernel whose CTAs have a Shared each.
template <class Shared>
cudaError_t launch_score_kernel(void (*kernel)(TokenTile, Pages), unsigned ctas, unsigned threads,
                                const TokenTile& tile, const Pages& pages, cudaStream_t stream) {
  return launch<sizeof(Shared)>(kernel, ctas, threads, stream, tile, pages);
}

/// Launches a score kernel that also selects, with a cluster of `ctas` per token.
template <class Shared>
cudaError_t launch_topk(void (*kernel)(TokenTile, Pages, int), int ctas, const TokenTile& tile, const Pages& pages,
                        cudaStream_t stream) {
  const unsigned size = static_cast<unsigned>(ctas);
  return launch_clusters<sizeof(Shared)>(kernel, size, size * static_cast<unsigned>(tile.count), kScoreThreads, stream,
                                         tile, pages, ctas);
}

/// Whether CTAs may have two warpgroups, with at most max_kv_tiles KV tiles per CTA.
inline bool can_use_two_warpgroups(const TokenTile& tile, const DeviceFacts& device, int max_kv_tiles) {
  return TwoWarpgroups::kStep % tile.kind().rows_per_block == 0 &&
         total_kv_tiles(tile) <= max_kv_tiles * std::int64_t{score_ctas(tile, device)};
}

/// The CTAs of a cluster that scores and selects one token. 0: two launches are faster.
inline int cluster_ctas(const TokenTile& tile, const DeviceFacts& device) {
  // The part of the SMs that clusters can use at once, because they must not cross a GPC. Measured on an H200,
  // 2026-11-16: 16 clusters of 6 CTAs, 28 of 4, 32 of 3.
  struct Fit {
    int ctas, used_sms, of_sms;
  };
  constexpr Fit kFits[] = {{kMaxClusterCtas, 8, 11}, {4, 28, 33}, {3, 8, 11}, {2, 1, 1}, {1, 1, 1}};
  const int all = device.num_sms, count = tile.count;
  for (const Fit& fit : kFits)
    if (count * fit.ctas * fit.of_sms <= all * fit.used_sms) {
      const bool keep_busy = fit.ctas == 1 ? 10 * count >= 9 * all : 2 * fit.ctas * count > all;
      return keep_busy ? fit.ctas : 0;
    }
  return 0;
}

}  // namespace kv4::cuda
