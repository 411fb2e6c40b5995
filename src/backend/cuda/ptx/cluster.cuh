// CTAs of a cluster. A block may write another's memory once that one has started: each arrives when it
// starts, and waits before it writes.
#pragma once

#include <cooperative_groups.h>

namespace kv4::cuda {

#if __CUDA_ARCH__ >= 900
/// Where nothing was written yet that others are to see: no fence.
__device__ inline void arrive_first() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ inline void arrive_cluster() { cooperative_groups::this_cluster().barrier_arrive(); }
__device__ inline void wait_cluster() { cooperative_groups::this_cluster().barrier_wait(); }
__device__ inline int block_in_cluster() { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
/// What `shared` is in another block's shared memory.
template <class T>
__device__ T& shared_of(T& shared, int block) {
  return *cooperative_groups::this_cluster().map_shared_rank(&shared, block);
}
#else
__device__ inline void arrive_first() {}
__device__ inline void arrive_cluster() {}
__device__ inline void wait_cluster() {}
__device__ inline int block_in_cluster() { return 0; }
template <class T>
__device__ T& shared_of(T& shared, int) {
  return shared;
}
#endif
__device__ inline void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

}  // namespace kv4::cuda
