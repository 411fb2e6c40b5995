#include "schema/rope.h"

#include <algorithm>
#include <numbers>

#include "base/check.h"

namespace kv4 {
namespace {

constexpr std::int64_t kLowCount = std::int64_t{1} << RopeAngles::kLowBits;

void fill_angles(const std::vector<double>& frequencies, std::int64_t count, std::int64_t step, double* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (double f : frequencies) {
      const double angle = static_cast<double>(i * step) * f;
      *out++ = std::cos(angle);
      *out++ = std::sin(angle);
    }
  }
}

std::int64_t high_count(std::int64_t positions) { return ceil_div(positions, kLowCount); }

}  // namespace

std::vector<double> rope_frequencies(const RopeSpec& rope, int rope_dim) {
  const int pairs = rope_dim / 2;
  std::vector<double> out(pairs);
  const auto correction_dim = [&](double rotations) {
    return rope_dim * std::log(rope.original_length / (rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(rope.theta));
  };
  double low = 0.0, high = 1.0;
  if (rope.yarn) {
    low = std::max(std::floor(correction_dim(rope.beta_fast)), 0.0);
    high = std::min(std::ceil(correction_dim(rope.beta_slow)), rope_dim - 1.0);
    if (low == high) high += 0.001;  // a step instead of a division by zero
  }
  for (int i = 0; i < pairs; ++i) {
    double f = std::pow(rope.theta, -2.0 * i / rope_dim);
    if (rope.yarn) {
      const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
      f = f / rope.factor * ramp + f * (1.0 - ramp);
    }
    out[i] = f;
  }
  return out;
}

std::int64_t rope_angle_count(int rope_dim, std::int64_t positions) {
  return (high_count(positions) + kLowCount) * rope_dim;
}

std::vector<double> build_rope_angles(const RopeSpec& rope, int rope_dim, std::int64_t positions) {
  const std::vector<double> frequencies = rope_frequencies(rope, rope_dim);
  std::vector<double> table(rope_angle_count(rope_dim, positions));
  fill_angles(frequencies, high_count(positions), kLowCount, table.data());
  fill_angles(frequencies, kLowCount, 1, table.data() + high_count(positions) * rope_dim);
  return table;
}

RopeAngles view_rope_angles(const double* table, int rope_dim, std::int64_t positions) {
  return {table, table + high_count(positions) * rope_dim, rope_dim / 2};
}

RopeTable build_rope_table(const RopeSpec& rope, int rope_dim, std::int64_t first, std::int64_t count,
                           std::int64_t step) {
  constexpr std::int64_t kMaxPosition = std::int64_t{1} << 30;
  require(rope_dim >= 2 && rope_dim % 2 == 0, ErrorCode::bad_argument, "rope_dim is {}; it must be even and at least 2",
          rope_dim);
  require(first >= 0 && count >= 0 && step >= 1 && first <= kMaxPosition && count <= kMaxPosition &&
              step <= kMaxPosition && first + (count > 0 ? (count - 1) * step : 0) <= kMaxPosition,
          ErrorCode::bad_argument, "rope positions {} + {} x {} must lie from 0 to {}", first, count, step,
          kMaxPosition);
  const std::int64_t end = count == 0 ? 1 : first + (count - 1) * step + 1;
  const std::vector<double> table = build_rope_angles(rope, rope_dim, end);
  const RopeAngles angles = view_rope_angles(table.data(), rope_dim, end);
  const int pairs = rope_dim / 2;
  RopeTable out;
  out.cos.resize(count * pairs);
  out.sin.resize(out.cos.size());
  for (std::int64_t i = 0; i < count; ++i)
    for (int p = 0; p < pairs; ++p) {
      const std::size_t at = i * pairs + p;
      rope_angle(angles, first + i * step, p, &out.cos[at], &out.sin[at]);
    }
  return out;
}

}  // namespace kv4
