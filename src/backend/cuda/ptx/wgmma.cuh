// wgmma (sm_90a): a warpgroup's asynchronous matrix multiply. D += A B: D is 64 x kN fp32 or int32 accumulators in
// registers, B lies in shared memory, A in shared memory or registers. Thread t of the warpgroup holds of D rows
// 16 (t / 32) + t % 32 / 4 and 8 below it, columns 2 (t % 4) and the next of every 8; of A in registers the same
// places, a 32-bit word at a time. Sources: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// Elements of A and B.
enum class MmaType { fp16, bf16, e4m3, s8 };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define KV4_WGMMA 1
#else
#define KV4_WGMMA 0
#endif

/// Orders the warpgroup's accesses to accumulators and A in registers before the multiplies that follow.
__device__ inline void wgmma_fence() {
#if KV4_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// The multiplies since the last commit become a group.
__device__ inline void wgmma_commit() {
#if KV4_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ void wgmma_wait() {
#if KV4_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
/// Keeps the compiler from moving uses of the accumulators before this point, after wgmma_wait.
template <int kSize>
__device__ void keep_behind_wait(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kSize>
__device__ void keep_behind_wait(std::int32_t (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
/// This thread's writes to shared memory become visible to wgmma and bulk copies, once a barrier has been passed.
__device__ inline void fence_async_proxy() {
#if KV4_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Operand lists.
#define KV4_8(kind, d, i)                                                                                     \
  kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), kind(d[i + 6]), \
      kind(d[i + 7])
#define KV4_32(kind, d, i) KV4_8(kind, d, i), KV4_8(kind, d, i + 8), KV4_8(kind, d, i + 16), KV4_8(kind, d, i + 24)
#define KV4_64(kind, d, i) KV4_32(kind, d, i), KV4_32(kind, d, i + 32)
#define KV4_32_NAMES                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KV4_64_NAMES                                                                        \
  KV4_32_NAMES                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KV4_F(x) "+f"(x)
#define KV4_S(x) "+r"(x)

// The forms of the instruction: A in shared memory (a: its descriptor) or in registers (a: 4 words), kN 64 or 128.
#define KV4_SHARED_A_64(types)                                                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned." types " {" KV4_32_NAMES \
               "}, %32, %33, p, 1, 1, 0, %35; }"                                                              \
               : KV4_32(KV4_F, d, kAt)                                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeB ? 1 : 0))
#define KV4_SHARED_A_128(types)                                                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned." types " {" KV4_64_NAMES \
               "}, %64, %65, p, 1, 1, 0, %67; }"                                                              \
               : KV4_64(KV4_F, d, kAt)                                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeB ? 1 : 0))

/// D (+)= A B with A and B in shared memory (descriptors), 16 elements deep. `add`: to the accumulators; otherwise they
/// are overwritten. kAt: the first accumulator. kTransposeB: B's rows are contiguous, not its columns. kN is not 256:
/// ptxas wants the registers for that from the start, before warpgroups have reallocated theirs.
template <MmaType kType, int kN, bool kTransposeB, int kAt = 0, int kSize>
__device__ void wgmma(float (&d)[kSize], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert((kType == MmaType::fp16 || kType == MmaType::bf16) && (kN == 64 || kN == 128));
  static_assert(kAt + kN / 2 <= kSize);
#if KV4_WGMMA
  if constexpr (kType == MmaType::fp16 && kN == 64)
    KV4_SHARED_A_64("m64n64k16.f32.f16.f16");
  else if constexpr (kType == MmaType::fp16)
    KV4_SHARED_A_128("m64n128k16.f32.f16.f16");
  else if constexpr (kN == 64)
    KV4_SHARED_A_64("m64n64k16.f32.bf16.bf16");
  else
    KV4_SHARED_A_128("m64n128k16.f32.bf16.bf16");
#endif
}

#define KV4_REGISTER_A_64(types)                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned." types  \
               " {" KV4_32_NAMES "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"             \
               : KV4_32(KV4_F, d, kAt)                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), \
                 "n"(kTransposeB ? 1 : 0))

/// The same with A in registers: a [4]. Of bf16: kN 64.
template <MmaType kType, int kN, bool kTransposeB, int kAt = 0, int kSize>
__device__ void wgmma(float (&d)[kSize], const std::uint32_t* a, std::uint64_t b, bool add) {
  static_assert((kType == MmaType::fp16 && (kN == 64 || kN == 128)) || (kType == MmaType::bf16 && kN == 64));
  static_assert(kAt + kN / 2 <= kSize);
#if KV4_WGMMA
  if constexpr (kType == MmaType::bf16)
    KV4_REGISTER_A_64("m64n64k16.f32.bf16.bf16");
  else if constexpr (kN == 64)
    KV4_REGISTER_A_64("m64n64k16.f32.f16.f16");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KV4_64_NAMES
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"
        : KV4_64(KV4_F, d, kAt)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeB ? 1 : 0));
#endif
}

/// D (+)= A B of 8-bit elements, 32 deep, A in registers, B's columns contiguous.
template <MmaType kType, int kN>
__device__ void wgmma(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(kType == MmaType::e4m3 && kN == 64);
#if KV4_WGMMA
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" KV4_32_NAMES
      "}, {%32, %33, %34, %35}, %36, p, 1, 1; }"
      : KV4_32(KV4_F, d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}
template <MmaType kType, int kN>
__device__ void wgmma(std::int32_t (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(kType == MmaType::s8 && kN == 64);
#if KV4_WGMMA
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" KV4_32_NAMES
               "}, {%32, %33, %34, %35}, %36, p; }"
               : KV4_32(KV4_S, d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

template <MmaType kType, int kN>
__device__ void wgmma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(kType == MmaType::e4m3 && kN == 128);
#if KV4_WGMMA
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" KV4_64_NAMES
      "}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
      : KV4_64(KV4_F, d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}
template <MmaType kType, int kN>
__device__ void wgmma(std::int32_t (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(kType == MmaType::s8 && kN == 128);
#if KV4_WGMMA
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" KV4_64_NAMES
               "}, {%64, %65, %66, %67}, %68, p; }"
               : KV4_64(KV4_S, d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

#undef KV4_REGISTER_A_64
#undef KV4_SHARED_A_128
#undef KV4_SHARED_A_64
#undef KV4_S
#undef KV4_F
#undef KV4_64_NAMES
#undef KV4_32_NAMES
#undef KV4_64
#undef KV4_32
#undef KV4_8
#undef KV4_WGMMA

}  // namespace kv4::cuda
