// Sizes and addresses of everything a cache stores, derived once from the model and the options.
//
// Address of a row in a page:  base + block * block_stride + plane offset + slot * row_bytes   (64-bit)
// Block-major and layer-major differ only in the strides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv4/export.h"
#include "kv4/model_config.h"
#include "kv4/options.h"

namespace kv4 {

/// One stored row: `width` channels, the last `tail` kept bf16 by V4's row formats. Payload and scale lie in separate
/// planes.
struct RowSchema {
  Format format = Format::bf16;
  int width = 0;
  int tail = 0;
  int payload_bytes = 0;
  int scale_bytes = 0;
  int bytes() const { return payload_bytes + scale_bytes; }  // payload and scale
};

/// The page of one row kind of one layer: all payloads, then all scales, then the format's per-page scale if it has
/// one.
struct PageSchema {
  RowKind kind;
  RowSchema row;
  int rows_per_block = 0;
  std::int64_t page_bytes = 0;     // a multiple of the page alignment
  std::int64_t content_bytes = 0;  // page_bytes at alignment 64, as in a block's image
  std::int64_t offset = 0;         // of block 0's page in the pool
  std::int64_t block_stride = 0;
  std::int64_t scale_offset = 0;    // in the page
  std::int64_t global_offset = -1;  // in the page: one fp32 (nvfp4), else -1
};

/// The last `rows` window rows of a request; the row of position p is at p mod rows.
struct WindowSchema {
  RowSchema row;
  int rows = 0;                     // window + R
  std::int64_t payload_offset = 0;  // in the state slot
  std::int64_t scale_offset = 0;
  std::int64_t undo_row_offset = 0;  // in the slot's undo rows: payload, then scale
};

/// Compressor rows that wait for their entry, one per row kind. Ring row of position p at p mod rows: [kv | gate], each
/// `columns` wide. V4.1 has them for entries of ratio 2 only: 0 rows where an entry waits for nothing.
struct PendingSchema {
  int columns = 0;  // overlap: 2 * width (next-entry columns, then own-entry columns), else width
  int rows = 0;
  DType dtype = DType::f32;
  std::int64_t row_bytes = 0;
  std::int64_t ring_offset = 0;  // in the state slot
  std::int64_t acc_offset = -1;  // without overlap: fp32 max, denominator, numerator x width; else -1
  bool online = false;           // rows are folded into the accumulator R + 1 tokens later
};

/// One owned layer: its window, its pages, its pending rows.
struct LayerCacheSchema {
  LayerSpec spec;
  WindowSchema window;
  std::vector<PageSchema> pages;       // one per row kind that the layer owns
  std::vector<PendingSchema> pending;  // one per page

  /// Ring rows kept of the own-entry (a) and of the next-entry (b) series of the main compressor; 0 where there is
  /// none.
  int tail_buffer_size_a() const { return pending.empty() ? 0 : pending[0].rows; }
  /// Ring rows of the next-entry series.
  int tail_buffer_size_b() const { return pending.empty() || !spec.rows[0].overlap ? 0 : pending[0].rows; }
  /// Whether a row carries one fp32 inverse scale.
  bool needs_inv_scale() const { return window.row.format == Format::fp8_row; }
};

/// Every size of a cache. Plain data, built by build_schema().
struct CacheSchema {
  ModelConfig config;
  CacheOptions options;                  // with every 0 = automatic filled in
  std::vector<LayerCacheSchema> layers;  // the owned ones, in model order, draft stages last
  int num_groups = 1;                    // backbone + draft stages
  int block_tokens = 0;
  int blocks_per_request = 0;          // of max_context
  std::int64_t block_bytes = 0;        // one block in every layer
  std::int64_t block_image_bytes = 0;  // the same as it is exported: page alignment 64, block-major
  std::int64_t slot_bytes = 0;         // state of one request
  std::int64_t undo_row_bytes =
      0;  // undo rows beside it, one per window: rows of the image that an in-place step of R + 1 tokens overwrites
  std::uint64_t layout_id = 0;  // equal iff exported bytes mean the same

  KV4_API const LayerCacheSchema& layer(int model_layer) const;  // throws if not owned
};

/// Throws Error(bad_config) where a width does not fit a format, a ratio does not divide the block, a size overflows,
/// ...
KV4_API CacheSchema build_schema(const ModelConfig& config, const CacheOptions& options);

/// Blocks for `requests` x `context` tokens with 10 % headroom; context is rounded up to whole blocks.
struct BlockBudget {
  std::int64_t blocks_per_request = 0;
  std::int64_t blocks = 0;
  std::int64_t csa_entry_bytes = 0;  // of all blocks, by what they hold
  std::int64_t index_key_bytes = 0;
  std::int64_t hca_entry_bytes = 0;
  std::int64_t shared_entry_bytes = 0;  // V4.1's
  std::int64_t bytes = 0;               // the sum
};
/// Throws Error(bad_argument) where a size overflows.
KV4_API BlockBudget compute_block_budget(const CacheSchema& schema, std::int64_t requests, std::int64_t context);

/// The inverse: how many blocks fit into `bytes` beside the fixed parts, and the context each of `requests` then gets
/// (headroom kept).
struct ContextBudget {
  std::int64_t blocks = 0;
  std::int64_t context = 0;  // tokens per request, whole blocks
};
/// 0 blocks where `bytes` does not cover the fixed parts.
KV4_API ContextBudget compute_context_budget(const CacheSchema& schema, std::int64_t bytes, std::int64_t requests);

/// One line of a memory plan.
struct MemoryPart {
  std::string name;
  std::int64_t bytes = 0;
  std::string note;
};

/// The bytes that a cache built from this schema allocates.
struct MemoryPlan {
  std::int64_t block_bytes = 0;
  double bytes_per_token = 0;                // block_bytes / block_tokens
  std::int64_t state_bytes_per_request = 0;  // backbone
  std::int64_t draft_bytes_per_request = 0;  // draft stages' windows
  std::int64_t blocks = 0;
  std::int64_t total_bytes = 0;
  std::vector<MemoryPart> parts;  // add up to total_bytes
};
/// The plan, without allocating anything.
KV4_API MemoryPlan plan_memory(const CacheSchema& schema);

}  // namespace kv4
