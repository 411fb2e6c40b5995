// Pooling, norm, rotation and transform of compressor rows, against hand-computed values and sums in double.
#include "ops/compress_row.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/group.h"

namespace kv4 {
namespace {

constexpr std::uint32_t kSeed = 20261118;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Rows of a window: kv and gate as fp32, one bias for all of them.
struct Window {
  int width;
  std::vector<std::vector<float>> kv, gate;
  std::vector<float> bias;

  std::vector<ops::SourceRow> rows(ops::RowType type = ops::RowType::f32) const {
    std::vector<ops::SourceRow> out;
    for (std::size_t r = 0; r < kv.size(); ++r)
      out.push_back({kv[r].data(), gate[r].data(), bias.data(), type, {nullptr, nullptr}});
    return out;
  }
};

Window random_window(int width, int count, float gate_scale) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  Window out{width, {}, {}, {}};
  const auto row = [&](float scale) {
    std::vector<float> values(static_cast<std::size_t>(width));
    for (float& x : values) x = scale * normal(random);
    return values;
  };
  for (int r = 0; r < count; ++r) {
    out.kv.push_back(row(1.0f));
    out.gate.push_back(row(gate_scale));
  }
  out.bias = row(0.5f);
  return out;
}

/// The softmax-weighted mean of a channel.
double mean_of(const Window& window, std::size_t c) {
  double most = -std::numeric_limits<double>::infinity(), den = 0, num = 0;
  const auto gate = [&](std::size_t r) { return static_cast<double>(window.gate[r][c] + window.bias[c]); };
  for (std::size_t r = 0; r < window.kv.size(); ++r) most = std::max(most, gate(r));
  for (std::size_t r = 0; r < window.kv.size(); ++r) {
    const double p = std::exp(gate(r) - most);
    den += p;
    num += p * static_cast<double>(window.kv[r][c]);
  }
  return num / den;
}

std::vector<float> folded(const Window& window, int count, ops::RowType type = ops::RowType::f32) {
  std::vector<float> acc(static_cast<std::size_t>(3 * window.width), kNan);  // old contents do not count
  const std::vector<ops::SourceRow> rows = window.rows(type);
  ops::fold_rows(OneLane{}, window.width, rows.data(), count, true, acc.data());
  return acc;
}

TEST(CompressRow, FoldIsTheSoftmaxMean) {
  for (const float gate_scale : {0.1f, 1.0f, 20.0f}) {
    const Window window = random_window(24, 8, gate_scale);
    const std::vector<float> acc = folded(window, 8);
    for (std::size_t c = 0; c < 24; ++c)
      EXPECT_NEAR(static_cast<double>(acc[48 + c] / acc[24 + c]), mean_of(window, c), 1e-5)
          << "seed " << kSeed << ", channel " << c;
  }
}

TEST(CompressRow, FoldInPartsHasTheBitsOfOneFold) {
  const Window window = random_window(10, 8, 3.0f);
  const std::vector<ops::SourceRow> rows = window.rows();
  const std::vector<float> whole = folded(window, 8);
  for (int first = 1; first < 8; ++first) {
    std::vector<float> acc = folded(window, first);
    ops::fold_rows(OneLane{}, 10, rows.data() + first, 8 - first, false, acc.data());
    EXPECT_EQ(acc, whole) << "after " << first;
  }
}

TEST(CompressRow, PoolOfNoRowsIsEmpty) {
  const std::vector<float> acc = folded(random_window(2, 1, 1.0f), 0);
  EXPECT_EQ(acc, (std::vector<float>{ops::kLowestGate, ops::kLowestGate, 0, 0, 0, 0}));
}

TEST(CompressRow, NanGateSpoilsTheMeanAndNotTheMaximum) {
  Window window{2, {{1, 1}, {2, 2}, {3, 3}}, {{0, 0}, {kNan, 0}, {1, 1}}, {0, 0}};
  std::vector<float> acc = folded(window, 3);
  EXPECT_EQ(acc[0], 1.0f);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(acc[2]), codec::kNanBits);  // one pattern
  EXPECT_EQ(std::bit_cast<std::uint32_t>(acc[4]), codec::kNanBits);
  EXPECT_FALSE(std::isnan(acc[3]));
  EXPECT_FALSE(std::isnan(acc[5]));

  const std::vector<ops::SourceRow> rows = window.rows();
  ops::pool_rows(
      OneLane{}, 2, 3, [&](int i) -> const ops::SourceRow& { return rows[static_cast<std::size_t>(i)]; }, acc.data());
  EXPECT_EQ(std::bit_cast<std::uint32_t>(acc[2]), codec::kNanBits);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(acc[4]), codec::kNanBits);
  EXPECT_FALSE(std::isnan(acc[3]));
}

TEST(CompressRow, GatesOfMinusInfinityCountAlike) {
  const Window window{1, {{1}, {3}}, {{-kInf}, {-kInf}}, {0}};
  const std::vector<float> acc = folded(window, 2);
  EXPECT_GT(acc[1], 0.0f);
  EXPECT_EQ(acc[2] / acc[1], 2.0f);

  const Window beside{1, {{1}, {3}}, {{-kInf}, {0}}, {0}};  // ... and nothing beside a finite one
  const std::vector<float> other = folded(beside, 2);
  EXPECT_EQ(other[2] / other[1], 3.0f);
}

TEST(CompressRow, PoolOfAllRowsAtHandIsTheSoftmaxMean) {
  const Window window = random_window(16, 8, 4.0f);
  const std::vector<ops::SourceRow> rows = window.rows();
  std::vector<float> acc(48);
  ops::pool_rows(
      OneLane{}, 16, 8, [&](int i) -> const ops::SourceRow& { return rows[static_cast<std::size_t>(i)]; }, acc.data());
  for (std::size_t c = 0; c < 16; ++c)
    EXPECT_NEAR(static_cast<double>(acc[32 + c] / acc[16 + c]), mean_of(window, c), 1e-5) << "channel " << c;
}

