// attend for any format, width, number of heads and type: what the tuned kernel does not take.
#pragma once

#include <cuda_runtime_api.h>

#include "kv4/params.h"

namespace kv4::cuda {

cudaError_t attend_plain(const ops::AttendParams& params, cudaStream_t stream);

}  // namespace kv4::cuda
