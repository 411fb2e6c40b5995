// Kernels of the benchmark itself: they fill inputs and serve as references for operations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kv4::bench {

/// Normally distributed numbers with mean 0 and deviation 1; `seed` and the index determine each.
cudaError_t fill_normal_f32(float* out, std::int64_t count, std::uint64_t seed, cudaStream_t stream);
cudaError_t fill_normal_bf16(std::uint16_t* out, std::int64_t count, std::uint64_t seed, cudaStream_t stream);
/// Whole numbers in [0, below).
cudaError_t fill_indices(std::int32_t* out, std::int64_t count, std::int32_t below, std::uint64_t seed,
                         cudaStream_t stream);
/// Fills `bytes` of every row; rows are `stride` apart.
struct ByteRows {
  std::uint8_t* data;
  std::int64_t rows, stride, bytes;
};
/// Whole numbers in [low, below).
cudaError_t fill_bytes(const ByteRows& out, int low, int below, std::uint64_t seed, cudaStream_t stream);

cudaError_t do_nothing(cudaStream_t stream);

/// Copies 16 bytes at a time; `bytes` is a multiple of 16.
cudaError_t copy_plain(void* to, const void* from, std::int64_t bytes, cudaStream_t stream);

/// Reads `bytes`, a multiple of 16, and writes nothing: afterwards L2 holds clean lines of `from`. `sink` is written if
/// the exclusive or of all bytes is one improbable value.
cudaError_t read_all(const void* from, std::int64_t bytes, std::uint32_t* sink, cudaStream_t stream);

/// Adds the number of non-finite values among `count` bf16 numbers to *found.
cudaError_t count_bad_bf16(const std::uint16_t* values, std::int64_t count, std::int32_t* found, cudaStream_t stream);

/// Reads the first pages of every item through the block table: exactly the bytes that a score kernel reads.
struct ScanParams {
  const std::uint8_t* keys;    // page b at keys + b * block_stride, key_bytes long
  const std::uint8_t* scales;  // likewise, scale_bytes long
  std::int64_t key_stride, scale_stride;
  std::int32_t key_bytes, scale_bytes;  // of a page; multiples of 16 and of 4
  const std::int32_t* block_table;      // [rows, blocks_per_request]
  const std::int32_t* request_rows;     // [items]
  std::int32_t blocks_per_request;
  std::int32_t items;
  std::int32_t pages;   // of each item
  std::uint32_t* sink;  // written if the exclusive or of all bytes is one improbable value
};
cudaError_t scan_pages(const ScanParams& params, cudaStream_t stream);

}  // namespace kv4::bench
