#include "kv4/block_allocator.h"

#include "base/check.h"

namespace kv4 {

BlockAllocator::BlockAllocator(std::int32_t num_blocks) {
  require(num_blocks >= 1, ErrorCode::bad_config, "num_blocks is {}; a pool needs at least 1 block", num_blocks);
  entries_.resize(num_blocks);
  for (BlockId b = num_blocks - 1; b >= 0; --b) push_free(b);  // the first allocation gets block 0
}

BlockAllocator::Entry& BlockAllocator::at(BlockId block) {
  require(block >= 0 && block < num_blocks(), ErrorCode::bad_argument,
          "block {} does not exist; the pool has blocks 0 to {}", block, num_blocks() - 1);
  return entries_[block];
}

const BlockAllocator::Entry& BlockAllocator::at(BlockId block) const {
  return const_cast<BlockAllocator*>(this)->at(block);
}

void BlockAllocator::push_free(BlockId block) {
  entries_[block].next = free_head_;
  free_head_ = block;
  ++num_free_;
}

void BlockAllocator::push_evictable(BlockId block) {
  Entry& e = entries_[block];
  e.prev = evictable_tail_;
  e.next = -1;
  (evictable_tail_ >= 0 ? entries_[evictable_tail_].next : evictable_head_) = block;
  evictable_tail_ = block;
  ++num_evictable_;
}

void BlockAllocator::unlink_evictable(BlockId block) {
  const Entry& e = entries_[block];
  (e.prev >= 0 ? entries_[e.prev].next : evictable_head_) = e.next;
  (e.next >= 0 ? entries_[e.next].prev : evictable_tail_) = e.prev;
  --num_evictable_;
}

std::optional<BlockId> BlockAllocator::allocate() {
  BlockId block = free_head_;
  if (block >= 0) {
    free_head_ = entries_[block].next;
    --num_free_;
  } else if (evictable_head_ >= 0) {
    block = evictable_head_;
    unlink_evictable(block);
  } else {
    return std::nullopt;
  }
  entries_[block] = {.count = 1};
  return block;
}

void BlockAllocator::retain(BlockId block) {
  Entry& e = at(block);
  require(e.count > 0 || e.published, ErrorCode::bad_argument,
          "block {} is free; only a held or published block can be shared", block);
  if (e.count == 0) unlink_evictable(block);
  ++e.count;
}

void BlockAllocator::release(BlockId block) {
  Entry& e = at(block);
  require(e.count > 0, ErrorCode::bad_argument, "block {} is not held; it was released once too often", block);
  if (--e.count > 0) return;
  if (e.published)
    push_evictable(block);
  else
    push_free(block);
}

void BlockAllocator::publish(BlockId block) {
  Entry& e = at(block);
  require(e.count > 0, ErrorCode::bad_argument, "block {} is not held; only a held block can be published", block);
  e.published = true;
}

void BlockAllocator::unpublish(BlockId block) {
  Entry& e = at(block);
  if (!e.published) return;
  e.published = false;
  if (e.count > 0) return;
  unlink_evictable(block);
  push_free(block);
}

std::int32_t BlockAllocator::reference_count(BlockId block) const { return at(block).count; }
bool BlockAllocator::is_published(BlockId block) const { return at(block).published; }

}  // namespace kv4
