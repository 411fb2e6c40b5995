#include "backend/cuda/runtime/upload_ring.h"

#include "backend/cuda/runtime/check.h"

namespace kv4::cuda {

void UploadRing::reserve(std::size_t bytes) {
  if (bytes <= capacity_) return;
  release();
  for (Buffer& buffer : buffers_) {
    buffer.host = static_cast<std::byte*>(pinned_malloc(static_cast<std::int64_t>(bytes)));
    buffer.device = static_cast<std::byte*>(device_malloc(static_cast<std::int64_t>(bytes)));
    check(cudaEventCreateWithFlags(&buffer.done, cudaEventDisableTiming), "cudaEventCreate");
  }
  capacity_ = bytes;
}

UploadRing::Buffer& UploadRing::next() {
  Buffer& buffer = buffers_[at_];
  at_ = (at_ + 1) % buffers_.size();
  check(cudaEventSynchronize(buffer.done), "waiting for an earlier transfer");
  return buffer;
}

void UploadRing::send(Buffer& buffer, std::size_t bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(buffer.device, buffer.host, bytes, cudaMemcpyHostToDevice, stream), "a transfer to the GPU");
}

void UploadRing::finish(Buffer& buffer, cudaStream_t stream) {
  check(cudaEventRecord(buffer.done, stream), "cudaEventRecord");
}

void UploadRing::release() {
  capacity_ = 0;
  for (Buffer& buffer : buffers_) {
    if (buffer.done != nullptr) {
      cudaEventSynchronize(buffer.done);
      cudaEventDestroy(buffer.done);
    }
    cudaFree(buffer.device);
    cudaFreeHost(buffer.host);
    buffer = {};
  }
}

}  // namespace kv4::cuda
