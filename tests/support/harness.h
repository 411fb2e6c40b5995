// A model with random weights, inputs that depend only on (stream, layer, position), and a driver that runs steps
// through a cache on any backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codec/numeric.h"
#include "kv4/kv_cache_manager.h"
#include "support/device.h"

namespace kv4::test {

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// A small generator with a fixed seed.
struct Random {
  std::uint64_t state;
  explicit Random(std::uint64_t seed) : state(mix(seed)) {}
  std::uint64_t next() { return state = mix(state); }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n)); }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }  // [-1, 1)
};

inline void fill_random(std::uint64_t key, float scale, float* out, std::size_t count) {
  Random random(key);
  for (std::size_t i = 0; i < count; i += 2) {
    const std::uint64_t bits = random.next();
    out[i] = scale * (static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f);
    if (i + 1 < count) out[i + 1] = scale * (static_cast<float>((bits >> 8) & 0xFFFFFF) * 0x1p-23f - 1.0f);
  }
}

struct Model {
  ModelConfig config;
  struct Layer {
    std::vector<float> bias, norm, index_bias, index_norm, raw_norm;
    std::vector<std::uint16_t> key_weight;  // V4.1's owners
    LayerWeights views;  // on the host
  };
  std::vector<Layer> layers;

  explicit Model(ModelConfig config_in) : config(std::move(config_in)) {
    for (const LayerSpec& spec : layer_schedule(config)) {
      Layer layer;
      for (const RowKind& kind : spec.rows) {
        if (kind.owner_layer != spec.layer) continue;
        const bool key = kind.role == RowRole::index_key;
        std::vector<float>& bias = key ? layer.index_bias : layer.bias;
        std::vector<float>& norm = key ? layer.index_norm : layer.norm;
        const int columns = kind.overlap ? 2 * kind.width : kind.width;
        bias.resize(static_cast<std::size_t>(kind.ratio * columns));
        norm.resize(static_cast<std::size_t>(kind.width));
        fill_random(mix(static_cast<std::uint64_t>(spec.layer) * 4 + key), 1.0f, bias.data(), bias.size());
        fill_random(mix(static_cast<std::uint64_t>(spec.layer) * 4 + 2 + key), 0.5f, norm.data(), norm.size());
        for (float& w : norm) w += 1.0f;
        if (!key || !config.shares_entries()) continue;
        std::vector<float> weight(static_cast<std::size_t>(kind.width * config.head_dim));
        fill_random(mix(static_cast<std::uint64_t>(spec.layer) + 2000), 0.5f, weight.data(), weight.size());
        for (float w : weight) layer.key_weight.push_back(codec::bf16_bits(w));
      }
      layer.raw_norm.resize(static_cast<std::size_t>(config.head_dim));
      fill_random(mix(static_cast<std::uint64_t>(spec.layer) + 1000), 0.5f, layer.raw_norm.data(),
                  layer.raw_norm.size());
      for (float& w : layer.raw_norm) w += 1.0f;
      layers.push_back(std::move(layer));
    }
    for (const LayerSpec& spec : layer_schedule(config)) {
      Layer& layer = layers[static_cast<std::size_t>(spec.layer)];
      layer.views.raw_norm_weight = {layer.raw_norm.data(), {config.head_dim}};
      for (const RowKind& kind : spec.rows) {
        if (kind.owner_layer != spec.layer) continue;
        const int columns = kind.overlap ? 2 * kind.width : kind.width;
        const bool key = kind.role == RowRole::index_key;
        if (!config.shares_entries()) (key ? layer.views.index_position_bias : layer.views.position_bias) = {
            key ? layer.index_bias.data() : layer.bias.data(), {kind.ratio, columns}};
        (key ? layer.views.index_norm_weight : layer.views.norm_weight) = {
            key ? layer.index_norm.data() : layer.norm.data(), {kind.width}};
        if (key && config.shares_entries())
          layer.views.index_key_weight = {layer.key_weight.data(), DType::bf16, {kind.width, config.head_dim}};
      }
    }
  }
  Model(const Model&) = delete;
};

