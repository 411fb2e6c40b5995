#include "run_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

namespace kv4::checks {
namespace {

struct Coded {
  float value = 0;
  float half_step = 0;
};

Coded read_e4m3(std::uint8_t byte) {
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  const int power = std::max(exponent, 1) - 7;
  const double magnitude = (exponent == 15 && mantissa == 7) ? std::numeric_limits<double>::quiet_NaN()
                                                             : std::ldexp((exponent > 0 ? 8 : 0) + mantissa, power - 3);
  return {static_cast<float>(byte & 0x80 ? -magnitude : magnitude), static_cast<float>(std::ldexp(1.0, power - 4))};
}

Coded read_e2m1(unsigned nibble) {
  static constexpr Coded kMagnitudes[] = {{0, .25f}, {.5f, .25f}, {1, .25f}, {1.5f, .25f},
                                          {2, .5f},  {3, .5f},    {4, 1},    {6, 1}};
  Coded out = kMagnitudes[nibble & 7];
  if (nibble & 8) out.value = -out.value;
  return out;
}

Coded read_bf16(const std::byte* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  const float value = from_bf16(bits);
  return {value, std::abs(value) * 0x1p-8f};
}

float read_f32(const std::byte* at) {
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

float read_ue8m0(std::byte byte) { return static_cast<float>(std::ldexp(1.0, static_cast<int>(byte) - 127)); }

/// The scale of channel c.
float scale_of(Format format, const std::byte* scale, int c, float global) {
  switch (format) {
    case Format::fp8_tile64: return read_ue8m0(scale[c / 64]);
    case Format::fp8_tile32:
    case Format::mxfp4: return read_ue8m0(scale[c / 32]);
    case Format::nvfp4_row: return read_e4m3(static_cast<std::uint8_t>(scale[c / 16])).value;
    case Format::nvfp4: return read_e4m3(static_cast<std::uint8_t>(scale[c / 16])).value * global;
    case Format::fp8_row:
    case Format::fp8: return read_f32(scale);
    case Format::bf16: break;
  }
  return 1.0f;
}

double round_bf16(double value) { return from_bf16(to_bf16(static_cast<float>(value))); }

void round_row(std::vector<double>& row) {
  for (double& value : row) value = round_bf16(value);
}

double largest(const std::vector<double>& row) {
  double out = 0;
  for (const double value : row) out = std::max(out, std::abs(value));
  return out;
}

void hadamard(std::vector<double>& row) {
  for (std::size_t half = 1; half < row.size(); half *= 2) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i & half) continue;
      const double a = row[i], b = row[i + half];
      row[i] = a + b;
      row[i + half] = a - b;
    }
  }
  for (double& value : row) value /= std::sqrt(static_cast<double>(row.size()));
}

