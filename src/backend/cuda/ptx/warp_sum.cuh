// shfl.sync with its predicate, which the intrinsic does not return.
#pragma once

namespace kv4::cuda {

/// Inclusive prefix sum over the lanes of a warp.
__device__ inline int sum_to_lane(int sum) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2)  // the shuffle's predicate says whether the source lane exists
    asm volatile(
        "{ .reg .pred below; .reg .s32 other;\n"
        "shfl.sync.up.b32 other|below, %0, %1, 0, 0xFFFFFFFF;\n"
        "@below add.s32 %0, other, %0; }"
        : "+r"(sum)
        : "r"(step));
  return sum;
}

}  // namespace kv4::cuda
