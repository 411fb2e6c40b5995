// What attend's kernels do before the kernel before them has ended: bring into L2 what the token's record, as it is
// then, points at, or find where that lies, to load it right after the wait if the record is still the same.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kLine = 128;
__device__ inline void fetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

/// The record as it is now, if it says which rows there are; otherwise a padded one.
__device__ inline ops::StepRecord guess_record(const ops::AttendParams& p, std::int64_t token) {
  if (p.step.tokens == nullptr || p.window_slots.slots != nullptr || p.entry_slots.slots != nullptr) return {};
  const ops::StepRecord r = load_record_again(p.step.tokens + token);
  return min(r.read_slot, r.write_slot) < 0 ? ops::StepRecord{} : r;  // half written
}

/// The same for loads that do not wait until the record has proved right: they must not leave the pools. Of two halves
/// that are of different steps, rows of the scratch could.
__device__ inline ops::StepRecord guess_record_to_load(const ops::AttendParams& p, std::int64_t token) {
  const ops::StepRecord r = guess_record(p, token);
  return r.in_place() || r.token_of(r.position) == token ? r : ops::StepRecord{};
}

/// All that says which rows a query has.
__device__ inline bool is_same(const ops::StepRecord& a, const ops::StepRecord& b) {
  return a.row == b.row && a.length == b.length && a.count == b.count && a.first_token == b.first_token &&
         a.read_slot == b.read_slot && a.write_slot == b.write_slot && a.position == b.position;
}

}  // namespace kv4::cuda
