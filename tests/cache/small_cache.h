// A cache of a small model with inputs that are a function of (stream, layer, position), and everything that a test can
// observe of it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/kv_cache_manager.h"
#include "support/device.h"

namespace kv4::small {

/// Widths that every format can tile; window 8, CSA 4, HCA 8.
inline ModelConfig config(std::vector<LayerKind> kinds = {LayerKind::swa, LayerKind::csa, LayerKind::hca,
                                                          LayerKind::csa}) {
  ModelConfig c;
  c.name = "small";
  c.num_layers = static_cast<int>(kinds.size());
  c.kinds = std::move(kinds);
  c.num_query_heads = 3;
  c.head_dim = 80;
  c.rope_dim = 16;
  c.window = 8;
  c.index_heads = 2;
  c.index_dim = 32;
  c.index_topk = 2;
  c.hca_ratio = 8;
  c.max_positions = 4096;
  c.rope_compress = {.theta = 160000.0, .yarn = true, .factor = 16.0};
  return c;
}

/// Blocks of 16 tokens; a step of up to 4 tokens is written in place.
inline CacheOptions options() {
  CacheOptions o;
  o.block_tokens = 16;
  o.max_rewind_tokens = 3;
  o.max_requests = 4;
  o.spare_slots = 2;
  o.max_context = 96;
  o.num_blocks = 20;
  o.max_step_tokens = 64;
  return o;
}

/// In [-1, 1), the same on every platform.
inline float noise(std::uint64_t key) {
  key += 0x9E3779B97F4A7C15ull;
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9ull;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBull;
  return static_cast<float>((key ^ (key >> 31)) >> 40) * 0x1p-23f - 1.0f;
}

enum Input { kRaw, kKv, kGate, kIndexKv, kIndexGate };

/// The inputs of one layer in one step, one row per token.
struct Inputs {
  std::vector<float> rows[5];
  std::int64_t width[5] = {};
  std::int64_t tokens = 0;

