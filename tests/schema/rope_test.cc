// Rotation tables against cos and sin of the angle, and YaRN's corners.
#include "schema/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "kv4/error.h"
#include "kv4/model_config.h"

namespace {

using kv4::RopeSpec;

const RopeSpec kMain{};
const RopeSpec kCompress{.theta = 160000.0, .yarn = true, .factor = 16.0};

// The spec's formula, written out again in long double.
std::vector<long double> frequencies(const RopeSpec& rope, int rope_dim) {
  std::vector<long double> out;
  const auto dim = [&](long double rotations) {
    return rope_dim *
           std::log(static_cast<long double>(rope.original_length) /
                    (rotations * 2 * std::numbers::pi_v<long double>)) /
           (2 * std::log(static_cast<long double>(rope.theta)));
  };
  const long double low = std::max(std::floor(dim(rope.beta_fast)), 0.0L);
  const long double high = std::min(std::ceil(dim(rope.beta_slow)), rope_dim - 1.0L);
  for (int i = 0; i < rope_dim / 2; ++i) {
    const long double f = std::pow(static_cast<long double>(rope.theta), -2.0L * i / rope_dim);
    const long double ramp = std::min(std::max((i - low) / (high - low), 0.0L), 1.0L);
    out.push_back(rope.yarn ? f / rope.factor * ramp + f * (1 - ramp) : f);
  }
  return out;
}

void expect_table(const RopeSpec& rope, int rope_dim, std::int64_t first, std::int64_t count, std::int64_t step) {
  const kv4::RopeTable table = kv4::build_rope_table(rope, rope_dim, first, count, step);
  const std::vector<long double> f = frequencies(rope, rope_dim);
  ASSERT_EQ(table.cos.size(), static_cast<std::size_t>(count) * f.size());
  ASSERT_EQ(table.sin.size(), table.cos.size());
  for (std::int64_t i = 0; i < count; ++i)
    for (std::size_t p = 0; p < f.size(); ++p) {
      const long double angle = static_cast<long double>(first + i * step) * f[p];
      const std::size_t at = static_cast<std::size_t>(i) * f.size() + p;
      // Half an fp32 ulp at 1, plus the error of double for an angle of 10^6.
      ASSERT_NEAR(static_cast<double>(table.cos[at]), static_cast<double>(std::cos(angle)), 0x1p-25 + 1e-9)
          << "position " << first + i * step << " pair " << p;
      ASSERT_NEAR(static_cast<double>(table.sin[at]), static_cast<double>(std::sin(angle)), 0x1p-25 + 1e-9)
          << "position " << first + i * step << " pair " << p;
    }
}

TEST(RopeTable, NearPositions) {
  expect_table(kMain, 64, 0, 600, 1);
  expect_table(kCompress, 64, 0, 600, 1);
  expect_table(kCompress, 8, 0, 100, 1);
}

TEST(RopeTable, AroundTheTablesSeams) {
  for (std::int64_t seam : {1024, 2048, 65536}) expect_table(kCompress, 64, seam - 3, 6, 1);
}

TEST(RopeTable, FarPositions) {
  for (const RopeSpec& rope : {kMain, kCompress}) {
    expect_table(rope, 64, 4096, 16, 65521);
    expect_table(rope, 64, 1'048'575 - 3, 4, 1);
    expect_table(rope, 64, 262'144, 2, 128);
  }
}

TEST(RopeTable, PositionZeroIsExact) {
  const kv4::RopeTable table = kv4::build_rope_table(kCompress, 64, 0, 1);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(table.cos[static_cast<std::size_t>(i)], 1.0f);
    EXPECT_EQ(table.sin[static_cast<std::size_t>(i)], 0.0f);
  }
}

TEST(RopeTable, APositionIsTheSameBitsInAnyTable) {
  const kv4::RopeTable whole = kv4::build_rope_table(kCompress, 64, 0, 3000);
  const kv4::RopeTable part = kv4::build_rope_table(kCompress, 64, 1000, 20, 100);
  const std::vector<double> angles = kv4::build_rope_angles(kCompress, 64, 100'000);
  const kv4::RopeAngles view = kv4::view_rope_angles(angles.data(), 64, 100'000);
  EXPECT_EQ(angles.size(), static_cast<std::size_t>(kv4::rope_angle_count(64, 100'000)));
  for (std::int64_t i = 0; i < 20; ++i)
    for (int p = 0; p < 32; ++p) {
      const std::size_t here = static_cast<std::size_t>(i * 32 + p),
                        there = static_cast<std::size_t>((1000 + i * 100) * 32 + p);
      float c = 0, s = 0;
      kv4::rope_angle(view, 1000 + i * 100, p, &c, &s);
      ASSERT_EQ(part.cos[here], whole.cos[there]);
      ASSERT_EQ(part.sin[here], whole.sin[there]);
      ASSERT_EQ(part.cos[here], c);
      ASSERT_EQ(part.sin[here], s);
    }
}

TEST(RopeFrequencies, YarnRampRunsFrom15To25) {
  const std::vector<double> plain = kv4::rope_frequencies({.theta = 160000.0}, 64),
                            yarn = kv4::rope_frequencies(kCompress, 64);
  ASSERT_EQ(yarn.size(), 32u);
  for (int i = 0; i < 32; ++i) {
    const double ratio = yarn[static_cast<std::size_t>(i)] / plain[static_cast<std::size_t>(i)];
    const double ramp = i <= 15 ? 0.0 : i >= 25 ? 1.0 : (i - 15) / 10.0;
    EXPECT_NEAR(ratio, 1.0 - ramp + ramp / 16.0, 1e-12) << i;
  }
  EXPECT_EQ(plain[0], 1.0);
  EXPECT_NEAR(kv4::rope_frequencies(kMain, 64)[16], 0.01, 1e-15);
}

TEST(RopeFrequencies, RampOfZeroWidthIsAStep) {
  RopeSpec rope = kCompress;
  rope.beta_fast = rope.beta_slow = 65536.0 / (2 * std::numbers::pi);  // dim = 0 for both
  for (double f : kv4::rope_frequencies(rope, 64)) EXPECT_TRUE(std::isfinite(f) && f > 0.0);
}

TEST(RopeTable, RefusesBadRanges) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(kv4::build_rope_table(kMain, 0, 0, 1), kv4::Error);
  EXPECT_THROW(kv4::build_rope_table(kMain, 7, 0, 1), kv4::Error);
  EXPECT_THROW(kv4::build_rope_table(kMain, 64, -1, 1), kv4::Error);
  EXPECT_THROW(kv4::build_rope_table(kMain, 64, 0, -1), kv4::Error);
  EXPECT_THROW(kv4::build_rope_table(kMain, 64, 0, 1, 0), kv4::Error);
  EXPECT_THROW(kv4::build_rope_table(kMain, 64, kHuge, 2, 1), kv4::Error);
  EXPECT_THROW(kv4::build_rope_table(kMain, 64, 0, kHuge, kHuge), kv4::Error);
  EXPECT_TRUE(kv4::build_rope_table(kMain, 64, 5, 0).cos.empty());
}

}  // namespace