inline ModelConfig base_config(int head, int rope, int index, int window, int csa, int hca,
                               std::vector<LayerKind> kinds) {
  ModelConfig c;
  c.name = "test";
  c.num_layers = static_cast<int>(kinds.size());
  c.num_query_heads = 4;
  c.head_dim = head;
  c.rope_dim = rope;
  c.window = window;
  c.index_heads = 4;
  c.index_dim = index;
  c.index_topk = 4;
  c.csa_ratio = csa;
  c.hca_ratio = hca;
  c.rope_compress = {.theta = 160000.0, .yarn = true, .factor = 16.0};
  c.kinds = std::move(kinds);
  return c;
}

/// Small widths that every format can tile.
inline ModelConfig tiny_config() {
  return base_config(80, 16, 32, 8, 4, 8, {LayerKind::swa, LayerKind::csa, LayerKind::hca, LayerKind::csa});
}
/// The sizes of transformers' test models.
inline ModelConfig transformers_tiny_config() {
  return base_config(32, 8, 16, 8, 4, 8, {LayerKind::hca, LayerKind::csa, LayerKind::swa});
}
/// Real widths and ratios, one layer of each kind.
inline ModelConfig real_config() {
  return base_config(512, 64, 128, 128, 4, 128, {LayerKind::swa, LayerKind::csa, LayerKind::hca});
}

/// V4.1: layer 0 has a window only, 1 and 2 own entries of ratio 2, 4 owns entries of ratio 1; 3 and 5 own none. 6
/// makes the candidates and owns nothing, 7 and 8 rank within them.
inline ModelConfig shared_config(int head, int rope, int index, int window) {
  ModelConfig c = base_config(head, rope, index, window, 4, 128, {});
  c.rms_eps = 1e-20;
  c.num_layers = 9;
  c.sharing = {.ratios = {0, 2, 2, 2, 1, 1, 1, 1, 1},
               .owners = {1, 2, 4},
               .index_sources = {1, 2, 4, 6, 7, 8},
               .candidate_source = 6,
               .candidate_block_size = 3,
               .candidate_topk_blocks = 3};
  for (const int ratio : c.sharing.ratios) c.kinds.push_back(ratio == 0 ? LayerKind::swa : LayerKind::shared);
  c.engram = {.layers = {0}, .max_ngram = 4, .pad_id = 2};
  return c;
}
inline ModelConfig shared_tiny_config() { return shared_config(64, 16, 32, 8); }
inline ModelConfig shared_real_config() { return shared_config(512, 64, 128, 128); }

/// The next `count` tokens of a request, with the inputs of `stream`.
struct Work {
  RequestId request = kNoRequest;
  std::uint64_t stream = 0;
  std::int32_t count = 1;
  std::int32_t decoder_count = 0;  // as StepItem's
};

/// The form of a step's inputs; it does not change the tokens.
struct InputStyle {
  DType raw_type = DType::f32, type = DType::f32, index_type = DType::f32;
  bool projection = false;  // raw rows before norm and rotation (backbone layers)
  std::int64_t gap = 0;     // elements between the end of a row and the next
  bool specials = false;    // includes NaN, infinities, zeros, tiny and huge numbers
};

/// The inputs of one layer in one step, on the host. Padded tokens are NaN.
struct LayerInputs {
  std::vector<float> wide[5];            // raw_kv, kv, gate, index_kv, index_gate
  std::vector<std::uint16_t> narrow[5];  // the same in bf16
  AppendInputs views;

  ConstTensorView& view(int part) {
    ConstTensorView* const all[] = {&views.raw_kv, &views.kv, &views.gate, &views.index_kv, &views.index_gate};
    return *all[part];
  }
};

