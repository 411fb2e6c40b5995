// The key pipeline: cp.async copies from key pages to a ring in shared memory, one per warp.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/scheduler.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/load_store.cuh"

namespace kv4::cuda {

/// The pipeline of one warp: it copies the warp's 32 keys of each of its warpgroup's KV tiles from the pages to a ring
/// of kStages stages. Every other row of 128 bytes has its halves swapped, so that the lanes of a quad load 16-byte
/// chunks without bank conflicts. Each lane owns one key of a KV tile: it copies the scales of that key and writes its
/// score. kIsLong: there may be more than 32 KV tiles. A warpgroup of a cluster has at most 32.
template <class CtaOf, int kKeyBytes, int kStages, bool kIsLong>
class KeyPipeline {
 public:
  using Cta = CtaOf;
  static constexpr int kPayloadBytes = kWarpKeys * kKeyBytes, kStageBytes = kPayloadBytes + kWarpKeys * kKeyScaleBytes;
  static constexpr int kStageStep = Cta::kWarps * kStageBytes;
  using Ring = std::uint8_t[kStages][Cta::kWarps][kStageBytes];
  static_assert(kStageBytes % 16 == 0 && (kKeyBytes == 64 || kKeyBytes == 128));

  /// kv_tiles: how many KV tiles this warpgroup takes, every Cta::kWarpgroups-th from first_kv_tile on. The request has
  /// `scored` keys.
  __device__ KeyPipeline(const Ring& ring, const Pages& pages, int request, int first_kv_tile, int kv_tiles, int scored)
      : pages_(&pages),
        first_(first_kv_tile * kBlockKV + static_cast<int>(threadIdx.x / 32 % 4) * kWarpKeys),
        kv_tiles_(kv_tiles),
        scored_(scored),
        request_(request),
        ring_(shared_address(ring[0][threadIdx.x / 32])) {
    const std::uint32_t row = pages.row_of(first_), lane = threadIdx.x % 32;
    payload_ = pages.payload + (kKeyBytes * row + 16 * lane);
    scale_ = pages.scale + kKeyScaleBytes * (row + own_key());
    asm("" : "+l"(payload_), "+l"(scale_), "+r"(ring_));  // kept in registers, not recomputed for every KV tile
  }

  /// Block ids of the first 32 KV tiles, one per lane. speculative_ids may run before the grid dependency wait.
  __device__ std::int32_t first_ids() const { return load_id(0); }
  __device__ std::int32_t speculative_ids() const { return load_id<true>(0); }

  /// Prefetches the first kCount KV tiles, which lie in these blocks, into L2. May run before the grid dependency wait.
  template <int kCount>
  __device__ void prefetch(std::int32_t first_ids) const {
    if (static_cast<int>(threadIdx.x % 32) < kCount && first_ids >= 0)
      pages_->template prefetch<kKeyBytes>(static_cast<std::uint32_t>(first_ids), pages_->row_of(first_));
  }

  /// The lane's own key among the warp's 32 keys of a KV tile.
  __device__ static std::uint32_t own_key() { return threadIdx.x % 32 / kQuad + 8 * (threadIdx.x % kQuad); }

  /// The warp's first key of the i-th KV tile.
  __device__ int first_key(int i) const { return first_ + i * Cta::kStep; }

  /// Prologue: issues the copies of the first kStages - 1 KV tiles, which lie in these blocks.
  __device__ void begin(std::int32_t first_ids) {
    ids_ = next_ = first_ids;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      free_ = i * kStageStep;
      issue(i);
    }
    stage_ = (kStages - 1) * kStageStep;
  }

  /// Waits for the next stage. Returns the shared address of its keys, which lie 64 or 128 bytes apart.
  __device__ std::uint32_t wait_next() {
    wait_for_copies<kStages - 2>();
    __syncwarp();
    free_ = stage_;
    stage_ = stage_ == (kStages - 1) * kStageStep ? 0 : stage_ + kStageStep;
    return ring_ + stage_;
  }
  /// The scales of the lane's own key in the current stage.
  __device__ std::uint32_t scales() const {
    return load_shared4(ring_ + stage_ + kPayloadBytes + kKeyScaleBytes * (threadIdx.x % 32));
  }

