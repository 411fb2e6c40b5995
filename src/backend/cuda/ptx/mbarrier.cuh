// Barriers in shared memory (mbarrier, sm_90) and their arrivals. Counts and arrivals stand side by side, because they
// must match: a barrier is initialised with the Arrivals of the threads that arrive at it.
//
// Threads that have synchronised need one arrival for all of them: it comes after the accesses of each. Racecheck of
// compute-sanitizer does not see that, because it orders accesses by the threads that arrived. In a build with
// KV4_RACECHECK each thread arrives for itself, so that every report of racecheck is a race. That build orders nothing
// else, except that 2-CTA pairs wait for their start earlier: barriers are passed twice (named_barrier.cuh).
#pragma once

#include <cstdint>

namespace kv4::cuda {

#ifdef KV4_RACECHECK
constexpr bool kEachArrives = true;
#else
constexpr bool kEachArrives = false;
#endif

/// The arrivals that complete a phase of a barrier.
class Arrivals {
 public:
  /// Threads that each call mbarrier_arrive.
  __host__ __device__ static constexpr Arrivals of_each(int threads) { return Arrivals(threads); }
  /// One thread, which announces the bytes of asynchronous copies: mbarrier_arrive_expect_tx.
  __host__ __device__ static constexpr Arrivals of_copies() { return Arrivals(1); }
  /// Whole warps, by arrives_for_warp.
  __host__ __device__ static constexpr Arrivals of_warps(int warps) {
    return Arrivals(kEachArrives ? 32 * warps : warps);
  }
  /// Threads that have synchronised at a named barrier, by arrives_for_group.
  __host__ __device__ static constexpr Arrivals of_group(int threads) { return Arrivals(kEachArrives ? threads : 1); }

  __host__ __device__ constexpr int count() const { return count_; }

 private:
  __host__ __device__ explicit constexpr Arrivals(int count) : count_(count) {}
  int count_;
};

/// Whether the thread arrives for its warp's accesses so far. Called by whole warps; lane: of 32.
__device__ inline bool arrives_for_warp(unsigned lane) {
  __syncwarp();
  return kEachArrives || lane == 0;
}
/// The same for a group that has synchronised at a named barrier; thread: of the group.
__device__ inline bool arrives_for_group(unsigned thread) { return kEachArrives || thread == 0; }

/// Racecheck lets no thread continue after a cluster's wait before all threads of the cluster wait. So where some of
/// them wait for others in between, all have to wait at one place.
constexpr bool kClusterWaitsTogether = kEachArrives;

/// Stands between a mbarrier_init and an arrival of the same thread: racecheck takes the init, one instruction of the
/// warp, as every lane's.
__device__ inline void part_init_from_arrival() {
  if constexpr (kEachArrives) __syncwarp();
}

__device__ inline void mbarrier_init(std::uint32_t barrier, Arrivals arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals.count()) : "memory");
}
/// Called after the last mbarrier_init by the same thread: asynchronous copies and other CTAs of the cluster then see
/// the barriers. Other threads of the CTA need a __syncthreads.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and announces the bytes of asynchronous copies that complete the phase.
__device__ inline void mbarrier_arrive_expect_tx(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives at another CTA's barrier. barrier: a shared::cluster address.
__device__ inline void mbarrier_arrive_remote(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Waits until the phase of that parity is complete.
__device__ inline void mbarrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace kv4::cuda
