// The order of kernels: programmatic dependent launch (ptx/pdl.cuh). Each kernel may start while the kernel
// before it still runs. It reads constants at once (weights, biases, RoPE tables, its own parameters), and waits for
// the grid dependency before it relies on anything else (but append's pending rows: kv4/cuda.h). Every thread waits,
// so a kernel that is done implies that all kernels before it are done.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/registers.cuh"

namespace kv4::cuda {

/// Brings a kernel's parameters into the constant cache while it would wait anyway. Otherwise each of their lines is a
/// miss on the critical path.
template <class Params>
__device__ void touch(const Params& params) {
  constexpr int kLine = 64;
  const unsigned* words = reinterpret_cast<const unsigned*>(&params);
  unsigned all = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Params) / 4); i += kLine / 4) all += words[i];
  branch_on(all);
}

/// Whether the current device is Hopper: kernels were compiled for it with PDL.
inline bool is_sm90() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  return major == 9;
}

/// SMs of the current device.
inline int num_sms() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

/// Whether a CTA of the current device may have so many bytes of shared memory.
inline bool has_shared_memory(int bytes) {
  int device = 0, limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return false;
  return bytes <= limit;
}

/// Shared memory and clusters that a kernel may ask for without more ado.
constexpr std::size_t kDefaultSharedBytes = 48 << 10;
constexpr unsigned kPortableClusterSize = 8;

/// Lets `kernel` be launched with that much dynamic shared memory.
template <class... Params>
cudaError_t allow_shared_memory(void (*kernel)(Params...), std::size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

/// The same, in clusters of that many CTAs. 0 bytes: none.
template <int kSharedBytes, class... Params>
cudaError_t allow_clusters(void (*kernel)(Params...), unsigned cluster) {
  if constexpr (kSharedBytes > 0)  // also below the default, which includes a kernel's static shared memory
    if (const cudaError_t error = allow_shared_memory(kernel, kSharedBytes); error != cudaSuccess) return error;
  if (cluster <= kPortableClusterSize) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

/// Each `cluster` adjacent CTAs can access each other's shared memory; 1 where there is no PDL.
template <int kSharedBytes = 0, class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), unsigned cluster, dim3 ctas, unsigned threads,
                            cudaStream_t stream, Args&&... args) {
  if (const cudaError_t error = allow_clusters<kSharedBytes>(kernel, cluster); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = is_sm90() ? (cluster > 1 ? 2 : 1) : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <int kSharedBytes = 0, class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 ctas, unsigned threads, cudaStream_t stream, Args&&... args) {
  return launch_clusters<kSharedBytes>(kernel, 1, ctas, threads, stream, std::forward<Args>(args)...);
}

/// The number of clusters of `cluster` CTAs that run at once; 0: the GPU does not support that size.
template <int kSharedBytes, class... Params>
int clusters_at_once(void (*kernel)(Params...), unsigned cluster, unsigned threads) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  const cudaLaunchConfig_t config{cluster, threads, kSharedBytes, nullptr, &attribute, 1};
  int count = 0;
  if (allow_clusters<kSharedBytes>(kernel, cluster) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess)
    return count;
  static_cast<void>(cudaGetLastError());  // of this query
  return 0;
}

/// A launch without PDL, in stream order: for kernels that do not wait for the grid dependency.
template <class... Params, class... Args>
cudaError_t launch_in_order(void (*kernel)(Params...), dim3 ctas, unsigned threads, std::size_t shared_bytes,
                            cudaStream_t stream, Args&&... args) {
  if (shared_bytes > kDefaultSharedBytes)
    if (const cudaError_t error = allow_shared_memory(kernel, shared_bytes); error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace kv4::cuda
