// Kept blocks and snapshots by key: what tiers take and give back (manager_blocks.cc).
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "cache/blocks.h"
#include "cache/prefix_cache.h"
#include "cache/steps.h"

namespace kv4 {

class KeptBlocks {
 public:
  /// `prefix` null: nothing is kept, and every call throws.
  KeptBlocks(PrefixCache* prefix, Blocks& blocks, const Steps& steps)
      : prefix_(prefix), blocks_(blocks), steps_(steps) {}

  PrefixCache& prefix() const;  // throws where there is none

  /// The blocks of `keys` from `at` on, `count` of them or as many as there is room for; keys before `at` are kept.
  /// `write` queues the bytes of the first blocks that were found room for.
  std::int64_t insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at, std::size_t count,
                      const std::function<void(std::span<const BlockId>)>& write);
  /// `write` queues the bytes of a place.
  bool insert_snapshot(const BlockKey& key, const std::function<void(std::uint8_t*)>& write);

 private:
  PrefixCache* prefix_;
  Blocks& blocks_;
  const Steps& steps_;
};

}  // namespace kv4
