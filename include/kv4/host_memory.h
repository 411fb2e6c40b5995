// Memory of the host for images and blocks on their way out of a cache and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kv4/backend.h"
#include "kv4/export.h"

namespace kv4 {

/// Pinned where the backend is a GPU's, so that transfers run at the bus's speed; ordinary memory on the CPU. Pinning
/// takes longer than a transfer: make one and use it again. Keeps its backend alive. Move only.
class KV4_API HostMemory {
 public:
  /// Throws Error(out_of_memory).
  HostMemory(std::shared_ptr<Backend> backend, std::int64_t size);
  HostMemory(HostMemory&& other) noexcept;
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// The memory, as large as it was asked for.
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::shared_ptr<Backend> backend_;
  std::span<std::byte> bytes_;
};

}  // namespace kv4
