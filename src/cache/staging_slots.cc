#include "cache/staging_slots.h"

#include "base/check.h"

namespace kv4 {
namespace {

std::int64_t round_up(std::int64_t bytes, std::int64_t to) { return ceil_div(bytes, to) * to; }

}  // namespace

HostSlots::HostSlots(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int count)
    : slot_bytes_(slot_bytes),
      stride_(round_up(std::max<std::int64_t>(slot_bytes, 1), kAlignment)),
      memory_(backend, count * stride_ + kAlignment) {
  std::byte* const memory = memory_.bytes().data();
  first_ = memory + (kAlignment - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory) % kAlignment));
  for (int i = count; i-- > 0;) free_.push_back(i);
}

tier::SharedBytes HostSlots::take() {
  int slot = 0;
  {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return {};
    slot = free_.back();
    free_.pop_back();
  }
  // Runs without the lock here: if memory is refused, shared_ptr calls `give` at once.
  const auto give = [pool = shared_from_this(), slot](std::byte*) {
    const std::lock_guard guard(pool->mutex_);
    pool->free_.push_back(slot);
  };
  return {std::shared_ptr<std::byte[]>(first_ + slot * stride_, give), static_cast<std::size_t>(slot_bytes_)};
}

int HostSlots::num_free() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(free_.size());
}

DeviceSlots::DeviceSlots(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int count)
    : memory_(backend, count * round_up(std::max<std::int64_t>(slot_bytes, 1), kAlignment)) {
  const std::int64_t stride = round_up(std::max<std::int64_t>(slot_bytes, 1), kAlignment);
  for (int i = count; i-- > 0;) free_.push_back(memory_.data() + i * stride);
}

std::byte* DeviceSlots::take() {
  if (free_.empty()) return nullptr;
  std::byte* const slot = free_.back();
  free_.pop_back();
  return slot;
}

}  // namespace kv4
