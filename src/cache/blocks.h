// The blocks of a cache: their holders, their tokens, and the choice of a block to evict.
#pragma once

#include <memory>
#include <span>

#include "cache/cache_memory.h"
#include "cache/prefix_cache.h"
#include "cache/sequence.h"
#include "kv4/block_allocator.h"

namespace kv4 {

class Blocks {
 public:
  /// `prefix` null: every block is free or held.
  Blocks(CacheMemory& memory, PrefixCache* prefix);

  BlockAllocator& allocator() { return allocator_; }
  const BlockAllocator& allocator() const { return allocator_; }

  int tokens() const { return memory_.schema.block_tokens; }  // of a block
  std::int64_t count_of(std::int64_t length) const;           // blocks for so many tokens
  std::int64_t num_held(const Sequence& s) const;             // by a request

  std::int64_t num_available(TenantId tenant) const;
  BlockId take(TenantId tenant);  // a block must be available
  void free_evicted(const Evicted& gone);
  void copy(BlockId from, BlockId to);
  /// Releases a request's blocks from `keep` on.
  void drop(std::int32_t row, const Sequence& s, std::int64_t keep);

  /// The token ids of a block: [tokens()].
  std::span<std::int32_t> token_ids(BlockId block) { return {first_token(block), first_token(block) + tokens()}; }
  std::span<const std::int32_t> token_ids(BlockId block) const {
    return {first_token(block), first_token(block) + tokens()};
  }

  std::int64_t memory_bytes() const;

 private:
  std::int32_t* first_token(BlockId block) const { return token_ids_.get() + std::int64_t{block} * tokens(); }

  CacheMemory& memory_;
  PrefixCache* prefix_;
  BlockAllocator allocator_;
  std::unique_ptr<std::int32_t[]> token_ids_;  // [num_blocks, block_tokens]
};

}  // namespace kv4
