// Rows for staged.cu: dense bf16 rows of 512 channels, in the workspace or in the caller's own memory.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/attend/kernels.h"
#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kStagedRowBytes = static_cast<int>(ops::kStagedRowBytes);
constexpr int kMaxStagedItems = 65535;  // of a grid's second dimension

constexpr int kBlockRows = static_cast<int>(ops::kStagedBlockRows);
static_assert(kBlockRows == kAttendTile);

/// Staged rows by number: a block of zeros; then the window rows of each item, by position; then its entries. The row
/// numbers of the caller's rows are the slots of entry_slots. Rows that are read in order lie in blocks that have the
/// layout of a KV tile in shared memory (staged_offset); chosen entries and the caller's rows lie one behind the other.
struct StagedRows {
  std::uint8_t* rows = nullptr;           // [num_rows, 512] bf16
  std::int32_t* item_of_token = nullptr;  // [tokens]; null: the caller's rows
  std::int32_t entries_at = 0;            // number of the first item's first entry: max_entries each
  std::int32_t max_entries = 0;
  bool entries_in_blocks = false;
  std::int64_t bytes = 0;  // of the table and the rows

  /// The number of the row of position 0, if the item had it: a multiple of kBlockRows. `first`: its first window row.
  KV4_HD std::int32_t window_at(const ops::StepRecord& record, std::int32_t item, std::int32_t window_tokens,
                                std::int32_t first) const {
    const std::int32_t before = record.first_token + item * (window_tokens + 2 * kBlockRows);
    return kBlockRows + (before + kBlockRows - 1) / kBlockRows * kBlockRows - first / kBlockRows * kBlockRows;
  }
};

/// Position of an item's first window row.
KV4_HD std::int32_t first_window_row(const ops::StepRecord& record, std::int32_t window_tokens, std::int32_t begin) {
  const std::int32_t oldest = record.length - window_tokens + 1, first = oldest > begin ? oldest : begin;
  return first < 0 ? 0 : first > record.length ? record.length : first;
}

/// The place of a row's 16-byte chunk.
KV4_HD std::int64_t staged_offset(std::int32_t row, std::int32_t chunk, bool in_blocks) {
  if (!in_blocks) return std::int64_t{row} * kStagedRowBytes + chunk * 16;
  return std::int64_t{row / kBlockRows} * kBlockRows * kStagedRowBytes + chunk / 8 * (kBlockRows * 128) +
         row % kBlockRows * 128 + ((chunk ^ row) % 8) * 16;
}

/// A request of the step has no more entries.
inline std::int64_t max_entries(const ops::AttendParams& p) {
  if (p.layer.num_kinds == 0) return 0;
  const ops::KindDesc& kind = p.layer.kinds[0];
  const std::int64_t in_table = std::int64_t{p.step.blocks_per_request} * kind.rows_per_block;
  return p.step.max_length > 0 && kind.ratio > 0 ? std::min<std::int64_t>(in_table, p.step.max_length / kind.ratio)
                                                 : in_table;
}

/// The layout in the workspace, behind the partial outputs of the other kernels.
inline StagedRows staged_rows(const ops::AttendParams& p) {
  const std::int64_t tokens = p.step.num_tokens, items = p.step.num_items, window = p.layer.window_tokens;
  StagedRows s;
  std::uint8_t* at = p.workspace == nullptr ? nullptr : p.workspace + ops::attend_workspace_bytes();
  s.item_of_token = reinterpret_cast<std::int32_t*>(at);
  s.rows = at == nullptr ? nullptr : at + ops::staged_table_bytes(tokens);
  s.bytes = ops::staged_bytes(tokens, items, window, max_entries(p));
  s.entries_at = static_cast<std::int32_t>(ops::staged_entries_at(tokens, items, window));
  s.max_entries = static_cast<std::int32_t>(ops::whole_staged_blocks(max_entries(p)));
  s.entries_in_blocks = p.chosen.data == nullptr;
  return s;
}

/// Expands all rows that the step's queries see into bf16, which is exact for fp8_tile64.
cudaError_t launch_stage_rows(const ops::AttendParams& params, const StagedRows& to, cudaStream_t stream);

}  // namespace kv4::cuda
