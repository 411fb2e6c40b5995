// Rows in the pools of other engines: exported bytes to their pages and back, without loss.
//
// FlashMLA, vLLM and SGLang keep V4's rows in the number formats of kv4 (docs/embedding.md has the table), in pages of
// their own size. So a context moves by copying rows:
//
//   std::vector<std::byte> blocks = cache.export_blocks(request);
//   const RowsView rows = entry_rows(cache.schema(), layer, RowRole::entry, blocks, cache.length(request));
//   copy_to_pages(rows, slots, planar_pages(*rows.row, 64, 576), their_pool);
//
// and back with copy_from_pages, then KVCacheManager::import_image, or insert_blocks and a replay of the window.
// Host memory only. Kernels that read such pools in place on a GPU are in kv4/cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kv4/export.h"
#include "kv4/schema.h"

namespace kv4 {

/// The layout of rows of one kind in a pool. Row `slot` is row slot % rows_per_page of page slot / rows_per_page.
struct PageLayout {
  std::int64_t rows_per_page = 0;
  std::int64_t page_bytes = 0;  // from page to page
  std::int64_t payload_at = 0;  // of row 0 in its page
  std::int64_t payload_stride = 0;
  std::int64_t scale_at = 0;
  std::int64_t scale_stride = 0;
};

/// All payloads of a page, then all scales; page_bytes rounded up to `alignment`. With 576: the V4 pools of FlashMLA,
/// vLLM and SGLang; with 1: pools of index keys of 132 (fp8) or 68 bytes (mxfp4).
KV4_API PageLayout planar_pages(const RowSchema& row, std::int64_t rows_per_page, std::int64_t alignment = 1);
/// Each row's payload, then its scale: rows of 584 bytes in one piece.
KV4_API PageLayout interleaved_pages(const RowSchema& row, std::int64_t rows_per_page);

/// Rows of one kind and layer inside exported bytes: row i has its payload at payload_at + i / rows_per_block *
/// block_bytes + i % rows_per_block * payload bytes, its scale alike. Owns nothing.
struct RowsView {
  const RowSchema* row = nullptr;  // of the schema, which must live on
  std::int64_t count = 0;
  std::span<std::byte> bytes;
  std::int64_t rows_per_block = 1;
  std::int64_t block_bytes = 0;
  std::int64_t payload_at = 0;
  std::int64_t scale_at = 0;

  /// The bytes of row i.
  std::span<std::byte> payload(std::int64_t i) const { return at(payload_at, i, row->payload_bytes); }
  /// The scale of row i.
  std::span<std::byte> scale(std::int64_t i) const { return at(scale_at, i, row->scale_bytes); }

 private:
  std::span<std::byte> at(std::int64_t first, std::int64_t i, std::int64_t size) const {
    return bytes.subspan(static_cast<std::size_t>(first + i / rows_per_block * block_bytes + i % rows_per_block * size),
                         static_cast<std::size_t>(size));
  }
};

/// Entries or index keys of a layer in blocks [n, block_image_bytes] as KVCacheManager::export_blocks gives them: the
/// length / ratio rows that exist.
KV4_API RowsView entry_rows(const CacheSchema& schema, int layer, RowRole role, std::span<std::byte> blocks,
                            std::int64_t length);
/// Window rows of a layer in an image, oldest first: positions length - count to length - 1. lengths [1 + draft
/// layers].
KV4_API RowsView window_rows(const CacheSchema& schema, int layer, std::span<std::byte> image,
                             std::span<const std::int64_t> lengths);

/// Row i goes to slots[i]; a negative slot skips the row.
KV4_API void copy_to_pages(const RowsView& rows, std::span<const std::int64_t> slots, const PageLayout& layout,
                           std::span<std::byte> pool);
/// Row i comes from slots[i]; a negative slot leaves the row as it is.
KV4_API void copy_from_pages(const RowsView& rows, std::span<const std::int64_t> slots, const PageLayout& layout,
                             std::span<const std::byte> pool);

}  // namespace kv4
