// Attention of one query head: a softmax over rows that serve as key and value, with a sink in its denominator.
#pragma once

#include "ops/compress_row.h"
#include "ops/score_row.h"

namespace kv4::ops {

/// The softmax of one head over the rows so far, and its weighted sum of them beside it.
struct Attention {
  float max = kLowestGate;
  float sum = 0.0f;
};

/// Adds a row. q: times the softmax scale; acc [width].
KV4_HD void attend_row(int width, const float* q, const float* row, Attention& a, float* acc) {
  const float z = row_dot(width, q, row);
  const bool higher = z > a.max;
  const float e = codec::exp_nonpositive(-codec::magnitude(z - a.max));
  const float past = higher ? e : 1.0f, fresh = higher ? 1.0f : e;
  a.max = higher ? z : a.max;
  a.sum = codec::fused(a.sum, past, fresh);
  for (int c = 0; c < width; ++c) acc[c] = codec::fused(fresh, row[c], acc[c] * past);
}

/// What the sums must be multiplied with, and the logarithm of the denominator.
struct AttentionEnd {
  float factor;
  float lse;
};

KV4_HD AttentionEnd end_attention(const Attention& a, const float* sink) {
  float max = a.max, sum = a.sum;
  float factor = 1.0f;
  if (sink != nullptr && *sink != -INFINITY) {
    const float e = codec::exp_nonpositive(-codec::magnitude(*sink - max));
    const bool higher = *sink > max;
    factor = higher ? e : 1.0f;
    sum = codec::fused(sum, factor, higher ? 1.0f : e);
    max = higher ? *sink : max;
  }
  if (sum == 0.0f) return {0.0f, -INFINITY};
  return {codec::quotient(factor, sum), max + logf(sum)};
}

}  // namespace kv4::ops
