// A warp's registers: how many it has, and when values occupy them.
#pragma once

namespace kv4::cuda {

/// setmaxnreg: all warps of a warpgroup call it. Takes registers that other warpgroups have given back.
template <int kRegisters>
__device__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// threadIdx.x, read again: values computed from it do not occupy registers from an earlier use on.
__device__ inline int reload_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// A branch that is never taken: the thread waits here until `x` is known.
__device__ inline void branch_on(unsigned x) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5DEECE66; @p nanosleep.u32 1; }" ::"r"(x));
}
/// The same, and the compiler moves no access to memory across it.
__device__ inline void branch_on_ordered(unsigned x) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5DEECE66; @p nanosleep.u32 1; }" ::"r"(x) : "memory");
}

}  // namespace kv4::cuda
