// Prefix blocks and snapshots on their way between a cache and other memory of its backend: queued, without waiting.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/internal_key.h"
#include "cache/manager_impl.h"

namespace kv4 {

/// The cache outlives it.
class BlockMover {
 public:
  explicit BlockMover(KVCacheManager& cache) : cache_(cache), m_(cache.impl(InternalKey())) {}

  const std::shared_ptr<Backend>& backend() const { return m_.memory.backend; }
  OneThread& driver() const { return m_.driver; }
  CallTimes& times() { return m_.times; }

  /// The root of the prompt's block keys, with the present weights.
  BlockKey root(const Prompt& prompt);
  /// The key of a prompt's full block; `before`: the keys of all blocks before it.
  BlockKey next_key(const BlockKey& root, const Prompt& prompt, std::span<const BlockKey> before);

  /// Throws where admit() would, and Error(bad_state) during a step. False: a shortage, whatever blocks are kept.
  bool has_room_for_request(const Prompt& prompt) const;
  /// KVCacheManager::admit() with known keys: see Requests.
  Expected<Admission> admit(const Prompt& prompt, const BlockKey& root, std::span<const BlockKey> known);

  /// Images of prefix blocks, to[i] [block_image_bytes]. False, and nothing is done: one of them is not there.
  bool gather(std::span<const BlockKey> keys, std::span<std::byte* const> to) const;
  bool gather_snapshot(const BlockKey& key, std::byte* to) const;  // [snapshot_bytes()]

  /// Inserts the prompt's blocks of `keys` from `at` on. Those before `at` must be kept, else nothing is done. Returns
  /// how many of them are kept now: as many as there was room for.
  std::int64_t insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                      std::span<std::byte* const> images);
  bool insert_snapshot(const BlockKey& key, const std::byte* from);

 private:
  KVCacheManager& cache_;
  KVCacheManager::Impl& m_;
};

}  // namespace kv4
