// Rotation angles, the same bits on every backend: cos and sin of position * frequency from two small double tables
// (RopeAngles), added in double with explicit operations, rounded to fp32 once. 1M positions cost 1 MiB instead of 256.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kv4/model_config.h"
#include "kv4/params.h"

namespace kv4 {

/// [rope_dim / 2] frequencies, YaRN applied.
std::vector<double> rope_frequencies(const RopeSpec& rope, int rope_dim);

KV4_HD void rope_angle(const RopeAngles& table, std::int64_t position, int pair, float* cos_out, float* sin_out) {
  const double* a = table.high + 2 * ((position >> RopeAngles::kLowBits) * table.pairs + pair);
  const double* b = table.low + 2 * ((position & ((1 << RopeAngles::kLowBits) - 1)) * table.pairs + pair);
#if defined(__CUDA_ARCH__)
  *cos_out = static_cast<float>(__fma_rn(a[0], b[0], -__dmul_rn(a[1], b[1])));
  *sin_out = static_cast<float>(__fma_rn(a[1], b[0], __dmul_rn(a[0], b[1])));
#else
  *cos_out = static_cast<float>(std::fma(a[0], b[0], -(a[1] * b[1])));
  *sin_out = static_cast<float>(std::fma(a[1], b[0], a[0] * b[1]));
#endif
}

/// The tables that RopeAngles views: [high | low].
std::vector<double> build_rope_angles(const RopeSpec& rope, int rope_dim, std::int64_t positions);
std::int64_t rope_angle_count(int rope_dim, std::int64_t positions);  // doubles
RopeAngles view_rope_angles(const double* table, int rope_dim, std::int64_t positions);

}  // namespace kv4
