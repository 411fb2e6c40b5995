#include "golden_reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "golden_report.h"
#include "kv4/error.h"

namespace kv4::checks {
namespace {

constexpr int kTile = 64;   // channels per scale of fp8_tile64
constexpr int kGroup = 32;  // channels per scale of mxfp4 and of fp8_tile32
constexpr int kEntryGroup = 16;  // channels per scale of nvfp4_row
constexpr double kE4m3Max = 448;
constexpr double kE2m1Max = 6;
constexpr double kTileFloor = 1e-4;  // least amax of fp8_tile64

double pow2_ceil(double x) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent);
}

double e4m3(std::uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -value : value;
}

std::array<double, 256> e4m3_values() {
  std::array<double, 256> values{};
  for (unsigned code = 0; code < values.size(); ++code) values[code] = e4m3(static_cast<std::uint8_t>(code));
  return values;
}

double e2m1(unsigned code) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
}

// Spacing at magnitude v of a format with `bits` mantissa bits; its normal numbers start at 2^least.
double spacing(double v, int bits, int least) {
  return std::ldexp(1.0, std::max(v > 0 ? std::ilogb(v) : least, least) - bits);
}
double e4m3_spacing(double v) { return spacing(v, 3, -6); }
double e2m1_spacing(double v) { return spacing(v, 1, 0); }

double ue8m0(std::byte scale) { return std::ldexp(1.0, std::to_integer<int>(scale) - 127); }

float bf16_at(const std::byte* at) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, 2);
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// Channels are summed in a fixed number of lanes, which compilers turn into vectors; a reference in double does not
// depend on the order.
constexpr std::size_t kLanes = 8;

double dot(const float* a, const float* b, std::size_t n) {
  double sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k) sums[k] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
  }
  for (; i < n; ++i) sums[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

void add_scaled(double scale, const float* x, double* sum, std::size_t n) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k) sum[i + k] += scale * static_cast<double>(x[i + k]);
  }
  for (; i < n; ++i) sum[i] += scale * static_cast<double>(x[i]);
}

void transform(std::span<double> x) {
  for (std::size_t half = 1; half < x.size(); half *= 2) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if ((i & half) != 0) continue;
      const double a = x[i];
      const double b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
}

template <class Number>
double relative(std::span<const Number> got, std::span<const Number> want) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  Worst difference;
  Worst largest;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference.see(std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
    largest.see(std::abs(static_cast<double>(want[i])));
  }
  return largest.value() > 0 ? difference.value() / largest.value() : difference.value();
}

// How a format scales a tile: by pow2_ceil(max(amax, floor) / code_max), with codes `code_spacing(code)` apart.
struct TileRule {
  int channels;
  double floor;
  double code_max;
  double (*code_spacing)(double);
};

TileRule tile_rule(Format format) {
  if (format == Format::fp8_tile64) return {kTile, kTileFloor, kE4m3Max, e4m3_spacing};
  if (format == Format::mxfp4) return {kGroup, kE2m1Max * std::ldexp(1.0, -126), kE2m1Max, e2m1_spacing};
  throw Error(ErrorCode::bad_argument,
              std::string("no tile rule for format ") + to_string(format) + "; use fp8_tile64 or mxfp4");
}

}  // namespace

double largest_magnitude(std::span<const float> values) {
  Worst largest;
  for (float x : values) largest.see(std::abs(static_cast<double>(x)));
  return largest.value();
}

double relative_error(std::span<const float> got, std::span<const float> want) { return relative(got, want); }
double relative_error(std::span<const double> got, std::span<const double> want) { return relative(got, want); }

double bf16_ulp(double magnitude) { return spacing(magnitude, 7, -126); }

float nearest_bf16(float x) {
  const double step = bf16_ulp(std::abs(static_cast<double>(x)));
  return static_cast<float>(std::nearbyint(static_cast<double>(x) / step) * step);
}

void decode_row(const RowSchema& row, const std::byte* payload, const std::byte* scale, std::span<float> out) {
  static const std::array<double, 256> kE4m3 = e4m3_values();
  const auto octet = [&](int i) { return std::to_integer<unsigned>(payload[i]); };
  const bool entry = row.format == Format::nvfp4_row;  // its scales are e4m3
  const int quantised = row.format == Format::bf16 ? 0 : row.width - (row.format == Format::fp8_tile64 ? row.tail : 0);
  const int channels = entry                               ? kEntryGroup
                       : row.format == Format::fp8_tile32 ? kGroup
                       : row.format == Format::bf16       ? 1
                                                          : tile_rule(row.format).channels;
  for (int start = 0; start < quantised; start += channels) {
    const std::byte byte = scale[start / channels];
    const double step = entry ? kE4m3[std::to_integer<unsigned>(byte)] : ue8m0(byte);
    for (int i = start; i < start + channels; ++i) {
      const bool fp4 = entry || row.format == Format::mxfp4;
      const double code = fp4 ? e2m1(octet(i / 2) >> (i % 2 * 4)) : kE4m3[octet(i)];
      out[i] = static_cast<float>(code * step);
    }
  }
  for (int i = quantised; i < row.width; ++i) out[i] = bf16_at(payload + quantised + 2 * (i - quantised));
}