class Driver {
 public:
  Driver(const Model& model, CacheOptions options, std::shared_ptr<Backend> backend_in = test_backend())
      : backend(std::move(backend_in)),
        cache(model.config, options, backend),
        model_(model),
        weights_(backend),
        inputs_(backend) {
    std::vector<LayerWeights> placed;
    for (const Model::Layer& layer : model.layers) {
      LayerWeights w = layer.views;
      for (ConstTensorView* t :
           {&w.position_bias, &w.norm_weight, &w.index_position_bias, &w.index_norm_weight, &w.raw_norm_weight,
            &w.index_key_weight})
        *t = weights_.put(*t);
      placed.push_back(w);
    }
    weights_.send();
    for (const LayerCacheSchema& layer : cache.schema().layers)
      if (layer.spec.group == 0)
        cache.bind_weights(layer.spec.layer, placed[static_cast<std::size_t>(layer.spec.layer)]);
  }

  RequestId admit() { return cache.admit().value(); }

  Expected<Step> prepare(const std::vector<Work>& work, int group = 0) {
    work_ = work;
    std::vector<std::vector<std::int32_t>> ids;
    std::vector<StepItem> items;
    starts_.clear();
    for (const Work& w : work) {
      const std::int64_t start = w.request == kNoRequest ? 0 : cache.length(w.request, group);
      starts_.push_back(start);
      std::vector<std::int32_t>& list = ids.emplace_back();
      for (std::int32_t i = 0; i < w.count; ++i) list.push_back(token_id(w.stream, start + i));
    }
    for (std::size_t i = 0; i < work.size(); ++i)
      items.push_back({work[i].request, work[i].count,
                       work[i].request == kNoRequest ? std::span<const std::int32_t>{} : ids[i], -1,
                       work[i].decoder_count});
    return cache.prepare_forward(items, group);
  }

  /// Appends the prepared tokens in every owned layer of the group.
  void append(const Step& step) {
    std::vector<const LayerCacheSchema*> layers;
    for (const LayerCacheSchema& layer : cache.schema().layers)
      if (layer.spec.group == step.group) layers.push_back(&layer);
    append_layers(step, layers);
  }
  void append_layer(const Step& step, const LayerCacheSchema& layer) { append_layers(step, {&layer}); }

  /// All inputs go over in one transfer; then it appends layer by layer.
  void append_layers(const Step& step, const std::vector<const LayerCacheSchema*>& layers) {
    std::vector<LayerInputs> inputs;
    for (const LayerCacheSchema* layer : layers) inputs.push_back(inputs_of(step, *layer));
    append_inputs(layers, inputs);
  }
  void append_inputs(const std::vector<const LayerCacheSchema*>& layers, std::vector<LayerInputs>& inputs) {
    inputs_.clear();
    std::vector<AppendInputs> placed;
    for (LayerInputs& in : inputs) {
      AppendInputs& p = placed.emplace_back(in.views);
      for (ConstTensorView* t : {&p.raw_kv, &p.kv, &p.gate, &p.index_kv, &p.index_gate}) *t = inputs_.put(*t);
    }
    inputs_.send();
    for (std::size_t i = 0; i < layers.size(); ++i) cache.acquire(layers[i]->spec.layer).append(placed[i]);
  }

