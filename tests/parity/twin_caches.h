// Two caches that get the same calls, one on the CPU and one on the device under test. Their results and all their
// bytes must be equal.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/harness.h"

#define KV4_NEEDS_DEVICE() \
  if (!kv4::test::why_no_device().empty()) GTEST_SKIP() << kv4::test::why_no_device()

namespace kv4::test {

/// Outputs by name.
using Outputs = std::vector<std::pair<std::string, std::vector<std::byte>>>;

inline void expect_same(const Outputs& got, const Outputs& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].first, want[i].first) << what;
    expect_same(got[i].second, want[i].second, what + ": " + got[i].first);
  }
}

class TwinCaches {
 public:
  TwinCaches(const Model& model, const CacheOptions& options, const InputStyle& style = {},
             std::shared_ptr<Backend> device = parity_backend())
      : cpu(model, options, make_cpu_backend(4)), gpu(model, options, std::move(device)) {
    cpu.style = gpu.style = style;
  }

  // --- requests
  RequestId admit() { return same(cpu.cache.admit(), gpu.cache.admit()).value(); }
  Expected<RequestId> fork(RequestId r) { return same(cpu.cache.fork(r), gpu.cache.fork(r)); }
  void release(RequestId r) {
    cpu.cache.release(r);
    gpu.cache.release(r);
  }
  void rewind(RequestId r, std::int64_t length, int group = 0) {
    EXPECT_EQ(cpu.cache.rewind_floor(r, group), gpu.cache.rewind_floor(r, group)) << "CPU's rewind_floor, GPU's";
    cpu.cache.rewind(r, length, group);
    gpu.cache.rewind(r, length, group);
  }
  /// Exports a request as bytes, and imports it on the other side.
  Expected<RequestId> exchange(RequestId r) {
    const Bytes from_cpu = bytes_of(cpu.cache, r), from_gpu = bytes_of(gpu.cache, r);
    expect_same(from_gpu, from_cpu, "exported");
    release(r);
    return same(cpu.cache.import_image(from_gpu.image, from_gpu.token_ids, from_gpu.blocks),
                gpu.cache.import_image(from_cpu.image, from_cpu.token_ids, from_cpu.blocks));
  }
  std::int64_t length(RequestId r, int group = 0) const { return cpu.cache.length(r, group); }

  // --- steps
  Expected<Step> prepare(const std::vector<Work>& work, int group = 0) {
    work_ = work;
    const Expected<Step> a = cpu.prepare(work, group), b = gpu.prepare(work, group);
    EXPECT_EQ(a.error(), b.error());
    if (a && b) {
      EXPECT_EQ(a->id, b->id);
    }
    return a;
  }
  std::vector<const LayerCacheSchema*> layers(const Step& step) const {
    std::vector<const LayerCacheSchema*> out;
    for (const LayerCacheSchema& layer : cpu.cache.schema().layers)
      if (layer.spec.group == step.group) out.push_back(&layer);
    return out;
  }
  void append(const Step& step) { append(step, layers(step)); }
  void append(const Step& step, const std::vector<const LayerCacheSchema*>& some) {
    std::vector<LayerInputs> inputs;
    for (const LayerCacheSchema* layer : some) inputs.push_back(cpu.inputs_of(step, *layer));
    cpu.append_inputs(some, inputs);
    gpu.append_inputs(some, inputs);
  }
  void commit(const Step& step) {
    cpu.cache.commit(step);
    gpu.cache.commit(step);
  }
  void abort(const Step& step) {
    cpu.cache.abort(step);
    gpu.cache.abort(step);
  }
  void run(const std::vector<Work>& work, int group = 0) {
    const Step step = prepare(work, group).value();
    append(step);
    commit(step);
  }

