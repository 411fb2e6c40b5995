#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kv4::cuda {

/// Throws Error(device_failure) naming what was tried, if it did not succeed; if a kernel failed, it says that the
/// context is lost.
void check(cudaError_t status, const char* what);
/// Whether a failed kernel has taken the current device's context along: no call on it succeeds any more.
bool context_lost();

/// Device memory; throws Error(out_of_memory) and leaves no error behind.
void* device_malloc(std::int64_t bytes);
/// Pinned host memory, likewise.
void* pinned_malloc(std::int64_t bytes);
/// After an attempt to pin so much.
void check_pinned(cudaError_t status, std::int64_t bytes);

/// Makes `device` current while it lives.
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
