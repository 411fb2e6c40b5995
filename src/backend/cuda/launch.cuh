// How kernels follow each other: each may be launched while the one before it still runs, reads constants (weights,
// biases, rope tables, its own parameters) at once, and waits for the other's results before it relies on anything
// else. Every thread waits, so a kernel that is done implies that all before it are.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace kv4::cuda {

/// Lets the next kernel start. It will wait for this one's results. For short kernels only: of a long one's successor,
/// the blocks that come early crowd the multiprocessors that are free first.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// After it, all that was queued before this kernel is done and visible.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
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
inline bool overlaps_launches() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  return major == 9;
}

template <int kSharedBytes = 0, class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 blocks, unsigned threads, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = overlaps_launches() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace kv4::cuda
