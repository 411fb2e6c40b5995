// Programmatic dependent launch (PDL, sm_90): a kernel may start while the kernel before it still runs.
// runtime/launch.cuh queues kernels that way.
#pragma once

namespace kv4::cuda {

/// Allows the next kernel to start. It waits for this kernel's results by itself. For short kernels, and for kernels
/// that free no SM resources before they end: otherwise the CTAs that start early crowd the SMs that have room.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Once it returns, all work queued before this kernel is done and visible.
__device__ inline void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// As grid_dependency_wait, once `computed` is there, which is not negative. Otherwise the assembler moves the
/// computation of `computed` behind the wait.
__device__ inline void grid_dependency_wait_after(int computed) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; setp.ge.s32 p, %0, 0; @p griddepcontrol.wait; }" ::"r"(computed) : "memory");
#endif
}

}  // namespace kv4::cuda
