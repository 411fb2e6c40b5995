#include "kv4/paged_kv_pool.h"

#include <cstring>

#include "backend/backend.h"
#include "base/check.h"

namespace kv4 {
namespace {

void check_block(BlockId block, std::int64_t num_blocks) {
  require(block >= 0 && block < num_blocks, ErrorCode::bad_argument,
          "block {} does not exist; the pool has blocks 0 to {}", block, num_blocks - 1);
}

void check_image_size(std::size_t have, std::int64_t want) {
  require(have == static_cast<std::size_t>(want), ErrorCode::bad_argument,
          "a block image of this cache has {} bytes; got {}", want, have);
}

}  // namespace

PagedKVPool::PagedKVPool(const CacheSchema& schema, std::shared_ptr<Backend> backend)
    : schema_(schema), backend_(std::move(backend)) {
  bytes_ = checked_mul(schema.block_bytes, schema.options.num_blocks, "paged pool");
  base_ = backend_->allocate(bytes_);
}

PagedKVPool::~PagedKVPool() { backend_->deallocate(base_, bytes_); }

void PagedKVPool::copy_block(BlockId from, BlockId to) {
  check_block(from, schema_.options.num_blocks);
  check_block(to, schema_.options.num_blocks);
  if (schema_.options.arrangement == Arrangement::block_major) {
    if (schema_.block_bytes > 0)
      backend_->copy(base_ + to * schema_.block_bytes, base_ + from * schema_.block_bytes, schema_.block_bytes);
    return;
  }
  for (const LayerCacheSchema& layer : schema_.layers)
    for (const PageSchema& page : layer.pages)
      backend_->copy(base_ + page.offset + to * page.block_stride, base_ + page.offset + from * page.block_stride,
                     page.page_bytes);
}

void PagedKVPool::save_block(BlockId block, int tokens, std::span<std::byte> out) const {
  check_block(block, schema_.options.num_blocks);
  check_image_size(out.size(), schema_.block_image_bytes);
  require(tokens >= 0 && tokens <= schema_.block_tokens, ErrorCode::bad_argument,
          "a block holds 0 to {} tokens; got {}", schema_.block_tokens, tokens);
  std::byte* to = out.data();
  for (const LayerCacheSchema& layer : schema_.layers)
    for (const PageSchema& page : layer.pages) {
      const std::byte* from = base_ + page.offset + block * page.block_stride;
      const std::int64_t rows = tokens / page.kind.ratio;
      const std::int64_t payload = rows * page.row.payload_bytes, scale = rows * page.row.scale_bytes;
      std::memset(to, 0, static_cast<std::size_t>(page.content_bytes));
      if (payload > 0) backend_->copy(to, from, payload);
      if (scale > 0) backend_->copy(to + page.scale_offset, from + page.scale_offset, scale);
      if (rows > 0 && page.global_offset >= 0) backend_->copy(to + page.global_offset, from + page.global_offset, 4);
      to += page.content_bytes;
    }
}

void PagedKVPool::load_block(BlockId block, std::span<const std::byte> image) {
  check_block(block, schema_.options.num_blocks);
  check_image_size(image.size(), schema_.block_image_bytes);
  const std::byte* from = image.data();
  for (const LayerCacheSchema& layer : schema_.layers)
    for (const PageSchema& page : layer.pages) {
      backend_->copy(base_ + page.offset + block * page.block_stride, from, page.content_bytes);
      from += page.content_bytes;
    }
}

}  // namespace kv4
