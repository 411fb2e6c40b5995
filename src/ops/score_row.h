// The score of one index key: sum over heads of weight * relu(q . k). The order of every operation is fixed, because a
// top-k set depends on it: the same on any backend.
//
// A dot product of mxfp4 rows is made of exact group sums: integers (a code's value times 2 is one, of at most 12)
// times powers of two. The groups are added in order in fp32. Other formats: fma over channels in order.
//
// Heads form chains of 16, each `acc = fma(weight, relu(dot), acc)` in order; the chains are added in adjacent pairs,
// (c0 + c1) + (c2 + c3). The accumulators of a tensor core lie in a quad of lanes in that order, so it gives these
// bits without a second pass.
#pragma once

#include "codec/codec.h"
#include "codec/mxfp4.h"
#include "codec/numeric.h"

namespace kv4::ops {

constexpr int kChainHeads = 16, kChains = 4;
static_assert(kChains * kChainHeads == kMaxIndexHeads);

/// NaN gives 0.
KV4_HD float relu(float x) { return x > 0.0f ? x : 0.0f; }

/// Twice the value of an e2m1 code.
KV4_HD int e2m1_double(std::uint32_t code) {
  const int m = static_cast<int>(code & 7u);
  const int magnitude = m < 4 ? m : m < 6 ? 2 * m - 4 : 4 * m - 16;
  return code & 8u ? -magnitude : magnitude;
}

/// A group's sum with both factors' codes times 2.
KV4_HD int group_sum(const std::uint8_t* a, const std::uint8_t* b, int count) {
  int sum = 0;
  for (int i = 0; i < count / 2; ++i)
    sum += e2m1_double(a[i]) * e2m1_double(b[i]) + e2m1_double(a[i] >> 4) * e2m1_double(b[i] >> 4);
  return sum;
}

/// dot of two mxfp4 rows: a group is sum * (2^(k - 2)) * 2^q, two exact products unless they leave fp32's range.
KV4_HD float mxfp4_dot(int width, const std::uint8_t* q, const std::uint8_t* q_scale, const std::uint8_t* k,
                       const std::uint8_t* k_scale) {
  float dot = 0.0f;
  for (int g = 0; g < width / codec::Mxfp4::kGroup; ++g) {
    const int at = g * codec::Mxfp4::kGroup / 2;
    const float sum = static_cast<float>(group_sum(q + at, k + at, codec::Mxfp4::kGroup));
    dot = dot + sum * (codec::ue8m0_value(k_scale[g]) * 0.25f) * codec::ue8m0_value(q_scale[g]);
  }
  return dot;
}

KV4_HD float row_dot(int width, const float* q, const float* k) {
  float dot = 0.0f;
  for (int c = 0; c < width; ++c) dot = codec::fused(q[c], k[c], dot);
  return dot;
}

/// Adds heads in their chains.
class ScoreSum {
 public:
  KV4_HD void add(int head, float weight, float dot) {
    float& chain = chains_[head / kChainHeads];
    chain = codec::fused(weight, relu(dot), chain);
  }
  KV4_HD float total() const { return (chains_[0] + chains_[1]) + (chains_[2] + chains_[3]); }

 private:
  float chains_[kChains] = {};
};

/// Orders scores for a top-k: a larger number is better. NaN is below all, -0 equals 0.
KV4_HD std::uint32_t score_order(float score) {
  if (codec::is_nan(score)) return 0;
  const std::uint32_t bits = codec::float_bits(score == 0.0f ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace kv4::ops
