// Kept blocks and snapshots as bytes, by key: what tiers take and give back.
#include <algorithm>
#include <utility>

#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/block_mover.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"

namespace kv4 {
namespace {

PrefixCache& prefix_of(std::optional<PrefixCache>& prefix) {
  require(prefix.has_value(), ErrorCode::bad_state, "this cache keeps no prefixes; set options.prefix.enabled");
  return *prefix;
}

}  // namespace

std::vector<BlockKey> KVCacheManager::block_keys(const Prompt& prompt) try {
  const OneThread::Call call(impl_->driver);
  PrefixCache& prefix = prefix_of(impl_->prefix);
  const std::span<const BlockKey> keys = prefix.keys_of(prefix.root(prompt.salt), prompt, false);
  return {keys.begin(), keys.end()};
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::optional<KeptBlock> KVCacheManager::find_block(const BlockKey& key) const {
  const OneThread::Call call(impl_->driver);
  if (!impl_->prefix) return std::nullopt;
  const PrefixIndex& index = impl_->prefix->index;
  const Slot slot = index.find(key);
  if (slot == kNoSlot) return std::nullopt;
  return KeptBlock{index.tenant(slot), index.tokens(slot), index.snapshot(slot) != kNoSnapshot};
}

std::int64_t KVCacheManager::snapshot_bytes() const { return impl_->snapshot_parts.bytes; }

bool KVCacheManager::read_block(const BlockKey& key, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 read_block", !impl_->backend->on_host());
  Impl& m = *impl_;
  const Slot slot = prefix_of(m.prefix).index.find(key);
  if (slot == kNoSlot) return false;
  m.kv_pool.save_block(m.prefix->index.block(slot), m.block_tokens(), out);
  return true;
}

bool KVCacheManager::read_snapshot(const BlockKey& key, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 read_snapshot", !impl_->backend->on_host());
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

std::int64_t KVCacheManager::insert_blocks(const Prompt& prompt,
                                           std::span<const std::span<const std::byte>> blocks) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 insert_blocks", !impl_->backend->on_host());
  Impl& m = *impl_;
  const PrefixIndex& index = prefix_of(m.prefix).index;
  for (const std::span<const std::byte> block : blocks)
    require(static_cast<std::int64_t>(block.size()) == m.schema.block_image_bytes, ErrorCode::bad_argument,
            "a block has {} bytes; got {}", m.schema.block_image_bytes, block.size());
  const std::vector<BlockKey> keys = block_keys(prompt);
  std::size_t at = 0;
  while (at < keys.size() && index.find(keys[at]) != kNoSlot) ++at;
  require(blocks.size() <= keys.size() - at, ErrorCode::bad_argument,
          "the prompt has {} full blocks, {} of them kept; got {} more", keys.size(), at, blocks.size());
  return m.insert_blocks(prompt, keys, at, blocks.size(), [&](std::span<const BlockId> room) {
    for (std::size_t i = 0; i < room.size(); ++i) m.kv_pool.load_block(room[i], blocks[i]);
  });
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool KVCacheManager::insert_snapshot(const BlockKey& key, std::span<const std::byte> bytes) {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 insert_snapshot", !impl_->backend->on_host());
  Impl& m = *impl_;
  require(static_cast<std::int64_t>(bytes.size()) == snapshot_bytes(), ErrorCode::bad_argument,
          "a snapshot has {} bytes; got {}", snapshot_bytes(), bytes.size());
  return m.insert_snapshot(key, [&](std::uint8_t* place) {
    const ops::CopyPiece piece{reinterpret_cast<const std::uint8_t*>(bytes.data()), place, std::ssize(bytes)};
    m.backend->write_pieces(std::span(&piece, 1), bytes);
  });
}

// Blocks count once their bytes are queued: nobody can find one before.
std::int64_t KVCacheManager::Impl::insert_blocks(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                                                 std::size_t count,
                                                 const std::function<void(std::span<const BlockId>)>& write) {
  PrefixCache& kept = prefix_of(prefix);
  require(!step_open, ErrorCode::bad_state, "blocks cannot be inserted during a step; commit or abort it first");
  Slot tail = at == 0 ? kNoSlot : kept.index.find(keys[at - 1]);
  if (at > 0 && tail == kNoSlot) return 0;  // evicted meanwhile
  const TenantId tenant = tail == kNoSlot ? prompt.tenant : kept.index.tenant(tail);
  std::vector<BlockId> room;
  room.reserve(count);
  if (tail != kNoSlot) kept.index.pin(tail);
  while (room.size() < count && num_available(tenant) >= 1) room.push_back(take_block(tenant));
  write(room);
  for (const BlockId block : room) {
    std::copy_n(prompt.token_ids.data() + at * static_cast<std::size_t>(block_tokens()), block_tokens(),
                &token_ids[std::int64_t{block} * block_tokens()]);
    tail = kept.index.append(tenant, tail, keys[at++], block, kept.weights_slot(), true).value().slot;
    allocator.publish(block);
    allocator.release(block);
  }
  kept.statistics.inserted_blocks += std::ssize(room);
  if (tail != kNoSlot) kept.index.unpin(tail);
  return std::ssize(room);
}

bool KVCacheManager::Impl::insert_snapshot(const BlockKey& key, const std::function<void(std::uint8_t*)>& write) {
  PrefixCache& kept = prefix_of(prefix);
  require(!step_open, ErrorCode::bad_state, "a snapshot cannot be inserted during a step; commit or abort it first");
  const Slot slot = kept.index.find(key);
  if (slot == kNoSlot) return false;
  if (kept.index.snapshot(slot) != kNoSnapshot) return true;
  const SnapshotId place = kept.take_place();
  if (place == kNoSnapshot) return false;
  write(kept.address(place));
  kept.attach(slot, place);
  kept.keep(slot, true);
  return true;
}

// --- in the backend's memory, queued

BlockKey BlockMover::root(const Prompt& prompt) { return prefix_of(m_.prefix).root(prompt.salt); }

BlockKey BlockMover::next_key(const BlockKey& root, const Prompt& prompt, std::span<const BlockKey> before) {
  return prefix_of(m_.prefix).block_key(before.empty() ? root : before.back(), prompt, before.size());
}

bool BlockMover::has_room_for_request(const Prompt& prompt) const {
  m_.check_prompt(prompt);
  require(!m_.step_open, ErrorCode::bad_state, "blocks cannot be loaded during a step; commit or abort it first");
  return !m_.free_rows.empty() && m_.state_pool.num_free() > 0;
}

Expected<Admission> BlockMover::admit(const Prompt& prompt, const BlockKey& root, std::span<const BlockKey> known) {
  const TimedCall call(cache_, &CallTimes::admit);
  const NvtxRange range("kv4 admit", !m_.backend->on_host());
  PrefixIdentity name = cache_.identify_prefix(prompt);
  if (name.root != root) known = {};  // of other weights than the present ones
  return m_.admit(prompt, std::move(name), known);
}

bool BlockMover::gather(std::span<const BlockKey> keys, std::span<std::byte* const> to) const {
  std::vector<BlockImage> images;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Slot slot = prefix_of(m_.prefix).index.find(keys[i]);
    if (slot == kNoSlot) return false;
    images.push_back({m_.prefix->index.block(slot), to[i]});
  }
  m_.kv_pool.gather_blocks(images);
  return true;
}

bool BlockMover::gather_snapshot(const BlockKey& key, std::byte* to) const {
  const PrefixCache& prefix = prefix_of(m_.prefix);
  const Slot slot = prefix.index.find(key);
  if (slot == kNoSlot || prefix.index.snapshot(slot) == kNoSnapshot) return false;
  const std::uint8_t* from = prefix.address(prefix.index.snapshot(slot));
  m_.backend->copy(to, reinterpret_cast<const std::byte*>(from), cache_.snapshot_bytes());
  return true;
}

std::int64_t BlockMover::insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                                std::span<std::byte* const> images) {
  std::vector<BlockImage> copies;
  copies.reserve(images.size());
  m_.kv_pool.reserve_images(images.size());
  return m_.insert_blocks(prompt, keys, at, images.size(), [&](std::span<const BlockId> room) {
    for (std::size_t i = 0; i < room.size(); ++i) copies.push_back({room[i], images[i]});
    m_.kv_pool.scatter_blocks(copies);
  });
}

bool BlockMover::insert_snapshot(const BlockKey& key, const std::byte* from) {
  return m_.insert_snapshot(key, [&](std::uint8_t* place) {
    m_.backend->copy(reinterpret_cast<std::byte*>(place), from, cache_.snapshot_bytes());
  });
}

}  // namespace kv4
