// The position from which on a request's window rows exist.
#pragma once

#include <cstdint>

#include "kv4/params.h"

namespace kv4::cuda {

/// Bypasses L1: a kernel may have read it before its grid dependency wait.
__device__ inline std::int32_t window_begin(const ops::StepDesc& step, const ops::StepRecord& record) {
  return step.window_begins == nullptr || record.padded() ? 0 : __ldcg(step.window_begins + record.row);
}

}  // namespace kv4::cuda
