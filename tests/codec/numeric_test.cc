// Scalar encoders and functions whose bits matter, against a search in double (naive_formats.h) and std::exp.
#include "codec/numeric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "codec/naive_formats.h"

namespace {

namespace codec = kv4::codec;
namespace naive = kv4::naive;
using naive::bits_of;
using naive::float_of;

constexpr std::uint32_t kSeed = 20260801;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Floats to test besides the random ones: around every boundary between two codes, and at the ends of the range.
std::vector<float> special_floats() {
  std::vector<float> out = {
      0.0f,   -0.0f,  kInfinity, -kInfinity, 0x1p-149f, -0x1p-149f, 0x1p-126f, 0x1.fffffep127f, -0x1.fffffep127f,
      448.0f, 464.0f, 480.0f,    6.0f,       7.0f};
  std::vector<double> values;
  for (int code = 0; code < 127; ++code) values.push_back(naive::e4m3_value(code));
  for (int code = 0; code < 8; ++code) values.push_back(naive::e2m1_value(code));
  std::sort(values.begin(), values.end());
  for (std::size_t i = 0; i + 1 < values.size(); ++i)
    for (double x : {values[i], (values[i] + values[i + 1]) / 2}) {
      const float f = static_cast<float>(x);
      for (float y : {f, std::nextafter(f, kInfinity), std::nextafter(f, -kInfinity)}) {
        out.push_back(y);
        out.push_back(-y);
      }
    }
  return out;
}

void expect_all_encoders(float x) {
  ASSERT_EQ(codec::e4m3_bits(x), naive::e4m3_bits(x)) << std::hexfloat << x;
  ASSERT_EQ(codec::e2m1_bits(x), naive::e2m1_bits(x)) << std::hexfloat << x;
  ASSERT_EQ(codec::bf16_bits(x), naive::bf16_bits(x)) << std::hexfloat << x;
}

TEST(CodecScalar, EveryBf16Input) {
  for (std::uint32_t b = 0; b < 65536; ++b) {
    const float x = float_of(b << 16);
    expect_all_encoders(x);
    if (std::isnan(x)) continue;
    ASSERT_EQ(codec::bf16_bits(x), b);
  }
}

TEST(CodecScalar, RandomAndSpecialFloats) {
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  for (float x : special_floats()) expect_all_encoders(x);
  std::mt19937 random(kSeed);
  for (int i = 0; i < 1'000'000; ++i) expect_all_encoders(float_of(static_cast<std::uint32_t>(random())));
  std::uniform_real_distribution<float> near(-8.0f, 8.0f), far(-500.0f, 500.0f);
  for (int i = 0; i < 1'000'000; ++i) expect_all_encoders(i % 2 == 0 ? near(random) : far(random));
}

TEST(CodecScalar, Bf16TiesOfEveryUpperHalf) {
  for (std::uint32_t high = 0; high < 65536; ++high)
    for (std::uint32_t low : {0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const float x = float_of(high << 16 | low);
      ASSERT_EQ(codec::bf16_bits(x), naive::bf16_bits(x)) << std::hex << (high << 16 | low);
    }
}

TEST(CodecScalar, DecodersListEveryCode) {
  for (int b = 0; b < 256; ++b) {
    const float x = codec::e4m3_value(static_cast<std::uint8_t>(b));
    if ((b & 127) == 127) {
      EXPECT_EQ(bits_of(x), 0x7FC00000u) << b;
      continue;
    }
    EXPECT_EQ(bits_of(x), bits_of(static_cast<float>(naive::e4m3_value(b)))) << b;
    EXPECT_EQ(codec::e4m3_bits(x), b);
  }
  EXPECT_EQ(codec::e4m3_value(0x7E), 448.0f);
  EXPECT_EQ(codec::e4m3_value(0x01), 0x1p-9f);
  for (int b = 0; b < 16; ++b) {
    const float x = codec::e2m1_value(static_cast<std::uint8_t>(b));
    EXPECT_EQ(bits_of(x), bits_of(static_cast<float>(naive::e2m1_value(b)))) << b;
    EXPECT_EQ(codec::e2m1_bits(x), b);
  }
  for (int b = 0; b < 65536; ++b) {
    const float x = codec::bf16_value(static_cast<std::uint16_t>(b));
    if (std::isnan(x)) continue;
    ASSERT_EQ(bits_of(x), bits_of(static_cast<float>(naive::bf16_value(b)))) << b;
  }
  for (int b = 0; b < 255; ++b)
    EXPECT_EQ(codec::ue8m0_value(static_cast<std::uint8_t>(b)), static_cast<float>(naive::ue8m0_value(b))) << b;
}

TEST(CodecScalar, NanOfAnyPatternIsStoredAsOne) {
  for (std::uint32_t bits :
       {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7FA00000u}) {
    const float x = float_of(bits);
    EXPECT_EQ(codec::bf16_bits(x), 0x7FC0) << std::hex << bits;
    EXPECT_EQ(codec::e4m3_bits(x), 0x7F) << std::hex << bits;
    EXPECT_EQ(codec::e2m1_bits(x), 0x7) << std::hex << bits;
    EXPECT_EQ(bits_of(codec::canonical_nan(x)), 0x7FC00000u);
  }
  EXPECT_EQ(bits_of(codec::canonical_nan(-0.0f)), 0x80000000u);
  EXPECT_EQ(codec::canonical_nan(-kInfinity), -kInfinity);
}

TEST(CodecScalar, InfinityClampsWhereThereIsNone) {
  EXPECT_EQ(codec::e4m3_bits(kInfinity), 0x7E);
  EXPECT_EQ(codec::e4m3_bits(-kInfinity), 0xFE);
  EXPECT_EQ(codec::e4m3_bits(464.1f), 0x7E);  // would round to NaN's code
  EXPECT_EQ(codec::e2m1_bits(kInfinity), 0x7);
  EXPECT_EQ(codec::e2m1_bits(-kInfinity), 0xF);
  EXPECT_EQ(codec::bf16_bits(kInfinity), 0x7F80);
  EXPECT_EQ(codec::bf16_bits(-kInfinity), 0xFF80);
  EXPECT_EQ(codec::bf16_bits(0x1.fffffep127f), 0x7F80);
}

TEST(CodecScalar, SignOfZeroAndDenormalsAreKept) {
  EXPECT_EQ(codec::bf16_bits(-0.0f), 0x8000);
  EXPECT_EQ(codec::e4m3_bits(-0.0f), 0x80);
  EXPECT_EQ(codec::e2m1_bits(-0.0f), 0x8);
  EXPECT_EQ(codec::e4m3_bits(-0x1p-149f), 0x80);
  EXPECT_EQ(codec::bf16_bits(0x1p-133f), 0x0001);
  EXPECT_EQ(codec::bf16_bits(0x1p-134f), 0x0000);  // half of the smallest: to even
  EXPECT_EQ(codec::bf16_bits(0x1.8p-134f), 0x0001);
  EXPECT_EQ(codec::bf16_value(0x0001), 0x1p-133f);
}

TEST(CodecPow2, CeilExponentByTheBits) {
  for (int e = -126; e <= 127; ++e) {
    const float p = codec::pow2(e);
    EXPECT_EQ(p, std::ldexp(1.0f, e));
    EXPECT_EQ(codec::pow2_ceil_exponent(p), e);
    if (e < 127) {
      EXPECT_EQ(codec::pow2_ceil_exponent(std::nextafter(p, kInfinity)), e + 1);
    }
    if (e > -126) {
      EXPECT_EQ(codec::pow2_ceil_exponent(std::nextafter(p, 0.0f)), e);
    }
  }
  EXPECT_EQ(codec::pow2(-127), 0x1p-127f);
  std::mt19937 random(kSeed);
  for (int i = 0; i < 200'000; ++i) {
    const float x = float_of(0x00800000u + static_cast<std::uint32_t>(random()) % 0x7F000000u);
    ASSERT_EQ(codec::pow2_ceil_exponent(x), naive::pow2_ceil_exponent(x)) << std::hexfloat << x << " seed " << kSeed;
  }
}

TEST(CodecPow2, LargestMagnitudePassesNanAndBoundsInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(codec::larger_magnitude(1.0f, -3.0f), 3.0f);
  EXPECT_EQ(codec::larger_magnitude(3.0f, -1.0f), 3.0f);
  EXPECT_EQ(codec::larger_magnitude(2.0f, nan), 2.0f);
  EXPECT_EQ(codec::larger_magnitude(0.0f, -kInfinity), codec::bf16_value(0x7F7F));
  EXPECT_EQ(codec::larger_magnitude(0.0f, 0x1p-149f), 0x1p-149f);
}

// --- exp

// Rounding of x log2(e) grows with x; the polynomial's part does not.
double exp_bound(double x) { return 1.7e-7 + 2.2e-8 * std::fabs(x); }

TEST(CodecExp, CloseToStdExpInDouble) {
  double worst_ulp = 0;
  float previous = 0.0f;
  // Every 977th float of [-86, -0], from the lowest up: bit patterns of negative floats fall as the value rises.
  for (std::uint32_t b = bits_of(codec::kExpFloor); b >= 0x80000000u + 977; b -= 977) {
    const float x = float_of(b);
    const float y = codec::exp_nonpositive(x);
    const double want = std::exp(static_cast<double>(x));
    ASSERT_LE(std::fabs(y - want), want * exp_bound(x)) << std::hexfloat << x;
    worst_ulp = std::max(worst_ulp, std::fabs(y - want) / std::ldexp(1.0, std::ilogb(want) - 23));
    ASSERT_GE(y, previous) << std::hexfloat << x;
    ASSERT_LE(y, 1.0f) << std::hexfloat << x;
    previous = y;
  }
  EXPECT_LE(worst_ulp, 20.0) << "at the far end, where a weight is nothing beside 1";
}

TEST(CodecExp, Ends) {
  EXPECT_EQ(bits_of(codec::exp_nonpositive(0.0f)), bits_of(1.0f));
  EXPECT_EQ(bits_of(codec::exp_nonpositive(-0.0f)), bits_of(1.0f));
  EXPECT_EQ(codec::exp_nonpositive(-0x1p-149f), 1.0f);
  const float least = codec::exp_nonpositive(codec::kExpFloor);
  EXPECT_GE(least, 0x1p-126f) << "no denormals";
  EXPECT_LE(least, 1e-36f);
  for (float x : {std::nextafter(codec::kExpFloor, -kInfinity), -88.0f, -1e4f, -3.4e38f, -kInfinity})
    EXPECT_EQ(bits_of(codec::exp_nonpositive(x)), bits_of(least)) << x;
  EXPECT_TRUE(std::isnan(codec::exp_nonpositive(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
