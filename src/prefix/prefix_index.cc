#include "prefix/prefix_index.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "schema/table_layout.h"

namespace kv4 {
namespace {

void check_options(const PrefixIndexOptions& o) {
  require(o.capacity_blocks >= 1 && o.capacity_blocks <= std::numeric_limits<NodeId>::max(), ErrorCode::bad_config,
          "capacity_blocks is {}; a prefix index holds 1 to {} blocks", o.capacity_blocks,
          std::numeric_limits<NodeId>::max());
  require(o.block_tokens >= 1, ErrorCode::bad_config, "block_tokens is {}; a block has at least 1 token",
          o.block_tokens);
  require(o.max_events >= 1, ErrorCode::bad_config, "max_events is {}; the stream holds at least 1", o.max_events);
  const SnapshotPolicy& s = o.snapshots;
  require(s.kind != SnapshotPolicy::Kind::checkpoint || (s.period_tokens >= 1 && s.period_tokens % o.block_tokens == 0),
          ErrorCode::bad_config, "period_tokens is {}; checkpoints stand at multiples of {} tokens", s.period_tokens,
          o.block_tokens);
  require(s.kind != SnapshotPolicy::Kind::none || s.replay_tokens >= 1, ErrorCode::bad_config,
          "replay_tokens is {}; without snapshots a hit replays at least a window", s.replay_tokens);
  const auto tenants = static_cast<std::int64_t>(o.tenant_shares.size());
  require(tenants >= 1 && tenants <= PrefixIndex::kMaxTenants, ErrorCode::bad_config,
          "there are {} tenants; an index has 1 to {}", tenants, PrefixIndex::kMaxTenants);
  std::int64_t shared = 0;
  for (const std::int64_t share : o.tenant_shares) shared = checked_add(shared, share, "tenant_shares");
  require(shared <= o.capacity_blocks, ErrorCode::bad_config,
          "the tenants' shares add up to {} blocks; the index holds {}", shared, o.capacity_blocks);
}

const PrefixIndexOptions& checked(const PrefixIndexOptions& options) {
  check_options(options);
  return options;
}

}  // namespace

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options)
    : options_(checked(options)),
      entries_(options.capacity_blocks),
      nodes_(entries_.size()),
      table_(options.capacity_blocks),
      events_(options.max_events) {
  for (const std::int64_t share : options.tenant_shares)
    tenants_.push_back({.share = share,
                        .size = 0,
                        .unreferenced = 0,
                        .policy = make_eviction(options.eviction, nodes_, options.capacity_blocks)});
  for (auto id = static_cast<NodeId>(entries_.size()); id-- > 0;) {
    entries_[id].parent = free_head_;
    free_head_ = id;
  }
}

const PrefixIndex::Entry& PrefixIndex::at(NodeId id) const {
  require(id >= 0 && id < static_cast<NodeId>(entries_.size()) && entries_[id].depth > 0, ErrorCode::bad_argument,
          "id {} holds no block; the index has {} of {} in use", id, size_, entries_.size());
  return entries_[id];
}

PrefixIndex::Entry& PrefixIndex::at(NodeId id) {
  return const_cast<Entry&>(static_cast<const PrefixIndex*>(this)->at(id));
}

const PrefixIndex::Tenant& PrefixIndex::tenant_at(TenantId tenant) const {
  require(tenant >= 0 && tenant < static_cast<TenantId>(tenants_.size()), ErrorCode::bad_argument,
          "tenant {} does not exist; the index has tenants 0 to {}", tenant, tenants_.size() - 1);
  return tenants_[tenant];
}

NodeId PrefixIndex::find(const BlockKey& key) const {
  return table_.find(key, [&](NodeId id) { return entries_[id].key == key; });
}

// A lookup reads a cell and an entry, each at a random place: without a prefetch it waits for memory twice.
void PrefixIndex::prefetch_ahead(std::span<const BlockKey> keys, std::size_t i) const {
  constexpr std::size_t kCellsAhead = 16, kEntriesAhead = 8;
  if (i + kCellsAhead < keys.size()) table_.prefetch(keys[i + kCellsAhead]);
  if (i + kEntriesAhead >= keys.size()) return;
  if (const NodeId id = table_.home_node(keys[i + kEntriesAhead]); id != kNoNode) {
    __builtin_prefetch(&entries_[id]);
    __builtin_prefetch(&nodes_[id]);
  }
}

