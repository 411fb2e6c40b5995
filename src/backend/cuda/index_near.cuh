// Near scores of fp8 keys: what their scorer (index_fp8.cu) and the selection that corrects them (topk_near.cuh) agree
// on.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// Bits of the scales that a key may have, 2^-40 to 2^30: nothing overflows, and no product of codes is a denormal.
constexpr std::uint32_t kLeastScale = (127u - 40) << 23, kMostScale = (127u + 30) << 23, kOddScale = 0xFFFFFFFFu;

/// Which of the 8 steps of a matrix product, each adding 16 channels, takes a channel.
constexpr int kMatrixSteps = 8, kStepChannels = 16;
__host__ __device__ constexpr int matrix_step(int channel) { return channel / 64 * 4 + channel % 16 / 4; }

}  // namespace kv4::cuda
