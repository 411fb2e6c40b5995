// The index of prefix blocks. Keys, counts and order only: no bytes, no locks, one thread at a time.
// A call costs O(1) per block; an eviction also looks at each tenant once. All memory except ghosts is allocated at the
// start. S3-FIFO has at most one ghost per block, hit density at most four.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv4/block_allocator.h"
#include "prefix/block_hash.h"
#include "prefix/eviction.h"
#include "prefix/key_table.h"

namespace kv4 {

inline constexpr BlockId kNoBlock = -1;

using SnapshotId = std::int32_t;
inline constexpr SnapshotId kNoSnapshot = -1;

struct PrefixIndexOptions {
  std::int64_t capacity_blocks = 0;
  int block_tokens = 128;
  EvictionKind eviction = EvictionKind::lru;
  SnapshotPolicy snapshots;
  std::int64_t max_events = 65536;  // in the stream; older ones are lost, and counted
  /// Blocks of each tenant that others cannot evict: one element per tenant, together at most the capacity.
  std::vector<std::int64_t> tenant_shares = {0};
};

/// The match of a prompt.
struct PrefixMatch {
  std::int64_t matched_blocks = 0;  // from the first block on, without a gap
  /// Tokens that need not be stored again: whole blocks, and at least one token of the prompt remains for a query.
  std::int64_t usable_tokens = 0;
  NodeId id = kNoNode;  // the last usable block; pin it before another call can evict it
  /// First token to compute. Tokens from here to usable_tokens are replayed, which rebuilds windows and pending rows;
  /// the entries are there already.
  std::int64_t resume_at = 0;
  SnapshotId snapshot = kNoSnapshot;  // to restore at resume_at; kNoSnapshot: begin with empty state
  std::int64_t replayed_tokens() const { return usable_tokens - resume_at; }
};

/// An evicted block, and its parts to free.
struct Evicted {
  BlockKey key{};
  BlockId block = kNoBlock;
  SnapshotId snapshot = kNoSnapshot;
};

class PrefixIndex {
 public:
  static constexpr std::int64_t kMaxTenants = 256;  // every eviction looks at each

  explicit PrefixIndex(const PrefixIndexOptions& options);

  /// `keys`: keys of the full blocks of a prompt of `prompt_tokens`, first block first. Changes nothing.
  PrefixMatch match(std::span<const BlockKey> keys, std::int64_t prompt_tokens) const;

  /// Adds a reference to the block and to every block before it: none of them is evicted.
  void pin(NodeId id);
  /// Drops these references. The deepest block becomes the first to be evicted.
  void unpin(NodeId id);
  /// As pin(parent(node)) and unpin(node); returns the parent.
  NodeId unpin_last(NodeId id);

  struct Stored {
    NodeId id = kNoNode;
    bool is_new = false;  // false: the index had the key, with a block of its own
  };
  /// Adds the block that follows `parent` (kNoNode: it begins a chain). The caller has pinned `parent`; the new block
  /// is pinned with it, so that unpin(new) replaces unpin(parent). nullopt: the index is full; evict first.
  /// `weights_slot`: the slot that forget() names, the same in a whole chain. `inserted`: for the event.
  std::optional<Stored> append(TenantId tenant, NodeId parent, const BlockKey& key, BlockId block = kNoBlock,
                               std::uint16_t weights_slot = 0, bool inserted = false);

  /// Evicts a block to make room for `tenant`: one without references and without children in the index. Other tenants
  /// lose only blocks above their shares. nullopt: no such block.
  std::optional<Evicted> evict(TenantId tenant);
  /// The number of calls of evict(tenant) that would find a block. A call for another tenant lowers it by at most one.
  std::int64_t num_evictable(TenantId tenant) const;

  /// Adds a whole chain, unpinned, and evicts as needed. Blocks that find no room are left out, the deepest first.
  struct Inserted {
    std::int64_t blocks = 0;           // blocks of the chain that are in the index now
    std::int64_t new_blocks = 0;       // those of them that were not there before
    std::span<const Evicted> evicted;  // valid until the next call
  };
  /// `blocks`: one per key, or empty where nothing is on the device.
  Inserted insert(TenantId tenant, std::span<const BlockKey> keys, std::span<const BlockId> blocks = {});

  using Gone = std::function<void(const Evicted&)>;
  /// Makes all blocks of these weights unfindable. Blocks without references go at once, with a call of `gone` each.
  /// The others go in forget_tail(). Costs a look at every node.
  void forget(std::uint16_t weights_slot, const Gone& gone);
  /// From this block up, removes forgotten blocks that have no references and no children, with a call of `gone` each.
  void forget_tail(NodeId id, const Gone& gone);

