// Attention over foreign lists by a tuned kernel: what runs before it, and after.
#pragma once

#include <cuda_runtime_api.h>

#include "kv4/params.h"

namespace kv4::cuda {

/// A problem with foreign lists, or with an lse that leaves the sink out, as a tuned kernel may take it.
struct ForeignAttend {
  ops::AttendParams plain;   // dense lists and an lse in the list workspace, no sink
  bool is_possible = false;  // false: `plain` is the problem as it was given
};

/// Host code that calls no CUDA function and reads no memory that the params point to.
ForeignAttend plan_foreign(const ops::AttendParams& params);
/// Writes the lists that `plain` names.
cudaError_t before_foreign(const ops::AttendParams& params, cudaStream_t stream);
/// Applies the sink to the output, and writes the lse that `params` asks for.
cudaError_t after_foreign(const ops::AttendParams& params, const ops::AttendParams& plain, cudaStream_t stream);

}  // namespace kv4::cuda
