#include "kv4/host_memory.h"

#include <utility>

#include "backend/backend.h"
#include "base/check.h"

namespace kv4 {

HostMemory::HostMemory(std::shared_ptr<Backend> backend, std::int64_t size) : backend_(std::move(backend)) {
  require(backend_ != nullptr, ErrorCode::bad_argument, "the backend is null; pass the cache's");
  require(size >= 0, ErrorCode::bad_argument, "host memory of {} bytes; the size must not be negative", size);
  bytes_ = std::span(backend_->allocate_host(size), size);
}

HostMemory::HostMemory(HostMemory&& other) noexcept
    : backend_(std::move(other.backend_)), bytes_(std::exchange(other.bytes_, {})) {}

HostMemory::~HostMemory() {
  if (backend_ != nullptr) backend_->deallocate_host(bytes_.data(), static_cast<std::int64_t>(bytes_.size()));
}

}  // namespace kv4
