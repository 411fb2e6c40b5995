// The k best of a row of scores: a larger score_order wins; of equal scores, the smaller index wins.
#pragma once

#include <algorithm>

#include "ops/score_row.h"

namespace kv4::ops {

/// The k best are the scores above `order`, and the first `ties` of those equal to it.
struct TopkThreshold {
  std::uint32_t order = 0;
  std::int64_t ties = 0;
};

constexpr int kSelectBins = 2048;

/// Finds, digit by digit from the top, the k-th best's digit among the scores that agree with it so far. histogram:
/// [kSelectBins]; 1 <= k <= count.
inline TopkThreshold find_threshold(const float* scores, std::int64_t count, std::int64_t k, std::uint32_t* histogram) {
  struct Digit {
    int shift, bits;
  };
  TopkThreshold found{0, k};
  std::uint32_t known = 0;  // the decided bits of `order`
  for (const Digit digit : {Digit{21, 11}, Digit{10, 11}, Digit{0, 10}}) {
    const std::uint32_t mask = (1u << digit.bits) - 1;
    std::fill_n(histogram, kSelectBins, 0u);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t order = score_order(scores[i]);
      if (((order ^ found.order) & known) == 0) ++histogram[order >> digit.shift & mask];
    }
    std::uint32_t bin = mask;
    for (; histogram[bin] < static_cast<std::uint64_t>(found.ties); --bin) found.ties -= histogram[bin];
    found.order |= bin << digit.shift;
    known |= mask << digit.shift;
  }
  return found;
}

/// Calls take(index) for the k best, indices ascending.
template <class Take>
void select_best(const float* scores, std::int64_t count, std::int64_t k, std::uint32_t* histogram, Take take) {
  TopkThreshold threshold = find_threshold(scores, count, k, histogram);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t order = score_order(scores[i]);
    if (order > threshold.order || (order == threshold.order && threshold.ties-- > 0)) take(i);
  }
}

}  // namespace kv4::ops
