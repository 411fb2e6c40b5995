#include <cuda_runtime.h>

#include <algorithm>

#include "device_kernels.h"

namespace kv4::bench {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1 << 16;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((count + kThreads - 1) / kThreads, 1, kMostBlocks));
}

// splitmix64's finaliser.
__device__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

__device__ std::uint64_t hash(std::uint64_t seed, std::int64_t i) {
  return mix(seed * 0x9e3779b97f4a7c15u + mix(static_cast<std::uint64_t>(i) + 0x9e3779b97f4a7c15u));
}

__device__ float normal(std::uint64_t seed, std::int64_t i) {
  const std::uint64_t bits = hash(seed, i);
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
  const float v = static_cast<float>(bits & 0xFFFFFF) * 0x1p-24f;
  return sqrtf(-2.0f * __logf(u)) * __cosf(6.2831853f * v);
}

__device__ std::int64_t first_index() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ std::int64_t index_stride() { return std::int64_t{gridDim.x} * kThreads; }

__global__ void __launch_bounds__(kThreads) fill_f32(float* out, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = first_index(); i < count; i += index_stride()) out[i] = normal(seed, i);
}

__global__ void __launch_bounds__(kThreads) fill_bf16(std::uint16_t* out, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = first_index(); i < count; i += index_stride()) {
    const std::uint32_t bits = __float_as_uint(normal(seed, i));
    out[i] = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

__global__ void __launch_bounds__(kThreads) fill_u8(ByteRows out, int low, int below, std::uint64_t seed) {
  for (std::int64_t i = first_index(); i < out.rows * out.bytes; i += index_stride())
    out.data[i / out.bytes * out.stride + i % out.bytes] =
        static_cast<std::uint8_t>(low + static_cast<int>(hash(seed, i) % static_cast<unsigned>(below - low)));
}

__global__ void __launch_bounds__(kThreads)
    fill_i32(std::int32_t* out, std::int64_t count, std::int32_t below, std::uint64_t seed) {
  for (std::int64_t i = first_index(); i < count; i += index_stride())
    out[i] = static_cast<std::int32_t>((hash(seed, i) >> 16) % static_cast<std::uint64_t>(below));
}

__global__ void nothing() {}

constexpr int kCopyUnroll = 4;

__global__ void __launch_bounds__(kThreads) copy_lines(uint4* to, const uint4* from, std::int64_t count) {
  const std::int64_t stride = index_stride();
  for (std::int64_t first = first_index(); first < count; first += kCopyUnroll * stride) {
    uint4 values[kCopyUnroll];
#pragma unroll
    for (int i = 0; i < kCopyUnroll; ++i)
      if (first + i * stride < count) values[i] = from[first + i * stride];
#pragma unroll
    for (int i = 0; i < kCopyUnroll; ++i)
      if (first + i * stride < count) to[first + i * stride] = values[i];
  }
}

__global__ void __launch_bounds__(kThreads) read_lines(const uint4* from, std::int64_t count, std::uint32_t* sink) {
  std::uint32_t sum = 0;
#pragma unroll 4
  for (std::int64_t i = first_index(); i < count; i += index_stride()) {
    const uint4 v = from[i];
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x9E3779B9u) *sink = sum;
}

__global__ void __launch_bounds__(kThreads)
    count_bad(const std::uint16_t* values, std::int64_t count, std::int32_t* found) {
  std::int32_t bad = 0;
  for (std::int64_t i = first_index(); i < count; i += index_stride()) bad += (values[i] & 0x7F80) == 0x7F80 ? 1 : 0;
  if (bad != 0) atomicAdd(found, bad);
}

constexpr int kWarps = kThreads / 32;

// Bound by bytes: a warp reads one page, with all its loads in flight at once.
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ ScanParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t page = std::int64_t{blockIdx.x} * kWarps + warp;
  if (page >= std::int64_t{p.items} * p.pages) return;
  const auto item = static_cast<std::int32_t>(page / p.pages), number = static_cast<std::int32_t>(page % p.pages);
  const std::int64_t block = p.block_table[std::int64_t{p.request_rows[item]} * p.blocks_per_request + number];
  const auto* keys = reinterpret_cast<const uint4*>(p.keys + block * p.key_stride);
  const auto* scales = reinterpret_cast<const std::uint32_t*>(p.scales + block * p.scale_stride);
  std::uint32_t sum = 0;
#pragma unroll 8
  for (int i = lane; i < p.key_bytes / 16; i += 32) {
    const uint4 v = keys[i];
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  for (int i = lane; i < p.scale_bytes / 4; i += 32) sum ^= scales[i];
  if (sum == 0x9E3779B9u) *p.sink = sum;
}

}  // namespace

cudaError_t fill_normal_f32(float* out, std::int64_t count, std::uint64_t seed, cudaStream_t stream) {
  fill_f32<<<blocks_for(count), kThreads, 0, stream>>>(out, count, seed);
  return cudaGetLastError();
}

cudaError_t fill_normal_bf16(std::uint16_t* out, std::int64_t count, std::uint64_t seed, cudaStream_t stream) {
  fill_bf16<<<blocks_for(count), kThreads, 0, stream>>>(out, count, seed);
  return cudaGetLastError();
}

cudaError_t fill_indices(std::int32_t* out, std::int64_t count, std::int32_t below, std::uint64_t seed,
                         cudaStream_t stream) {
  fill_i32<<<blocks_for(count), kThreads, 0, stream>>>(out, count, below, seed);
  return cudaGetLastError();
}

cudaError_t fill_bytes(const ByteRows& out, int low, int below, std::uint64_t seed, cudaStream_t stream) {
  fill_u8<<<blocks_for(out.rows * out.bytes), kThreads, 0, stream>>>(out, low, below, seed);
  return cudaGetLastError();
}

cudaError_t do_nothing(cudaStream_t stream) {
  nothing<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}

cudaError_t copy_plain(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  const std::int64_t count = bytes / 16;
  copy_lines<<<blocks_for((count + kCopyUnroll - 1) / kCopyUnroll), kThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from), count);
  return cudaGetLastError();
}

cudaError_t read_all(const void* from, std::int64_t bytes, std::uint32_t* sink, cudaStream_t stream) {
  constexpr int kReadBlocks = 2048;
  read_lines<<<kReadBlocks, kThreads, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16, sink);
  return cudaGetLastError();
}

cudaError_t count_bad_bf16(const std::uint16_t* values, std::int64_t count, std::int32_t* found, cudaStream_t stream) {
  count_bad<<<blocks_for(count), kThreads, 0, stream>>>(values, count, found);
  return cudaGetLastError();
}

cudaError_t scan_pages(const ScanParams& params, cudaStream_t stream) {
  const std::int64_t pages = std::int64_t{params.items} * params.pages;
  scan<<<static_cast<unsigned>((pages + kWarps - 1) / kWarps), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kv4::bench