double frequency(const RopeSpec& rope, int dim, int i) {
  const double plain = std::pow(rope.theta, -2.0 * i / dim);
  if (!rope.yarn) return plain;
  const auto turn = [&](double rotations) {
    return dim * std::log(rope.original_length / (rotations * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
  };
  const double low = std::max(std::floor(turn(rope.beta_fast)), 0.0),
               high = std::min(std::ceil(turn(rope.beta_slow)), dim - 1.0);
  const double ramp = std::clamp((i - low) / (high > low ? high - low : 0.001), 0.0, 1.0);
  return plain / rope.factor * ramp + plain * (1 - ramp);
}

}  // namespace

PlainRow decode_plain(const RowSchema& row, const std::byte* payload, const std::byte* scale, float global) {
  PlainRow out;
  const bool quantised = row.format != Format::bf16,
             fp4 = row.format == Format::mxfp4 || row.format == Format::nvfp4 || row.format == Format::nvfp4_row;
  const int head = quantised ? row.width - row.tail : 0;
  for (int c = 0; c < row.width; ++c) {
    Coded coded;
    if (c < head) {
      const auto byte = static_cast<std::uint8_t>(payload[fp4 ? c / 2 : c]);
      coded = fp4 ? read_e2m1(c % 2 ? byte >> 4 : byte & 15) : read_e4m3(byte);
      const float factor = scale_of(row.format, scale, c, global);
      coded = {coded.value * factor, coded.half_step * factor};
    } else {
      coded = read_bf16(payload + head + 2 * (c - head));
    }
    out.values.push_back(coded.value);
    out.half_steps.push_back(coded.half_step);
  }
  return out;
}

/// Softmax per channel over the entry's rows; with overlap, also over the first-half columns of the previous span.
std::vector<double> PlainModel::pooled(const History& history, std::size_t layer, std::size_t kind,
                                       std::int64_t entry) const {
  using Tensor = InputGenerator::Tensor;
  const LayerCacheSchema& schema = schema_.layers[layer];
  const RowKind& row = schema.pages[kind].kind;
  const int columns = schema.pending[kind].columns, width = row.width;
  const LayerWeights& weights = weights_.of(layer);
  const auto* bias = static_cast<const float*>((kind == 0 ? weights.position_bias : weights.index_position_bias).data);
  const auto rounded = [&](float x) { return schema.pending[kind].dtype == DType::bf16 ? from_bf16(to_bf16(x)) : x; };
  const std::int64_t first = std::max<std::int64_t>(0, (entry - (row.overlap ? 1 : 0)) * row.ratio),
                     end = (entry + 1) * row.ratio;

  std::vector<double> top(width, -std::numeric_limits<double>::infinity()), sum(top.size()), out(top.size());
  for (const bool second_pass : {false, true}) {
    for (std::int64_t t = first; t < end; ++t) {
      const TokenRef token = history.at(t);
      const float* kv = generator_.row(token, schema.spec.layer, kind == 0 ? Tensor::kv : Tensor::index_kv, columns);
      const float* gate =
          generator_.row(token, schema.spec.layer, kind == 0 ? Tensor::gate : Tensor::index_gate, columns);
      const int shift = row.overlap && t >= entry * row.ratio ? width : 0;
      for (int c = 0; c < width; ++c) {
        const std::size_t at = c;
        const double g = rounded(gate[shift + c]) + bias[t % row.ratio * columns + shift + c];
        if (!second_pass) {
          top[at] = std::max(top[at], g);
        } else {
          sum[at] += std::exp(g - top[at]);
          out[at] += std::exp(g - top[at]) * rounded(kv[shift + c]);
        }
      }
    }
  }
  for (std::size_t c = 0; c < out.size(); ++c) out[c] /= sum[c];
  return out;
}

void PlainModel::rotate(std::vector<double>& row, std::int64_t position) const {
  const int dim = schema_.config.rope_dim;
  for (int i = 0; i < dim / 2; ++i) {
    const double angle = static_cast<double>(position) * frequency(schema_.config.rope_compress, dim, i);
    double& a = row[row.size() - (dim - 2 * i)];
    double& b = *(&a + 1);
    const double x0 = a, x1 = b;
    a = x0 * std::cos(angle) - x1 * std::sin(angle);
    b = x1 * std::cos(angle) + x0 * std::sin(angle);
  }
}

ReferenceRow PlainModel::compressed(const History& history, std::size_t layer, std::size_t kind,
                                    std::int64_t entry) const {
  const RowKind& row = schema_.layers[layer].pages[kind].kind;
  const LayerWeights& weights = weights_.of(layer);
  const auto* norm = static_cast<const float*>((kind == 0 ? weights.norm_weight : weights.index_norm_weight).data);
  ReferenceRow out{pooled(history, layer, kind, entry), 0};
  round_row(out.values);
  double squares = 0;
  for (const double value : out.values) squares += value * value;
  const double root = std::sqrt(squares / static_cast<double>(out.values.size()) + schema_.config.rms_eps);
  for (std::size_t c = 0; c < out.values.size(); ++c) out.values[c] = out.values[c] / root * norm[c];
  round_row(out.values);
  rotate(out.values, entry * row.ratio);
  round_row(out.values);
  const bool transformed = row.role == RowRole::index_key && schema_.options.hadamard;
  double peak = largest(out.values);
  if (transformed) {
    hadamard(out.values);
    round_row(out.values);
    peak = std::max(peak, largest(out.values));
  }
  out.tolerance = std::ldexp(1.0, std::ilogb(peak) - (transformed ? 5 : 6));
  return out;
}

}  // namespace kv4::checks
