// Kept blocks and snapshots as bytes, by key: what tiers take and give back.
#include <algorithm>

#include "base/check.h"
#include "cache/manager_impl.h"

namespace kv4 {
namespace {

PrefixCache& prefix_of(std::optional<PrefixCache>& prefix) {
  require(prefix.has_value(), ErrorCode::bad_state, "this cache keeps no prefixes; set options.prefix.enabled");
  return *prefix;
}

}  // namespace

std::vector<BlockKey> KVCacheManager::block_keys(const Prompt& prompt) {
  PrefixCache& prefix = prefix_of(impl_->prefix);
  const std::span<const BlockKey> keys = prefix.keys_of(prefix.root(prompt.salt), prompt, false);
  return {keys.begin(), keys.end()};
}

std::optional<KeptBlock> KVCacheManager::find_block(const BlockKey& key) const {
  if (!impl_->prefix) return std::nullopt;
  const PrefixIndex& index = impl_->prefix->index;
  const Slot slot = index.find(key);
  if (slot == kNoSlot) return std::nullopt;
  return KeptBlock{index.tenant(slot), index.tokens(slot), index.snapshot(slot) != kNoSnapshot};
}

std::int64_t KVCacheManager::snapshot_bytes() const {
  return snapshot_layout(impl_->schema, impl_->schema.block_tokens).bytes;
}

bool KVCacheManager::read_block(const BlockKey& key, std::span<std::byte> out) const {
  Impl& m = *impl_;
  const Slot slot = prefix_of(m.prefix).index.find(key);
  if (slot == kNoSlot) return false;
  m.kv_pool.save_block(m.prefix->index.block(slot), m.block_tokens(), out);
  return true;
}

bool KVCacheManager::read_snapshot(const BlockKey& key, std::span<std::byte> out) const {
  Impl& m = *impl_;
  require(static_cast<std::int64_t>(out.size()) == snapshot_bytes(), ErrorCode::bad_argument,
          "a snapshot has {} bytes; got room for {}", snapshot_bytes(), out.size());
  PrefixCache& prefix = prefix_of(m.prefix);
  const Slot slot = prefix.index.find(key);
  if (slot == kNoSlot || prefix.index.snapshot(slot) == kNoSnapshot) return false;
  const ops::CopyPiece piece{prefix.address(prefix.index.snapshot(slot)), reinterpret_cast<std::uint8_t*>(out.data()),
                             static_cast<std::int64_t>(out.size())};
  m.backend->read_pieces(std::span(&piece, 1), out);
  return true;
}

std::int64_t KVCacheManager::insert_blocks(const Prompt& prompt, std::span<const std::span<const std::byte>> blocks) {
  Impl& m = *impl_;
  PrefixCache& prefix = prefix_of(m.prefix);
  require(!m.step_open, ErrorCode::bad_state, "blocks cannot be inserted during a step; commit or abort it first");
  for (const std::span<const std::byte> block : blocks)
    require(static_cast<std::int64_t>(block.size()) == m.schema.block_image_bytes, ErrorCode::bad_argument,
            "a block has {} bytes; got {}", m.schema.block_image_bytes, block.size());
  const std::vector<BlockKey> keys = block_keys(prompt);
  std::size_t at = 0;
  Slot tail = kNoSlot;
  for (Slot next; at < keys.size() && (next = prefix.index.find(keys[at])) != kNoSlot; ++at) tail = next;
  require(blocks.size() <= keys.size() - at, ErrorCode::bad_argument,
          "the prompt has {} full blocks, {} of them kept; got {} more", keys.size(), at, blocks.size());

  if (tail != kNoSlot) prefix.index.pin(tail);
  std::int64_t inserted = 0;
  for (const std::span<const std::byte> bytes : blocks) {
    const TenantId tenant = tail == kNoSlot ? prompt.tenant : prefix.index.tenant(tail);
    if (m.num_available(tenant) < 1) break;
    const BlockId block = m.take_block(tenant);
    m.kv_pool.load_block(block, bytes);
    std::copy_n(prompt.token_ids.data() + at * static_cast<std::size_t>(m.block_tokens()), m.block_tokens(),
                &m.token_ids[std::int64_t{block} * m.block_tokens()]);
    tail = prefix.index.append(tenant, tail, keys[at++], block, prefix.origin(), true).value().slot;
    m.allocator.publish(block);
    m.allocator.release(block);
    ++inserted;
  }
  prefix.statistics.inserted_blocks += inserted;
  if (tail != kNoSlot) prefix.index.unpin(tail);
  return inserted;
}

bool KVCacheManager::insert_snapshot(const BlockKey& key, std::span<const std::byte> bytes) {
  Impl& m = *impl_;
  PrefixCache& prefix = prefix_of(m.prefix);
  require(!m.step_open, ErrorCode::bad_state, "a snapshot cannot be inserted during a step; commit or abort it first");
  require(static_cast<std::int64_t>(bytes.size()) == snapshot_bytes(), ErrorCode::bad_argument,
          "a snapshot has {} bytes; got {}", snapshot_bytes(), bytes.size());
  const Slot slot = prefix.index.find(key);
  if (slot == kNoSlot) return false;
  if (prefix.index.snapshot(slot) != kNoSnapshot) return true;
  const SnapshotId place = prefix.take_place();
  if (place == kNoSnapshot) return false;
  const ops::CopyPiece piece{reinterpret_cast<const std::uint8_t*>(bytes.data()), prefix.address(place),
                             static_cast<std::int64_t>(bytes.size())};
  m.backend->write_pieces(std::span(&piece, 1), bytes);
  prefix.attach(slot, place);
  prefix.keep(slot, true);
  return true;
}

}  // namespace kv4
