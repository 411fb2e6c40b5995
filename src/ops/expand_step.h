// Expands one record per item into the tables that a step's operations and views read: a record per token, lengths and
// slots per item.
#pragma once

#include "kv4/params.h"

namespace kv4::ops {

/// The record of an item's token.
KV4_HD StepRecord token_record(const StepTableDesc& t, const StepRecord& item, std::int32_t token) {
  StepRecord out = item;
  out.position = item.length + token - item.first_token;
  if (item.padded()) return out;
  const std::int32_t index = out.position / t.block_tokens;
  if (out.position < item.block) {
    out.block = t.dummy_block;
    return out;
  }
  out.block = index < t.blocks_per_request
                  ? t.block_table[static_cast<std::int64_t>(item.row) * t.blocks_per_request + index]
                  : -1;
  return out;
}

/// Writes the views' arrays of item i, and the begin of its window.
KV4_HD void write_item_arrays(const StepTableDesc& t, const StepRecord& item, std::int32_t i,
                              std::int32_t window_begin) {
  const bool padded = item.padded();
  if (!padded && t.window_begins != nullptr) t.window_begins[item.row] = window_begin;
  t.item_rows[i] = item.row;
  t.item_slots[i] = padded ? -1 : item.write_slot;
  t.csa_lens[i] = padded ? 0 : item.end() / t.csa_ratio;
  t.hca_lens[i] = padded ? 0 : item.end() / t.hca_ratio;
  t.ring_heads[i] = padded ? 0 : item.end() % t.ring_rows;
}

/// The position that ring row r of an item holds after the step; -1: none. head: end % ring_rows.
KV4_HD std::int32_t ring_position(std::int32_t end, std::int32_t head, std::int32_t ring_rows, std::int32_t r,
                                  std::int32_t window_begin) {
  const std::int32_t position = end - head + r - (r >= head ? ring_rows : 0);
  return position < window_begin ? -1 : position;
}

}  // namespace kv4::ops
