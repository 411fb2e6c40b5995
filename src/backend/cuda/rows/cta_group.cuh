// A CTA as the group of base/group.h: row code of ops/ and codec/ over shared memory.
#pragma once

#include <cuda_runtime.h>

namespace kv4::cuda {

class Block {
 public:
  /// scratch: shared, one float.
  __device__ explicit Block(float* scratch) : scratch_(scratch) {}

  __device__ int lane() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }

  /// x >= 0, so that floats order as their bits do.
  __device__ float max(float x) const {
    int* most = reinterpret_cast<int*>(scratch_);
    __syncthreads();
    if (threadIdx.x == 0) *most = 0;
    __syncthreads();
    atomicMax(most, __float_as_int(x));
    __syncthreads();
    return __int_as_float(*most);
  }

 private:
  float* scratch_;
};

}  // namespace kv4::cuda