PrefixMatch PrefixIndex::match(std::span<const BlockKey> keys, std::int64_t prompt_tokens) const {
  const std::int64_t full_blocks = prompt_tokens / options_.block_tokens;
  require(prompt_tokens >= 0 && static_cast<std::int64_t>(keys.size()) <= full_blocks, ErrorCode::bad_argument,
          "{} keys for a prompt of {} tokens, which has {} full blocks", keys.size(), prompt_tokens, full_blocks);
  const std::int64_t most_usable = std::max<std::int64_t>(prompt_tokens - 1, 0) / options_.block_tokens;
  PrefixMatch out;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    prefetch_ahead(keys, i);
    const NodeId id = find(keys[i]);
    if (id == kNoNode) break;
    if (++out.matched_blocks > most_usable) continue;
    const Entry& entry = entries_[id];
    out.id = id;
    out.usable_tokens = out.matched_blocks * options_.block_tokens;
    if (entry.snapshot == kNoSnapshot) continue;
    out.snapshot = entry.snapshot;
    out.resume_at = out.usable_tokens;
  }
  if (options_.snapshots.kind == SnapshotPolicy::Kind::none)  // replay starts at a block boundary: spans begin there
    out.resume_at = std::max<std::int64_t>(0, out.usable_tokens - options_.snapshots.replay_tokens) /
                    options_.block_tokens * options_.block_tokens;
  return out;
}

void PrefixIndex::add_reference(NodeId id) {
  Entry& entry = at(id);
  if (entry.references++ > 0) return;
  Tenant& tenant = tenants_[entry.tenant];
  --tenant.unreferenced;
  if (!entry.waits) tenant.policy->hold(id);
}

void PrefixIndex::drop_reference(NodeId id, std::int64_t behind) {
  Entry& entry = at(id);
  require(entry.references > 0, ErrorCode::bad_argument, "id {} is not pinned; it was unpinned once too often", id);
  entry.last_used = ++clock_;
  if (--entry.references > 0) return;
  Tenant& tenant = tenants_[entry.tenant];
  ++tenant.unreferenced;
  if (entry.waits) return;
  nodes_[id].behind = static_cast<std::uint8_t>(std::min<std::int64_t>(behind, 255));
  if (entry.fresh)
    tenant.policy->insert(id, key_fingerprint(entry.key));
  else
    tenant.policy->release(id);
  entry.fresh = false;
  if (entry.children > 0 && tenant.policy->leaves_only()) tenant.policy->hold(id);
}

void PrefixIndex::pin(NodeId id) {
  for (NodeId each = id; each != kNoNode; each = at(each).parent) add_reference(each);
}

// Goes from the tail to the head, so that the deepest block is the least recently used.
void PrefixIndex::unpin(NodeId id) {
  std::int64_t behind = 0;
  for (NodeId each = id; each != kNoNode; each = at(each).parent) drop_reference(each, behind++);
}

NodeId PrefixIndex::unpin_last(NodeId id) {
  const NodeId parent = at(id).parent;
  drop_reference(id, 0);
  return parent;
}

std::optional<PrefixIndex::Stored> PrefixIndex::append(TenantId tenant, NodeId parent, const BlockKey& key,
                                                       BlockId block, std::uint16_t weights_slot, bool inserted) {
  tenant_at(tenant);
  require(parent == kNoNode || at(parent).references > 0, ErrorCode::bad_argument,
          "id {} is not pinned; pin a block before appending to it", parent);
  if (const NodeId known = find(key); known != kNoNode) {
    if (at(known).parent != parent) {
      fail(ErrorCode::bad_argument,
           "key {} follows id {}, but it was stored behind id {}; a key belongs to one chain", to_hex(key), parent,
           at(known).parent);
    }
    add_reference(known);
    return Stored{known, false};
  }
  if (free_head_ == kNoNode) return std::nullopt;
  const NodeId id = free_head_;
  Entry& entry = entries_[id];
  free_head_ = entry.parent;
  entry = {.key = key,
           .parent = parent,
           .depth = parent == kNoNode ? 1 : at(parent).depth + 1,
           .references = 1,
           .tenant = tenant,
           .block = block,
           .weights_slot = weights_slot,
           .fresh = true,
           .last_used = ++clock_};
  if (parent != kNoNode) ++at(parent).children;
  table_.insert(key, id);
  ++tenants_[tenant].size;
  ++size_;
  record({BlockEvent::Kind::stored, key, inserted});
  return Stored{id, true};
}

// LRU names a block without children at once, because chains are unpinned from the tail on. S3-FIFO may name a block
// with children: that block is held until the last child is gone.
NodeId PrefixIndex::find_victim(Tenant& tenant) {
  for (;;) {
    const NodeId id = tenant.policy->victim();
    if (id == kNoNode || entries_[id].children == 0) return id;
    entries_[id].waits = true;
    tenant.policy->hold(id);
  }
}

std::optional<Evicted> PrefixIndex::evict(TenantId tenant) {
  tenant_at(tenant);
  NodeId chosen = kNoNode;
  for (TenantId i = 0; i < std::ssize(tenants_); ++i) {
    Tenant& other = tenants_[i];
    if (i != tenant && other.size <= other.share) continue;
    const NodeId id = find_victim(other);
    if (id != kNoNode && (chosen == kNoNode || at(id).last_used < at(chosen).last_used)) chosen = id;
  }
  if (chosen == kNoNode) return std::nullopt;
  return remove(chosen);
}

