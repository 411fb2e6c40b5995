// The part of a cache that outlives its requests: the index of blocks, places for snapshots, counters. It knows no
// requests; the manager moves blocks and bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/device_memory.h"
#include "kv4/statistics.h"
#include "prefix/prefix_index.h"

namespace kv4 {

/// The first blocks of a chain; tail is the last of them.
struct KeptChain {
  NodeId tail = kNoNode;
  std::int64_t blocks = 0;
};

// Invariants between calls, in addition to those of the index:
// 1. A block is in the index if and only if the allocator has it as published; one without holders there has no
//    references here.
// 2. A place is free, reserved by the open step (taken, no id), or the snapshot of the index's id that it names.
class PrefixCache {
 public:
  PrefixCache(const CacheSchema& schema, const std::shared_ptr<Backend>& backend);

  PrefixIndex index;
  PrefixStatistics statistics;  // counters; now() completes them
  PrefixStatistics now() const;
  TokenHistogram usable_tokens, replayed_tokens;  // of every prompt, and of every hit

  /// Keys of a prompt's full blocks, first block first; `kept`: up to the first that is not there. The first of them
  /// may be `known`. Valid until the next call.
  std::span<const BlockKey> keys_of(const BlockKey& root, const Prompt& prompt, bool kept,
                                    std::span<const BlockKey> known = {});
  /// The full blocks of these tokens that the index has.
  KeptChain find_chain(const PrefixIdentity& chain, std::span<const std::int32_t> token_ids);
  BlockKey root(std::string_view salt);
  BlockKey block_key(const BlockKey& parent, std::span<const std::int32_t> token_ids, std::string_view extra);
  /// The key of a prompt's full block, whose parent is the root or the block before it.
  BlockKey block_key(const BlockKey& parent, const Prompt& prompt, std::size_t block);
  void set_weights_id(std::string_view id);
  /// The slot of the present weights, and of named ones; nullopt: nothing was stored with them.
  std::uint16_t weights_slot() const { return weights_slot_; }
  std::optional<std::uint16_t> weights_slot_of(std::string_view weights_id) const;
  /// Ends the slot's weights generation; its number may be given to other weights.
  void end_weights_slot(std::uint16_t weights_slot);
  /// A weights generation belongs to one id of one cache; nullopt: it is another cache's, or over.
  std::uint64_t weights_generation(std::uint16_t weights_slot) const { return weights_generations_[weights_slot]; }
  std::optional<std::uint16_t> weights_slot_in(std::uint64_t weights_generation) const;
  void set_rope_digest(std::string_view bytes) { identity_.rope_digest = hasher_.digest(bytes); }

  /// Whether a request that resumes here differs from a cold run: V4.1, after a replay of fewer tokens than windows
  /// depend on. Its blocks are not kept, so that exact and approximate ones do not mix.
  bool is_approximate(const PrefixMatch& match) const {
    return replays_too_few_ && match.snapshot == kNoSnapshot && match.resume_at > 0;
  }

  /// A place for a snapshot: a free one, or that of the coldest block, those of running requests last. kNoSnapshot:
  /// none can be had.
  SnapshotId take_place();
  std::size_t num_places() const { return places_.size(); }
  void give_place(SnapshotId place);
  std::uint8_t* address(SnapshotId place) const;
  /// The number i * block_tokens, an int32 in the backend's memory.
  const std::uint8_t* boundary(std::int64_t i) const {
    return reinterpret_cast<const std::uint8_t*>(boundaries_.data() + 4 * i);
  }
  void attach(NodeId id, SnapshotId place);

  /// The id's snapshot, if it has one, stays until its place is needed.
  void keep(NodeId id, bool inserted = false);
  /// The snapshot stays until leave(), for a holder that will soon have a newer one; there may be several holders.
  void stay(NodeId id);
  /// Ends a stay(). kept: keep() it now.
  void leave(NodeId id, bool kept);

  std::int64_t memory_bytes() const { return index.memory_bytes() + memory_.bytes() + boundaries_.bytes(); }

 private:
  struct SnapshotPlace {
    NodeId id = kNoNode;
    bool taken = false;
    bool kept = false;
    std::int32_t staying = 0;
  };
  void keep_place(SnapshotId place, bool inserted);
  SnapshotPlace& at(SnapshotId place) { return places_[place]; }

  const bool replays_too_few_;
  BlockHasher hasher_;
  ChainIdentity identity_;  // without the salt
  std::vector<std::string>
      weights_ids_;  // by id; one may be longer than weights_generations_ where memory was refused
  std::vector<std::uint64_t> weights_generations_;  // [weights slots] 0: the number is not in use
  std::uint16_t weights_slot_ = 0;
  std::int64_t place_bytes_;
  DeviceMemory memory_;
  DeviceMemory boundaries_;  // int32 [blocks_per_request + 1]
  std::vector<SnapshotPlace> places_;
  std::vector<SnapshotId> free_places_;
  std::vector<BlockKey> keys_;
};

}  // namespace kv4
