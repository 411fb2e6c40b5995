// Uploads small host arrays to the device: a ring of pinned buffers, each with a counterpart on the device. The host
// waits only if it is a whole ring of transfers ahead.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace kv4::cuda {

class UploadRing {
 public:
  UploadRing() = default;
  ~UploadRing() { release(); }
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  /// Makes every buffer hold at least `bytes`. Waits for transfers in flight if buffers must grow.
  void reserve(std::size_t bytes);

  /// The next buffer: fill `host`, then send. Waits if the buffer is still in use.
  struct Buffer {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    cudaEvent_t done = nullptr;
  };
  Buffer& next();
  /// Copies the first `bytes` of the buffer to the device. Call finish() after the last kernel that reads them.
  void send(Buffer& buffer, std::size_t bytes, cudaStream_t stream);
  void finish(Buffer& buffer, cudaStream_t stream);

  std::size_t capacity() const { return capacity_; }

 private:
  void release();

  std::array<Buffer, 4> buffers_{};
  std::size_t capacity_ = 0;
  std::size_t at_ = 0;
};

}  // namespace kv4::cuda
