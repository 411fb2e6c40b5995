#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kv4::cuda {

/// Throws Error(device_failure) that names the call, if it did not succeed. If a kernel failed, the message says that
/// the context is lost.
void check(cudaError_t status, const char* what);
/// Whether a failed kernel has destroyed the current device's context: no call on it succeeds any more.
bool context_lost();

/// Device memory; throws Error(out_of_memory) and leaves no CUDA error behind.
void* device_malloc(std::int64_t bytes);
/// Pinned host memory, likewise.
void* pinned_malloc(std::int64_t bytes);
/// Checks the result of an attempt to pin `bytes`.
void check_pinned(cudaError_t status, std::int64_t bytes);

/// Makes `device` current for its lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

}  // namespace kv4::cuda
