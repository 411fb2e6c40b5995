// Index scores: exact group sums, the order of sums, and the order of scores.
#include "ops/score_row.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace kv4 {
namespace {

constexpr std::uint32_t kSeed = 20261118;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kValues[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};  // of e2m1 codes

TEST(ScoreRow, DoubledCodes) {
  for (std::uint32_t code = 0; code < 16; ++code) {
    EXPECT_EQ(ops::e2m1_double(code), 2 * kValues[code]) << code;
    EXPECT_EQ(ops::e2m1_double(code | 0xF0u), 2 * kValues[code]) << code;  // the other element of the byte
  }
}

TEST(ScoreRow, GroupSumTakesBothNibbles) {
  const std::uint8_t a[2] = {0x72, 0x1F}, b[2] = {0xF4, 0x07};  // {1, 6, -6, .5} and {2, -6, 6, 0}
  EXPECT_EQ(ops::group_sum(a, b, 4), 4 * (1 * 2 + 6 * -6 + -6 * 6 + 0));
  EXPECT_EQ(ops::group_sum(a, b, 2), 4 * (1 * 2 + 6 * -6));
  const std::vector<std::uint8_t> most(16, 0x77);
  EXPECT_EQ(ops::group_sum(most.data(), most.data(), 32), 32 * 144);
}

TEST(ScoreRow, DotOfMxfp4RowsIsTheSumOfTheirValues) {
  std::mt19937 random(kSeed);
  for (int round = 0; round < 100; ++round) {
    std::uint8_t q[64], k[64], q_scale[4], k_scale[4];
    for (int i = 0; i < 64; ++i) {
      q[i] = static_cast<std::uint8_t>(random());
      k[i] = static_cast<std::uint8_t>(random());
    }
    for (int g = 0; g < 4; ++g) {  // 2^-3 .. 2^4: a sum of four groups is exact in fp32
      q_scale[g] = static_cast<std::uint8_t>(126 + random() % 3);
      k_scale[g] = static_cast<std::uint8_t>(126 + random() % 3);
    }
    double want = 0;
    for (int c = 0; c < 128; ++c) {
      const int shift = c % 2 * 4;
      want += kValues[q[c / 2] >> shift & 15] * std::exp2(q_scale[c / 32] - 127) * kValues[k[c / 2] >> shift & 15] *
              std::exp2(k_scale[c / 32] - 127);
    }
    EXPECT_EQ(static_cast<double>(ops::mxfp4_dot(128, q, q_scale, k, k_scale)), want) << "round " << round;
  }
}

TEST(ScoreRow, DotIsFusedAndInOrder) {
  const float x = 1.0f + 0x1p-12f;
  const float q[2] = {-(1.0f + 0x1p-11f), x}, k[2] = {1.0f, x};
  EXPECT_EQ(ops::row_dot(2, q, k), 0x1p-24f);  // 0 if the square were rounded first
  const float ordered[3] = {0x1p24f, 1, 1}, ones[3] = {1, 1, 1};
  EXPECT_EQ(ops::row_dot(3, ordered, ones), 0x1p24f);
  EXPECT_EQ(ops::row_dot(0, q, k), 0.0f);
}

TEST(ScoreRow, ReluOfNanIsZero) {
  EXPECT_EQ(ops::relu(kNan), 0.0f);
  EXPECT_EQ(ops::relu(-1.0f), 0.0f);
  EXPECT_EQ(ops::relu(2.0f), 2.0f);
}

TEST(ScoreRow, ChainsOfSixteenHeadsAreAddedByPairs) {
  ops::ScoreSum chains;
  chains.add(0, 1.0f, 0x1p24f);
  chains.add(32, 1.0f, 1.0f);
  chains.add(63, 1.0f, 1.0f);
  EXPECT_EQ(chains.total(), 0x1p24f + 2.0f);  // one after the other: 2^24

  ops::ScoreSum one;
  one.add(0, 1.0f, 0x1p24f);
  one.add(1, 1.0f, 1.0f);
  one.add(15, 1.0f, 1.0f);
  EXPECT_EQ(one.total(), 0x1p24f);  // in order within a chain
}

TEST(ScoreRow, WeightsMayBeNegativeAndDotsMayNot) {
  ops::ScoreSum sum;
  EXPECT_EQ(sum.total(), 0.0f);
  sum.add(3, -2.0f, 3.0f);
  sum.add(20, 5.0f, -7.0f);
  sum.add(40, 1.0f, kNan);
  EXPECT_EQ(sum.total(), -6.0f);
  sum.add(41, kNan, 1.0f);
  EXPECT_TRUE(std::isnan(sum.total()));
}

TEST(ScoreRow, OrderOfScores) {
  const float ascending[] = {-kInf, -3e38f, -1.0f, -0x1p-149f, 0.0f, 0x1p-149f, 1.0f, 1.0f + 0x1p-23f, 3e38f, kInf};
  EXPECT_EQ(ops::score_order(kNan), 0u);
  EXPECT_EQ(ops::score_order(-kNan), 0u);
  EXPECT_EQ(ops::score_order(-0.0f), ops::score_order(0.0f));
  std::uint32_t before = ops::score_order(kNan);
  for (const float score : ascending) {
    EXPECT_GT(ops::score_order(score), before) << score;
    before = ops::score_order(score);
  }
}

}  // namespace
}  // namespace kv4
