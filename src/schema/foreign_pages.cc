#include "kv4/foreign_pages.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "schema/image_layout.h"

namespace kv4 {

namespace {

/// Checks that all slots are inside, then calls `copy(row, payload offset, scale offset)` for every row that has a
/// slot.
template <class Copy>
void for_each_slot(const RowsView& rows, std::span<const std::int64_t> slots, const PageLayout& layout,
                   std::size_t pool_bytes, const Copy& copy) {
  require(rows.row != nullptr, ErrorCode::bad_argument, "the rows have no schema; make them with entry_rows");
  require(static_cast<std::int64_t>(slots.size()) == rows.count, ErrorCode::bad_argument, "{} slots for {} rows",
          slots.size(), rows.count);
  require(layout.rows_per_page > 0 && layout.page_bytes > 0, ErrorCode::bad_argument,
          "pages of {} rows and {} bytes; both must be positive", layout.rows_per_page, layout.page_bytes);
  const auto plane_fits = [&](std::int64_t at, std::int64_t stride, std::int64_t size) {
    return at >= 0 && stride >= size && at + (layout.rows_per_page - 1) * stride + size <= layout.page_bytes;
  };
  require(plane_fits(layout.payload_at, layout.payload_stride, rows.row->payload_bytes) &&
              plane_fits(layout.scale_at, layout.scale_stride, rows.row->scale_bytes),
          ErrorCode::bad_argument, "rows of {} + {} bytes do not fit into pages of {} rows and {} bytes as laid out",
          rows.row->payload_bytes, rows.row->scale_bytes, layout.rows_per_page, layout.page_bytes);
  const std::int64_t num_slots = static_cast<std::int64_t>(pool_bytes) / layout.page_bytes * layout.rows_per_page;
  for (const std::int64_t slot : slots)
    require(slot < num_slots, ErrorCode::bad_argument, "slot {}; a pool of {} bytes has slots 0 to {}", slot,
            pool_bytes, num_slots - 1);
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const std::int64_t slot = slots[i];
    if (slot < 0) continue;
    const std::int64_t page = slot / layout.rows_per_page * layout.page_bytes, in_page = slot % layout.rows_per_page;
    copy(i, page + layout.payload_at + in_page * layout.payload_stride,
         page + layout.scale_at + in_page * layout.scale_stride);
  }
}

}  // namespace

PageLayout planar_pages(const RowSchema& row, std::int64_t rows_per_page, std::int64_t alignment) {
  require(rows_per_page > 0 && alignment > 0, ErrorCode::bad_argument, "{} rows per page, alignment {}: both above 0",
          rows_per_page, alignment);
  PageLayout out;
  out.rows_per_page = rows_per_page;
  out.payload_stride = row.payload_bytes;
  out.scale_at = checked_mul(rows_per_page, row.payload_bytes, "page");
  out.scale_stride = row.scale_bytes;
  out.page_bytes = round_up(checked_mul(rows_per_page, row.bytes(), "page"), alignment, "page");
  return out;
}

PageLayout interleaved_pages(const RowSchema& row, std::int64_t rows_per_page) {
  require(rows_per_page > 0, ErrorCode::bad_argument, "{} rows per page; above 0", rows_per_page);
  PageLayout out;
  out.rows_per_page = rows_per_page;
  out.payload_stride = out.scale_stride = row.bytes();
  out.scale_at = row.payload_bytes;
  out.page_bytes = checked_mul(rows_per_page, row.bytes(), "page");
  return out;
}

RowsView entry_rows(const CacheSchema& schema, int layer, RowRole role, std::span<std::byte> blocks,
                    std::int64_t length) {
  const LayerCacheSchema& wanted = schema.layer(layer);
  std::int64_t page_at = 0;  // offset of the layer's page in a block's image
  for (const LayerCacheSchema& one : schema.layers)
    for (const PageSchema& page : one.pages) {
      if (&one != &wanted || page.kind.role != role) {
        page_at += page.content_bytes;
        continue;
      }
      require(page.global_offset < 0, ErrorCode::bad_argument,
              "{} rows have a scale per page, for which pages of other engines have no place",
              to_string(page.row.format));
      const std::int64_t num_blocks = ceil_div(length, schema.block_tokens);
      require(length >= 0 && static_cast<std::int64_t>(blocks.size()) >= num_blocks * schema.block_image_bytes,
              ErrorCode::bad_argument, "{} bytes of blocks; {} tokens have {} blocks of {}", blocks.size(), length,
              num_blocks, schema.block_image_bytes);
      return {.row = &page.row,
              .count = length / page.kind.ratio,
              .bytes = blocks,
              .rows_per_block = page.rows_per_block,
              .block_bytes = schema.block_image_bytes,
              .payload_at = page_at,
              .scale_at = page_at + page.scale_offset};
    }
  for (const RowKind& kind : wanted.spec.rows)
    require(kind.role != role, ErrorCode::bad_argument, "layer {} reads the {} of layer {}; take them from there",
            layer, role == RowRole::entry ? "entries" : "index keys", kind.owner_layer);
  fail(ErrorCode::bad_argument, "layer {} is a {} layer and has no {}", layer, to_string(wanted.spec.kind),
       role == RowRole::entry ? "entries" : "index keys");
}

RowsView window_rows(const CacheSchema& schema, int layer, std::span<std::byte> image,
                     std::span<const std::int64_t> lengths) {
  const LayerCacheSchema& wanted = schema.layer(layer);
  const ImageLayout layout = image_layout(schema, lengths);
  require(static_cast<std::int64_t>(image.size()) == layout.bytes, ErrorCode::bad_argument,
          "an image of {} bytes; these lengths have {}", image.size(), layout.bytes);
  const WindowPart& part = layout.windows[&wanted - schema.layers.data()];
  return {.row = &wanted.window.row,
          .count = part.count,
          .bytes = image,
          .rows_per_block = std::max<std::int64_t>(part.count, 1),
          .payload_at = part.payload_at,
          .scale_at = part.scale_at};
}

void copy_to_pages(const RowsView& rows, std::span<const std::int64_t> slots, const PageLayout& layout,
                   std::span<std::byte> pool) {
  for_each_slot(rows, slots, layout, pool.size(), [&](std::int64_t i, std::int64_t payload_at, std::int64_t scale_at) {
    std::ranges::copy(rows.payload(i), pool.data() + payload_at);
    std::ranges::copy(rows.scale(i), pool.data() + scale_at);
  });
}

void copy_from_pages(const RowsView& rows, std::span<const std::int64_t> slots, const PageLayout& layout,
                     std::span<const std::byte> pool) {
  for_each_slot(rows, slots, layout, pool.size(), [&](std::int64_t i, std::int64_t payload_at, std::int64_t scale_at) {
    const std::span<std::byte> payload = rows.payload(i), scale = rows.scale(i);
    std::memcpy(payload.data(), pool.data() + payload_at, payload.size());
    std::memcpy(scale.data(), pool.data() + scale_at, scale.size());
  });
}

}  // namespace kv4
