// KVCacheManager: requests and steps, images, the prefix cache's calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings.h"
#include "cache.h"
#include "kv4/error.h"
#include "pools.h"
#include "prompt.h"

namespace kv4::python {
namespace {

/// A StepItem with token ids of its own.
struct ItemData {
  RequestId request = kNoRequest;
  std::int32_t count = 1;
  std::vector<std::int32_t> token_ids;
  std::int64_t position = -1;
};

void bind_steps(nb::module_& m) {
  nb::class_<ItemData>(m, "StepItem", "The next `count` tokens of a request: a prefill chunk, a decode or a draft.")
      .def(
          "__init__",
          [](ItemData* self, RequestId request, const TokenIds& token_ids, std::optional<std::int32_t> count,
             std::int64_t position) {
            std::vector<std::int32_t> ids = token_ids_of(token_ids);
            const std::int32_t tokens = count.value_or(ids.empty() ? 1 : static_cast<std::int32_t>(ids.size()));
            new (self) ItemData{request, tokens, std::move(ids), position};
          },
          nb::arg("request") = kNoRequest, nb::arg("token_ids") = nb::none(), nb::arg("count") = nb::none(),
          nb::arg("position") = -1,
          "request    -1: `count` padded tokens\n"
          "token_ids  ints, or an int32 or int64 array [count]; None for padding and for draft stages\n"
          "count      None: as many as there are token ids, else 1\n"
          "position   of the first token, must be the request's length; -1: not stated")
      .def_ro("request", &ItemData::request)
      .def_ro("count", &ItemData::count)
      .def_prop_ro(
          "token_ids", [](const ItemData& self) { return AnyArray(own_array(self.token_ids)); }, "int32 [n]")
      .def_ro("position", &ItemData::position);
  nb::class_<Step>(m, "Step", "One forward of a batch; its tokens are the items' tokens in order.")
      .def_ro("id", &Step::id)
      .def_ro("num_tokens", &Step::num_tokens)
      .def_ro("num_items", &Step::num_items)
      .def_ro("group", &Step::group);
}

Step prepare_forward(Cache& cache, const std::vector<ItemData>& items, int group, nb::handle stream) {
  std::vector<StepItem> views;
  for (const ItemData& item : items) views.push_back({item.request, item.count, item.token_ids, item.position});
  std::vector<Cache::Item> opened;
  const Expected<Step> step = cache.work_on(stream, [&](KVCacheManager& manager) {
    Expected<Step> made = manager.prepare_forward(views, group);
    if (made)
      for (const StepItem& item : views)
        opened.push_back(item.request == kNoRequest ? Cache::Item{}
                                                    : Cache::Item{manager.length(item.request, group), item.count});
    return made;
  });
  const Step open = value_or_raise(step, "prepare_forward");
  cache.items = std::move(opened);
  cache.num_tokens = open.num_tokens;
  return open;
}

template <void (KVCacheManager::*end)(const Step&)>
void end_step(Cache& cache, const Step& step, const StreamLike& stream) {
  cache.work_on(stream, [&](KVCacheManager& manager) { (manager.*end)(step); });
  cache.items.clear();
  cache.num_tokens = 0;
}

void def_steps(nb::class_<Cache>& cache) {
  cache.def(
      "bind_weights",
      [](Cache& self, int layer, const ArrayLike& position_bias, const ArrayLike& norm_weight,
         const ArrayLike& index_position_bias, const ArrayLike& index_norm_weight, const ArrayLike& raw_norm_weight) {
        Arguments arguments(*self.device, self.device->choose_stream(nb::none()));
        const LayerWeights weights{
            arguments.in(position_bias, "position_bias"), arguments.in(norm_weight, "norm_weight"),
            arguments.in(index_position_bias, "index_position_bias"),
            arguments.in(index_norm_weight, "index_norm_weight"), arguments.in(raw_norm_weight, "raw_norm_weight")};
        self.work([&](KVCacheManager& manager) { manager.bind_weights(layer, weights); });
        self.weights[layer] = arguments.take();
      },
      nb::arg("layer"), nb::arg("position_bias") = nb::none(), nb::arg("norm_weight") = nb::none(),
      nb::arg("index_position_bias") = nb::none(), nb::arg("index_norm_weight") = nb::none(),
      nb::arg("raw_norm_weight") = nb::none(),
      "Constants of a layer, float32 and dense, where the cache is; not copied, but kept alive.\n\n"
      "position_bias        CSA [ratio, 2 * head_dim], HCA [ratio, head_dim]\n"
      "norm_weight          [head_dim]\n"
      "index_position_bias  CSA [ratio, 2 * index_dim]\n"
      "index_norm_weight    CSA [index_dim]\n"
      "raw_norm_weight      [head_dim], any layer, for append(raw_is_projection=True)");
  cache.def(
      "bind_rope_table",
      [](Cache& self, const ArrayLike& cos, const ArrayLike& sin) {
        Arguments arguments(*self.device, self.device->choose_stream(nb::none()));
        const ConstTensorView cosines = arguments.in(cos, "cos"), sines = arguments.in(sin, "sin");
        self.work([&](KVCacheManager& manager) { manager.bind_rope_table(cosines, sines); });
        self.rope_table = arguments.take();
      },
      nb::arg("cos"), nb::arg("sin"),
      "The engine's own table for CSA and HCA layers, float32 [positions, rope_dim / 2] each; kept alive.");
  cache.def(
      "prepare_forward",
      [](Cache& self, const std::vector<ItemData>& items, int group, const StreamLike& stream) {
        return prepare_forward(self, items, group, stream);
      },
      nb::arg("items"), nb::arg("group") = 0, nb::kw_only(), nb::arg("stream") = nb::none(),
      "Reserves all that the step may write, or raises ShortageError and changes nothing. group: 0 = backbone,\n"
      "d + 1 = draft stage d. One step at a time.");
  cache.def(
      "acquire",
      [](Cache& self, int layer) {
        return self.work([&](KVCacheManager& manager) { return Layer{&self, manager.acquire(layer)}; });
      },
      nb::arg("layer"), nb::keep_alive<0, 1>(), "The handle of a layer for the open step.");
  cache.def("commit", &end_step<&KVCacheManager::commit>, nb::arg("step"), nb::kw_only(),
            nb::arg("stream") = nb::none(), "Lengths advance at once; on a GPU the step's work may still be queued.");
  cache.def("abort", &end_step<&KVCacheManager::abort>, nb::arg("step"), nb::kw_only(), nb::arg("stream") = nb::none(),
            "As if the step had never been prepared.");
  cache.def(
      "finished",
      [](Cache& self, const Step& step) {
        return self.work([&](KVCacheManager& manager) { return manager.finished(step); });
      },
      nb::arg("step"), "Whether the work of a committed step is done.");
  cache.def(
      "set_stream",
      [](Cache& self, const StreamLike& stream) {
        std::optional<Stream> chosen;
        if (!stream.is_none()) chosen = parse_stream(stream);
        self.device->pin_stream(chosen);
        self.work_on(nb::none(), [](KVCacheManager&) {});
      },
      nb::arg("stream"), "Work is queued on this stream from now on; None: on torch's current one at each call.");
  cache.def(
      "synchronize", [](Cache& self) { self.work([](KVCacheManager& manager) { manager.synchronize(); }); },
      "Waits for all queued work; raises DeviceFailureError if some of it failed.");
}

void def_requests(nb::class_<Cache>& cache) {
  cache.def(
      "admit",
      [](Cache& self) {
        return value_or_raise(self.work_on(nb::none(), [](KVCacheManager& manager) { return manager.admit(); }),
                              "admit");
      },
      "A new request; raises ShortageError.");
  cache.def(
      "admit",
      [](Cache& self, const PromptData& prompt) {
        const PromptView view(prompt);
        return value_or_raise(
            self.work_on(nb::none(), [&](KVCacheManager& manager) { return manager.admit(view.prompt()); }), "admit");
      },
      nb::arg("prompt"),
      "Begins with the longest prefix of the prompt that is kept, and shares its blocks. Needs "
      "options.prefix.enabled.");
  cache.def(
      "rewind",
      [](Cache& self, RequestId request, std::int64_t length, int group) {
        self.work_on(nb::none(), [&](KVCacheManager& manager) { manager.rewind(request, length, group); });
      },
      nb::arg("request"), nb::arg("length"), nb::arg("group") = 0,
      "Forgets the tokens from `length` on, down to rewind_floor(): as if they had never been appended.");
  cache.def(
      "rewind_floor",
      [](Cache& self, RequestId request, int group) {
        return self.work([&](KVCacheManager& manager) { return manager.rewind_floor(request, group); });
      },
      nb::arg("request"), nb::arg("group") = 0);
  cache.def(
      "fork",
      [](Cache& self, RequestId request) {
        return value_or_raise(self.work_on(nb::none(), [&](KVCacheManager& manager) { return manager.fork(request); }),
                              "fork");
      },
      nb::arg("request"), "A request that shares all that has been computed of this one; raises ShortageError.");
  cache.def(
      "release",
      [](Cache& self, RequestId request) {
        self.work_on(nb::none(), [&](KVCacheManager& manager) { manager.release(request); });
      },
      nb::arg("request"));
  cache.def(
      "length",
      [](Cache& self, RequestId request, int group) {
        return self.work([&](KVCacheManager& manager) { return manager.length(request, group); });
      },
      nb::arg("request"), nb::arg("group") = 0, "Committed tokens.");
  cache.def(
      "token_ids",
      [](Cache& self, RequestId request) {
        return AnyArray(own_array(self.work([&](KVCacheManager& manager) { return manager.token_ids(request); })));
      },
      nb::arg("request"), "int32 [length]");
  cache.def(
      "blocks",
      [](Cache& self, RequestId request) {
        return self.work([&](KVCacheManager& manager) { return manager.blocks(request); });
      },
      nb::arg("request"));
}

void def_images(nb::class_<Cache>& cache) {
  cache.def(
      "export_image",
      [](Cache& self, RequestId request) {
        return self.work_on(nb::none(), [&](KVCacheManager& manager) { return manager.export_image(request); });
      },
      nb::arg("request"), "The request's state as a CanonicalImage.");
  cache.def(
      "export_image",
      [](Cache& self, RequestId request, const ArrayLike& out) {
        const HostOutput target =
            host_output(out, self.work([&](KVCacheManager& manager) { return manager.image_bytes(request); }), "out");
        self.work_on(nb::none(), [&](KVCacheManager& manager) { manager.export_image(request, target.bytes); });
      },
      nb::arg("request"), nb::arg("out"),
      "The same into memory of the caller, uint8 [image_bytes(request)]; fastest into HostMemory.");
  cache.def(
      "image_bytes",
      [](Cache& self, RequestId request) {
        return self.work([&](KVCacheManager& manager) { return manager.image_bytes(request); });
      },
      nb::arg("request"));
  cache.def(
      "export_blocks",
      [](Cache& self, RequestId request, const ArrayLike& out) {
        const std::int64_t count = self.work(
            [&](KVCacheManager& manager) { return static_cast<std::int64_t>(manager.blocks(request).size()); });
        const std::int64_t bytes = self.manager->schema().block_image_bytes;
        AnyArray array = out.is_none() ? new_bytes({count, bytes}) : nb::object(out);
        const HostOutput target = host_output(array, count * bytes, "out");
        self.work_on(nb::none(), [&](KVCacheManager& manager) { manager.export_blocks(request, target.bytes); });
        return array;
      },
      nb::arg("request"), nb::arg("out") = nb::none(), "The request's entries: uint8 [blocks, block_image_bytes].");
  cache.def(
      "import_image",
      [](Cache& self, const CanonicalImage& image, const TokenIds& token_ids, const ArrayLike& blocks) {
        const std::vector<std::int32_t> ids = token_ids_of(token_ids);
        const HostBytes entries = host_bytes(blocks, "blocks");
        return value_or_raise(
            self.work_on(nb::none(),
                         [&](KVCacheManager& manager) { return manager.import_image(image, ids, entries.bytes); }),
            "import_image");
      },
      nb::arg("image"), nb::arg("token_ids"), nb::arg("blocks"),
      "A request from its image, token ids [length] and blocks, uint8 [blocks, block_image_bytes]; raises "
      "ShortageError.");
}

void def_parts(nb::class_<Cache>& cache) {
  cache.def(
      "schema", [](const Cache& self) -> const CacheSchema& { return self.manager->schema(); },
      nb::rv_policy::reference_internal);
  cache.def(
      "allocator", [](const Cache& self) -> const BlockAllocator& { return self.manager->allocator(); },
      nb::rv_policy::reference_internal, "To look at; the cache allocates.");
  cache.def(
      "kv_pool", [](Cache& self) { return KVPool(self.device, self.manager->schema(), self.manager->kv_pool()); },
      nb::keep_alive<0, 1>());
  cache.def(
      "state_pool",
      [](Cache& self) { return StatePool(self.device, self.manager->schema(), self.manager->state_pool()); },
      nb::keep_alive<0, 1>());
  cache.def("backend", [](const Cache& self) { return self.device; });
  cache.def("num_requests", [](Cache& self) { return self.work([](KVCacheManager& m) { return m.num_requests(); }); });
  cache.def(
      "memory_bytes", [](Cache& self) { return self.manager->memory_bytes(); },
      "Exactly plan_memory(schema()).total_bytes.");
}

}  // namespace

void bind_manager(nb::module_& m) {
  bind_steps(m);
  nb::class_<Cache> cache(
      m, "KVCacheManager",
      "The cache of one model on one device.\n\n"
      "admit -> [prepare_forward -> acquire(layer).append ... for each layer -> commit | abort]* -> release\n\n"
      "Calls release the GIL while they work and take turns, so that threads may share a cache; a step belongs to "
      "one.\n"
      "What raises has changed nothing.");
  cache.def(
      "__init__",
      [](Cache* self, const ModelConfig& config, const CacheOptions& options, std::shared_ptr<Device> backend) {
        if (!backend) backend = std::make_shared<Device>(make_cpu_backend(), -1, std::nullopt);
        auto manager =
            backend->work([&] { return std::make_unique<KVCacheManager>(config, options, backend->backend()); });
        new (self) Cache{std::move(backend), std::move(manager), {}, {}, {}, 0};
      },
      nb::arg("config"), nb::arg("options"), nb::arg("backend") = nb::none(),
      "backend: None is one thread of the CPU.");
  def_steps(cache);
  def_requests(cache);
  def_images(cache);
  def_prefix(cache);
  def_statistics(cache);
  def_parts(cache);
}

}  // namespace kv4::python