  LayerInputs inputs_of(const Step& step, const LayerCacheSchema& layer) const {
    LayerInputs in;
    const auto part = [&](int i, int width) {
      const std::int64_t stride = width + style.gap;
      fill(layer.spec.layer, i, width, stride, static_cast<std::size_t>(step.num_tokens), in.wide[i]);
      ConstTensorView& view = in.view(i);
      view = {in.wide[i].data(), {step.num_tokens, width}};
      if ((i == 0 ? style.raw_type : i < 3 ? style.type : style.index_type) == DType::bf16) {
        in.narrow[i].reserve(in.wide[i].size());
        for (float x : in.wide[i]) in.narrow[i].push_back(codec::bf16_bits(x));
        view = {in.narrow[i].data(), DType::bf16, {step.num_tokens, width}};
      }
      view.strides[0] = stride;
    };
    part(0, model_.config.head_dim);
    if (layer.spec.kind == LayerKind::shared && !layer.pages.empty()) {
      part(1, model_.config.head_dim);
      if (layer.pages[0].kind.ratio > 1) part(2, model_.config.head_dim);
    }
    for (std::size_t k = 0; k < layer.pending.size() && layer.spec.kind != LayerKind::shared; ++k) {
      part(static_cast<int>(1 + 2 * k), layer.pending[k].columns);
      part(static_cast<int>(2 + 2 * k), layer.pending[k].columns);
    }
    in.views.raw_is_projection = style.projection && layer.spec.group == 0;
    return in;
  }

  void run(const std::vector<Work>& work, int group = 0) {
    const Step step = prepare(work, group).value();
    append(step);
    cache.commit(step);
  }

  /// Appends a request's next tokens in these chunks.
  void feed(RequestId request, std::uint64_t stream, const std::vector<std::int32_t>& chunks) {
    for (std::int32_t c : chunks) run({{request, stream, c}});
  }

  static std::int32_t token_id(std::uint64_t stream, std::int64_t position) {
    return static_cast<std::int32_t>(mix(stream * 1000003 + static_cast<std::uint64_t>(position)) & 0x1FFFF);
  }

  const std::shared_ptr<Backend> backend;
  KVCacheManager cache;
  InputStyle style;

 private:
  void fill(int layer, int part, int width, std::int64_t stride, std::size_t tokens, std::vector<float>& out) const {
    out.assign(tokens * static_cast<std::size_t>(stride), std::nanf(""));  // padded tokens must not be read
    std::size_t token = 0;
    for (std::size_t i = 0; i < work_.size(); ++i) {
      for (std::int32_t c = 0; c < work_[i].count; ++c, ++token) {
        if (work_[i].request == kNoRequest) continue;
        const std::uint64_t key =
            mix(work_[i].stream) ^ mix(static_cast<std::uint64_t>(starts_[i] + c) * 64 +
                                       static_cast<std::uint64_t>(layer) * 7 + static_cast<std::uint64_t>(part) + 1);
        const float scale = part == 0 || part % 2 == 1 ? 3.0f : 6.0f;
        float* row = out.data() + token * static_cast<std::size_t>(stride);
        fill_random(key, scale, row, static_cast<std::size_t>(width));
        if (style.specials) make_special(key, row, width);
      }
    }
  }

  // Most special rows change one channel in sixteen, some change all.
  static void make_special(std::uint64_t key, float* row, int width) {
    const float values[] = {NAN,      INFINITY, -INFINITY, 0.0f,  -0.0f,  1e-40f, -1e-40f, 3e38f,
                            -3.3e38f, 1e-7f,    448.0f,    1e30f, -1e30f, 1e20f,  0.25f,   -6.0f};
    Random random(key ^ 0x5EC1A1);
    const std::int64_t kind = random.below(8);  // 0 to 3: no NaN and no infinity; 7: ordinary
    if (kind == 7) return;
    const std::int64_t every = kind == 0 ? 1 : 16;
    for (int c = 0; c < width; ++c)
      if (random.below(every) == 0) row[c] = values[kind <= 3 ? random.between(3, 15) : random.below(16)];
  }

  const Model& model_;
  Twins weights_, inputs_;
  std::vector<Work> work_;
  std::vector<std::int64_t> starts_;
};

/// Everything of a request that must not depend on its history.
struct Bytes {
  CanonicalImage image;
  std::vector<std::byte> blocks;
  std::vector<std::int32_t> token_ids;
  bool operator==(const Bytes&) const = default;
};