  ConstTensorView view(Input which) const {
    if (width[which] == 0) return {};
    return {rows[which].data(), DType::f32, {tokens, width[which]}};
  }
  float* row(Input which, std::int64_t token) { return rows[which].data() + token * width[which]; }
  AppendInputs views() { return {view(kRaw), view(kKv), view(kGate), view(kIndexKv), view(kIndexGate)}; }
};

struct Part {
  RequestId request = kNoRequest;
  std::uint64_t stream = 0;
  std::int32_t count = 1;
};

inline float input_value(std::uint64_t stream, int layer, std::int64_t position, Input which, std::int64_t channel) {
  const std::uint64_t key =
      (((stream * 64 + static_cast<std::uint64_t>(layer)) * 8192 + static_cast<std::uint64_t>(position)) * 8 + which) *
          4096 +
      static_cast<std::uint64_t>(channel);
  return noise(key) * (which == kGate || which == kIndexGate ? 3.0f : 1.0f);
}

inline std::int32_t token_id(std::uint64_t stream, std::int64_t position) {
  return static_cast<std::int32_t>(stream * 100'000 + static_cast<std::uint64_t>(position));
}

inline std::vector<std::int32_t> token_ids(std::uint64_t stream, std::int64_t first, std::int64_t count) {
  std::vector<std::int32_t> out;
  for (std::int64_t p = first; p < first + count; ++p) out.push_back(token_id(stream, p));
  return out;
}

/// Compressor constants of a layer; the same for every cache of the model.
struct Weights {
  std::vector<float> bias[2], norm[2];
  LayerWeights views;  // in the backend's memory

  Weights(const LayerCacheSchema& layer, test::Twins& twins) {
    ConstTensorView* bias_view[] = {&views.position_bias, &views.index_position_bias};
    ConstTensorView* norm_view[] = {&views.norm_weight, &views.index_norm_weight};
    for (std::size_t k = 0; k < layer.pages.size(); ++k) {
      const std::int64_t ratio = layer.pages[k].kind.ratio, columns = layer.pending[k].columns,
                         width = layer.pages[k].kind.width;
      const std::uint64_t key =
          0xABCDull << 40 | static_cast<std::uint64_t>(layer.spec.layer) << 32 | static_cast<std::uint64_t>(k) << 24;
      for (std::int64_t i = 0; i < ratio * columns; ++i) bias[k].push_back(noise(key + static_cast<std::uint64_t>(i)));
      for (std::int64_t i = 0; i < width; ++i)
        norm[k].push_back(1.0f + 0.5f * noise(key + (1u << 20) + static_cast<std::uint64_t>(i)));
      *bias_view[k] = twins.put(TensorView(bias[k].data(), {ratio, columns}));
      *norm_view[k] = twins.put(TensorView(norm[k].data(), {width}));
    }
  }
};

class SmallCache {
 public:
  explicit SmallCache(const CacheOptions& o = options(), const ModelConfig& c = config(), bool bind = true,
                      std::shared_ptr<Backend> backend_in = test::test_backend())
      : backend(std::move(backend_in)), cache(c, o, backend), constants_(backend), inputs_(backend) {
    for (const LayerCacheSchema& layer : cache.schema().layers) {
      weights.push_back(std::make_unique<Weights>(layer, constants_));
      if (bind && !layer.pages.empty()) cache.bind_weights(layer.spec.layer, weights.back()->views);
    }
    constants_.send();
  }

  RequestId admit() { return cache.admit().value(); }

  Expected<Step> try_prepare(const std::vector<Part>& parts, int group = 0) {
    std::vector<std::int64_t> starts;
    std::vector<std::vector<std::int32_t>> ids;
    std::vector<StepItem> items;
    for (const Part& p : parts) {
      starts.push_back(p.request == kNoRequest ? 0 : cache.length(p.request, group));
      ids.push_back(p.request == kNoRequest ? std::vector<std::int32_t>{}
                                            : token_ids(p.stream, starts.back(), p.count));
    }
    for (std::size_t i = 0; i < parts.size(); ++i) items.push_back({parts[i].request, parts[i].count, ids[i], -1});
    const Expected<Step> step = cache.prepare_forward(items, group);
    if (step) {
      parts_ = parts;
      starts_ = starts;
    }
    return step;
  }
  Step prepare(const std::vector<Part>& parts, int group = 0) { return try_prepare(parts, group).value(); }

  /// Inputs of the prepared step; padded tokens get huge numbers, which must have no effect.
  Inputs inputs(const LayerCacheSchema& layer) const {
    Inputs in;
    const std::int64_t head = cache.schema().config.head_dim;
    in.width[kRaw] = head;
    for (std::size_t k = 0; k < layer.pending.size(); ++k)
      in.width[kKv + 2 * k] = in.width[kGate + 2 * k] = layer.pending[k].columns;
    for (std::size_t i = 0; i < parts_.size(); ++i)
      for (std::int32_t t = 0; t < parts_[i].count; ++t, ++in.tokens)
        for (int which = 0; which < 5; ++which)
          for (std::int64_t c = 0; c < in.width[which]; ++c)
            in.rows[which].push_back(
                parts_[i].request == kNoRequest
                    ? 1e30f
                    : input_value(parts_[i].stream, layer.spec.layer, starts_[i] + t, static_cast<Input>(which), c));
    return in;
  }

  /// Appends the prepared step in every layer of its group. `change` edits the inputs of a layer first.
  using Change = std::function<void(const LayerCacheSchema&, Inputs&)>;
  void append(const Step& step, const Change& change = {}) {
    std::vector<const LayerCacheSchema*> layers;
    std::vector<Inputs> all;
    for (const LayerCacheSchema& layer : cache.schema().layers) {
      if (layer.spec.group != step.group) continue;
      layers.push_back(&layer);
      all.push_back(inputs(layer));
      if (change) change(layer, all.back());
    }
    append_inputs(layers, all);
  }
  void append_inputs(const std::vector<const LayerCacheSchema*>& layers, std::vector<Inputs>& all) {
    inputs_.clear();
    std::vector<AppendInputs> placed;
    for (Inputs& in : all) {
      AppendInputs& p = placed.emplace_back(in.views());
      for (ConstTensorView* t : {&p.raw_kv, &p.kv, &p.gate, &p.index_kv, &p.index_gate}) *t = inputs_.put(*t);
    }
    inputs_.send();
    for (std::size_t i = 0; i < layers.size(); ++i) cache.acquire(layers[i]->spec.layer).append(placed[i]);
  }

  void run(const std::vector<Part>& parts, int group = 0) {
    const Step step = prepare(parts, group);
    append(step);
    cache.commit(step);
  }

  /// A request of `length` tokens of a stream, by chunks.
  RequestId request(std::uint64_t stream, std::int32_t length, std::int32_t chunk = 48) {
    const RequestId id = admit();
    for (std::int32_t done = 0; done < length; done += chunk) run({{id, stream, std::min(chunk, length - done)}});
    return id;
  }

  /// Every byte of the blocks' pool and of the slots'.
  std::vector<std::byte> block_memory() {
    return test::read_bytes(*backend, cache.kv_pool().base(), cache.kv_pool().memory_bytes());
  }
  std::vector<std::byte> slot_memory() {
    return test::read_bytes(*backend, cache.state_pool().base(), cache.state_pool().memory_bytes());
  }

  const std::shared_ptr<Backend> backend;
  KVCacheManager cache;
  std::vector<std::unique_ptr<Weights>> weights;

 private:
  test::Twins constants_, inputs_;
  std::vector<Part> parts_;
  std::vector<std::int64_t> starts_;
};

/// The reference for the tested cache: always on the CPU.
class CpuCache : public SmallCache {
 public:
  explicit CpuCache(const CacheOptions& o = options()) : SmallCache(o, config(), true, make_cpu_backend()) {}
};

/// A request's bytes and state.
struct RequestState {
  std::vector<std::int64_t> lengths, floors;
  std::vector<std::int32_t> ids;
  std::vector<BlockId> blocks;
  CanonicalImage image;
  std::vector<std::byte> block_bytes;
  bool operator==(const RequestState&) const = default;
};

inline RequestState request_state(const KVCacheManager& cache, RequestId request) {
  RequestState out;
  for (int g = 0; g < cache.schema().num_groups; ++g) {
    out.lengths.push_back(cache.length(request, g));
    out.floors.push_back(cache.rewind_floor(request, g));
  }
  out.ids = cache.token_ids(request);
  out.blocks = cache.blocks(request);
  out.image = cache.export_image(request);
  out.block_bytes = cache.export_blocks(request);
  return out;
}

/// Everything a caller can see of a cache.
struct CacheState {
  int num_requests = 0;
  std::int32_t free_blocks = 0, evictable_blocks = 0, free_slots = 0;
  std::vector<std::int32_t> reference_counts;
  std::vector<RequestState> requests;
  bool operator==(const CacheState&) const = default;
};

inline CacheState state_of(KVCacheManager& cache, const std::vector<RequestId>& requests) {
  CacheState out;
  out.num_requests = cache.num_requests();
  out.free_blocks = cache.allocator().num_free();
  out.evictable_blocks = cache.allocator().num_evictable();
  out.free_slots = cache.state_pool().num_free();
  for (BlockId b = 0; b < cache.allocator().num_blocks(); ++b)
    out.reference_counts.push_back(cache.allocator().reference_count(b));
  for (RequestId r : requests) out.requests.push_back(request_state(cache, r));
  return out;
}

/// A short form for a failed comparison.
inline void PrintTo(const CacheState& s, std::ostream* out) {
  *out << s.num_requests << " requests, " << s.free_blocks << " free and " << s.evictable_blocks
       << " evictable blocks, " << s.free_slots << " free slots";
  for (const RequestState& r : s.requests) {
    *out << "; length " << testing::PrintToString(r.lengths) << " floor " << testing::PrintToString(r.floors)
         << " blocks " << testing::PrintToString(r.blocks);
    std::size_t sum = 0;
    for (std::byte b : r.image.bytes) sum = sum * 31 + static_cast<std::size_t>(b);
    for (std::byte b : r.block_bytes) sum = sum * 31 + static_cast<std::size_t>(b);
    *out << " bytes " << std::hex << sum << std::dec;
  }
}

/// Same bytes, whatever their blocks and history.
inline void expect_same_bytes(const KVCacheManager& a, RequestId in_a, const KVCacheManager& b, RequestId in_b) {
  const auto compare = [](const std::vector<std::byte>& x, const std::vector<std::byte>& y, const char* what) {
    ASSERT_EQ(x.size(), y.size()) << what;
    const auto at = std::mismatch(x.begin(), x.end(), y.begin()).first;
    EXPECT_TRUE(at == x.end()) << what << " differ from byte " << at - x.begin() << " of " << x.size();
  };
  const CanonicalImage x = a.export_image(in_a), y = b.export_image(in_b);
  EXPECT_EQ(x.layout_id, y.layout_id);
  EXPECT_EQ(x.lengths, y.lengths);
  compare(x.bytes, y.bytes, "images");
  compare(a.export_blocks(in_a), b.export_blocks(in_b), "blocks");
  EXPECT_EQ(a.token_ids(in_a), b.token_ids(in_b));
}

/// The call throws an Error of this code whose message holds every one of `parts`.
template <class F>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, F&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(to_string(e.code()), std::string(to_string(code))) << e.what();
    for (const std::string& part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "'" << part << "' is not in: " << e.what();
    return;
  }
  ADD_FAILURE() << "no Error was thrown; wanted " << to_string(code) << (parts.empty() ? "" : " with " + parts.front());
}

// --- gathers

/// A gather's outputs as floats; every place was NaN, -7 or 9 before.
struct Gathered {
  std::int64_t width = 0, rows = 0;
  std::vector<float> values;              // [items | tokens, rows, width]
  std::vector<std::int32_t> lens, first;  // [items]
  std::vector<std::uint8_t> valid;        // [tokens, rows]