  /// Issues the copies of KV tile i + kStages - 1 into the stage before the current one; i is the current KV tile.
  __device__ void refill(int i) { issue(i + kStages - 1); }

 private:
  /// KV tiles are issued in order. Keys without a block are not copied, and their scores are not used.
  __device__ void issue(int i) {
    if (kIsLong && i % 32 == 0) {
      ids_ = next_;
      next_ = load_id(i + 32);
    }
    const std::int32_t block = __shfl_sync(kAllLanes, ids_, i % 32);
    const std::uint32_t lane = threadIdx.x % 32, swapped = kKeyBytes == 128 ? lane / 8 % 2 * 4 : 0;
    const std::uint32_t to = ring_ + free_ + 16 * (lane ^ swapped), id = static_cast<std::uint32_t>(block);
    if (block >= 0) {
      const std::uint8_t* from = payload_ + std::uint64_t{id} * pages_->payload_stride;
#pragma unroll
      for (int at = 0; at < kPayloadBytes; at += 512) copy_async<16>(to + at, from + at, pages_->policy);
      copy_async<4>(ring_ + free_ + kPayloadBytes + kKeyScaleBytes * lane,
                    scale_ + std::uint64_t{id} * pages_->scale_stride, pages_->policy);
    }
    commit_copies();
  }

  /// The block id of KV tile i + lane.
  template <bool kFromL2 = false>
  __device__ std::int32_t load_id(int i) const {
    i += static_cast<int>(threadIdx.x % 32);
    if (i >= kv_tiles_ || first_key(i) >= scored_) return -1;
    const std::int32_t* const at =
        pages_->table + (std::int64_t{request_} * pages_->blocks_per_request + (first_key(i) >> pages_->block_shift));
    return kFromL2 ? __ldcg(at) : *at;
  }

  const Pages* pages_;
  int first_, kv_tiles_, scored_, request_;
  const std::uint8_t *payload_, *scale_;  // the lane's first bytes in block 0
  std::uint32_t ring_, stage_, free_;     // stages are offsets in the ring
  std::int32_t ids_ = -1, next_;
};

/// The number of KV tiles of a CTA's assignment that a warpgroup takes, and the pipeline of its keys.
template <class Cta>
__device__ int kv_tiles_of_warpgroup(const Assignment& assignment, int warpgroup) {
  return (assignment.count - warpgroup + Cta::kWarpgroups - 1) / Cta::kWarpgroups;
}
template <class Keys>
__device__ Keys keys_of(const typename Keys::Ring& ring, const Pages& pages, const Assignment& assignment,
                        int warpgroup) {
  return Keys(ring, pages, assignment.request, assignment.kv_tile + warpgroup,
              kv_tiles_of_warpgroup<typename Keys::Cta>(assignment, warpgroup), assignment.scored);
}

/// Prefetches the first keys of a speculative assignment into L2, before the grid dependency wait: 32 keys of kStages
/// KV tiles for each warp of the CTA. kWorkers otherwise idle warps do it. Where no warp is idle, each warp calls
/// KeyPipeline::prefetch.
template <class Cta, int kKeyBytes, int kStages, int kWorkers>
__device__ void prefetch_first_keys(const Assignment& assignment, const Pages& pages, int worker) {
  constexpr int kEach = kStages * Cta::kWarps / kWorkers;
  static_assert(kEach <= 32);
  if (assignment.count == 0) return;
  const int first = assignment.kv_tile * kBlockKV, end = min(first + assignment.count * kBlockKV, assignment.scored);
  const int lane = static_cast<int>(threadIdx.x % 32), key = first + (worker + lane * kWorkers) * kWarpKeys;
  if (lane >= kEach || key >= end) return;
  const std::int32_t block =
      __ldcg(pages.table + std::int64_t{assignment.request} * pages.blocks_per_request + (key >> pages.block_shift));
  if (block >= 0) pages.prefetch<kKeyBytes>(static_cast<std::uint32_t>(block), pages.row_of(key));
}

}  // namespace kv4::cuda
