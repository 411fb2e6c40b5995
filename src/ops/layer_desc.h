// Converts the schema to the plain descriptions that operations get (kv4/params.h), once per layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv4/params.h"
#include "kv4/schema.h"

namespace kv4::ops {

/// The addresses of the layer's memory.
struct LayerMemory {
  std::byte* blocks = nullptr;
  std::byte* slots = nullptr;
  std::int32_t* fold_watermarks = nullptr;  // [num_slots, num_layers]
  std::byte* undo_rows = nullptr;           // [num_slots, undo_row_bytes]
  std::int32_t* undo_positions = nullptr;   // [num_slots, num_layers]
  std::byte* scratch = nullptr;             // schema/table_layout.h, ScratchLayout
};

LayerDesc describe_layer(const CacheSchema& schema, int index, const LayerMemory& memory);

}  // namespace kv4::ops
