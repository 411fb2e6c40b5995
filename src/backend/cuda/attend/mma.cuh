// Wgmma, Hopper's asynchronous matrix multiplication, and its companions: shared memory descriptors, barriers,
// clusters. A warpgroup is 4 warps. It multiplies 64 rows of A by a tile of B, both fp16 in shared memory, in panels of
// 128 bytes (64 elements) per row whose 16-byte chunks are swizzled by the row, and adds to fp32 accumulators in
// registers: thread t holds rows 16 (t / 32) + t % 32 / 4 and 8 below it, columns 2 (t % 4) and the next one of every
// 8.
// Sources: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/bulk_copy.cuh"
#include "backend/cuda/ptx/load_store.cuh"

namespace kv4::cuda {

constexpr int kPanelRowBytes = 128, kPanelRows = 64, kPanelBytes = kPanelRowBytes * kPanelRows;

/// Byte offset of a 16-byte chunk of a panel's row. Panels begin at multiples of 1,024.
__device__ constexpr std::uint32_t panel_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kPanelRowBytes + ((chunk ^ (row & 7)) << 4));
}

/// The address of the first panel, as the lower half of a descriptor; `leading`: the distance between panels if columns
/// continue through several.
__device__ inline std::uint32_t panel_place(std::uint32_t address, std::uint32_t leading = 16) {
  return (address & 0x3FFFFu) >> 4 | leading >> 4 << 16;
}
/// The descriptor of 128-byte swizzled panels at `bytes` from there: 8 rows take 1,024 bytes. One addition, because
/// building a descriptor takes almost as long as a multiplication.
__device__ inline std::uint64_t panel_descriptor(std::uint32_t place, std::uint32_t bytes) {
  constexpr std::uint32_t kSwizzled = 1024 >> 4 | 1u << 30;
  std::uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(place + (bytes >> 4)), "r"(kSwizzled));
  return descriptor;
}

__device__ inline void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Makes this thread's writes to shared memory visible to wgmma, after the next barrier.
__device__ inline void publish_to_mma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define KV4_EIGHT(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

#define KV4_32(d, i) KV4_EIGHT(d, i), KV4_EIGHT(d, i + 8), KV4_EIGHT(d, i + 16), KV4_EIGHT(d, i + 24)
#define KV4_64(d, i) KV4_32(d, i), KV4_32(d, i + 32)
#define KV4_32_NAMES                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KV4_64_NAMES                                                                        \
  KV4_32_NAMES                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b^T (+ d), 16 channels: a is [64 heads, 16], b [64 rows, 16], both with adjacent channels.
__device__ inline void multiply_channels(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KV4_32_NAMES "}, %32, %33, p, 1, 1, 0, 0; }"
      : KV4_32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d[kAt ..] += a b, 16 rows: a is [64 heads, 16], b [16 rows, 64 or 128 channels], with adjacent channels. Not 256:
// ptxas would need the registers from the start, before warpgroups have changed their register counts.
template <int kAt, int kSize>
__device__ void multiply_rows_64(float (&d)[kSize], std::uint64_t a, std::uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KV4_32_NAMES "}, %32, %33, 1, 1, 1, 0, 1;"
               : KV4_32(d, kAt)
               : "l"(a), "l"(b));
}

template <int kAt, int kSize>
__device__ void multiply_rows_128(float (&d)[kSize], std::uint64_t a, std::uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KV4_64_NAMES "}, %64, %65, 1, 1, 1, 0, 1;"
               : KV4_64(d, kAt)
               : "l"(a), "l"(b));
}

// The same with P in registers: a thread's four words of 16 columns are at the positions of its accumulators.
template <int kAt, int kSize>
__device__ void multiply_rows_128(float (&d)[kSize], const std::uint32_t* a, std::uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KV4_64_NAMES
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : KV4_64(d, kAt)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// As multiply_channels and multiply_rows_128, for bf16.
__device__ inline void multiply_bf16_channels(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KV4_32_NAMES "}, %32, %33, p, 1, 1, 0, 0; }"
      : KV4_32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

template <int kAt, int kSize>
__device__ void multiply_bf16_rows(float (&d)[kSize], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KV4_64_NAMES "}, %64, %65, p, 1, 1, 0, 1; }"
      : KV4_64(d, kAt)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

template <int kSize>
__device__ void multiply_bf16_rows_64(float (&d)[kSize], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KV4_32_NAMES "}, %32, %33, p, 1, 1, 0, 1; }"
      : KV4_32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

#undef KV4_64_NAMES
#undef KV4_32_NAMES
#undef KV4_64
#undef KV4_32
#undef KV4_EIGHT

__device__ inline void shared_store(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// --- named barriers

/// For `threads` threads; id 0 belongs to __syncthreads.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- clusters

__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// Waits until all CTAs have finished reading from each other. There were no writes, so it need not wait for this
/// thread's stores to global memory.
__device__ inline void cluster_done_reading() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  cluster_wait();
}
/// The same shared memory address in another CTA of the cluster.
__device__ inline std::uint32_t in_block(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ inline void cluster_store(std::uint32_t address, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ inline uint4 cluster_load(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ inline float cluster_load_float(std::uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

}  // namespace kv4::cuda