TEST(CompressRow, ElementsAreReadByType) {
  const float x[2] = {0.0f, 1.0f + 0x1p-8f + 0x1p-20f};  // above the tie of two bf16 numbers
  const std::uint16_t y[2] = {0, 0xC020};                // -2.5
  EXPECT_EQ(ops::load_element(x, ops::RowType::f32, 1), x[1]);
  EXPECT_EQ(ops::load_element(x, ops::RowType::f32_as_bf16, 1), 1.0f + 0x1p-7f);
  EXPECT_EQ(ops::load_element(y, ops::RowType::bf16, 1), -2.5f);
}

TEST(CompressRow, SquaresAreAddedByPairs) {
  float tmp[4];
  const float ordered[4] = {4096, 0, 1, 1};  // summed in order: 2^24
  EXPECT_EQ(ops::square_sum(OneLane{}, ordered, 4, tmp), 16777218.0f);
  const float three[3] = {3, 4, 12};  // a missing one is 0
  EXPECT_EQ(ops::square_sum(OneLane{}, three, 3, tmp), 169.0f);
  const float one[1] = {-5};
  EXPECT_EQ(ops::square_sum(OneLane{}, one, 1, tmp), 25.0f);
}

TEST(CompressRow, NormFactor) {
  EXPECT_EQ(ops::norm_factor(64.0f, 4, 0.0f), 0.25f);
  EXPECT_EQ(ops::norm_factor(0.0f, 4, 0.0625f), 4.0f);  // eps stands inside the root
}

TEST(CompressRow, MeanIsRoundedToBf16) {
  const float acc[6] = {0, 0, 2, kNan, 2.0f + 0x1p-7f + 0x1p-10f, 1};
  float row[2];
  ops::mean_row(OneLane{}, 2, acc, row);
  EXPECT_EQ(row[0], 1.0f + 0x1p-7f);
  EXPECT_TRUE(std::isnan(row[1]));
}

TEST(CompressRow, NormThenRotationOfTheTail) {
  float row[4] = {2, -2, 2, -2}, tmp[4];
  const float weight[4] = {1, 2, 1, 1}, cos[1] = {0.5f}, sin[1] = {0.25f};
  ops::norm_and_rotate_row(OneLane{}, 4, weight, 0.0f, 1, cos, sin, row, tmp);
  EXPECT_EQ(row[0], 1.0f);  // 2 / sqrt(4) * 1
  EXPECT_EQ(row[1], -2.0f);
  EXPECT_EQ(row[2], 0.75f);   // 1 * 0.5 - -1 * 0.25
  EXPECT_EQ(row[3], -0.25f);  // -1 * 0.5 + 1 * 0.25
}

TEST(CompressRow, FinishedRowIsNearTheSameInDouble) {
  constexpr int kWidth = 24, kPairs = 4;
  const Window window = random_window(kWidth, 8, 1.0f);
  const std::vector<float> acc = folded(window, 8), weight(kWidth, 1.5f);
  std::vector<float> cos, sin, row(kWidth), tmp(32);
  for (int i = 0; i < kPairs; ++i) {
    cos.push_back(static_cast<float>(std::cos(0.3 * i)));
    sin.push_back(static_cast<float>(std::sin(0.3 * i)));
  }
  ops::finish_row(OneLane{}, kWidth, acc.data(), weight.data(), 1e-6f, kPairs, cos.data(), sin.data(), row.data(),
                  tmp.data());
  std::vector<double> want;
  double squares = 0;
  for (std::size_t c = 0; c < kWidth; ++c) squares += std::pow(want.emplace_back(mean_of(window, c)), 2);
  for (double& x : want) x *= 1.5 / std::sqrt(squares / kWidth + 1e-6);
  for (std::size_t i = 0; i < kPairs; ++i) {
    double& a = want[kWidth - 2 * kPairs + 2 * i];
    double& b = want[kWidth - 2 * kPairs + 2 * i + 1];
    const double angle = 0.3 * static_cast<double>(i), x = a, y = b;
    a = x * std::cos(angle) - y * std::sin(angle);
    b = y * std::cos(angle) + x * std::sin(angle);
  }
  for (std::size_t c = 0; c < kWidth; ++c) {
    EXPECT_NEAR(static_cast<double>(row[c]), want[c], 0.03) << "channel " << c;  // bf16 steps of values of at most 4
    EXPECT_EQ(row[c], codec::round_bf16(row[c]));
  }
}

TEST(CompressRow, HadamardOfUnitVectorsHasTheSignsOfSylvester) {
  for (unsigned j = 0; j < 16; ++j) {
    float x[16] = {};
    x[j] = 1;
    ops::hadamard_row(OneLane{}, 16, x);
    for (unsigned i = 0; i < 16; ++i) EXPECT_EQ(x[i], std::popcount(i & j) % 2 == 0 ? 0.25f : -0.25f) << i << ", " << j;
  }
}

TEST(CompressRow, HadamardTwiceIsTheRowAgain) {
  float x[8] = {1, -2, 0.5f, 3, 0, -1, 4, 2};
  const std::vector<float> before(x, x + 8);
  ops::hadamard_row(OneLane{}, 8, x);
  ops::hadamard_row(OneLane{}, 8, x);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(x[i], before[i], 0.04f);
  float single[1] = {-3};
  ops::hadamard_row(OneLane{}, 1, single);
  EXPECT_EQ(single[0], -3.0f);
}

}  // namespace
}  // namespace kv4
