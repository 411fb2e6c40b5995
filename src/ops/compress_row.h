// From pending rows to one entry: pool, norm, rotate, transform. The order of every operation is fixed, because the
// result is bytes: the same for any split into steps, any group size, any backend.
#pragma once

#include "base/group.h"
#include "codec/numeric.h"
#include "kv4/tensor.h"

namespace kv4::ops {

/// The type of a compressor row as it is read: as it is, or fp32 rounded to the pending dtype first.
enum class RowType : std::uint8_t { f32, bf16, f32_as_bf16 };

/// One row of a pooling window, its kv and gate already at the right columns.
struct SourceRow {
  const void* kv;
  const void* gate;
  const float* bias;
  RowType type;
  const void* fetch[2];  // memory to prefetch while this row is read
  int fetch_pace = 1;    // bytes to advance there per byte of this row
};

KV4_HD float load_element(const void* row, RowType type, int c) {
  if (type == RowType::bf16) return codec::bf16_value(static_cast<const std::uint16_t*>(row)[c]);
  const float x = static_cast<const float*>(row)[c];
  return type == RowType::f32 ? x : codec::round_bf16(x);
}

/// Online softmax of one channel: (max, denominator, numerator) over the rows so far.
struct Pool {
  float max, den, num;
};

constexpr float kLowestGate = -3.40282347e38f;

KV4_HD float larger_gate(float gate, float max) { return gate > max ? gate : max; }  // NaN is ignored

KV4_HD Pool empty_pool() { return {kLowestGate, 0.0f, 0.0f}; }

/// Adds a row. One exp, of the distance between its gate and the maximum, is the rescale factor of the rows before it
/// or its own factor; the other is 1.
KV4_HD Pool pool_add(Pool p, float gate, float kv) {
  const float e = codec::exp_nonpositive(-codec::magnitude(gate - p.max));
  const bool higher = gate > p.max;
  const float rescale = higher ? e : 1.0f;
  const float own = higher ? 1.0f : e;
  return {higher ? gate : p.max, codec::fused(p.den, rescale, own), codec::fused(own, kv, p.num * rescale)};
}

/// Adds a row to a pool whose maximum is that of all its rows from the start.
KV4_HD Pool pool_add_known_max(Pool p, float gate, float kv) {
  const float e = codec::exp_nonpositive(gate - p.max);
  return {p.max, p.den + e, codec::fused(e, kv, p.num)};
}

/// Folds rows in order into acc [3, width]; `fresh` starts from nothing.
template <class Group>
KV4_HD void fold_rows(Group g, int width, const SourceRow* rows, int count, bool fresh, float* acc) {
  for (int c = g.lane(); c < width; c += g.size()) {
    Pool p = fresh ? empty_pool() : Pool{acc[c], acc[width + c], acc[2 * width + c]};
    for (int r = 0; r < count; ++r)
      p = pool_add(p, load_element(rows[r].gate, rows[r].type, c) + rows[r].bias[c],
                   load_element(rows[r].kv, rows[r].type, c));
    acc[c] = p.max;
    acc[width + c] = codec::canonical_nan(p.den);
    acc[2 * width + c] = codec::canonical_nan(p.num);
  }
}

/// Pools rows that are all available, such as those of an overlapping kind's entry: the largest gate first, then one
/// sum. row(i): the i-th SourceRow. Writes denominators and numerators of acc [3, width].
template <class Group, class Row>
KV4_HD void pool_rows(Group g, int width, int count, Row row, float* acc) {
  for (int c = g.lane(); c < width; c += g.size()) {
    const auto biased_gate = [c](const SourceRow& r) { return load_element(r.gate, r.type, c) + r.bias[c]; };
    Pool p = empty_pool();
    for (int i = 0; i < count; ++i) p.max = larger_gate(biased_gate(row(i)), p.max);
    for (int i = 0; i < count; ++i) {
      const SourceRow& r = row(i);
      p = pool_add_known_max(p, biased_gate(r), load_element(r.kv, r.type, c));
    }
    acc[width + c] = codec::canonical_nan(p.den);
    acc[2 * width + c] = codec::canonical_nan(p.num);
  }
}

/// Sum of squares by adjacent pairs: s_i = x_i^2, then s_i = s_2i + s_2i+1 until one is left; missing ones are 0.
/// tmp: [width rounded up to a power of two]. Every lane gets the result.
template <class Group>
KV4_HD float square_sum(Group g, const float* x, int width, float* tmp) {
  int n = 1;
  while (n < width) n *= 2;
  for (int c = g.lane(); c < n; c += g.size()) tmp[c] = c < width ? x[c] * x[c] : 0.0f;
  for (int step = 1; step < n; step *= 2) {
    g.sync();
    for (int i = g.lane() * 2 * step; i < n; i += g.size() * 2 * step) tmp[i] = tmp[i] + tmp[i + step];
  }
  g.sync();
  return tmp[0];
}

KV4_HD float norm_factor(float sum, int width, float eps) {
  return codec::quotient(1.0f, codec::square_root(codec::quotient(sum, static_cast<float>(width)) + eps));
}

/// Mean of a pool acc [3, width] -> bf16.
template <class Group>
KV4_HD void mean_row(Group g, int width, const float* acc, float* row) {
  for (int c = g.lane(); c < width; c += g.size())
    row[c] = codec::round_bf16(codec::quotient(acc[2 * width + c], acc[width + c]));
  g.sync();
}

/// A row of bf16 values in place: RMS norm -> bf16.
template <class Group>
KV4_HD void norm_row(Group g, int width, const float* norm_weight, float eps, float* row, float* tmp) {
  const float factor = norm_factor(square_sum(g, row, width, tmp), width, eps);
  for (int c = g.lane(); c < width; c += g.size()) row[c] = codec::round_bf16(row[c] * factor * norm_weight[c]);
  g.sync();
}

/// Rotation of the channels [2 * pairs] in place -> bf16.
template <class Group>
KV4_HD void rotate_channels(Group g, int pairs, const float* cos, const float* sin, float* channels) {
  for (int i = g.lane(); i < pairs; i += g.size()) {
    const float x0 = channels[2 * i], x1 = channels[2 * i + 1];
    channels[2 * i] = codec::round_bf16(codec::fused(x0, cos[i], -(x1 * sin[i])));
    channels[2 * i + 1] = codec::round_bf16(codec::fused(x1, cos[i], x0 * sin[i]));
  }
  g.sync();
}

/// A row of bf16 values in place: RMS norm -> bf16 -> rotation of the last 2 * pairs channels -> bf16.
template <class Group>
KV4_HD void norm_and_rotate_row(Group g, int width, const float* norm_weight, float eps, int pairs, const float* cos,
                                const float* sin, float* row, float* tmp) {
  norm_row(g, width, norm_weight, eps, row, tmp);
  rotate_channels(g, pairs, cos, sin, row + width - 2 * pairs);
}

/// V4.1: out [rows] = weight [rows, width] . latent -> bf16; each sum runs over the channels in order.
template <class Group>
KV4_HD void project_latent(Group g, int width, const float* latent, const std::uint16_t* weight, int rows, float* out) {
  for (int r = g.lane(); r < rows; r += g.size()) {
    float sum = 0.0f;
    for (int c = 0; c < width; ++c)
      sum = codec::fused(latent[c], codec::bf16_value(weight[static_cast<std::int64_t>(r) * width + c]), sum);
    out[r] = codec::round_bf16(sum);
  }
  g.sync();
}

/// Entry from its pool.
template <class Group>
KV4_HD void finish_row(Group g, int width, const float* acc, const float* norm_weight, float eps, int pairs,
                       const float* cos, const float* sin, float* row, float* tmp) {
  mean_row(g, width, acc, row);
  norm_and_rotate_row(g, width, norm_weight, eps, pairs, cos, sin, row, tmp);
}

/// Normalised Walsh-Hadamard transform in Sylvester order, strides 1, 2, 4, ...; width a power of two. Result bf16.
template <class Group>
KV4_HD void hadamard_row(Group g, int width, float* x) {
  for (int h = 1; h < width; h *= 2) {
    for (int i = g.lane(); i < width / 2; i += g.size()) {
      const int at = i / h * 2 * h + i % h;
      const float a = x[at], b = x[at + h];
      x[at] = a + b;
      x[at + h] = a - b;
    }
    g.sync();
  }
  const float scale = codec::quotient(1.0f, codec::square_root(static_cast<float>(width)));
  for (int c = g.lane(); c < width; c += g.size()) x[c] = codec::round_bf16(x[c] * scale);
  g.sync();
}

}  // namespace kv4::ops
