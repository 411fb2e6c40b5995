// append for any sizes and alignments: what the tuned kernel does not take.
#pragma once

#include <cuda_runtime_api.h>

#include "kv4/params.h"

namespace kv4::cuda {

/// The same bytes as `append`, in one launch.
cudaError_t append_plain(const ops::AppendParams& params, cudaStream_t stream);

}  // namespace kv4::cuda
