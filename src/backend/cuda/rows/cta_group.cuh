// A CTA as the group of base/group.h, for the row code of ops/ and codec/ on shared memory.
#pragma once

#include <cuda_runtime.h>

namespace kv4::cuda {

class CtaGroup {
 public:
  /// scratch: shared, one float.
  __device__ explicit CtaGroup(float* scratch) : scratch_(scratch) {}

  __device__ int lane() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }

  /// x >= 0: floats then have the order of their bits.
  __device__ float max(float x) const {
    int* largest = reinterpret_cast<int*>(scratch_);
    __syncthreads();
    if (threadIdx.x == 0) *largest = 0;
    __syncthreads();
    atomicMax(largest, __float_as_int(x));
    __syncthreads();
    return __int_as_float(*largest);
  }

 private:
  float* scratch_;
};

}  // namespace kv4::cuda
