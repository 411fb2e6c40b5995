// attend for any format, width, number of heads and type: everything that the tuned kernels do not support.
#pragma once

#include <cuda_runtime_api.h>

#include "kv4/params.h"

namespace kv4::cuda {

cudaError_t attend_generic(const ops::AttendParams& params, cudaStream_t stream);

}  // namespace kv4::cuda
