// append for all sizes and alignments that the tuned kernel does not support.
#pragma once

#include <cuda_runtime_api.h>

#include "kv4/params.h"

namespace kv4::cuda {

/// The same bytes as `append`, in one launch.
cudaError_t append_generic(const ops::AppendParams& params, cudaStream_t stream);

}  // namespace kv4::cuda