std::int64_t PrefixIndex::num_evictable(TenantId tenant) const {
  std::int64_t out = tenant_at(tenant).unreferenced;
  for (TenantId i = 0; i < std::ssize(tenants_); ++i)
    if (i != tenant) out += std::clamp<std::int64_t>(tenants_[i].size - tenants_[i].share, 0, tenants_[i].unreferenced);
  return out;
}

void PrefixIndex::drop_child(NodeId parent) {
  Entry& entry = at(parent);
  EvictionPolicy& policy = *tenants_[entry.tenant].policy;
  if (--entry.children > 0 || (!entry.waits && !policy.leaves_only())) return;
  entry.waits = false;
  if (entry.references == 0) policy.expose(parent);
}

Evicted PrefixIndex::remove(NodeId id) {
  Entry& entry = at(id);
  const Evicted out{entry.key, entry.block, entry.snapshot};
  Tenant& tenant = tenants_[entry.tenant];
  tenant.policy->evict(id, key_fingerprint(entry.key));
  --tenant.size;
  --tenant.unreferenced;
  --size_;
  if (entry.parent != kNoNode) drop_child(entry.parent);
  if (!entry.forgotten) erase_key(id);
  entry = {};
  entry.parent = free_head_;
  free_head_ = id;
  return out;
}

void PrefixIndex::erase_key(NodeId id) {
  const BlockKey& key = at(id).key;
  table_.erase(key, id, [&](NodeId other) -> const BlockKey& { return entries_[other].key; });
  record({BlockEvent::Kind::evicted, key});
}

void PrefixIndex::forget_tail(NodeId id, const Gone& gone) {
  while (id != kNoNode && at(id).forgotten && at(id).references == 0 && at(id).children == 0) {
    const NodeId parent = at(id).parent;
    gone(remove(id));
    id = parent;
  }
}

void PrefixIndex::forget(std::uint16_t weights_slot, const Gone& gone) {
  const auto each = [&](auto&& act) {
    for (NodeId id = 0; id < static_cast<NodeId>(entries_.size()); ++id) {
      Entry& entry = entries_[id];
      if (entry.depth > 0 && entry.weights_slot == weights_slot) act(id, entry);
    }
  };
  each([&](NodeId id, Entry& entry) {
    if (entry.forgotten) return;
    erase_key(id);
    entry.forgotten = true;
  });
  each([&](NodeId id, Entry&) { forget_tail(id, gone); });
}

PrefixIndex::Inserted PrefixIndex::insert(TenantId tenant, std::span<const BlockKey> keys,
                                          std::span<const BlockId> blocks) {
  require(blocks.empty() || blocks.size() == keys.size(), ErrorCode::bad_argument,
          "{} blocks for {} keys; give one each, or none", blocks.size(), keys.size());
  evicted_.clear();
  Inserted out;
  NodeId tail = kNoNode;
  try {
    for (const BlockKey& key : keys) {
      const BlockId block = blocks.empty() ? kNoBlock : blocks[out.blocks];
      std::optional<Stored> stored = append(tenant, tail, key, block);
      if (!stored) {
        const std::optional<Evicted> gone = evict(tenant);
        if (!gone) break;
        evicted_.push_back(*gone);
        stored = append(tenant, tail, key, block);
      }
      tail = stored->id;
      ++out.blocks;
      out.new_blocks += stored->is_new;
    }
  } catch (...) {  // a key of another chain: the blocks before it stay
    unpin(tail);
    throw;
  }
  unpin(tail);
  out.evicted = evicted_;
  return out;
}

SnapshotId PrefixIndex::attach_snapshot(NodeId id, SnapshotId snapshot) {
  Entry& entry = at(id);
  const SnapshotId before = entry.snapshot;
  entry.snapshot = snapshot;
  return before;
}

std::int64_t PrefixIndex::memory_bytes() const {
  static_assert(sizeof(Entry) + sizeof(EvictionNode) == kPrefixEntryBytes && sizeof(BlockEvent) == kPrefixEventBytes);
  return static_cast<std::int64_t>(entries_.size() * kPrefixEntryBytes + events_.size() * kPrefixEventBytes) +
         table_.memory_bytes();
}

void PrefixIndex::record(const BlockEvent& event) {
  if (num_events_ == events_.size()) {
    ++first_event_;
    --num_events_;
    ++lost_events_;
  }
  events_[(first_event_ + num_events_++) % events_.size()] = event;
}

std::size_t PrefixIndex::read_events(std::span<BlockEvent> out) {
  const std::size_t count = std::min<std::size_t>(out.size(), num_events_);
  for (std::size_t i = 0; i < count; ++i) out[i] = events_[(first_event_ + i) % events_.size()];
  first_event_ += count;
  num_events_ -= count;
  return count;
}

}  // namespace kv4
