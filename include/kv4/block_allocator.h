// Block ids: reference counts, free and evictable lists. No bytes, no locks, every call O(1).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kv4/export.h"

namespace kv4 {

/// A block's place in the pool, from 0 on.
using BlockId = std::int32_t;

/// A block is free, held (reference count >= 1), or evictable (published, count 0). A published or shared block is
/// immutable.
class KV4_API BlockAllocator {
 public:
  /// All blocks free. Throws Error(bad_config) for fewer than one.
  explicit BlockAllocator(std::int32_t num_blocks);

  /// A free block with count 1; if none is free the oldest evictable one, unpublished. nullopt: all are held.
  std::optional<BlockId> allocate();
  void retain(BlockId block);   // count + 1; an evictable block is held again
  void release(BlockId block);  // count - 1; at 0 it becomes evictable if published, else free
  /// From now on the content is known by a key: it stays after the last release until the block is needed.
  void publish(BlockId block);
  /// The content is not known by a key any more; an evictable block becomes free.
  void unpublish(BlockId block);

  std::int32_t reference_count(BlockId block) const;  // how many hold it; 0: free or evictable
  bool is_published(BlockId block) const;             // its content is known by a key
  /// Shared or published: nobody may write it.
  bool is_immutable(BlockId block) const { return reference_count(block) > 1 || is_published(block); }

  /// All blocks: free, evictable and held.
  std::int32_t num_blocks() const { return static_cast<std::int32_t>(entries_.size()); }
  std::int32_t num_free() const { return num_free_; }                        // neither held nor published
  std::int32_t num_evictable() const { return num_evictable_; }              // published, held by nobody
  std::int32_t num_available() const { return num_free_ + num_evictable_; }  // free or evictable
  std::int32_t num_held() const { return num_blocks() - num_available(); }   // reference count at least 1
  /// Host memory of the table.
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(entries_.size() * sizeof(Entry)); }
  /// The same for a table of so many blocks.
  static std::int64_t memory_bytes(std::int64_t num_blocks) {
    return num_blocks * static_cast<std::int64_t>(sizeof(Entry));
  }

 private:
  // 1. count > 0: in no list. 2. count = 0 and published: in the evictable list, oldest first. 3. count = 0, not
  // published: in the free list, last freed first. 4. num_free_ and num_evictable_ are the lists' lengths.
  struct Entry {
    std::int32_t count = 0;
    bool published = false;
    BlockId prev = -1;  // evictable list only
    BlockId next = -1;  // both lists
  };
  Entry& at(BlockId block);
  const Entry& at(BlockId block) const;
  void push_free(BlockId block);
  void push_evictable(BlockId block);
  void unlink_evictable(BlockId block);

  std::vector<Entry> entries_;
  BlockId free_head_ = -1;
  BlockId evictable_head_ = -1;
  BlockId evictable_tail_ = -1;
  std::int32_t num_free_ = 0;
  std::int32_t num_evictable_ = 0;
};

}  // namespace kv4
