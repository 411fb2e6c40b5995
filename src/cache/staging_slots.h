// Memory for blocks on their way, cut into slots of one size, all of it allocated at the start.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/device_memory.h"
#include "kv4/host_memory.h"
#include "tier/shared_bytes.h"

namespace kv4 {

/// Staging slots in the host memory with the fastest transfers, at multiples of 4,096. Any thread; slots may outlive
/// their pool.
class HostSlots : public std::enable_shared_from_this<HostSlots> {
 public:
  static std::shared_ptr<HostSlots> make(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int count) {
    return std::shared_ptr<HostSlots>(new HostSlots(backend, slot_bytes, count));
  }

  /// Empty if all slots are taken.
  tier::SharedBytes take();
  int num_free() const;

 private:
  static constexpr std::int64_t kAlignment = 4096;

  HostSlots(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int count);

  std::int64_t slot_bytes_, stride_;
  HostMemory memory_;
  std::byte* first_;
  mutable std::mutex mutex_;
  std::vector<int> free_;
};

/// Staging slots in the backend's memory; one thread. Give a slot back only when no queued work uses it any more.
class DeviceSlots {
 public:
  DeviceSlots(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int count);

  std::byte* take();  // null if all slots are taken
  void give(std::byte* slot) { free_.push_back(slot); }
  int num_free() const { return static_cast<int>(free_.size()); }

 private:
  static constexpr std::int64_t kAlignment = 256;

  DeviceMemory memory_;
  std::vector<std::byte*> free_;
};

/// Slots of the host and, where the device cannot read those itself, slots of the device.
struct StagingSlots {
  StagingSlots(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int host_count, int device_count)
      : host(HostSlots::make(backend, slot_bytes, host_count)) {
    if (!backend->on_host()) device.emplace(backend, slot_bytes, device_count);
  }
  int num_free() const { return device ? std::min(host->num_free(), device->num_free()) : host->num_free(); }

  std::shared_ptr<HostSlots> host;
  std::optional<DeviceSlots> device;
};

}  // namespace kv4