std::vector<double> allowed_error(const RowSchema& row, std::span<const float> want, double slack) {
  const TileRule rule = tile_rule(row.format);
  const std::size_t quantised = row.format == Format::fp8_tile64 ? row.width - row.tail : row.width;
  std::vector<double> allowed(want.size(), slack);
  for (std::size_t start = 0; start < quantised; start += rule.channels) {
    const auto tile = want.subspan(start, rule.channels);
    const double scale = pow2_ceil(std::max(largest_magnitude(tile) + slack, rule.floor) / rule.code_max);
    for (std::size_t i = 0; i < tile.size(); ++i) {
      const double code = (std::abs(static_cast<double>(tile[i])) + slack) / scale;
      allowed[start + i] += 0.5 * rule.code_spacing(code) * scale;
    }
  }
  return allowed;
}

Matrix hadamard(const Matrix& rows, std::int64_t width) {
  Matrix out(rows.rows, rows.cols);
  std::vector<double> x(width);
  for (std::size_t start = 0; start < rows.values.size(); start += x.size()) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(rows.values[start + i]);
    transform(x);
    for (std::size_t i = 0; i < x.size(); ++i)
      out.values[start + i] = static_cast<float>(x[i] / std::sqrt(static_cast<double>(width)));
  }
  return out;
}

std::vector<double> index_scores(const ScoreInputs& inputs, const Matrix& keys) {
  const std::int64_t tokens = inputs.q.rows;
  std::vector<double> scores(tokens * keys.rows);
  const std::size_t dim = keys.cols;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t h = 0; h < inputs.weights.cols; ++h) {
      const float* q = inputs.q.row(t).data() + h * keys.cols;
      const double weight = static_cast<double>(inputs.weights.row(t)[h]) * inputs.scale;
      for (std::int64_t j = 0; j < keys.rows; ++j) {
        scores[t * keys.rows + j] += weight * std::max(dot(q, keys.row(j).data(), dim), 0.0);
      }
    }
  }
  return scores;
}

std::vector<std::int32_t> top_k(std::span<const double> scores, std::int64_t visible, std::int64_t k) {
  std::vector<std::int32_t> order(visible);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min(visible, k));
  return order;
}

std::vector<double> attend(const AttentionInputs& inputs, const std::vector<std::span<const float>>& rows) {
  const std::size_t heads = inputs.sinks.size();
  const std::size_t dim = inputs.q.size() / heads;
  std::vector<double> out(inputs.q.size());
  std::vector<double> weights(rows.size());
  for (std::size_t h = 0; h < heads; ++h) {
    double top = static_cast<double>(inputs.sinks[h]);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      weights[r] = inputs.scale * dot(inputs.q.data() + h * dim, rows[r].data(), dim);
      top = std::max(top, weights[r]);
    }
    double denominator = std::exp(static_cast<double>(inputs.sinks[h]) - top);
    for (double& weight : weights) denominator += weight = std::exp(weight - top);
    double* sum = out.data() + h * dim;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      add_scaled(weights[r] / denominator, rows[r].data(), sum, dim);
    }
  }
  return out;
}

Pooled pool_rows(const Matrix& kv, const Matrix& gate, const Matrix& bias) {
  const std::size_t width = kv.cols;
  Pooled pooled{std::vector<double>(width), std::vector<double>(width)};
  for (std::size_t c = 0; c < width; ++c) {
    const auto biased = [&](std::int64_t r) {
      return static_cast<double>(gate.row(r)[c]) + static_cast<double>(bias.row(r)[c]);
    };
    double top = -std::numeric_limits<double>::infinity();
    for (std::int64_t r = 0; r < kv.rows; ++r) top = std::max(top, biased(r));
    double sum = 0;
    for (std::int64_t r = 0; r < kv.rows; ++r) {
      const double weight = std::exp(biased(r) - top);
      sum += weight;
      pooled.value[c] += weight * static_cast<double>(kv.row(r)[c]);
    }
    pooled.value[c] /= sum;
    pooled.log_sum[c] = top + std::log(sum);
  }
  return pooled;
}

}  // namespace kv4::checks