inline Bytes bytes_of(const KVCacheManager& cache, RequestId request) {
  return {cache.export_image(request), cache.export_blocks(request), cache.token_ids(request)};
}

inline void expect_same(const std::vector<std::byte>& a, const std::vector<std::byte>& b, const std::string& what) {
  if (a == b) return;
  const std::size_t shorter = std::min(a.size(), b.size());
  const auto end = a.begin() + static_cast<std::ptrdiff_t>(shorter);
  std::size_t different = 0;
  for (std::size_t i = 0; i < shorter; ++i) different += a[i] != b[i];
  ADD_FAILURE() << what << " differ: " << different << " bytes, the first at "
                << std::mismatch(a.begin(), end, b.begin()).first - a.begin() << " of " << a.size() << " and "
                << b.size();
}

inline void expect_same(const Bytes& a, const Bytes& b, const std::string& what) {
  EXPECT_EQ(a.image.lengths, b.image.lengths) << what;
  EXPECT_EQ(a.image.layout_id, b.image.layout_id) << what;
  expect_same(a.image.bytes, b.image.bytes, what + ": images");
  expect_same(a.blocks, b.blocks, what + ": blocks");
  EXPECT_TRUE(a.token_ids == b.token_ids) << what << ": token ids differ";
}

/// Splits `total` tokens into random chunks of at most `most`.
inline std::vector<std::int32_t> random_chunks(Random& random, std::int64_t total, std::int64_t most) {
  std::vector<std::int32_t> out;
  while (total > 0) {
    const std::int64_t c = random.between(1, std::min(most, total));
    out.push_back(static_cast<std::int32_t>(c));
    total -= c;
  }
  return out;
}

/// Every choice of stored formats.
struct FormatCase {
  Format rows;
  Format keys;
  bool hadamard;
  DType pending;
  bool shared = false;        // a model of V4.1
  Format entries = Format{};  // of such a model
  std::string name() const {
    return std::string(to_string(rows)) + "_" + (shared ? std::string("shared_") + to_string(entries) + "_" : "") +
           to_string(keys) + (hadamard ? "_hadamard_" : "_plain_") + to_string(pending);
  }
};

/// Small widths, and a model of the case's generation.
inline ModelConfig tiny_config(const FormatCase& f) { return f.shared ? shared_tiny_config() : tiny_config(); }

inline std::vector<FormatCase> format_cases() {
  return {{Format::fp8_tile64, Format::mxfp4, true, DType::f32}, {Format::fp8_row, Format::nvfp4, true, DType::f32},
          {Format::bf16, Format::bf16, false, DType::f32},       {Format::fp8_tile64, Format::fp8, false, DType::bf16},
          {Format::bf16, Format::mxfp4, true, DType::bf16},      {Format::fp8_row, Format::bf16, true, DType::bf16}};
}

/// The same for V4.1.
inline std::vector<FormatCase> shared_format_cases() {
  return {{Format::fp8_tile32, Format::mxfp4, false, DType::f32, true, Format::nvfp4_row},
          {Format::fp8_row, Format::fp8, false, DType::bf16, true, Format::bf16},
          {Format::bf16, Format::bf16, false, DType::f32, true, Format::fp8_tile32}};
}
/// Of both.
inline std::vector<FormatCase> all_format_cases() {
  std::vector<FormatCase> out = format_cases();
  for (const FormatCase& f : shared_format_cases()) out.push_back(f);
  return out;
}

inline CacheOptions options_for(const FormatCase& f) {
  CacheOptions o;
  if (f.shared) {
    o.window_format = f.rows;
    o.entry_format = f.entries;
  } else {
    o.row_format = f.rows;
  }
  o.index_format = f.keys;
  o.hadamard = f.hadamard;
  o.pending_dtype = f.pending;
  o.max_requests = 6;
  o.spare_slots = 6;
  o.max_context = 1024;
  o.max_step_tokens = 1024;
  return o;
}

}  // namespace kv4::test
