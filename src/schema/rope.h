// Rotation angles, the same bits on every backend: cos and sin of position * frequency through two small double tables,
//   position = 1024 * high + low,   cos(a + b) = cos a cos b - sin a sin b,   sin(a + b) = sin a cos b + cos a sin b,
// in double with explicit operations, rounded to fp32 once. 1M positions cost 1 MiB instead of 256.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/host_device.h"
#include "kv4/model_config.h"

namespace kv4 {

/// [rope_dim / 2] frequencies, YaRN applied.
std::vector<double> rope_frequencies(const RopeSpec& rope, int rope_dim);

/// View of both tables: cos and sin interleaved, [count, pairs, 2] doubles.
struct RopeAngles {
  static constexpr int kLowBits = 10;
  const double* high = nullptr;  // [ceil(positions / 1024), pairs, 2]
  const double* low = nullptr;   // [1024, pairs, 2]
  std::int32_t pairs = 0;

  KV4_HD void at(std::int64_t position, int pair, float* cos_out, float* sin_out) const {
    const double* a = high + 2 * ((position >> kLowBits) * pairs + pair);
    const double* b = low + 2 * ((position & ((1 << kLowBits) - 1)) * pairs + pair);
#if defined(__CUDA_ARCH__)
    *cos_out = static_cast<float>(__fma_rn(a[0], b[0], -__dmul_rn(a[1], b[1])));
    *sin_out = static_cast<float>(__fma_rn(a[1], b[0], __dmul_rn(a[0], b[1])));
#else
    *cos_out = static_cast<float>(std::fma(a[0], b[0], -(a[1] * b[1])));
    *sin_out = static_cast<float>(std::fma(a[1], b[0], a[0] * b[1]));
#endif
  }
};

/// Owns what RopeAngles views: [high | low].
std::vector<double> build_rope_angles(const RopeSpec& rope, int rope_dim, std::int64_t positions);
std::int64_t rope_angle_count(int rope_dim, std::int64_t positions);  // doubles
RopeAngles view_rope_angles(const double* table, int rope_dim, std::int64_t positions);

}  // namespace kv4
