#include "kv4/paged_kv_pool.h"

#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"
#include "schema/operations.h"

namespace kv4 {
namespace {

void check_block(BlockId block, std::int64_t num_blocks) {
  require(block >= 0 && block < num_blocks, ErrorCode::bad_argument,
          "block {} does not exist; the pool has blocks 0 to {}", block, num_blocks - 1);
}

void check_image_size(std::size_t have, std::int64_t want) {
  require(std::cmp_equal(have, want), ErrorCode::bad_argument, "a block image of this cache has {} bytes; got {}", want,
          have);
}

std::uint8_t* bytes_at(std::byte* base, std::int64_t offset) { return reinterpret_cast<std::uint8_t*>(base) + offset; }

/// Copies from the pool to an image: the rows of the first `tokens` tokens.
void add_rows_of(const CacheSchema& schema, std::byte* base, const BlockImage& image, int tokens,
                 std::vector<ops::CopyPiece>& pieces) {
  const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
    if (bytes > 0) pieces.push_back({bytes_at(base, from), bytes_at(image.memory, to), bytes});
  };
  std::int64_t to = 0;
  for (const LayerCacheSchema& layer : schema.layers)
    for (const PageSchema& page : layer.pages) {
      const std::int64_t from = page.offset + image.block * page.block_stride, rows = tokens / page.kind.ratio;
      add(from, to, rows * page.row.payload_bytes);
      add(from + page.scale_offset, to + page.scale_offset, rows * page.row.scale_bytes);
      if (page.global_offset >= 0) add(from + page.global_offset, to + page.global_offset, rows > 0 ? 4 : 0);
      to += page.content_bytes;
    }
}

/// Copies from an image to the pool. Pages that are neighbours in both are one piece.
void add_pages_of(const CacheSchema& schema, std::byte* base, BlockId block, const std::byte* image,
                  std::vector<ops::CopyPiece>& pieces) {
  const std::uint8_t* from = reinterpret_cast<const std::uint8_t*>(image);
  for (const LayerCacheSchema& layer : schema.layers)
    for (const PageSchema& page : layer.pages) {
      std::uint8_t* const to = bytes_at(base, page.offset + block * page.block_stride);
      if (!pieces.empty() && pieces.back().from + pieces.back().bytes == from &&
          pieces.back().to + pieces.back().bytes == to)
        pieces.back().bytes += page.content_bytes;
      else
        pieces.push_back({from, to, page.content_bytes});
      from += page.content_bytes;
    }
}

}  // namespace

PagedKVPool::PagedKVPool(const CacheSchema& schema, std::shared_ptr<Backend> backend)
    : schema_(schema), backend_(std::move(backend)) {
  require_operations(schema, backend_->shared_entries() != nullptr);
  bytes_ = checked_mul(schema.block_bytes, schema.options.num_blocks, "paged pool");
  for (const LayerCacheSchema& layer : schema.layers) pieces_per_block_ += 3 * layer.pages.size();
  reserve_images(1);
  backend_->reserve_staging(schema.block_image_bytes);
  base_ = backend_->allocate(bytes_);
}

PagedKVPool::~PagedKVPool() { backend_->deallocate(base_, bytes_); }

void PagedKVPool::reserve_images(std::size_t images) const try {
  pieces_.reserve(images * pieces_per_block_);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void PagedKVPool::copy_block(BlockId from, BlockId to) {
  check_block(from, schema_.options.num_blocks);
  check_block(to, schema_.options.num_blocks);
  if (schema_.options.arrangement == Arrangement::block_major) {
    if (schema_.block_bytes > 0)
      backend_->copy(base_ + to * schema_.block_bytes, base_ + from * schema_.block_bytes, schema_.block_bytes);
    return;
  }
  pieces_.clear();
  for (const LayerCacheSchema& layer : schema_.layers)
    for (const PageSchema& page : layer.pages)
      pieces_.push_back({bytes_at(base_, page.offset + from * page.block_stride),
                         bytes_at(base_, page.offset + to * page.block_stride), page.page_bytes});
  backend_->copy_pieces(pieces_);
}

void PagedKVPool::save_block(BlockId block, int tokens, std::span<std::byte> out) const {
  check_block(block, schema_.options.num_blocks);
  check_image_size(out.size(), schema_.block_image_bytes);
  require(tokens >= 0 && tokens <= schema_.block_tokens, ErrorCode::bad_argument,
          "a block holds 0 to {} tokens; got {}", schema_.block_tokens, tokens);
  const BlockImage image{block, out.data()};
  copy_out({&image, 1}, tokens, ImageMemory::caller);
}

void PagedKVPool::load_block(BlockId block, std::span<const std::byte> image) {
  check_image_size(image.size(), schema_.block_image_bytes);
  const BlockImage from{block, const_cast<std::byte*>(image.data())};  // only read
  scatter_blocks({&from, 1}, ImageMemory::caller);
}

void PagedKVPool::gather_blocks(std::span<const BlockImage> images, ImageMemory memory) const {
  copy_out(images, schema_.block_tokens, memory);
}

void PagedKVPool::copy_out(std::span<const BlockImage> images, int tokens, ImageMemory memory) const {
  pieces_.clear();
  for (const BlockImage& image : images) check_block(image.block, schema_.options.num_blocks);
  const std::size_t bytes = schema_.block_image_bytes;
  if (memory == ImageMemory::backend) reserve_images(images.size());
  for (const BlockImage& image : images) {
    if (memory == ImageMemory::backend && bytes > 0) backend_->fill(image.memory, 0, schema_.block_image_bytes);
    add_rows_of(schema_, base_, image, tokens, pieces_);
    if (memory == ImageMemory::backend) continue;
    backend_->read_pieces(pieces_, {image.memory, bytes});
    pieces_.clear();
  }
  if (!pieces_.empty()) backend_->copy_pieces(pieces_);
}

void PagedKVPool::scatter_blocks(std::span<const BlockImage> images, ImageMemory memory) {
  pieces_.clear();
  for (const BlockImage& image : images) check_block(image.block, schema_.options.num_blocks);
  if (memory == ImageMemory::backend) reserve_images(images.size());
  for (const BlockImage& image : images) {
    add_pages_of(schema_, base_, image.block, image.memory, pieces_);
    if (memory == ImageMemory::backend) continue;
    backend_->write_pieces(pieces_, {image.memory, static_cast<std::size_t>(schema_.block_image_bytes)});
    pieces_.clear();
  }
  if (!pieces_.empty()) backend_->copy_pieces(pieces_);
}

}  // namespace kv4
