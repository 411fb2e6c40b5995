// Kept blocks and snapshots as bytes, by key: what tiers take and give back.
#include <algorithm>
#include <utility>

#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/block_mover.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"

namespace kv4 {

PrefixCache& KeptBlocks::prefix() const {
  require(prefix_ != nullptr, ErrorCode::bad_state, "this cache keeps no prefixes; set options.prefix.enabled");
  return *prefix_;
}

std::vector<BlockKey> KVCacheManager::block_keys(const Prompt& prompt) try {
  const OneThread::Call call(impl_->driver);
  PrefixCache& prefix = impl_->kept.prefix();
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

std::int64_t KVCacheManager::snapshot_bytes() const { return impl_->snapshots.bytes(); }

bool KVCacheManager::read_block(const BlockKey& key, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 read_block", !impl_->on_host());
  Impl& m = *impl_;
  const Slot slot = m.kept.prefix().index.find(key);
  if (slot == kNoSlot) return false;
  m.memory.kv_pool.save_block(m.prefix->index.block(slot), m.blocks.tokens(), out);
  return true;
}

bool KVCacheManager::read_snapshot(const BlockKey& key, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 read_snapshot", !impl_->on_host());
  Impl& m = *impl_;
  require(static_cast<std::int64_t>(out.size()) == snapshot_bytes(), ErrorCode::bad_argument,
          "a snapshot has {} bytes; got room for {}", snapshot_bytes(), out.size());
  PrefixCache& prefix = m.kept.prefix();
  const Slot slot = prefix.index.find(key);
  if (slot == kNoSlot || prefix.index.snapshot(slot) == kNoSnapshot) return false;
  const ops::CopyPiece piece{prefix.address(prefix.index.snapshot(slot)), reinterpret_cast<std::uint8_t*>(out.data()),
                             static_cast<std::int64_t>(out.size())};
  m.memory.backend->read_pieces(std::span(&piece, 1), out);
  return true;
}

std::int64_t KVCacheManager::insert_blocks(const Prompt& prompt,
                                           std::span<const std::span<const std::byte>> blocks) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 insert_blocks", !impl_->on_host());
  Impl& m = *impl_;
  const PrefixIndex& index = m.kept.prefix().index;
  for (const std::span<const std::byte> block : blocks)
    require(static_cast<std::int64_t>(block.size()) == m.memory.schema.block_image_bytes, ErrorCode::bad_argument,
            "a block has {} bytes; got {}", m.memory.schema.block_image_bytes, block.size());
  const std::vector<BlockKey> keys = block_keys(prompt);
  std::size_t at = 0;
  while (at < keys.size() && index.find(keys[at]) != kNoSlot) ++at;
  require(blocks.size() <= keys.size() - at, ErrorCode::bad_argument,
          "the prompt has {} full blocks, {} of them kept; got {} more", keys.size(), at, blocks.size());
  return m.kept.insert(prompt, keys, at, blocks.size(), [&](std::span<const BlockId> room) {
    for (std::size_t i = 0; i < room.size(); ++i) m.memory.kv_pool.load_block(room[i], blocks[i]);
  });
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool KVCacheManager::insert_snapshot(const BlockKey& key, std::span<const std::byte> bytes) {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 insert_snapshot", !impl_->on_host());
  Impl& m = *impl_;
  require(static_cast<std::int64_t>(bytes.size()) == snapshot_bytes(), ErrorCode::bad_argument,
          "a snapshot has {} bytes; got {}", snapshot_bytes(), bytes.size());
  return m.kept.insert_snapshot(key, [&](std::uint8_t* place) {
    const ops::CopyPiece piece{reinterpret_cast<const std::uint8_t*>(bytes.data()), place, std::ssize(bytes)};
    m.memory.backend->write_pieces(std::span(&piece, 1), bytes);
  });
}

// Blocks count once their bytes are queued: nobody can find one before.
std::int64_t KeptBlocks::insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at, std::size_t count,
                                const std::function<void(std::span<const BlockId>)>& write) {
  PrefixCache& kept = prefix();
  require(!steps_.is_open(), ErrorCode::bad_state, "blocks cannot be inserted during a step; commit or abort it first");
  Slot tail = at == 0 ? kNoSlot : kept.index.find(keys[at - 1]);
  if (at > 0 && tail == kNoSlot) return 0;  // evicted meanwhile
  const TenantId tenant = tail == kNoSlot ? prompt.tenant : kept.index.tenant(tail);
  std::vector<BlockId> room;
  room.reserve(count);
  if (tail != kNoSlot) kept.index.pin(tail);
  while (room.size() < count && blocks_.num_available(tenant) >= 1) room.push_back(blocks_.take(tenant));
  write(room);
  for (const BlockId block : room) {
    const std::span<const std::int32_t> ids = prompt.token_ids.subspan(at * blocks_.tokens(), blocks_.tokens());
    std::copy(ids.begin(), ids.end(), blocks_.token_ids(block).begin());
    tail = kept.index.append(tenant, tail, keys[at++], block, kept.weights_slot(), true).value().slot;
    blocks_.allocator().publish(block);
    blocks_.allocator().release(block);
  }
  kept.statistics.inserted_blocks += std::ssize(room);
  if (tail != kNoSlot) kept.index.unpin(tail);
  return std::ssize(room);
}

bool KeptBlocks::insert_snapshot(const BlockKey& key, const std::function<void(std::uint8_t*)>& write) {
  PrefixCache& kept = prefix();
  require(!steps_.is_open(), ErrorCode::bad_state,
          "a snapshot cannot be inserted during a step; commit or abort it first");
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

BlockKey BlockMover::root(const Prompt& prompt) { return m_.kept.prefix().root(prompt.salt); }

BlockKey BlockMover::next_key(const BlockKey& root, const Prompt& prompt, std::span<const BlockKey> before) {
  return m_.kept.prefix().block_key(before.empty() ? root : before.back(), prompt, before.size());
}

bool BlockMover::has_room_for_request(const Prompt& prompt) const {
  m_.requests.check(prompt);
  require(!m_.steps.is_open(), ErrorCode::bad_state, "blocks cannot be loaded during a step; commit or abort it first");
  return !m_.table.full() && m_.memory.state_pool.num_free() > 0;
}

Expected<Admission> BlockMover::admit(const Prompt& prompt, const BlockKey& root, std::span<const BlockKey> known) {
  const TimedCall call(cache_, &CallTimes::admit);
  const NvtxRange range("kv4 admit", !m_.on_host());
  return counted(m_.requests.admit(prompt, root, known), m_.admit_shortages);
}

bool BlockMover::gather(std::span<const BlockKey> keys, std::span<std::byte* const> to) const {
  std::vector<BlockImage> images;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Slot slot = m_.kept.prefix().index.find(keys[i]);
    if (slot == kNoSlot) return false;
    images.push_back({m_.prefix->index.block(slot), to[i]});
  }
  m_.memory.kv_pool.gather_blocks(images);
  return true;
}

bool BlockMover::gather_snapshot(const BlockKey& key, std::byte* to) const {
  const PrefixCache& prefix = m_.kept.prefix();
  const Slot slot = prefix.index.find(key);
  if (slot == kNoSlot || prefix.index.snapshot(slot) == kNoSnapshot) return false;
  const std::uint8_t* from = prefix.address(prefix.index.snapshot(slot));
  m_.memory.backend->copy(to, reinterpret_cast<const std::byte*>(from), cache_.snapshot_bytes());
  return true;
}

std::int64_t BlockMover::insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                                std::span<std::byte* const> images) {
  std::vector<BlockImage> copies;
  copies.reserve(images.size());
  m_.memory.kv_pool.reserve_images(images.size());
  return m_.kept.insert(prompt, keys, at, images.size(), [&](std::span<const BlockId> room) {
    for (std::size_t i = 0; i < room.size(); ++i) copies.push_back({room[i], images[i]});
    m_.memory.kv_pool.scatter_blocks(copies);
  });
}

bool BlockMover::insert_snapshot(const BlockKey& key, const std::byte* from) {
  return m_.kept.insert_snapshot(key, [&](std::uint8_t* place) {
    m_.memory.backend->copy(reinterpret_cast<std::byte*>(place), from, cache_.snapshot_bytes());
  });
}

}  // namespace kv4
