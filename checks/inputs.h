// Seeded inputs for the cache: every row is a pure function of (seed, stream, layer, position), so any split of a
// request into steps gets the same inputs. Rows are windows into one pool of random numbers, chosen by a hash, so each
// costs only a copy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/aligned_vector.h"
#include "device_tensors.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::checks {

constexpr std::uint64_t kPaddingStream = ~std::uint64_t{0};  // rows of NaN: reading them shows

/// A token: its text and its position there.
struct TokenRef {
  std::uint64_t stream = kPaddingStream;
  std::int64_t position = 0;
};

/// Maps a request's positions to streams; a fork continues with another stream.
class History {
 public:
  explicit History(std::uint64_t stream) : segments_{{stream, 0}} {}
  TokenRef at(std::int64_t position) const;
  void switch_at(std::int64_t position, std::uint64_t stream) { segments_.push_back({stream, position}); }

 private:
  std::vector<TokenRef> segments_;  // stream and its first position, ascending
};

class InputGenerator {
 public:
  enum class Tensor : std::uint8_t { raw_kv, kv, gate, index_kv, index_gate, weights };

  explicit InputGenerator(std::uint64_t seed);
  std::int32_t token_id(TokenRef token) const;
  const float* row(TokenRef token, int layer, Tensor tensor, int columns) const;
  const std::uint16_t* bf16_row(TokenRef token, int layer, Tensor tensor,
                                int columns) const;  // the same values rounded

 private:
  std::size_t offset(TokenRef token, int layer, Tensor tensor, int columns) const;

  std::uint64_t seed_;
  std::vector<float> pool_;  // normally distributed, mean 0, deviation 1
  std::vector<std::uint16_t> pool_bf16_;
  std::vector<float> nan_;
  std::vector<std::uint16_t> nan_bf16_;
};

/// Buffers for the inputs of one layer in one step: raw_kv bf16, the compressor's rows fp32.
class LayerInputs {
 public:
  LayerInputs(const LayerCacheSchema& layer, int max_tokens);
  void fill(const InputGenerator& generator, int layer, std::span<const TokenRef> tokens);
  AppendInputs view(int tokens) const;
  /// Bytes of one token's rows.
  static std::int64_t token_bytes(const LayerCacheSchema& layer);

 private:
  int width_ = 0, columns_ = 0, index_columns_ = 0;  // 0: not in this layer
  AlignedVector<std::uint16_t> raw_kv_;
  AlignedVector<float> kv_, gate_, index_kv_, index_gate_;
};

/// Constants of every layer of a cache, in host memory. They must outlive the managers that they are bound to.
class SeededWeights {
 public:
  SeededWeights(const CacheSchema& schema, const InputGenerator& generator);
  void bind(KVCacheManager& manager) const;  // on a backend of the host
  /// `place` holds them in the memory of the manager's backend and must outlive the manager too.
  void bind(KVCacheManager& manager, DeviceTensors& place) const;
  const LayerWeights& of(std::size_t owned_layer) const { return layers_[owned_layer].views; }

 private:
  struct Layer {
    int layer = 0;
    AlignedVector<float> bias, norm, index_bias, index_norm;
    LayerWeights views;
  };
  std::vector<Layer> layers_;
};

std::uint16_t to_bf16(float value);  // nearest, ties to even
float from_bf16(std::uint16_t bits);

}  // namespace kv4::checks
