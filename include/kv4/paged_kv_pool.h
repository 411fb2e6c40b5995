// Compressed entries and index keys of all layers, addressed by block ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv4/backend.h"
#include "kv4/block_allocator.h"
#include "kv4/export.h"
#include "kv4/params.h"
#include "kv4/schema.h"

namespace kv4 {

/// The memory of block images. The caller's: the call is done when it returns. The backend's: the copies are queued, in
/// a single pass.
enum class ImageMemory : std::uint8_t { caller, backend };

/// A block and the place of its image.
struct BlockImage {
  BlockId block = 0;
  std::byte* memory = nullptr;  // [block_image_bytes]
};

/// Owns the blocks' memory. Not thread-safe.
class KV4_API PagedKVPool {
 public:
  /// Allocates the memory of the backend. The schema must live as long.
  PagedKVPool(const CacheSchema& schema, std::shared_ptr<Backend> backend);
  ~PagedKVPool();
  PagedKVPool(const PagedKVPool&) = delete;
  PagedKVPool& operator=(const PagedKVPool&) = delete;

  /// Block 0; an address of the backend.
  std::byte* base() const { return base_; }
  /// Exactly num_blocks * block_bytes.
  std::int64_t memory_bytes() const { return bytes_; }

  /// All layers' pages of a block; queued.
  void copy_block(BlockId from, BlockId to);
  /// The block as it is exported: every layer's pages in model order at alignment 64, rows of the first `tokens`
  /// tokens, zeros elsewhere. out: [block_image_bytes]
  void save_block(BlockId block, int tokens, std::span<std::byte> out) const;
  /// The inverse of save_block: `image` [block_image_bytes].
  void load_block(BlockId block, std::span<const std::byte> image);
  /// Reserves the lists of calls with up to so many images, which then allocate nothing. Initially: one image.
  void reserve_images(std::size_t images) const;
  /// Images of whole blocks.
  void gather_blocks(std::span<const BlockImage> images, ImageMemory memory) const;
  /// The inverse of gather_blocks.
  void scatter_blocks(std::span<const BlockImage> images, ImageMemory memory);

 private:
  void copy_out(std::span<const BlockImage> images, int tokens, ImageMemory memory) const;

  const CacheSchema& schema_;
  std::shared_ptr<Backend> backend_;
  std::byte* base_ = nullptr;
  std::int64_t bytes_ = 0;
  std::size_t pieces_per_block_ = 0;            // at most
  mutable std::vector<ops::CopyPiece> pieces_;  // of the current call
};

}  // namespace kv4
