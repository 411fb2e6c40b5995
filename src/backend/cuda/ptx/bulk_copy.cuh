// Bulk copies (cp.async.bulk, sm_90): one thread starts a copy of many bytes, which holds no registers and no issue
// slots. All readers wait at the mbarrier that counts its bytes.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/mbarrier.cuh"

namespace kv4::cuda {

/// Prefetches into L2, with an eviction policy (createpolicy).
__device__ inline void bulk_prefetch_l2(const void* from, int bytes, std::uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(policy));
#endif
}

/// From global into shared memory; `barrier` counts the bytes. Addresses and bytes: multiples of 16.
__device__ inline void bulk_load(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
/// From shared memory into another CTA's of the cluster (map_to_cta), whose `barrier` counts the bytes.
__device__ inline void bulk_copy_to_cta(std::uint32_t to, std::uint32_t from, std::uint32_t bytes,
                                        std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/// From shared into global memory. The thread's stores since the last commit_bulk_stores are a group.
__device__ inline void bulk_store(void* to, std::uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until at most kPending of the thread's groups still have shared memory to read; the rest of it may be written.
template <int kPending>
__device__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until all stores are done.
__device__ inline void wait_for_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace kv4::cuda
