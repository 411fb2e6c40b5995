// The rows that a query attends to, and their addresses: the window, then the entries. A row is located in three steps
// with at most one load each, so that a kernel can have the loads of several rows in flight.
#pragma once

#include <cstdint>

#include "backend/cuda/append/window_begin.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/rows/decode.cuh"
#include "kv4/params.h"

namespace kv4::cuda {

/// For numbers that are not negative. kByShift: the divisor is nearly always a power of two.
template <bool kByShift>
__device__ std::int32_t quotient(std::int32_t x, std::int32_t by) {
  return kByShift && (by & (by - 1)) == 0 ? x >> (31 - __clz(by)) : x / by;
}
template <bool kByShift>
__device__ std::int32_t remainder(std::int32_t x, std::int32_t by) {
  return kByShift && (by & (by - 1)) == 0 ? x & (by - 1) : x % by;
}

struct QueryRows {
  ops::StepRecord at;        // padded: no rows, and no sink either
  std::int32_t first = 0;    // position of the first window row
  std::int32_t begin = 0;    // window rows before this position do not exist
  std::int32_t window = 0;   // rows of the window
  std::int32_t entries = 0;  // rows after the window; some may not exist

  QueryRows() = default;
  __device__ QueryRows(const ops::AttendParams& p, std::int64_t token) : QueryRows(p, token, record_of(p, token)) {}

  /// With the token's record, or with a record that replaces it where there are slot lists only.
  __device__ QueryRows(const ops::AttendParams& p, std::int64_t token, const ops::StepRecord& record) : at(record) {
    const bool has_step = p.step.tokens != nullptr;
    if (at.padded()) return;
    if (p.window_slots.slots != nullptr) {
      window = length_of(p.window_slots, token);
    } else if (has_step) {
      begin = window_begin(p.step, at);
      first = max(begin, at.position - p.layer.window_tokens + 1);
      window = at.position + 1 - first;
    }
    if (p.entry_slots.slots != nullptr)
      entries = length_of(p.entry_slots, token);
    else if (has_step && p.layer.num_kinds > 0)
      entries = p.chosen.data == nullptr ? visible<false>(p) : p.num_chosen;
  }

  __device__ std::int32_t count() const { return window + entries; }

  /// The name of row i: a position, an entry, or a slot of a list; negative: the row does not exist. kAnyEntry: the
  /// visibility of a chosen entry is checked later (`seen`), so that no load waits for the list.
  template <bool kAnyEntry = false>
  __device__ std::int32_t key(const ops::AttendParams& p, std::int64_t token, std::int32_t i) const {
    if (i >= count()) return -1;
    if (i < window)
      return p.window_slots.slots == nullptr ? first + i : p.window_slots.slots[token * p.window_slots.stride + i];
    i -= window;
    if (p.entry_slots.slots != nullptr) return p.entry_slots.slots[token * p.entry_slots.stride + i];
    if (p.chosen.data == nullptr) return i;
    const std::int32_t entry = static_cast<const std::int32_t*>(p.chosen.data)[token * p.chosen.row_stride + i];
    return kAnyEntry || entry < visible<false>(p) ? entry : -1;
  }
  template <bool kByShift>
  __device__ std::int32_t seen(const ops::AttendParams& p, std::int32_t i, std::int32_t key) const {
    const bool is_chosen = i >= window && p.entry_slots.slots == nullptr && p.chosen.data != nullptr;
    return is_chosen && key >= visible<kByShift>(p) ? -1 : key;
  }

  /// The block or state slot of row i; negative: the row does not exist.
  template <bool kByShift = false>
  __device__ std::int32_t block(const ops::AttendParams& p, std::int32_t i, std::int32_t key) const {
    if (key < 0) return -1;
    if (i < window) {
      if (p.window_slots.slots != nullptr) return quotient<kByShift>(key, p.layer.window.rows);
      return in_scratch(p, key) ? 0 : at.read_slot;
    }
    const std::int32_t block = quotient<kByShift>(key, p.layer.kinds[0].rows_per_block);
    if (p.entry_slots.slots != nullptr) return block;
    return p.step.block_table[std::int64_t{at.row} * p.step.blocks_per_request + block];
  }

  template <bool kByShift = false>
  __device__ RowPointers place(const ops::AttendParams& p, std::int32_t i, std::int32_t key, std::int32_t block) const {
    if (block < 0) return {};
    if (i >= window)
      return pointers_of(p.layer.kinds[0].page, block, remainder<kByShift>(key, p.layer.kinds[0].rows_per_block));
    const ops::WindowDesc& w = p.layer.window;
    if (in_scratch(p, key)) return pointers_of(w.scratch, 0, at.token_of(key));
    return pointers_of(w.ring, block, remainder<kByShift>(key, w.rows));
  }

 private:
  __device__ static ops::StepRecord record_of(const ops::AttendParams& p, std::int64_t token) {
    if (p.step.tokens != nullptr) return p.step.tokens[token];
    ops::StepRecord record;
    record.row = 0;
    return record;
  }
  __device__ bool in_scratch(const ops::AttendParams& p, std::int32_t position) const {
    return p.window_slots.slots == nullptr && position >= at.length && !at.in_place();
  }
  template <bool kByShift>
  __device__ std::int32_t visible(const ops::AttendParams& p) const {
    return quotient<kByShift>(at.position + 1, p.layer.kinds[0].ratio);
  }
  __device__ static std::int32_t length_of(const ops::SlotList& list, std::int64_t token) {
    const std::int32_t max_length = static_cast<std::int32_t>(list.stride);
    return list.lens == nullptr ? max_length : max(0, min(list.lens[token], max_length));
  }
};

/// The rows of a window that stores each row at its position modulo the window's tokens.
struct RingSlots {
  std::int32_t tokens, first, first_slot, count;

  __device__ RingSlots(const ops::AttendParams& p, const QueryRows& rows)
      : tokens(p.layer.window_tokens), first(rows.first), first_slot(0), count(0) {
    if (rows.at.padded() || tokens == 0) return;
    first_slot = first % tokens;
    count = rows.at.position + 1 - first;
  }
  /// Position of the row in a slot; -1: the slot has no row.
  __device__ std::int32_t position(std::int32_t slot) const {
    const std::int32_t behind = slot - first_slot + (slot < first_slot ? tokens : 0);
    return slot < tokens && behind < count ? first + behind : -1;
  }
};

}  // namespace kv4::cuda
