// Copies of many bytes (sm_90): one thread starts a copy, which holds no registers and no instruction slots, and
// everybody waits at the barrier that counts its bytes.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/mbarrier.cuh"

namespace kv4::cuda {

/// From global into shared memory; its bytes count at `barrier`. Addresses and bytes: multiples of 16.
__device__ inline void bulk_load(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
/// The other way. The thread's stores since the last close_bulk_stores are a group.
__device__ inline void bulk_store(void* to, std::uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void close_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Shared memory of all but the thread's last kMore groups was read and may be written.
template <int kMore>
__device__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kMore) : "memory");
}
/// All of them are done.
__device__ inline void wait_for_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace kv4::cuda
