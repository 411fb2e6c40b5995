#include "cache/block_mover.h"

#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/cache_call.h"

namespace kv4 {

BlockKey BlockMover::root(const Prompt& prompt) { return m_.prefix_blocks.prefix().root(prompt.salt); }

BlockKey BlockMover::next_key(const BlockKey& root, const Prompt& prompt, std::span<const BlockKey> before) {
  return m_.prefix_blocks.prefix().block_key(before.empty() ? root : before.back(), prompt, before.size());
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
  return m_.prefix_blocks.read(keys, to, ImageMemory::backend);
}

bool BlockMover::gather_snapshot(const BlockKey& key, std::byte* to) const {
  return m_.prefix_blocks.read_snapshot(key, to, ImageMemory::backend);
}

std::int64_t BlockMover::insert(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at,
                                std::span<std::byte* const> images) {
  return m_.prefix_blocks.insert(prompt, keys, at, images, ImageMemory::backend);
}

bool BlockMover::insert_snapshot(const BlockKey& key, const std::byte* from) {
  return m_.prefix_blocks.insert_snapshot(key, from, ImageMemory::backend);
}

}  // namespace kv4
