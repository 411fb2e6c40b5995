// What attend's kernels do before the kernel before them has ended: bring into L2 what the token's record, as it is
// then, points at. Nothing else may depend on it.
#pragma once

#include <cstdint>

#include "backend/cuda/source_rows.cuh"
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

}  // namespace kv4::cuda
