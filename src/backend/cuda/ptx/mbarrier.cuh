// Barriers in shared memory (sm_90), and who arrives at them. Counts and arrivals stand side by side, because each must
// fit the other: a barrier is made with the Arrivals of those who arrive at it.
//
// Threads that have met need one arrival between them: what the others did comes before it. compute-sanitizer's
// racecheck does not see that, it orders accesses by the threads that arrived. In a build with KV4_RACECHECK each
// thread arrives for itself, so that what racecheck still reports is a race. Threads wait for nothing else than before.
#pragma once

#include <cstdint>

namespace kv4::cuda {

#ifdef KV4_RACECHECK
constexpr bool kEachArrives = true;
#else
constexpr bool kEachArrives = false;
#endif

/// What a barrier counts before it lets threads pass.
class Arrivals {
 public:
  /// Threads that each call barrier_arrive.
  __host__ __device__ static constexpr Arrivals of_each(int threads) { return Arrivals(threads); }
  /// One thread, which says how many bytes are to come: barrier_arrive_expecting.
  __host__ __device__ static constexpr Arrivals of_copies() { return Arrivals(1); }
  /// Whole warps, by arrives_for_warp.
  __host__ __device__ static constexpr Arrivals of_warps(int warps) {
    return Arrivals(kEachArrives ? 32 * warps : warps);
  }
  /// Threads that have met at a named barrier, by arrives_for_group.
  __host__ __device__ static constexpr Arrivals of_group(int threads) { return Arrivals(kEachArrives ? threads : 1); }

  __host__ __device__ constexpr int count() const { return count_; }

 private:
  __host__ __device__ explicit constexpr Arrivals(int count) : count_(count) {}
  int count_;
};

/// Whether the thread is to arrive, for what its warp has done so far. Whole warps; lane: of 32.
__device__ inline bool arrives_for_warp(unsigned lane) {
  __syncwarp();
  return kEachArrives || lane == 0;
}
/// The same for a group that has met at a named barrier; thread: of the group.
__device__ inline bool arrives_for_group(unsigned thread) { return kEachArrives || thread == 0; }

/// Between a barrier_init and an arrival of the same thread: racecheck takes the former, one instruction of the warp,
/// as every lane's.
__device__ inline void part_init_from_arrival() {
  if constexpr (kEachArrives) __syncwarp();
}

__device__ inline void barrier_init(std::uint32_t barrier, Arrivals arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals.count()) : "memory");
}
/// After the last barrier_init, by the same thread: copies and other blocks of the cluster see them, too. Other threads
/// need a barrier of their own.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// And so many bytes of asynchronous stores are to come before the barrier is passed.
__device__ inline void barrier_arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Of another block.
__device__ inline void barrier_arrive_in_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace kv4::cuda