  /// Appends only window rows; entries and keys are computed outside the cache.
  void write_and_flush(const Step& step, Random& random) {
    for (const LayerCacheSchema* layer : layers(step)) {
      LayerInputs in = cpu.inputs_of(step, *layer);
      const bool narrow = random.below(2), masked = random.below(2);
      std::vector<float> rows[2];
      std::vector<std::uint16_t> rows16[2];
      ConstTensorView views[2];
      for (std::size_t k = 0; k < layer->pages.size(); ++k) {
        const std::int64_t width = layer->pages[k].kind.width;
        rows[k].resize(static_cast<std::size_t>(step.num_tokens * width));
        fill_random(random.next(), 5.0f, rows[k].data(), rows[k].size());
        for (float x : rows[k]) rows16[k].push_back(codec::bf16_bits(x));
        views[k] = narrow ? TensorView(rows16[k].data(), DType::bf16, {step.num_tokens, width})
                          : TensorView(rows[k].data(), {step.num_tokens, width});
      }
      std::vector<std::uint8_t> valid(static_cast<std::size_t>(step.num_tokens));
      for (std::uint8_t& v : valid) v = static_cast<std::uint8_t>(random.below(3) ? random.between(1, 255) : 0);
      for (Driver* d : {&cpu, &gpu}) {
        Twins twins(d->backend);
        const ConstTensorView raw = twins.put(in.views.raw_kv);
        FlushInputs flush{twins.put(views[0]), twins.put(views[1]), {}};
        if (masked) flush.valid = twins.put(TensorView(valid.data(), DType::u8, {step.num_tokens}));
        twins.send();
        d->cache.acquire(layer->spec.layer).write_swa(raw);
        if (!layer->pages.empty()) d->cache.acquire(layer->spec.layer).flush_compression(flush);
      }
    }
  }

  // --- comparisons
  void check(RequestId r, const std::string& what) {
    expect_same(bytes_of(gpu.cache, r), bytes_of(cpu.cache, r), what + ", request " + std::to_string(r));
    EXPECT_EQ(gpu.cache.blocks(r), cpu.cache.blocks(r)) << what;
  }

  /// Compares every byte of every block, whether a request has the block or not.
  void check_blocks(const std::string& what) {
    const auto all = [](Driver& d) {
      return read_bytes(*d.backend, d.cache.kv_pool().base(), d.cache.kv_pool().memory_bytes());
    };
    expect_same(all(gpu), all(cpu), what + ": the blocks' pool");
  }

  /// Compares all gathers of an open step.
  void check_gathers(const Step& step, std::uint64_t seed, const std::string& what) {
    expect_same(gather_everything(gpu, step, seed), gather_everything(cpu, step, seed), what);
  }

  /// Compares tables and the rows that they point to.
  void check_views(const Step& step, const std::string& what) {
    expect_same(view_everything(gpu, step), view_everything(cpu, step), what);
  }

  Driver cpu, gpu;

 private:
  template <class T>
  static const Expected<T> same(const Expected<T>& a, const Expected<T>& b) {
    EXPECT_EQ(a.error(), b.error());
    if (a && b) {
      EXPECT_EQ(*a, *b);
    }
    return a;
  }

