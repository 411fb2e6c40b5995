// CTAs of a cluster and their shared memory. A CTA may access another's shared memory once that CTA has started: each
// CTA arrives when it starts, and waits before its first access.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace kv4::cuda {

#if __CUDA_ARCH__ >= 900
#define KV4_CLUSTER(...) __VA_ARGS__
#else
#define KV4_CLUSTER(...)
#endif

// Calls by whole warps, whose lanes have not diverged (.aligned).

/// Arrives and releases: the other CTAs see this thread's earlier writes after cluster_wait.
__device__ inline void cluster_arrive() {
  KV4_CLUSTER(asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"));
}
/// Arrives without a fence: this thread has written nothing that other CTAs read.
__device__ inline void cluster_arrive_relaxed() {
  KV4_CLUSTER(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"));
}
__device__ inline void cluster_wait() {
  KV4_CLUSTER(asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"));
}
/// Waits until all CTAs have finished reading from each other. Nothing was written, so it need not wait for this
/// thread's stores to global memory.
__device__ inline void cluster_done_reading() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// Calls by all threads, whose warps may have diverged.

__device__ inline void cluster_arrive_diverged() { KV4_CLUSTER(asm volatile("barrier.cluster.arrive;" ::: "memory")); }
__device__ inline void cluster_wait_diverged() { KV4_CLUSTER(asm volatile("barrier.cluster.wait;" ::: "memory")); }
__device__ inline void cluster_sync_diverged() {
  cluster_arrive_diverged();
  cluster_wait_diverged();
}

/// The same address in another CTA of the cluster.
__device__ inline std::uint32_t map_to_cta(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped = address;
  KV4_CLUSTER(asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank)));
  return mapped;
}
__device__ inline void cluster_store(std::uint32_t address, float x, float y) {
  KV4_CLUSTER(asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory"));
}
/// Asynchronous: the other CTA's mbarrier `barrier` counts the bytes.
template <int kWords>
__device__ void cluster_store_async(std::uint32_t to, const std::uint32_t (&x)[kWords], std::uint32_t barrier) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    KV4_CLUSTER(asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                             "r"(x[0]), "r"(barrier)
                             : "memory"));
  } else if constexpr (kWords == 2) {
    KV4_CLUSTER(asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
        "r"(x[0]), "r"(x[1]), "r"(barrier)
        : "memory"));
  } else {
    KV4_CLUSTER(asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
        : "memory"));
  }
}
__device__ inline uint4 cluster_load(std::uint32_t address) {
  uint4 x{};
  KV4_CLUSTER(asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                           : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                           : "r"(address)
                           : "memory"));
  return x;
}
__device__ inline float cluster_load_float(std::uint32_t address) {
  float x = 0.0f;
  KV4_CLUSTER(asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory"));
  return x;
}

#undef KV4_CLUSTER

#if __CUDA_ARCH__ >= 900
__device__ inline int cta_rank() { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
/// `shared` in another CTA's shared memory.
template <class T>
__device__ T& shared_of_cta(T& shared, int rank) {
  return *cooperative_groups::this_cluster().map_shared_rank(&shared, rank);
}
#else
__device__ inline int cta_rank() { return 0; }
template <class T>
__device__ T& shared_of_cta(T& shared, int) {
  return shared;
}
#endif

}  // namespace kv4::cuda
