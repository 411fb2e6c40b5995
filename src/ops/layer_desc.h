// Plain descriptions of memory, passed by value to operations on any backend. Built from the schema once per layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "codec/codec.h"
#include "kv4/schema.h"
#include "kv4/tensor.h"
#include "schema/rope.h"

namespace kv4::ops {

/// Row r of block (or slot) b: data + b * block_stride + r * row_stride.
struct Plane {
  std::uint8_t* data = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;

  KV4_HD std::uint8_t* at(std::int64_t block, std::int64_t row) const {
    return data + block * block_stride + row * row_stride;
  }
};

/// Rows of one format in two planes. `global` is nvfp4's per-page scale, null elsewhere.
struct RowPlanes {
  Format format = Format::bf16;
  codec::RowShape shape{};
  Plane payload;
  Plane scale;
  Plane global;
};

/// The window ring of one layer: a block is a state slot, the row of position p is p mod rows.
struct WindowDesc {
  RowPlanes ring;
  std::int32_t rows = 0;
  RowPlanes scratch;  // rows of a long step by token index; one block
  // The row that the last of R + 1 tokens written in place overwrites. No query will ask for it again, but the image of
  // the length before the step has it, so it is kept in case the step is aborted.
  RowPlanes displaced;                          // a block is a state slot, one row
  std::int32_t* displaced_positions = nullptr;  // [slot * displaced_stride], -1: none
  std::int64_t displaced_stride = 0;

  KV4_HD std::int32_t& displaced_position(std::int64_t slot) const {
    return displaced_positions[slot * displaced_stride];
  }
};

/// Compressor state of one row kind. Ring row of p: [kv columns | gate columns] at p mod rows of its slot.
struct PendingDesc {
  Plane ring;  // a block is a state slot
  DType dtype = DType::f32;
  std::int32_t columns = 0;
  std::int32_t rows = 0;
  bool online = false;
  Plane accumulator;                  // [slot]: fp32 [3, width] max, denominator, numerator; data null with overlap
  std::int32_t* frontiers = nullptr;  // [slot * frontier_stride]: tokens below it are in the accumulator
  std::int64_t frontier_stride = 0;
};

/// One row kind: where its rows lie and how they are made.
struct KindDesc {
  RowPlanes page;  // a block is a block id, a row is a slot of the page
  std::int32_t ratio = 0;
  std::int32_t rows_per_block = 0;
  bool overlap = false;
  bool hadamard = false;
  float global_scale = 1.0f;
  PendingDesc pending;
  const float* bias = nullptr;         // [ratio, columns]; null until weights are bound
  const float* norm_weight = nullptr;  // [width]
};

struct LayerDesc {
  static constexpr int kMaxKinds = 2;
  WindowDesc window;
  std::int32_t window_tokens = 0;  // rows a query sees
  std::int32_t num_kinds = 0;
  KindDesc kinds[kMaxKinds];
  float eps = 0.0f;
};

/// Where the layer's memory is.
struct LayerMemory {
  std::byte* blocks = nullptr;
  std::byte* slots = nullptr;
  std::int32_t* frontiers = nullptr;            // [num_slots, num_layers]
  std::byte* displaced = nullptr;               // [num_slots, displaced_bytes]
  std::int32_t* displaced_positions = nullptr;  // [num_slots, num_layers]
  std::byte* scratch = nullptr;                 // schema/table_layout.h, ScratchLayout
};

LayerDesc describe_layer(const CacheSchema& schema, int index, const LayerMemory& memory);

/// The step as the tables at fixed addresses hold it (schema/table_layout.h).
struct StepDesc {
  std::int32_t num_tokens = 0;
  std::int32_t num_items = 0;
  std::int32_t block_tokens = 0;
  std::int32_t blocks_per_request = 0;
  const std::int32_t* token_rows = nullptr;    // [num_tokens] request row, -1: padded
  const std::int32_t* positions = nullptr;     // [num_tokens]
  const std::int32_t* item_rows = nullptr;     // [num_items], -1: padded
  const std::int32_t* read_slots = nullptr;    // [rows]
  const std::int32_t* write_slots = nullptr;   // [rows]
  const std::int32_t* lengths = nullptr;       // [rows] committed; positions from here on are the step's own
  const std::int32_t* counts = nullptr;        // [rows]
  const std::int32_t* first_tokens = nullptr;  // [rows]
  const std::int32_t* block_table = nullptr;   // [rows, blocks_per_request]
};

/// Cos and sin for entries: the engine's table if `cos` is set, else our angles.
struct RopeDesc {
  const float* cos = nullptr;  // [positions, rope_dim / 2]
  const float* sin = nullptr;
  RopeAngles angles;
  std::int32_t rope_dim = 0;
};

/// Rows of `row_stride` elements, last dimension dense.
struct InputDesc {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
};

struct OutputDesc {
  void* data = nullptr;
  DType dtype = DType::f32;
};

struct AppendParams {
  LayerDesc layer;
  StepDesc step;
  RopeDesc rope;
  InputDesc window_rows;               // [tokens, head_dim]
  InputDesc kv[LayerDesc::kMaxKinds];  // [tokens, columns]; data null: window rows only
  InputDesc gate[LayerDesc::kMaxKinds];
};

struct FlushParams {
  LayerDesc layer;
  StepDesc step;
  InputDesc rows[LayerDesc::kMaxKinds];  // [tokens, width]: finished rows of each kind
  const std::uint8_t* valid = nullptr;   // [tokens] or null
};

struct GatherParams {
  LayerDesc layer;
  StepDesc step;
  std::int32_t kind = 0;           // row kind gathered (not for the window)
  std::int64_t rows_per_item = 0;  // second dimension of out
  InputDesc indices;               // gather_chosen: i32 [tokens, rows_per_item]
  OutputDesc out;                  // [tokens | items, rows_per_item, width]
  std::uint8_t* valid = nullptr;   // gather_chosen: [tokens, rows_per_item] or null
  std::int32_t* lens = nullptr;    // gather_all, gather_window: [items]
  std::int32_t* first = nullptr;   // gather_window: [items]
};

}  // namespace kv4::ops
