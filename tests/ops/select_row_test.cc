// The k best of a row of scores, against a sort.
#include "ops/select_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace kv4 {
namespace {

constexpr std::uint32_t kSeed = 20261118;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::int64_t> selected(const std::vector<float>& scores, std::int64_t k) {
  std::vector<std::uint32_t> histogram(ops::kSelectBins, 77);  // old contents do not count
  std::vector<std::int64_t> out;
  ops::select_best(scores.data(), static_cast<std::int64_t>(scores.size()), k, histogram.data(),
                   [&](std::int64_t i) { out.push_back(i); });
  return out;
}

/// NaN after all numbers; among equal scores, the smaller index first.
std::vector<std::int64_t> sorted_best(const std::vector<float>& scores, std::int64_t k) {
  std::vector<std::int64_t> all(scores.size());
  std::iota(all.begin(), all.end(), 0);
  std::stable_sort(all.begin(), all.end(), [&](std::int64_t a, std::int64_t b) {
    const float x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  all.resize(static_cast<std::size_t>(k));
  std::sort(all.begin(), all.end());
  return all;
}

TEST(SelectRow, OfEqualScoresTheFirst) {
  const std::vector<float> scores = {3, 1, 3, 2, 3};
  EXPECT_EQ(selected(scores, 2), (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(selected(scores, 4), (std::vector<std::int64_t>{0, 2, 3, 4}));
  EXPECT_EQ(selected({0.0f, -0.0f, 0.0f}, 2), (std::vector<std::int64_t>{0, 1}));
}

TEST(SelectRow, ThresholdCountsTheTiesItTakes) {
  const float scores[] = {3, 1, 3, 2, 3};
  std::vector<std::uint32_t> histogram(ops::kSelectBins);
  ops::TopkThreshold found = ops::find_threshold(scores, 5, 2, histogram.data());
  EXPECT_EQ(found.order, ops::score_order(3));
  EXPECT_EQ(found.ties, 2);
  found = ops::find_threshold(scores, 5, 4, histogram.data());
  EXPECT_EQ(found.order, ops::score_order(2));
  EXPECT_EQ(found.ties, 1);
  found = ops::find_threshold(scores, 5, 5, histogram.data());
  EXPECT_EQ(found.order, ops::score_order(1));
  EXPECT_EQ(found.ties, 1);
}

TEST(SelectRow, NanIsTakenLast) {
  EXPECT_EQ(selected({kNan, -kInf, kNan, 1}, 1), (std::vector<std::int64_t>{3}));
  EXPECT_EQ(selected({kNan, -kInf, kNan, 1}, 2), (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(selected({kNan, -kInf, kNan, 1}, 3), (std::vector<std::int64_t>{0, 1, 3}));
  EXPECT_EQ(selected({kNan, kNan}, 1), (std::vector<std::int64_t>{0}));
}

TEST(SelectRow, EveryDigitDecides) {
  // Scores that differ in only one bit: bits of all three digits, and of neighbours across their borders.
  for (int bit = 0; bit < 31; ++bit) {
    const float low = codec::bits_float(0x3F800000u & ~(1u << bit)), high = codec::bits_float(0x3F800000u | 1u << bit);
    const std::int64_t best = low > high || std::isnan(high) ? 0 : 1;
    EXPECT_EQ(selected({low, high}, 1), (std::vector<std::int64_t>{best})) << "bit " << bit;
    EXPECT_EQ(selected({-high, -low}, 1), (std::vector<std::int64_t>{std::isnan(high) ? 1 : best})) << "bit " << bit;
  }
}

TEST(SelectRow, LikeASort) {
  std::mt19937 random(kSeed);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> scores(1 + random() % 300);
    const int kind = round % 4;
    for (float& score : scores) {
      if (kind == 0) score = codec::bits_float(static_cast<std::uint32_t>(random()));   // anything
      if (kind == 1) score = static_cast<float>(random() % 5) - 2;                      // ties
      if (kind == 2) score = 1.0f + static_cast<float>(random() % 64) * 0x1p-23f;       // differ in the last digit
      if (kind == 3) score = random() % 3 == 0 ? kNan : random() % 2 == 0 ? -kInf : 1;  // little to choose from
    }
    const auto count = static_cast<std::int64_t>(scores.size());
    for (const std::int64_t k : {std::int64_t{1}, 1 + static_cast<std::int64_t>(random()) % count, count})
      EXPECT_EQ(selected(scores, k), sorted_best(scores, k)) << "seed " << kSeed << ", round " << round << ", k " << k;
  }
}

}  // namespace
}  // namespace kv4
