// Attention of one query head: a softmax over rows that serve as key and value, with a sink in its denominator.
#pragma once

#include "ops/compress_row.h"
#include "ops/score_row.h"

namespace kv4::ops {

/// Online softmax of one head: row maximum and denominator over the rows so far. Its numerator, O, is stored
/// separately.
struct Attention {
  float max = kLowestGate;
  float sum = 0.0f;
};

/// The rescale factor of O and the denominator before a logit is added, and the logit's P.
struct AttentionStep {
  float rescale, p;
};

KV4_HD AttentionStep add_logit(Attention& a, float z) {
  const bool higher = z > a.max;
  const float e = codec::exp_nonpositive(-codec::magnitude(z - a.max));
  const AttentionStep step = higher ? AttentionStep{e, 1.0f} : AttentionStep{1.0f, e};
  a = {higher ? z : a.max, codec::fused(a.sum, step.rescale, step.p)};
  return step;
}

/// Adds a row. q: times the softmax scale; acc [width].
KV4_HD void attend_row(int width, const float* q, const float* row, Attention& a, float* acc) {
  const AttentionStep step = add_logit(a, row_dot(width, q, row));
  for (int c = 0; c < width; ++c) acc[c] = codec::fused(step.p, row[c], acc[c] * step.rescale);
}

/// The factor that turns the numerator into the output, and the logarithm of the denominator.
struct AttentionEnd {
  float factor;
  float lse;
};

KV4_HD AttentionEnd end_attention(Attention a, const float* sink) {
  if (sink != nullptr && *sink == INFINITY) return {0.0f, INFINITY};
  const float factor = sink != nullptr && *sink != -INFINITY ? add_logit(a, *sink).rescale : 1.0f;
  if (a.sum == 0.0f) return {0.0f, -INFINITY};
  return {codec::quotient(factor, a.sum), a.max + logf(a.sum)};
}

/// LseMode::rows.
KV4_HD float lse_of_rows(Attention a) { return a.sum == 0.0f ? INFINITY : a.max + logf(a.sum); }

/// What a sink makes of an attention without one, whose lse is -infinity without rows: the factor of its output, and
/// the lse of `mode`.
KV4_HD AttentionEnd add_sink(float lse, const float* sink, LseMode mode) {
  const bool rows = lse != -INFINITY;
  const float lse_of_rows = rows ? lse : INFINITY;
  if (sink == nullptr || *sink == -INFINITY) return {1.0f, mode == LseMode::rows ? lse_of_rows : lse};
  if (*sink == INFINITY) return {0.0f, mode == LseMode::rows ? lse_of_rows : INFINITY};
  const float above = rows ? *sink - lse : INFINITY;  // of the sink over the rows
  const float factor = 1.0f / (1.0f + expf(above));
  if (mode == LseMode::rows) return {factor, lse_of_rows};
  return {factor, above > 0.0f ? *sink + log1pf(expf(-above)) : lse + log1pf(expf(above))};
}

}  // namespace kv4::ops
