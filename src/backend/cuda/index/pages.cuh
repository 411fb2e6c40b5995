// The addresses of key pages, and the layout that the key pipeline needs of them.
#pragma once

#include <cstdint>

#include "backend/cuda/index/device_facts.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/bulk_copy.cuh"
#include "backend/cuda/runtime/aligned.h"

namespace kv4::cuda {

/// The addresses of a layer's key pages: dense rows of payloads and of scales. The step from a warpgroup's KV tile to
/// its next is a whole number of blocks, so a warp's row in a block stays the same.
struct Pages {
  const std::uint8_t *payload, *scale;
  std::uint32_t payload_stride, scale_stride;  // from block to block
  std::int32_t block_shift;                    // log2 of rows per block
  const std::int32_t* table;                   // [requests, blocks_per_request]
  std::int32_t blocks_per_request;
  std::uint64_t policy;  // L2 eviction policy of keys that were read

  /// A key's row in its block.
  __device__ std::uint32_t row_of(int key) const { return static_cast<std::uint32_t>(key & ((1 << block_shift) - 1)); }
  __device__ const std::uint8_t* payload_of(std::uint32_t block) const {
    return payload + std::uint64_t{block} * payload_stride;
  }
  __device__ const std::uint8_t* scale_of(std::uint32_t block) const {
    return scale + std::uint64_t{block} * scale_stride;
  }

  /// Prefetches a warp's 32 keys, from a row of a block on, into L2. May run before the grid dependency wait: no result
  /// depends on it (kv4/cuda.h).
  template <int kKeyBytes>
  __device__ void prefetch(std::uint32_t block, std::uint32_t row) const {
    bulk_prefetch_l2(payload_of(block) + kKeyBytes * row, kWarpKeys * kKeyBytes, policy);
    bulk_prefetch_l2(scale_of(block) + kKeyScaleBytes * row, kWarpKeys * kKeyScaleBytes, policy);
  }
};

inline bool is_power_of_two(std::int64_t x) { return (x & (x - 1)) == 0; }

/// Whether the device is a Hopper GPU, and keys of `key_bytes` bytes and queries have the layout that KeyPipeline and
/// QueryAddress read.
inline bool can_stream_keys(const ops::IndexParams& p, int key_bytes, const DeviceFacts& device) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const ops::Plane &payload = kind.page.payload, &scale = kind.page.scale;
  const std::int64_t q_bytes = p.q.dtype == DType::u8 ? 1 : p.q.dtype == DType::bf16 ? 2 : 4;
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  return device.is_sm90 && kind.page.shape.width == kWidth && kind.rows_per_block >= kWarpKeys &&
         is_power_of_two(kind.rows_per_block) && FourWarpgroups::kStep % kind.rows_per_block == 0 &&
         max_entries(p) < kLimit && payload.row_stride == key_bytes && scale.row_stride == kKeyScaleBytes &&
         payload.block_stride < kLimit && scale.block_stride < kLimit &&
         is_aligned(payload.data, payload.block_stride, 16) && is_aligned(scale.data, scale.block_stride, 16) &&
         is_aligned(p.q.data, p.q.row_stride * q_bytes, 16);
}

// The policies that createpolicy.fractional gives on sm_90.
constexpr std::uint64_t kEvictNormal = 0x16F0000000000000u, kEvictFirst = 0x12F0000000000000u;

inline Pages make_pages(const TokenTile& tile) {
  const ops::KindDesc& kind = tile.kind();
  Pages pages{};
  // With one token per request no key is read again soon, so scores, tables and code stay in L2 instead.
  pages.policy = tile.p.step.num_items == tile.p.step.num_tokens ? kEvictFirst : kEvictNormal;
  pages.payload = kind.page.payload.data;
  pages.scale = kind.page.scale.data;
  pages.payload_stride = static_cast<std::uint32_t>(kind.page.payload.block_stride);
  pages.scale_stride = static_cast<std::uint32_t>(kind.page.scale.block_stride);
  while (kind.rows_per_block > 1 << pages.block_shift) ++pages.block_shift;
  pages.table = tile.p.step.block_table;
  pages.blocks_per_request = tile.p.step.blocks_per_request;
  return pages;
}

}  // namespace kv4::cuda
