#include "cache/prefix_blocks.h"

#include <algorithm>

#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"

namespace kv4 {

PrefixCache& PrefixBlocks::prefix() const {
  require(prefix_ != nullptr, ErrorCode::bad_state, "this cache keeps no prefixes; set options.prefix.enabled");
  return *prefix_;
}

std::vector<BlockKey> KVCacheManager::block_keys(const Prompt& prompt) try {
  const OneThread::Call call(impl_->driver);
  PrefixCache& prefix = impl_->prefix_blocks.prefix();
  const std::span<const BlockKey> keys = prefix.keys_of(prefix.root(prompt.salt), prompt, false);
  return {keys.begin(), keys.end()};
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::optional<PrefixBlock> KVCacheManager::find_block(const BlockKey& key) const {
  const OneThread::Call call(impl_->driver);
  if (!impl_->prefix) return std::nullopt;
  const PrefixIndex& index = impl_->prefix->index;
  const NodeId id = index.find(key);
  if (id == kNoNode) return std::nullopt;
  return PrefixBlock{index.tenant(id), index.tokens(id), index.snapshot(id) != kNoSnapshot};
}

std::int64_t KVCacheManager::snapshot_bytes() const { return impl_->snapshots.bytes(); }

bool KVCacheManager::read_block(const BlockKey& key, std::span<std::byte> out) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 read_block", !impl_->on_host());
  const std::int64_t bytes = schema().block_image_bytes;
  require(std::ssize(out) == bytes, ErrorCode::bad_argument, "a block image of this cache has {} bytes; got {}", bytes,
          out.size());
  std::byte* const to = out.data();
  return impl_->prefix_blocks.read({&key, 1}, {&to, 1}, ImageMemory::caller);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool KVCacheManager::read_snapshot(const BlockKey& key, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 read_snapshot", !impl_->on_host());
  require(std::ssize(out) == snapshot_bytes(), ErrorCode::bad_argument, "a snapshot has {} bytes; got room for {}",
          snapshot_bytes(), out.size());
  return impl_->prefix_blocks.read_snapshot(key, out.data(), ImageMemory::caller);
}

std::int64_t KVCacheManager::insert_blocks(const Prompt& prompt,
                                           std::span<const std::span<const std::byte>> blocks) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 insert_blocks", !impl_->on_host());
  Impl& m = *impl_;
  const PrefixIndex& index = m.prefix_blocks.prefix().index;
  for (const std::span<const std::byte> block : blocks)
    require(static_cast<std::int64_t>(block.size()) == m.memory.schema.block_image_bytes, ErrorCode::bad_argument,
            "a block has {} bytes; got {}", m.memory.schema.block_image_bytes, block.size());
  const std::vector<BlockKey> keys = block_keys(prompt);
  std::size_t at = 0;
  while (at < keys.size() && index.find(keys[at]) != kNoNode) ++at;
  require(blocks.size() <= keys.size() - at, ErrorCode::bad_argument,
          "the prompt has {} full blocks, {} of them kept; got {} more", keys.size(), at, blocks.size());
  std::vector<std::byte*> images;
  for (const std::span<const std::byte> block : blocks) images.push_back(const_cast<std::byte*>(block.data()));  // read
  return m.prefix_blocks.insert(prompt, keys, at, images, ImageMemory::caller);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool KVCacheManager::insert_snapshot(const BlockKey& key, std::span<const std::byte> bytes) {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 insert_snapshot", !impl_->on_host());
  require(std::ssize(bytes) == snapshot_bytes(), ErrorCode::bad_argument, "a snapshot has {} bytes; got {}",
          snapshot_bytes(), bytes.size());
  return impl_->prefix_blocks.insert_snapshot(key, bytes.data(), ImageMemory::caller);
}

bool PrefixBlocks::read(std::span<const BlockKey> keys, std::span<std::byte* const> to, ImageMemory memory) const {
  const PrefixIndex& index = prefix().index;
  std::vector<BlockImage> images;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const NodeId id = index.find(keys[i]);
    if (id == kNoNode) return false;
    images.push_back({index.block(id), to[i]});
  }
  memory_.kv_pool.gather_blocks(images, memory);
  return true;
}

bool PrefixBlocks::read_snapshot(const BlockKey& key, std::byte* to, ImageMemory memory) const {
  const PrefixCache& kept = prefix();
  const NodeId id = kept.index.find(key);
  if (id == kNoNode || kept.index.snapshot(id) == kNoSnapshot) return false;
  const std::uint8_t* const from = kept.address(kept.index.snapshot(id));
  const std::int64_t bytes = snapshots_.bytes();
  if (memory == ImageMemory::backend) {
    memory_.backend->copy(to, reinterpret_cast<const std::byte*>(from), bytes);
  } else {
    const ops::CopyPiece piece{from, reinterpret_cast<std::uint8_t*>(to), bytes};
    memory_.backend->read_pieces({&piece, 1}, {to, static_cast<std::size_t>(bytes)});
  }
  return true;
}

// Blocks enter the index once their bytes are queued: nobody can find one before.
std::int64_t PrefixBlocks::insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                                std::span<std::byte* const> images, ImageMemory memory) {
  PrefixCache& kept = prefix();
  require(!steps_.is_open(), ErrorCode::bad_state, "blocks cannot be inserted during a step; commit or abort it first");
  NodeId tail = at == 0 ? kNoNode : kept.index.find(keys[at - 1]);
  if (at > 0 && tail == kNoNode) return 0;  // it was evicted meanwhile
  std::int64_t known = 0;  // inserted or computed since the caller looked
  for (; known < std::ssize(images); ++known, ++at) {
    const NodeId id = kept.index.find(keys[at]);
    if (id == kNoNode) break;
    tail = id;
  }
  images = images.subspan(known);
  const TenantId tenant = tail == kNoNode ? prompt.tenant : kept.index.tenant(tail);
  std::vector<BlockImage> room;
  room.reserve(images.size());
  if (memory == ImageMemory::backend) memory_.kv_pool.reserve_images(images.size());
  if (tail != kNoNode) kept.index.pin(tail);
  while (room.size() < images.size() && blocks_.num_available(tenant) >= 1)
    room.push_back({blocks_.take(tenant), images[room.size()]});
  memory_.kv_pool.scatter_blocks(room, memory);
  for (const BlockImage& image : room) {
    const std::span<const std::int32_t> ids = prompt.token_ids.subspan(at * blocks_.tokens(), blocks_.tokens());
    std::copy(ids.begin(), ids.end(), blocks_.token_ids(image.block).begin());
    tail = kept.index.append(tenant, tail, keys[at++], image.block, kept.weights_slot(), true).value().id;
    blocks_.allocator().publish(image.block);
    blocks_.allocator().release(image.block);
  }
  kept.statistics.inserted_blocks += std::ssize(room);
  if (tail != kNoNode) kept.index.unpin(tail);
  return known + std::ssize(room);
}

bool PrefixBlocks::insert_snapshot(const BlockKey& key, const std::byte* from, ImageMemory memory) {
  PrefixCache& kept = prefix();
  require(!steps_.is_open(), ErrorCode::bad_state,
          "a snapshot cannot be inserted during a step; commit or abort it first");
  const NodeId id = kept.index.find(key);
  if (id == kNoNode) return false;
  if (kept.index.snapshot(id) != kNoSnapshot) return true;
  const SnapshotId place = kept.take_place();
  if (place == kNoSnapshot) return false;
  std::uint8_t* const to = kept.address(place);
  const std::int64_t bytes = snapshots_.bytes();
  if (memory == ImageMemory::backend) {
    memory_.backend->copy(reinterpret_cast<std::byte*>(to), from, bytes);
  } else {
    const ops::CopyPiece piece{reinterpret_cast<const std::uint8_t*>(from), to, bytes};
    memory_.backend->write_pieces({&piece, 1}, {from, static_cast<std::size_t>(bytes)});
  }
  kept.attach(id, place);
  kept.keep(id, true);
  return true;
}

}  // namespace kv4
