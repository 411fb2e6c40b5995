// The model's arithmetic once more, plain and in double, written independently of the library that it checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kv4/schema.h"

namespace kv4::checks {

/// Dense rows of floats.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> values;  // [rows, cols]

  Matrix() = default;
  Matrix(std::int64_t rows_in, std::int64_t cols_in) : rows(rows_in), cols(cols_in), values(rows_in * cols_in) {}
  Matrix(std::int64_t rows_in, std::int64_t cols_in, std::vector<float> values_in)
      : rows(rows_in), cols(cols_in), values(std::move(values_in)) {}

  std::span<const float> row(std::int64_t i) const { return std::span(values).subspan(i * cols, cols); }
  std::span<float> row(std::int64_t i) { return std::span(values).subspan(i * cols, cols); }
};

double largest_magnitude(std::span<const float> values);
/// max |got - want| / max |want|; max |got - want| where `want` is all zero.
double relative_error(std::span<const float> got, std::span<const float> want);
double relative_error(std::span<const double> got, std::span<const double> want);

/// Distance between neighbouring bf16 numbers at this magnitude.
double bf16_ulp(double magnitude);
/// `x` rounded to the nearest bf16, ties to even.
float nearest_bf16(float x);

/// Decodes a stored row. fp8_tile64, bf16 and mxfp4, fp8_tile32 and nvfp4_row: the formats of the replays.
void decode_row(const RowSchema& row, const std::byte* payload, const std::byte* scale, std::span<float> out);

/// Allowed distance of a stored channel from `want` when the quantised value may be off by `slack`: slack + half a step
/// of the format there. The step belongs to the scale for the tile's largest |want| + slack, which covers both scales
/// of a tile whose maximum is near a power of two.
std::vector<double> allowed_error(const RowSchema& row, std::span<const float> want, double slack);

/// Normalised Walsh-Hadamard transform of every `width` channels, Sylvester order.
Matrix hadamard(const Matrix& rows, std::int64_t width);

struct ScoreInputs {
  const Matrix& q;        // [tokens, heads * index_dim]
  const Matrix& weights;  // [tokens, heads]
  double scale = 1;
};
/// score[t, j] = sum_h w[t, h] * scale * relu(q[t, h] . keys[j]); [tokens, keys.rows], for visible and other j alike.
std::vector<double> index_scores(const ScoreInputs& inputs, const Matrix& keys);
/// The `k` largest of the first `visible`; of equal scores the smaller index.
std::vector<std::int32_t> top_k(std::span<const double> scores, std::int64_t visible, std::int64_t k);

struct AttentionInputs {
  std::span<const float> q;      // [heads, head_dim]
  std::span<const float> sinks;  // [heads]
  double scale = 1;
};
/// One softmax over `rows` with a sink in the denominator. [heads, head_dim]
std::vector<double> attend(const AttentionInputs& inputs, const std::vector<std::span<const float>>& rows);

/// Softmax-weighted sum of the rows, per channel, and the logarithm of the softmax denominator. gate and bias [rows,
/// width].
struct Pooled {
  std::vector<double> value;    // [width]
  std::vector<double> log_sum;  // [width]
};
Pooled pool_rows(const Matrix& kv, const Matrix& gate, const Matrix& bias);

}  // namespace kv4::checks
