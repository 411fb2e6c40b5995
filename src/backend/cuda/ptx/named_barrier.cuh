// Barriers of a CTA.
//
// Racecheck records a barrier when it handles the last warp that arrives. It reports a warp that continues before that
// and reads an earlier store (H200, driver 580.159, 2026-11-18: the first reads after a barrier, in one CTA of a
// hundred, in other CTAs and warps each time; later reads of the same bytes never). With KV4_RACECHECK a barrier is
// passed twice: the second pass begins after the end of the first.
#pragma once

#include "backend/cuda/ptx/mbarrier.cuh"

namespace kv4::cuda {

/// A barrier of `threads` threads, all of which wait. Barrier 0 is __syncthreads's.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  if constexpr (kEachArrives) asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// A barrier of all threads of the CTA.
__device__ inline void cta_sync() {
  __syncthreads();
  if constexpr (kEachArrives) asm volatile("bar.sync 0;" ::: "memory");
}

/// A barrier of `threads` threads, some of which only arrive.
__device__ inline void named_barrier_sync_with_arrivals(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kv4::cuda
