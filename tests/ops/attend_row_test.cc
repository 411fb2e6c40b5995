// Attention of one head row by row, against a softmax in double; sinks, NaN, and no rows.
#include "ops/attend_row.h"

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
constexpr int kWidth = 12;

struct Output {
  std::vector<float> row;
  float lse;
};

Output attended(const std::vector<float>& q, const std::vector<std::vector<float>>& rows, const float* sink) {
  ops::Attention attention;
  Output out{std::vector<float>(q.size()), 0};
  for (const auto& row : rows)
    ops::attend_row(static_cast<int>(q.size()), q.data(), row.data(), attention, out.row.data());
  const ops::AttentionEnd end = ops::end_attention(attention, sink);
  for (float& x : out.row) x *= end.factor;
  out.lse = end.lse;
  return out;
}

void expect_softmax(const std::vector<float>& q, const std::vector<std::vector<float>>& rows, const float* sink) {
  std::vector<double> logits;
  for (const auto& row : rows) {
    double z = 0;
    for (std::size_t c = 0; c < q.size(); ++c) z += static_cast<double>(q[c]) * static_cast<double>(row[c]);
    logits.push_back(z);
  }
  double row_max = sink ? static_cast<double>(*sink) : logits[0], sum = 0;
  for (const double z : logits) row_max = std::max(row_max, z);
  std::vector<double> want(q.size());
  for (std::size_t r = 0; r < rows.size(); ++r) {
    sum += std::exp(logits[r] - row_max);
    for (std::size_t c = 0; c < q.size(); ++c) want[c] += std::exp(logits[r] - row_max) * static_cast<double>(rows[r][c]);
  }
  if (sink) sum += std::exp(static_cast<double>(*sink) - row_max);
  const Output got = attended(q, rows, sink);
  for (std::size_t c = 0; c < q.size(); ++c)
    EXPECT_NEAR(static_cast<double>(got.row[c]), want[c] / sum, 2e-5) << "seed " << kSeed << ", channel " << c;
  EXPECT_NEAR(static_cast<double>(got.lse), row_max + std::log(sum), 2e-5 * (1 + std::abs(row_max)));
}

TEST(AttendRow, IsASoftmaxOverItsRows) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  const auto row = [&](float scale) {
    std::vector<float> values(kWidth);
    for (float& x : values) x = scale * normal(random);
    return values;
  };
  for (const float scale : {0.05f, 0.5f, 4.0f}) {
    const std::vector<float> q = row(scale);
    std::vector<std::vector<float>> rows;
    for (int r = 0; r < 40; ++r) rows.push_back(row(1.0f));
    expect_softmax(q, rows, nullptr);
    for (const float sink : {-30.0f, 0.0f, 2.5f, 30.0f}) expect_softmax(q, rows, &sink);
    expect_softmax(q, {rows[0]}, nullptr);
  }
}

TEST(AttendRow, OneRowIsItself) {
  const std::vector<float> row = {1.5f, -2};
  const Output out = attended({0.5f, 0.25f}, {row}, nullptr);
  EXPECT_EQ(out.row, row);
  EXPECT_EQ(out.lse, 0.25f);  // 0.75 - 0.5
}

TEST(AttendRow, EqualLogitsShareAlike) {
  const float sink = 0;
  const Output out = attended({0, 0}, {{4, 8}, {0, 4}, {8, 0}}, &sink);  // the sink takes a fourth
  EXPECT_EQ(out.row, (std::vector<float>{3, 3}));
  EXPECT_FLOAT_EQ(out.lse, std::log(4.0f));
}

TEST(AttendRow, LogitsFarAboveLeaveNothingOfTheOthers) {
  for (const bool rising : {true, false}) {
    const std::vector<std::vector<float>> rows = rising ? std::vector<std::vector<float>>{{1, 1}, {1000, 2}}
                                                        : std::vector<std::vector<float>>{{1000, 2}, {1, 1}};
    EXPECT_EQ(attended({1, 0}, rows, nullptr).row, (std::vector<float>{1000, 2}));
  }
}

TEST(AttendRow, NoRows) {
  const Output none = attended({1, 1}, {}, nullptr);
  EXPECT_EQ(none.row, (std::vector<float>{0, 0}));
  EXPECT_EQ(none.lse, -kInf);
  const float no_sink = -kInf;
  EXPECT_EQ(attended({1, 1}, {}, &no_sink).lse, -kInf);
  EXPECT_EQ(ops::end_attention({}, &no_sink).factor, 0.0f);
  const float sink = 1.25f;
  const Output sunk = attended({1, 1}, {}, &sink);
  EXPECT_EQ(sunk.row, (std::vector<float>{0, 0}));
  EXPECT_EQ(sunk.lse, sink);
}

TEST(AttendRow, SinkOfMinusInfinityIsNone) {
  const std::vector<std::vector<float>> rows = {{1, 2}, {3, -1}};
  const float sink = -kInf;
  const Output with = attended({0.5f, 1}, rows, &sink), without = attended({0.5f, 1}, rows, nullptr);
  EXPECT_EQ(with.row, without.row);
  EXPECT_EQ(with.lse, without.lse);
}

TEST(AttendRow, NanSpoilsTheOutput) {
  const Output out = attended({1, 1}, {{1, 2}, {kNan, 0}, {2, 1}}, nullptr);
  EXPECT_TRUE(std::isnan(out.row[0]) && std::isnan(out.row[1]));
  EXPECT_TRUE(std::isnan(out.lse));
  EXPECT_TRUE(std::isnan(attended({1, 1}, {{1, 2}}, &kNan).lse));
}

TEST(AttendRow, StepScalesEitherThePastOrTheNewRow) {
  ops::Attention attention;
  ops::AttentionStep step = ops::add_logit(attention, 1.0f);
  EXPECT_EQ(step.p, 1.0f);
  EXPECT_EQ(attention.sum, 1.0f);
  step = ops::add_logit(attention, 0.0f);  // below the maximum
  EXPECT_EQ(step.rescale, 1.0f);
  EXPECT_FLOAT_EQ(step.p, std::exp(-1.0f));
  EXPECT_EQ(attention.max, 1.0f);
  step = ops::add_logit(attention, 1.0f);  // a tie
  EXPECT_EQ(step.rescale, 1.0f);
  EXPECT_EQ(step.p, 1.0f);
  step = ops::add_logit(attention, 3.0f);  // above it
  EXPECT_FLOAT_EQ(step.rescale, std::exp(-2.0f));
  EXPECT_EQ(step.p, 1.0f);
  EXPECT_EQ(attention.max, 3.0f);
}

}  // namespace
}  // namespace kv4
