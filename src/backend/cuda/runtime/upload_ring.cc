#include "backend/cuda/runtime/upload_ring.h"

#include "backend/cuda/runtime/check.h"

namespace kv4::cuda {

void UploadRing::reserve(std::size_t bytes) {
  if (bytes <= capacity_) return;
  release();
  for (Slot& slot : slots_) {
    slot.host = static_cast<std::byte*>(pinned_malloc(static_cast<std::int64_t>(bytes)));
    slot.device = static_cast<std::byte*>(device_malloc(static_cast<std::int64_t>(bytes)));
    check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming), "cudaEventCreate");
  }
  capacity_ = bytes;
}

UploadRing::Slot& UploadRing::next() {
  Slot& slot = slots_[at_];
  at_ = (at_ + 1) % slots_.size();
  check(cudaEventSynchronize(slot.done), "waiting for an earlier transfer");
  return slot;
}

void UploadRing::send(Slot& slot, std::size_t bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(slot.device, slot.host, bytes, cudaMemcpyHostToDevice, stream), "a transfer to the GPU");
}

void UploadRing::finish(Slot& slot, cudaStream_t stream) {
  check(cudaEventRecord(slot.done, stream), "cudaEventRecord");
}

void UploadRing::release() {
  capacity_ = 0;
  for (Slot& slot : slots_) {
    if (slot.done != nullptr) {
      cudaEventSynchronize(slot.done);
      cudaEventDestroy(slot.done);
    }
    cudaFree(slot.device);
    cudaFreeHost(slot.host);
    slot = {};
  }
}

}  // namespace kv4::cuda
