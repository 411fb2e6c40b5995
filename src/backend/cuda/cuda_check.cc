#include "backend/cuda/cuda_check.h"

#include "base/check.h"

namespace kv4::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // what can be cleared is; an asynchronous failure stays
  fail(ErrorCode::device_failure,
       "{} failed: {} ({}). If a kernel queued earlier failed, the device's memory is lost: end the process, or reset "
       "the device and make a new cache",
       what, cudaGetErrorString(status), cudaGetErrorName(status));
}

void* device_malloc(std::int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
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
  const cudaError_t status = cudaMallocHost(&memory, static_cast<std::size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorCode::out_of_memory, "the system refused {} bytes of pinned memory", bytes);
  }
  check(status, "cudaMallocHost");
  return memory;
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
