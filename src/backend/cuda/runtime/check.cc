#include "backend/cuda/runtime/check.h"

#include "base/check.h"

namespace kv4::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears it, unless it is an asynchronous failure
  if (context_lost())
    fail(
        ErrorCode::device_failure,
        "{}: a kernel that was queued before failed: {} ({}). The GPU's context is lost, and all memory on it: end the "
        "process, or reset the device and make a new cache",
        what, cudaGetErrorString(status), cudaGetErrorName(status));
  fail(ErrorCode::device_failure, "{} failed: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

// cudaMemGetInfo fails only if the context is lost, or while a stream is being captured.
bool context_lost() {
  std::size_t available = 0, total = 0;
  const cudaError_t status = cudaMemGetInfo(&available, &total);
  cudaGetLastError();
  return status != cudaSuccess && (status < cudaErrorStreamCaptureUnsupported || status > cudaErrorCapturedEvent);
}

void* device_malloc(std::int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) available = total = 0;
    fail(ErrorCode::out_of_memory,
         "the GPU refused {} bytes ({} of {} are free); ask for fewer blocks, requests or step tokens", bytes,
         available, total);
  }
  check(status, "cudaMalloc");
  return memory;
}

void* pinned_malloc(std::int64_t bytes) {
  void* memory = nullptr;
  check_pinned(cudaMallocHost(&memory, bytes), bytes);
  return memory;
}

void check_pinned(cudaError_t status, std::int64_t bytes) {
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorCode::out_of_memory,
         "the system refused {} bytes of pinned memory; ask for less, or free some of the host's memory", bytes);
  }
  check(status, "pinning memory");
}

DeviceGuard::DeviceGuard(int device) {
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ == device) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  switched_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (switched_) cudaSetDevice(previous_);
}

}  // namespace kv4::cuda
