// How kernels follow each other: each may be launched while the one before it still runs, reads constants (weights,
// biases, rope tables, its own parameters) at once, and waits for the other's results before it relies on anything
// else (but append's pending rows: kv4/cuda.h). Every thread waits, so a kernel that is done implies that all before it
// are.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace kv4::cuda {

/// Lets the next kernel start. It will wait for this one's results. For short kernels, and for those that leave no
/// place free until they end: else the blocks that come early crowd the SMs that have room.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// After it, all that was queued before this kernel is done and visible.
__device__ inline void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The same after `made` is, which is not negative: else the assembler puts what it is made of behind the wait.
__device__ inline void grid_dependency_wait_after(int made) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; setp.ge.s32 p, %0, 0; @p griddepcontrol.wait; }" ::"r"(made) : "memory");
#endif
}

/// Brings a kernel's parameters into the constant cache while it would wait anyway: a miss for every line of them would
/// else lie on its way.
template <class Params>
__device__ void touch(const Params& params) {
  constexpr int kLine = 64;
  const unsigned* words = reinterpret_cast<const unsigned*>(&params);
  unsigned all = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Params) / 4); i += kLine / 4) all += words[i];
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5DEECE66; @p nanosleep.u32 1; }" ::"r"(all));
}

/// Whether the kernels that run on the current device were compiled with the two calls above.
inline bool is_sm90() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  return major == 9;
}

/// Of the current device.
inline int num_sms() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

/// Whether a CTA of the current device may have so many bytes of shared memory.
inline bool has_shared_memory(int bytes) {
  int device = 0, most = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return false;
  return bytes <= most;
}

/// `cluster` neighbouring CTAs share their memory; 1 where launches do not overlap.
template <int kSharedBytes = 0, class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), unsigned cluster, dim3 blocks, unsigned threads,
                            cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = is_sm90() ? (cluster > 1 ? 2 : 1) : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <int kSharedBytes = 0, class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 blocks, unsigned threads, cudaStream_t stream, Args&&... args) {
  return launch_clusters<kSharedBytes>(kernel, 1, blocks, threads, stream, std::forward<Args>(args)...);
}

}  // namespace kv4::cuda