  std::vector<float> row(std::int64_t item, std::int64_t i) const {
    const float* at = values.data() + (item * rows + i) * width;
    return {at, at + width};
  }
};

/// Outputs of a gather in the tested backend's memory.
struct GatherPlaces {
  TensorView out, lens, first, valid;
};

/// Calls gather(places) with poisoned outputs of the given type and reads them back.
template <class F>
Gathered gather_with(std::int64_t first_dim, std::int64_t rows, std::int64_t width, DType type, F&& gather) {
  test::Twins twins(test::test_backend());
  Gathered out;
  out.width = width;
  out.rows = rows;
  const std::size_t count = static_cast<std::size_t>(first_dim * rows * width), guard = 8;
  out.lens.assign(static_cast<std::size_t>(first_dim), -7);
  out.first.assign(static_cast<std::size_t>(first_dim), -7);
  out.valid.assign(static_cast<std::size_t>(first_dim * rows), 9);
  std::vector<std::uint16_t> narrow(count + guard, 0x7FC1);
  std::vector<float> wide(count + guard, std::numeric_limits<float>::quiet_NaN());
  const std::int64_t all = static_cast<std::int64_t>(count + guard);
  const TensorView values = twins.put_output(type == DType::bf16 ? TensorView(narrow.data(), DType::bf16, {all})
                                                                 : TensorView(wide.data(), {all}));
  GatherPlaces places;
  places.out = {values.data, type, {first_dim, rows, width}};
  places.lens = twins.put_output({out.lens.data(), {first_dim}});
  places.first = twins.put_output({out.first.data(), {first_dim}});
  places.valid = twins.put_output({out.valid.data(), DType::u8, {first_dim, rows}});
  twins.send();
  gather(places);
  twins.fetch();
  for (std::size_t i = 0; i < guard; ++i)
    EXPECT_TRUE(narrow[count + i] == 0x7FC1 && std::isnan(wide[count + i])) << "written past the output";
  if (type == DType::bf16)
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t bits = static_cast<std::uint32_t>(narrow[i]) << 16;
      std::memcpy(&wide[i], &bits, 4);
    }
  wide.resize(count);
  out.values = std::move(wide);
  return out;
}

