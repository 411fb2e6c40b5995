// The views of layer_cache_handle.h with arrays in place of pointers.
#pragma once

#include <nanobind/nanobind.h>

#include "cache.h"

namespace kv4::python {

struct SWAArrays {
  AnyArray payload, rope, scale;    // u8 [slots, rows, bytes] or None
  AnyArray slots, positions, head;  // i32 [num_items], [num_items, rows], [num_items]
  std::int32_t num_items, rows;
};

struct PagedArrays {
  AnyArray block_table, request_rows, lens;  // i32 [max_requests, blocks_per_request], [num_items], [num_items]
  std::int32_t num_items, rows_per_block, blocks_per_request;
};

struct ClassicalArrays : PagedArrays {
  AnyArray payload, rope, scale;  // u8 [num_blocks, rows_per_block, bytes] or None
};

struct IndexerArrays : PagedArrays {
  AnyArray keys, scales;  // u8 [num_blocks, rows_per_block, bytes] or None
  AnyArray global_scale;  // f32 [num_blocks] or None
};

SWAArrays swa_arrays(const Cache& cache, const SWAView& view);
ClassicalArrays classical_arrays(const Cache& cache, const ClassicalView& view);
IndexerArrays indexer_arrays(const Cache& cache, const IndexerView& view);

}  // namespace kv4::python
