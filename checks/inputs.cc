#include "inputs.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

namespace kv4::checks {
namespace {

constexpr std::size_t kPoolSize = std::size_t{1} << 20;
constexpr std::size_t kRowAlignment = 16;  // elements
constexpr std::int32_t kVocabulary = 129280;
constexpr float kBiasScale = 0.5f, kNormSpread = 0.1f;

/// splitmix64's finaliser.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return mix(a + 0x9e3779b97f4a7c15u + mix(b)); }

double unit(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

template <class T>
void fill_rows(AlignedVector<T>& out, int columns, std::span<const TokenRef> tokens, auto&& row_of) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(out.data() + i * columns, row_of(tokens[i]), columns * sizeof(T));
  }
}

AlignedVector<float> scaled(const InputGenerator& generator, int layer, std::int64_t salt, std::int64_t rows,
                            int columns, float base, float scale) {
  AlignedVector<float> out;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = generator.row({0, (salt << 20) + r}, layer, InputGenerator::Tensor::weights, columns);
    for (int c = 0; c < columns; ++c) out.push_back(base + scale * row[c]);
  }
  return out;
}

}  // namespace

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

TokenRef History::at(std::int64_t position) const {
  auto segment = segments_.rbegin();
  while (segment->position > position) ++segment;
  return {segment->stream, position};
}

InputGenerator::InputGenerator(std::uint64_t seed) : seed_(mix(seed)), pool_(kPoolSize), pool_bf16_(kPoolSize) {
  for (std::size_t i = 0; i < kPoolSize; i += 2) {
    const double radius = std::sqrt(-2 * std::log(unit(mix(seed_, i)))),
                 angle = 2 * std::numbers::pi * unit(mix(seed_, i + 1));
    pool_[i] = static_cast<float>(radius * std::cos(angle));
    pool_[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  for (std::size_t i = 0; i < kPoolSize; ++i) pool_bf16_[i] = to_bf16(pool_[i]);
  constexpr std::size_t kWidest = 1 << 16;
  nan_.assign(kWidest, std::numeric_limits<float>::quiet_NaN());
  nan_bf16_.assign(kWidest, to_bf16(nan_[0]));
}

std::int32_t InputGenerator::token_id(TokenRef token) const {
  return static_cast<std::int32_t>(mix(mix(seed_, token.stream), static_cast<std::uint64_t>(token.position)) %
                                   kVocabulary);
}

std::size_t InputGenerator::offset(TokenRef token, int layer, Tensor tensor, int columns) const {
  const std::uint64_t place = (static_cast<std::uint64_t>(layer) << 8) + static_cast<std::uint64_t>(tensor);
  const std::uint64_t hash = mix(mix(mix(seed_, token.stream), static_cast<std::uint64_t>(token.position)), place);
  return hash % ((kPoolSize - columns) / kRowAlignment) * kRowAlignment;
}

const float* InputGenerator::row(TokenRef token, int layer, Tensor tensor, int columns) const {
  return token.stream == kPaddingStream ? nan_.data() : pool_.data() + offset(token, layer, tensor, columns);
}

const std::uint16_t* InputGenerator::bf16_row(TokenRef token, int layer, Tensor tensor, int columns) const {
  return token.stream == kPaddingStream ? nan_bf16_.data() : pool_bf16_.data() + offset(token, layer, tensor, columns);
}

LayerInputs::LayerInputs(const LayerCacheSchema& layer, int max_tokens) : width_(layer.window.row.width) {
  const std::size_t tokens = max_tokens;
  raw_kv_.resize(tokens * width_);
  if (!layer.pending.empty()) columns_ = layer.pending[0].columns;
  if (layer.pending.size() > 1) index_columns_ = layer.pending[1].columns;
  kv_.resize(tokens * columns_);
  gate_.resize(kv_.size());
  index_kv_.resize(tokens * index_columns_);
  index_gate_.resize(index_kv_.size());
}

void LayerInputs::fill(const InputGenerator& generator, int layer, std::span<const TokenRef> tokens) {
  using Tensor = InputGenerator::Tensor;
  fill_rows(raw_kv_, width_, tokens, [&](TokenRef t) { return generator.bf16_row(t, layer, Tensor::raw_kv, width_); });
  const auto fill_floats = [&](AlignedVector<float>& out, int columns, Tensor tensor) {
    if (columns > 0)
      fill_rows(out, columns, tokens, [&](TokenRef t) { return generator.row(t, layer, tensor, columns); });
  };
  fill_floats(kv_, columns_, Tensor::kv);
  fill_floats(gate_, columns_, Tensor::gate);
  fill_floats(index_kv_, index_columns_, Tensor::index_kv);
  fill_floats(index_gate_, index_columns_, Tensor::index_gate);
}

AppendInputs LayerInputs::view(int tokens) const {
  AppendInputs out;
  out.raw_kv = TensorView(const_cast<std::uint16_t*>(raw_kv_.data()), DType::bf16, {tokens, width_});
  if (columns_ > 0) {
    out.kv = ConstTensorView(kv_.data(), {tokens, columns_});
    out.gate = ConstTensorView(gate_.data(), {tokens, columns_});
  }
  if (index_columns_ > 0) {
    out.index_kv = ConstTensorView(index_kv_.data(), {tokens, index_columns_});
    out.index_gate = ConstTensorView(index_gate_.data(), {tokens, index_columns_});
  }
  return out;
}

std::int64_t LayerInputs::token_bytes(const LayerCacheSchema& layer) {
  std::int64_t bytes = std::int64_t{2} * layer.window.row.width;
  for (const PendingSchema& pending : layer.pending) bytes += std::int64_t{2} * 4 * pending.columns;
  return bytes;
}

SeededWeights::SeededWeights(const CacheSchema& schema, const InputGenerator& generator) {
  for (const LayerCacheSchema& layer : schema.layers) {
    Layer& out = layers_.emplace_back();
    out.layer = layer.spec.layer;
    for (std::size_t k = 0; k < layer.pages.size(); ++k) {
      const RowKind& kind = layer.pages[k].kind;
      const auto salt = static_cast<std::int64_t>(k) * 2;
      const int columns = layer.pending[k].columns;
      AlignedVector<float>& bias = k == 0 ? out.bias : out.index_bias;
      AlignedVector<float>& norm = k == 0 ? out.norm : out.index_norm;
      bias = scaled(generator, out.layer, salt, kind.ratio, columns, 0.0f, kBiasScale);
      norm = scaled(generator, out.layer, salt + 1, 1, kind.width, 1.0f, kNormSpread);
      (k == 0 ? out.views.position_bias : out.views.index_position_bias) =
          TensorView(bias.data(), {kind.ratio, columns});
      (k == 0 ? out.views.norm_weight : out.views.index_norm_weight) = TensorView(norm.data(), {kind.width});
    }
  }
}

void SeededWeights::bind(KVCacheManager& manager) const {
  for (const Layer& layer : layers_) {
    if (!layer.views.position_bias.empty()) manager.bind_weights(layer.layer, layer.views);
  }
}

void SeededWeights::bind(KVCacheManager& manager, DeviceTensors& place) const {
  for (const Layer& layer : layers_) {
    if (!layer.views.position_bias.empty()) manager.bind_weights(layer.layer, place.in(layer.views));
  }
}

}  // namespace kv4::checks
