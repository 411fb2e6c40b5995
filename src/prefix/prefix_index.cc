#include "prefix/prefix_index.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "schema/table_layout.h"

namespace kv4 {
namespace {

void check_options(const PrefixIndexOptions& o) {
  require(o.capacity_blocks >= 1 && o.capacity_blocks <= std::numeric_limits<Slot>::max(), ErrorCode::bad_config,
          "capacity_blocks is {}; a prefix index holds 1 to {} blocks", o.capacity_blocks,
          std::numeric_limits<Slot>::max());
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
  for (auto slot = static_cast<Slot>(entries_.size()); slot-- > 0;) {
    entries_[slot].parent = free_head_;
    free_head_ = slot;
  }
}

const PrefixIndex::Entry& PrefixIndex::at(Slot slot) const {
  require(slot >= 0 && slot < static_cast<Slot>(entries_.size()) && entries_[slot].depth > 0, ErrorCode::bad_argument,
          "slot {} holds no block; the index has {} of {} in use", slot, size_, entries_.size());
  return entries_[slot];
}

PrefixIndex::Entry& PrefixIndex::at(Slot slot) {
  return const_cast<Entry&>(static_cast<const PrefixIndex*>(this)->at(slot));
}

const PrefixIndex::Tenant& PrefixIndex::tenant_at(TenantId tenant) const {
  require(tenant >= 0 && tenant < static_cast<TenantId>(tenants_.size()), ErrorCode::bad_argument,
          "tenant {} does not exist; the index has tenants 0 to {}", tenant, tenants_.size() - 1);
  return tenants_[tenant];
}

Slot PrefixIndex::find(const BlockKey& key) const {
  return table_.find(key, [&](Slot slot) { return entries_[slot].key == key; });
}

// Keys are spread over all of the table: a lookup waits for memory twice unless both are asked for ahead of time.
void PrefixIndex::prefetch_ahead(std::span<const BlockKey> keys, std::size_t i) const {
  constexpr std::size_t kCellsAhead = 16, kEntriesAhead = 8;
  if (i + kCellsAhead < keys.size()) table_.prefetch(keys[i + kCellsAhead]);
  if (i + kEntriesAhead >= keys.size()) return;
  if (const Slot slot = table_.home_slot(keys[i + kEntriesAhead]); slot != kNoSlot) {
    __builtin_prefetch(&entries_[slot]);
    __builtin_prefetch(&nodes_[slot]);
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
    const Slot slot = find(keys[i]);
    if (slot == kNoSlot) break;
    if (++out.matched_blocks > most_usable) continue;
    const Entry& entry = entries_[slot];
    out.slot = slot;
    out.usable_tokens = out.matched_blocks * options_.block_tokens;
    if (entry.snapshot == kNoSnapshot) continue;
    out.snapshot = entry.snapshot;
    out.resume_at = out.usable_tokens;
  }
  if (options_.snapshots.kind == SnapshotPolicy::Kind::none)  // from the start of a block: spans begin there
    out.resume_at = std::max<std::int64_t>(0, out.usable_tokens - options_.snapshots.replay_tokens) /
                    options_.block_tokens * options_.block_tokens;
  return out;
}

void PrefixIndex::add_reference(Slot slot) {
  Entry& entry = at(slot);
  if (entry.references++ > 0) return;
  Tenant& tenant = tenants_[entry.tenant];
  --tenant.unreferenced;
  if (!entry.waits) tenant.policy->hold(slot);
}

void PrefixIndex::drop_reference(Slot slot, std::int64_t behind) {
  Entry& entry = at(slot);
  require(entry.references > 0, ErrorCode::bad_argument, "slot {} is not pinned; it was unpinned once too often", slot);
  entry.last_used = ++clock_;
  if (--entry.references > 0) return;
  Tenant& tenant = tenants_[entry.tenant];
  ++tenant.unreferenced;
  if (entry.waits) return;
  nodes_[slot].behind = static_cast<std::uint8_t>(std::min<std::int64_t>(behind, 255));
  if (entry.fresh)
    tenant.policy->insert(slot, key_fingerprint(entry.key));
  else
    tenant.policy->release(slot);
  entry.fresh = false;
  if (entry.children > 0 && tenant.policy->leaves_only()) tenant.policy->hold(slot);
}

void PrefixIndex::pin(Slot slot) {
  for (Slot each = slot; each != kNoSlot; each = at(each).parent) add_reference(each);
}

// From the tail to the head: the deepest block is the least recently used.
void PrefixIndex::unpin(Slot slot) {
  std::int64_t behind = 0;
  for (Slot each = slot; each != kNoSlot; each = at(each).parent) drop_reference(each, behind++);
}

Slot PrefixIndex::unpin_last(Slot slot) {
  const Slot parent = at(slot).parent;
  drop_reference(slot, 0);
  return parent;
}

std::optional<PrefixIndex::Stored> PrefixIndex::append(TenantId tenant, Slot parent, const BlockKey& key, BlockId block,
                                                       std::uint16_t weights_slot, bool inserted) {
  tenant_at(tenant);
  require(parent == kNoSlot || at(parent).references > 0, ErrorCode::bad_argument,
          "slot {} is not pinned; pin a block before appending to it", parent);
  if (const Slot known = find(key); known != kNoSlot) {
    if (at(known).parent != parent) {
      fail(ErrorCode::bad_argument,
           "key {} follows slot {}, but it was stored behind slot {}; a key belongs to one chain", to_hex(key), parent,
           at(known).parent);
    }
    add_reference(known);
    return Stored{known, false};
  }
  if (free_head_ == kNoSlot) return std::nullopt;
  const Slot slot = free_head_;
  Entry& entry = entries_[slot];
  free_head_ = entry.parent;
  entry = {.key = key,
           .parent = parent,
           .depth = parent == kNoSlot ? 1 : at(parent).depth + 1,
           .references = 1,
           .tenant = tenant,
           .block = block,
           .weights_slot = weights_slot,
           .fresh = true,
           .last_used = ++clock_};
  if (parent != kNoSlot) ++at(parent).children;
  table_.insert(key, slot);
  ++tenants_[tenant].size;
  ++size_;
  record({BlockEvent::Kind::stored, key, inserted});
  return Stored{slot, true};
}

// LRU meets a block without children at once, because chains are given back from the tail on. S3-FIFO may meet one with
// children: it is held until the last of them is gone.
Slot PrefixIndex::find_victim(Tenant& tenant) {
  for (;;) {
    const Slot slot = tenant.policy->victim();
    if (slot == kNoSlot || entries_[slot].children == 0) return slot;
    entries_[slot].waits = true;
    tenant.policy->hold(slot);
  }
}

std::optional<Evicted> PrefixIndex::evict(TenantId tenant) {
  tenant_at(tenant);
  Slot chosen = kNoSlot;
  for (TenantId i = 0; i < std::ssize(tenants_); ++i) {
    Tenant& other = tenants_[i];
    if (i != tenant && other.size <= other.share) continue;
    const Slot slot = find_victim(other);
    if (slot != kNoSlot && (chosen == kNoSlot || at(slot).last_used < at(chosen).last_used)) chosen = slot;
  }
  if (chosen == kNoSlot) return std::nullopt;
  return remove(chosen);
}

std::int64_t PrefixIndex::num_evictable(TenantId tenant) const {
  std::int64_t out = tenant_at(tenant).unreferenced;
  for (TenantId i = 0; i < std::ssize(tenants_); ++i)
    if (i != tenant) out += std::clamp<std::int64_t>(tenants_[i].size - tenants_[i].share, 0, tenants_[i].unreferenced);
  return out;
}

void PrefixIndex::drop_child(Slot parent) {
  Entry& entry = at(parent);
  EvictionPolicy& policy = *tenants_[entry.tenant].policy;
  if (--entry.children > 0 || (!entry.waits && !policy.leaves_only())) return;
  entry.waits = false;
  if (entry.references == 0) policy.expose(parent);
}

Evicted PrefixIndex::remove(Slot slot) {
  Entry& entry = at(slot);
  const Evicted out{entry.key, entry.block, entry.snapshot};
  Tenant& tenant = tenants_[entry.tenant];
  tenant.policy->evict(slot, key_fingerprint(entry.key));
  --tenant.size;
  --tenant.unreferenced;
  --size_;
  if (entry.parent != kNoSlot) drop_child(entry.parent);
  if (!entry.forgotten) erase_key(slot);
  entry = {};
  entry.parent = free_head_;
  free_head_ = slot;
  return out;
}

void PrefixIndex::erase_key(Slot slot) {
  const BlockKey& key = at(slot).key;
  table_.erase(key, slot, [&](Slot other) -> const BlockKey& { return entries_[other].key; });
  record({BlockEvent::Kind::evicted, key});
}

void PrefixIndex::forget_tail(Slot slot, const Gone& gone) {
  while (slot != kNoSlot && at(slot).forgotten && at(slot).references == 0 && at(slot).children == 0) {
    const Slot parent = at(slot).parent;
    gone(remove(slot));
    slot = parent;
  }
}

void PrefixIndex::forget(std::uint16_t weights_slot, const Gone& gone) {
  const auto each = [&](auto&& act) {
    for (Slot slot = 0; slot < static_cast<Slot>(entries_.size()); ++slot) {
      Entry& entry = entries_[slot];
      if (entry.depth > 0 && entry.weights_slot == weights_slot) act(slot, entry);
    }
  };
  each([&](Slot slot, Entry& entry) {
    if (entry.forgotten) return;
    erase_key(slot);
    entry.forgotten = true;
  });
  each([&](Slot slot, Entry&) { forget_tail(slot, gone); });
}

PrefixIndex::Inserted PrefixIndex::insert(TenantId tenant, std::span<const BlockKey> keys,
                                          std::span<const BlockId> blocks) {
  require(blocks.empty() || blocks.size() == keys.size(), ErrorCode::bad_argument,
          "{} blocks for {} keys; give one each, or none", blocks.size(), keys.size());
  evicted_.clear();
  Inserted out;
  Slot tail = kNoSlot;
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
      tail = stored->slot;
      ++out.blocks;
      out.new_blocks += stored->is_new;
    }
  } catch (...) {  // a key of another chain: what came before it stays
    unpin(tail);
    throw;
  }
  unpin(tail);
  out.evicted = evicted_;
  return out;
}

SnapshotId PrefixIndex::attach_snapshot(Slot slot, SnapshotId snapshot) {
  Entry& entry = at(slot);
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