inline Gathered gather_window(LayerCacheHandle handle, const Step& step, std::int64_t rows, DType type = DType::f32) {
  return gather_with(step.num_items, rows, handle.head_dim(), type, [&](const GatherPlaces& to) {
    const KVPair pair = handle.gather_swa_kv(to.out, to.lens, to.first);
    EXPECT_TRUE(pair.k.data == to.out.data && pair.v.data == to.out.data) << "K = V";
  });
}

inline Gathered gather_entries(LayerCacheHandle handle, const Step& step, std::int64_t rows, DType type = DType::f32) {
  return gather_with(step.num_items, rows, handle.head_dim(), type, [&](const GatherPlaces& to) {
    const KVPair pair = handle.gather_all_compressed_kv(to.out, to.lens);
    EXPECT_TRUE(pair.k.data == to.out.data && pair.v.data == to.out.data) << "K = V";
  });
}

inline Gathered gather_keys(LayerCacheHandle handle, const Step& step, std::int64_t rows, DType type = DType::f32) {
  const std::int64_t width = handle.schema().pages[1].kind.width;
  return gather_with(step.num_items, rows, width, type, [&](const GatherPlaces& to) {
    EXPECT_EQ(handle.gather_all_index_keys(to.out, to.lens).data, to.out.data);
  });
}

}  // namespace kv4::small
