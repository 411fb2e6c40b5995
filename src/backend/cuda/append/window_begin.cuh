// Where a request's window rows begin to exist.
#pragma once

#include <cstdint>

#include "kv4/params.h"

namespace kv4::cuda {

/// Past the first level of caches: a kernel may have looked at it before its wait.
__device__ inline std::int32_t window_begin(const ops::StepDesc& step, const ops::StepRecord& record) {
  return step.window_begins == nullptr || record.padded() ? 0 : __ldcg(step.window_begins + record.row);
}

}  // namespace kv4::cuda
