// cp.async: copies of 4 to 16 bytes from global into shared memory, which hold no registers while they are in flight.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// to: shared address. Copies of 16 bytes bypass the L1 cache.
template <int kBytes>
__device__ void copy_async(std::uint32_t to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
}

/// The first `bytes` of kBytes come from memory, the rest are zeros.
template <int kBytes>
__device__ void copy_async_or_zero(std::uint32_t to, const void* from, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

/// The same 16 bytes or zeros, with an L2 eviction policy (createpolicy).
__device__ inline void copy_async16_or_zero(std::uint32_t to, const void* from, int bytes, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
               "l"(policy)
               : "memory");
}

/// With an L2 eviction policy (createpolicy).
template <int kBytes>
__device__ void copy_async(std::uint32_t to, const void* from, std::uint64_t policy) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "l"(policy)
                 : "memory");
  }
}

/// Arrives at the barrier, whose count includes this arrival, once all of the thread's copies so far are done (sm_80).
__device__ inline void arrive_when_copied(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// The thread's copies since the last commit become a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of the thread's groups are in flight.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Waits for all of the thread's copies, committed or not.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kv4::cuda
