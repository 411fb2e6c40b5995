// Loads, stores and prefetches whose width, cache level or order the compiler would choose otherwise. Volatile: in
// program order, relative to each other and to stores.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// An address in shared memory, as instructions take it.
__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// --- global memory

/// Brings the line into L2.
__device__ inline void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

template <int kCount>
struct Words {
  std::uint32_t w[kCount];
};

/// Bypasses L1, which keeps its lines for data that is read more than once.
template <int kCount>
__device__ Words<kCount> load_no_l1(const void* at) {
  Words<kCount> q;
  if constexpr (kCount == 4) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.w[0]), "=r"(q.w[1]), "=r"(q.w[2]), "=r"(q.w[3])
                 : "l"(at)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(q.w[0]), "=r"(q.w[1]) : "l"(at) : "memory");
  } else {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(q.w[0]) : "l"(at) : "memory");
  }
  return q;
}

/// The same for loads whose order relative to other accesses does not matter to the compiler.
__device__ inline uint4 load16_no_l1(const void* at) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}
__device__ inline uint2 load8_no_l1(const void* at) {
  uint2 x;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(at));
  return x;
}

/// From L2: L1 may hold older bytes.
template <int kCount>
__device__ Words<kCount> load_l2(const void* at) {
  Words<kCount> x;
  if constexpr (kCount == 4) {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(at)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(at) : "memory");
  } else {
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x.w[0]) : "l"(at) : "memory");
  }
  return x;
}

/// The compiler moves no other access across it.
__device__ inline std::int32_t load4_ordered(const std::int32_t* at) {
  std::int32_t x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

/// The thread's later accesses see all writes that other CTAs made before they released the value.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
/// Returns the value before. Acquire and release: it orders all accesses of the thread before and after it.
__device__ inline std::uint32_t add_acquire_release(std::uint32_t* at, std::uint32_t x) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(x) : "memory");
  return before;
}

/// How long L2 keeps a line.
enum class L2Priority {
  normal,
  evict_first  ///< for rows: L2 keeps the decoded rows, which an engine's next kernel reads
};

/// Policies for instructions that take one.
__device__ inline std::uint64_t evict_last_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// 1, 4, 8 or 16 bytes, in the low bytes of the words; not through the read-only path.
template <int kBytes, L2Priority kPriority>
__device__ Words<4> load_global(const void* at) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4 || kBytes == 1);
  constexpr bool kEvictFirst = kPriority == L2Priority::evict_first;
  const auto from = __cvta_generic_to_global(at);
  std::uint64_t policy = 0;
  if constexpr (kEvictFirst) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  Words<4> x = {};
  if constexpr (kBytes == 16 && kEvictFirst)
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(from), "l"(policy)
                 : "memory");
  else if constexpr (kBytes == 16)
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(from)
                 : "memory");
  else if constexpr (kBytes == 8 && kEvictFirst)
    asm volatile("ld.global.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(x.w[0]), "=r"(x.w[1])
                 : "l"(from), "l"(policy)
                 : "memory");
  else if constexpr (kBytes == 8)
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(from) : "memory");
  else if constexpr (kBytes == 4 && kEvictFirst)
    asm volatile("ld.global.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(x.w[0]) : "l"(from), "l"(policy) : "memory");
  else if constexpr (kBytes == 4)
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x.w[0]) : "l"(from) : "memory");
  else
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(x.w[0]) : "l"(from) : "memory");
  return x;
}

/// The compiler splits vector stores whose value comes out of a branch, and gives those of __stwb and __stcg a stronger
/// order than needed.
__device__ inline void store16(void* at, std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}
__device__ inline void store8(void* at, std::uint32_t x, std::uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(at)), "r"(x), "r"(y) : "memory");
}

// --- shared memory, by address (shared_address). Loads of data that a barrier has made visible; the compiler may move
// other accesses across them.

__device__ inline uint4 load_shared16(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
  return x;
}
__device__ inline uint2 load_shared8(std::uint32_t at) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}
__device__ inline std::uint32_t load_shared4(std::uint32_t at) {
  std::uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}

// The compiler moves no other access across these.

__device__ inline uint4 load_shared16_ordered(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ inline void store_shared16(std::uint32_t at, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ inline void increment_shared(std::uint32_t at) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(at) : "memory");
}
__device__ inline void store_shared4(std::uint32_t at, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

}  // namespace kv4::cuda