  /// Attaches a snapshot to the block's end. Returns the snapshot that was there before, if any.
  SnapshotId attach_snapshot(NodeId id, SnapshotId snapshot);
  SnapshotId detach_snapshot(NodeId id) { return attach_snapshot(id, kNoSnapshot); }

  /// Records the event that the snapshot at the end of this block is kept.
  void note_snapshot(NodeId id, bool inserted) { record({BlockEvent::Kind::snapshot, at(id).key, inserted}); }

  /// Moves the oldest events to `out`, in order, as many as fit. Returns their number.
  std::size_t read_events(std::span<BlockEvent> out);
  std::uint64_t lost_events() const { return lost_events_; }

  NodeId find(const BlockKey& key) const;
  const BlockKey& key(NodeId id) const { return at(id).key; }
  BlockId block(NodeId id) const { return at(id).block; }
  SnapshotId snapshot(NodeId id) const { return at(id).snapshot; }
  NodeId parent(NodeId id) const { return at(id).parent; }
  std::int32_t children(NodeId id) const { return at(id).children; }
  std::int32_t references(NodeId id) const { return at(id).references; }
  TenantId tenant(NodeId id) const { return at(id).tenant; }
  std::uint64_t last_used(NodeId id) const { return at(id).last_used; }
  std::int64_t tokens(NodeId id) const { return std::int64_t{at(id).depth} * options_.block_tokens; }

  int block_tokens() const { return options_.block_tokens; }
  std::int64_t capacity() const { return options_.capacity_blocks; }
  std::int64_t size() const { return size_; }
  std::int64_t tenant_size(TenantId tenant) const { return tenant_at(tenant).size; }
  const SnapshotPolicy& snapshots() const { return options_.snapshots; }
  /// Memory of the index, without ghosts.
  std::int64_t memory_bytes() const;

 private:
  // 1. depth > 0: the node is in use, and in table_ unless forgotten. depth = 0: it is in the free list, linked by
  //    `parent`.
  // 2. A block's parent is in use, and `children` counts the blocks that name this block as parent.
  // 3. A block's references include those of each child: a reference to a block is one to every block before it.
  // 4. references > 0: the tenant's policy does not know the block yet (fresh) or holds it. references = 0: the block
  //    may be a victim unless it waits; by 3 so may its descendants, and the deepest of them do not wait.
  struct Entry {
    BlockKey key{};
    NodeId parent = kNoNode;
    std::int32_t depth = 0;  // blocks from the start of the chain, this one included
    std::int32_t children = 0;
    std::int32_t references = 0;
    TenantId tenant = 0;
    BlockId block = kNoBlock;
    SnapshotId snapshot = kNoSnapshot;
    std::uint16_t weights_slot = 0;
    bool fresh : 1 = false;       // its policy does not know it yet
    bool waits : 1 = false;       // was named as a victim and is held until its children are gone
    bool forgotten : 1 = false;   // not in table_
    std::uint64_t last_used = 0;  // to compare the victims of several tenants
  };
  struct Tenant {
    std::int64_t share = 0;
    std::int64_t size = 0;          // blocks, pinned ones included
    std::int64_t unreferenced = 0;  // blocks without references
    std::unique_ptr<EvictionPolicy> policy;
  };

  Entry& at(NodeId id);
  const Entry& at(NodeId id) const;
  const Tenant& tenant_at(TenantId tenant) const;
  void prefetch_ahead(std::span<const BlockKey> keys, std::size_t i) const;
  void add_reference(NodeId id);
  void drop_reference(NodeId id, std::int64_t behind);  // `behind`: blocks behind it in the chain
  NodeId find_victim(Tenant& tenant);
  void drop_child(NodeId parent);
  void erase_key(NodeId id);
  Evicted remove(NodeId id);
  void record(const BlockEvent& event);

  PrefixIndexOptions options_;
  std::vector<Entry> entries_;
  std::vector<EvictionNode> nodes_;
  KeyTable table_;
  std::vector<Tenant> tenants_;
  NodeId free_head_ = kNoNode;
  std::int64_t size_ = 0;
  std::uint64_t clock_ = 0;
  std::vector<Evicted> evicted_;
  std::vector<BlockEvent> events_;  // a ring
  std::uint64_t first_event_ = 0, num_events_ = 0, lost_events_ = 0;
};

}  // namespace kv4
