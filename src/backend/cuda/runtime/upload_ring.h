// Small host arrays on their way to the device: a few pinned buffers in rotation, each with its twin on the device, so
// that the host never waits unless it is that many transfers ahead.
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

  /// Every buffer can hold `bytes` from now on. Waits for transfers under way if they must grow.
  void reserve(std::size_t bytes);

  /// The next buffer: fill `host`, then send. Waits if it is still in use.
  struct Slot {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    cudaEvent_t done = nullptr;
  };
  Slot& next();
  /// Copies the first `bytes` of the slot to the device. After the last kernel that reads them call finish().
  void send(Slot& slot, std::size_t bytes, cudaStream_t stream);
  void finish(Slot& slot, cudaStream_t stream);

  std::size_t capacity() const { return capacity_; }

 private:
  void release();

  std::array<Slot, 4> slots_{};
  std::size_t capacity_ = 0;
  std::size_t at_ = 0;
};

}  // namespace kv4::cuda
