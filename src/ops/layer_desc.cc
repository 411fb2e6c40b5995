#include "ops/layer_desc.h"

#include "schema/table_layout.h"

namespace kv4::ops {
namespace {

std::uint8_t* bytes(std::byte* base, std::int64_t offset) {
  return base == nullptr ? nullptr : reinterpret_cast<std::uint8_t*>(base) + offset;
}

std::int32_t* of_layer(std::int32_t* first, int index) { return first == nullptr ? nullptr : first + index; }

RowShape shape_of(const RowSchema& row) { return {row.width, row.tail}; }

WindowDesc describe_window(const CacheSchema& schema, const WindowSchema& w, int index, const LayerMemory& memory) {
  WindowDesc out;
  out.rows = w.rows;
  out.ring = {w.row.format,
              shape_of(w.row),
              {bytes(memory.slots, w.payload_offset), schema.slot_bytes, w.row.payload_bytes},
              {bytes(memory.slots, w.scale_offset), schema.slot_bytes, w.row.scale_bytes},
              {}};
  const ScratchPart scratch = scratch_layout(schema).layers[index];
  out.scratch = out.ring;
  out.scratch.payload = {bytes(memory.scratch, scratch.payload_at), 0, w.row.payload_bytes};
  out.scratch.scale = {bytes(memory.scratch, scratch.scale_at), 0, w.row.scale_bytes};
  out.undo_row = out.ring;
  out.undo_row.payload = {bytes(memory.undo_rows, w.undo_row_offset), schema.undo_row_bytes, w.row.payload_bytes};
  out.undo_row.scale = {bytes(memory.undo_rows, w.undo_row_offset + w.row.payload_bytes), schema.undo_row_bytes,
                        w.row.scale_bytes};
  out.undo_positions = of_layer(memory.undo_positions, index);
  out.undo_row_stride = static_cast<std::int64_t>(schema.layers.size());
  return out;
}

PendingDesc describe_pending(const CacheSchema& schema, const PendingSchema& p, int index, const LayerMemory& memory) {
  PendingDesc out;
  out.ring = {bytes(memory.slots, p.ring_offset), schema.slot_bytes, p.row_bytes};
  out.dtype = p.dtype;
  out.columns = p.columns;
  out.rows = p.rows;
  out.online = p.online;
  if (p.acc_offset >= 0) out.accumulator = {bytes(memory.slots, p.acc_offset), schema.slot_bytes, 0};
  out.fold_watermarks = of_layer(memory.fold_watermarks, index);
  out.fold_watermark_stride = static_cast<std::int64_t>(schema.layers.size());
  return out;
}

// The page and, in the owner's own description, the pending rows of one row kind.
KindDesc describe_kind(const CacheSchema& schema, const PageSchema& page, const LayerMemory& memory) {
  KindDesc kind;
  kind.page = {page.row.format,
               shape_of(page.row),
               {bytes(memory.blocks, page.offset), page.block_stride, page.row.payload_bytes},
               {bytes(memory.blocks, page.offset + page.scale_offset), page.block_stride, page.row.scale_bytes},
               {}};
  if (page.global_offset >= 0)
    kind.page.global = {bytes(memory.blocks, page.offset + page.global_offset), page.block_stride, 0};
  kind.ratio = page.kind.ratio;
  kind.rows_per_block = page.rows_per_block;
  kind.overlap = page.kind.overlap;
  kind.hadamard = page.kind.role == RowRole::index_key && schema.options.hadamard;
  kind.global_scale = schema.options.index_global_scale;
  return kind;
}

}  // namespace

LayerDesc describe_layer(const CacheSchema& schema, int index, const LayerMemory& memory) {
  const LayerCacheSchema& layer = schema.layers[index];
  LayerDesc out;
  out.window = describe_window(schema, layer.window, index, memory);
  out.window_tokens = schema.config.window;
  out.eps = static_cast<float>(schema.config.rms_eps);
  for (const RowKind& read : layer.spec.rows) {
    const LayerCacheSchema& owner = schema.layer(read.owner_layer);
    std::size_t k = 0;
    while (owner.pages[k].kind.role != read.role) ++k;
    KindDesc& kind = out.kinds[out.num_kinds++];
    kind = describe_kind(schema, owner.pages[k], memory);
    if (&owner == &layer) kind.pending = describe_pending(schema, layer.pending[k], index, memory);
  }
  return out;
}

}  // namespace kv4::ops