  Outputs gather_everything(Driver& d, const Step& step, std::uint64_t seed) {
    std::int64_t window_rows = 0, longest = 0;
    for (const Work& w : work_) {
      if (w.request == kNoRequest) continue;
      const std::int64_t length = d.cache.length(w.request, step.group);
      window_rows = std::max(window_rows, std::min<std::int64_t>(length, d.cache.schema().config.window - 1) + w.count);
      longest = std::max(longest, length + w.count);
    }
    Random random(seed);
    const std::int64_t items = step.num_items, tokens = step.num_tokens, k = tokens > 500 ? 2 : 5;
    Outputs out;
    Twins twins(d.backend);
    const auto place = [&](const std::string& name, DType type, std::initializer_list<std::int64_t> shape) {
      TensorView view(&seed, type, shape);  // any address: only the shape matters
      out.emplace_back(name, std::vector<std::byte>(static_cast<std::size_t>(extent_bytes(view)), std::byte{0xA5}));
      view.data = out.back().second.data();
      return twins.put_output(view);
    };
    // Collects all addresses first, so that each direction needs one transfer.
    std::vector<std::function<void()>> calls;
    std::vector<std::vector<std::int32_t>> all_indices;
    all_indices.reserve(cpu.cache.schema().layers.size());
    for (const LayerCacheSchema* layer : layers(step)) {
      const int number = layer->spec.layer;
      const std::string name = "layer " + std::to_string(number) + " ";
      const DType type = random.below(2) ? DType::f32 : DType::bf16;
      const std::int64_t extra = random.below(4);
      const auto handle = [&d, number] { return d.cache.acquire(number); };
      {
        const TensorView rows = place(name + "window", type,
                                      {items, std::max<std::int64_t>(window_rows + extra, 1), layer->window.row.width}),
                         lens = place(name + "window lens", DType::i32, {items}),
                         first = place(name + "window first", DType::i32, {items});
        calls.push_back([=] { handle().gather_swa_kv(rows, lens, first); });
      }
      for (std::size_t i = 0; i < layer->pages.size(); ++i) {
        const RowKind& kind = layer->pages[i].kind;
        const std::int64_t n = std::max<std::int64_t>(longest / kind.ratio + extra, 1);
        const TensorView rows = place(name + (i == 0 ? "entries" : "keys"), type, {items, n, kind.width}),
                         lens = place(name + (i == 0 ? "entries lens" : "keys lens"), DType::i32, {items});
        calls.push_back([=] {
          i == 0 ? void(handle().gather_all_compressed_kv(rows, lens))
                 : void(handle().gather_all_index_keys(rows, lens));
        });
      }
      if (layer->pages.empty()) continue;
      std::vector<std::int32_t>& indices = all_indices.emplace_back();
      const std::int64_t stride = k + random.below(3), most = longest / layer->pages[0].kind.ratio + 2;
      for (std::int64_t i = 0; i < tokens * stride; ++i)
        indices.push_back(random.below(12) == 0 ? static_cast<std::int32_t>(random.next())
                                                : static_cast<std::int32_t>(random.between(-1, most)));
      ConstTensorView index = twins.put(TensorView(indices.data(), {tokens, stride}));
      index.shape[1] = k;
      const TensorView rows = place(name + "chosen", type, {tokens, k, layer->pages[0].kind.width});
      const TensorView valid = random.below(3) ? place(name + "valid", DType::u8, {tokens, k}) : TensorView{};
      calls.push_back([=] { handle().gather_compressed_kv(index, rows, valid); });
    }
    twins.send();
    for (const auto& call : calls) call();
    twins.fetch();
    return out;
  }

  Outputs view_everything(Driver& d, const Step& step) {
    Outputs out;
    HostViews here(d.cache, d.backend);
    const auto add = [&](const std::string& name, const void* from, std::int64_t bytes) {
      const std::byte* at = static_cast<const std::byte*>(from);
      out.emplace_back(name, std::vector<std::byte>(at, at + bytes));
    };
    for (const LayerCacheSchema* layer : layers(step)) {
      const std::string name = "layer " + std::to_string(layer->spec.layer) + " view ";
      LayerCacheHandle handle = d.cache.acquire(layer->spec.layer);
      const SWAView swa = here.view(handle.read_swa_view());
      add(name + "slots", swa.slots, 4 * swa.num_items);
      add(name + "positions", swa.positions, std::int64_t{4} * swa.num_items * swa.rows);
      add(name + "head", swa.head, 4 * swa.num_items);
      out.emplace_back(name + "ring rows", std::vector<std::byte>());
      for (int i = 0; i < swa.num_items; ++i)
        for (int r = 0; r < swa.rows; ++r)
          if (swa.positions[i * swa.rows + r] >= 0)
            for (const PlaneView* plane : {&swa.payload, &swa.scale}) {
              if (plane->data == nullptr) continue;
              const std::byte* at = plane->data + swa.slots[i] * plane->block_stride + r * plane->row_stride;
              out.back().second.insert(out.back().second.end(), at, at + plane->row_bytes);
            }
      const auto tables = [&](const std::string& what, const auto& view) {
        add(name + what + " blocks", view.block_table,
            std::int64_t{4} * d.cache.schema().options.max_requests * view.blocks_per_request);
        add(name + what + " rows", view.request_rows, 4 * view.num_items);
        add(name + what + " lens", view.lens, 4 * view.num_items);
      };
      if (!layer->pages.empty()) tables("entries", here.view(handle.read_classical_view()));
      if (layer->pages.size() > 1) tables("keys", here.view(handle.read_indexer_view()));
    }
    return out;
  }

  std::vector<Work> work_;
};

}  // namespace kv4::test
