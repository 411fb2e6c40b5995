// How the tuned attend divides a token's work among the thread blocks of a cluster. For attend.cu, and for what
// measures it.
#pragma once

#include <cuda_runtime_api.h>

#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kMaxCluster = 16, kMostChannelParts = 4;

/// Together at most kMaxCluster. Blocks with the same rows and other channels score those rows each.
struct AttendSplit {
  int rows;      // parts
  int channels;  // parts of V's channels: 1, 2 or 4
};

AttendSplit split_of(const ops::AttendParams& params);
/// The tuned kernel only.
cudaError_t attend_split(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);

}  // namespace kv4::cuda
