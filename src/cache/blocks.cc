#include "cache/blocks.h"

#include <algorithm>

#include "base/check.h"

namespace kv4 {

Blocks::Blocks(CacheMemory& memory, PrefixCache* prefix)
    : memory_(memory),
      prefix_(prefix),
      allocator_(static_cast<std::int32_t>(memory.schema.options.num_blocks)),
      token_ids_(std::make_unique_for_overwrite<std::int32_t[]>(memory.schema.options.num_blocks *
                                                                memory.schema.block_tokens)) {
  // Kernels write every entry. A replay's entries exist already, so kernels write them into a block that nobody reads;
  // the host leaves them out.
  if (prefix != nullptr && !memory.backend->on_host()) memory.tables.set_dummy_block(allocator_.allocate().value());
}

std::int64_t Blocks::count_of(std::int64_t length) const { return ceil_div(length, tokens()); }

std::int64_t Blocks::num_held(const Sequence& s) const {
  return std::max(count_of(s.length()), s.chain.replay_end / tokens());
}

std::int64_t Blocks::num_available(TenantId tenant) const {
  return allocator_.num_free() + (prefix_ != nullptr ? prefix_->index.num_evictable(tenant) : 0);
}

BlockId Blocks::take(TenantId tenant) {
  if (allocator_.num_free() == 0) free_evicted(prefix_->index.evict(tenant).value());
  return allocator_.allocate().value();
}

void Blocks::free_evicted(const Evicted& gone) {
  allocator_.unpublish(gone.block);
  prefix_->give_place(gone.snapshot);
  ++prefix_->statistics.evicted_blocks;
}

void Blocks::copy(BlockId from, BlockId to) {
  memory_.kv_pool.copy_block(from, to);
  std::copy_n(first_token(from), tokens(), first_token(to));
}

// Last first, so that the allocator is as it was before they were taken.
void Blocks::drop(std::int32_t row, const Sequence& s, std::int64_t keep) {
  for (std::int64_t i = num_held(s) - 1; i >= keep; --i) {
    allocator_.release(memory_.tables.block(row, i));
    memory_.tables.set_block(row, i, -1);
  }
}

std::int64_t Blocks::memory_bytes() const {
  return allocator_.memory_bytes() + memory_.schema.options.num_blocks * tokens() * 4;
}

}  // namespace kv4
