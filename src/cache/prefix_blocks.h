// Prefix blocks and snapshots as bytes, by key, for tiers.
#pragma once

#include <cstdint>
#include <span>

#include "cache/blocks.h"
#include "cache/cache_memory.h"
#include "cache/prefix_cache.h"
#include "cache/snapshots.h"
#include "cache/steps.h"

namespace kv4 {

class PrefixBlocks {
 public:
  /// `prefix` null: nothing is kept, and every call throws.
  PrefixBlocks(CacheMemory& memory, PrefixCache* prefix, Blocks& blocks, const Snapshots& snapshots, const Steps& steps)
      : memory_(memory), prefix_(prefix), blocks_(blocks), snapshots_(snapshots), steps_(steps) {}

  PrefixCache& prefix() const;  // throws where there is none

  /// Images of prefix blocks, to[i] [block_image_bytes]. False, and nothing is done: one of them is not there.
  bool read(std::span<const BlockKey> keys, std::span<std::byte* const> to, ImageMemory memory) const;
  bool read_snapshot(const BlockKey& key, std::byte* to, ImageMemory memory) const;

  /// Inserts the blocks of `keys` from `at` on, one for each image or as many as there is room for. Returns how many of
  /// them are kept now. Images of blocks that are kept already are not read. Keys before `at` must be kept, else
  /// nothing is done.
  std::int64_t insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                      std::span<std::byte* const> images, ImageMemory memory);
  /// False: there is no such block, or no room.
  bool insert_snapshot(const BlockKey& key, const std::byte* from, ImageMemory memory);

 private:
  CacheMemory& memory_;
  PrefixCache* prefix_;
  Blocks& blocks_;
  const Snapshots& snapshots_;
  const Steps& steps_;
};

}  // namespace kv4
