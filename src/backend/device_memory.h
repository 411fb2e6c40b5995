// Memory of a backend, freed by its owner's destructor. Move only.
#pragma once

#include <memory>
#include <utility>

#include "backend/backend.h"

namespace kv4 {

class DeviceMemory {
 public:
  /// Zeroed. Throws Error(out_of_memory).
  DeviceMemory(std::shared_ptr<Backend> backend, std::int64_t bytes)
      : backend_(std::move(backend)), bytes_(bytes), data_(backend_->allocate(bytes)) {}
  DeviceMemory(DeviceMemory&& other) noexcept
      : backend_(std::move(other.backend_)),
        bytes_(std::exchange(other.bytes_, 0)),
        data_(std::exchange(other.data_, nullptr)) {}
  ~DeviceMemory() {
    if (backend_ != nullptr) backend_->deallocate(data_, bytes_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Backend> backend_;
  std::int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace kv4
