// Row code is compiled for the host and, by nvcc, for the device.
#pragma once

#if defined(__CUDACC__)
#define KV4_HD __host__ __device__ inline
#else
#define KV4_HD inline
#endif
