// Speculative prefetch: attend's kernels read the token's record before the preceding kernel has ended. They bring into
// L2 the memory that this speculative record refers to, or locate it, so that they can load it right after the grid
// dependency wait if validation shows the same record.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kLine = 128;

/// The current record if it determines the rows; otherwise a padded record.
__device__ inline ops::StepRecord speculative_record(const ops::AttendParams& p, std::int64_t token) {
  if (p.step.tokens == nullptr || p.window_slots.slots != nullptr || p.entry_slots.slots != nullptr) return {};
  const ops::StepRecord r = load_record_l2(p.step.tokens + token);
  return min(r.read_slot, r.write_slot) < 0 ? ops::StepRecord{} : r;  // partly written
}

/// The same for loads that start before the record is validated: such loads must stay inside the pools. If the two
/// halves of the record come from different steps, rows of the scratch could lie outside.
__device__ inline ops::StepRecord speculative_record_to_load(const ops::AttendParams& p, std::int64_t token) {
  const ops::StepRecord r = speculative_record(p, token);
  return r.in_place() || r.token_of(r.position) == token ? r : ops::StepRecord{};
}

/// Validation: all fields that determine the rows of a query.
__device__ inline bool is_same(const ops::StepRecord& a, const ops::StepRecord& b) {
  return a.row == b.row && a.length == b.length && a.count == b.count && a.first_token == b.first_token &&
         a.read_slot == b.read_slot && a.write_slot == b.write_slot && a.position == b.position;
}

}  // namespace kv4::cuda
