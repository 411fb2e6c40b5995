// Backends, host memory, block allocator, paged pool, state pool, images.
#include "pools.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "kv4/host_memory.h"

namespace kv4::python {
namespace {

void bind_backends(nb::module_& m) {
  nb::class_<Device>(m, "Backend",
                     "Where a cache lives and computes. Several caches may share one; their calls take turns.")
      .def_prop_ro("device", &Device::name, "'cpu' or 'cuda:N'")
      .def_prop_ro("threads", &Device::threads, "that an operation uses on a CPU; 1 on a GPU")
      .def("__repr__", [](const Device& self) {
        const std::string threads = self.threads() > 1 ? ", " + std::to_string(self.threads()) + " threads" : "";
        return "<kv4.Backend " + self.name() + threads + ">";
      });
  m.def(
      "make_cpu_backend",
      [](int threads) { return std::make_shared<Device>(make_cpu_backend(threads), -1, std::nullopt, threads); },
      nb::arg("threads") = 1, "`threads`: how many an operation uses; results do not depend on it.");
  m.def(
      "make_cuda_backend",
      [](int device, const StreamLike& stream) {
        std::optional<Stream> chosen;
        if (!stream.is_none()) chosen = parse_stream(stream);
        return std::make_shared<Device>(make_cuda_backend(device, chosen.value_or(Stream{})), device, chosen);
      },
      nb::arg("device") = 0, nb::arg("stream") = nb::none(),
      "A GPU. Work is queued on `stream`; without one on torch's current stream at each call where torch uses the "
      "GPU,\n"
      "else on the default stream. Raises NoDeviceError; why_no_cuda() says why.");
  m.def("why_no_cuda", &why_no_cuda, nb::arg("device") = 0, "Why make_cuda_backend would fail, or ''.");
  m.def("cpu_target", &cpu_target, "The instruction set the row code runs on: 'AVX3', 'AVX2', 'NEON', ..., 'scalar'.");

  nb::class_<HostMemory>(
      m, "HostMemory",
      "Memory of the host for images and blocks: pinned where the backend is a GPU. Make one and use "
      "it again.")
      .def(
          "__init__",
          [](HostMemory* self, const std::shared_ptr<Device>& backend, std::int64_t size) {
            new (self) HostMemory(backend->work([&] { return HostMemory(backend->backend(), size); }));
          },
          nb::arg("backend"), nb::arg("size"))
      .def(
          "bytes",
          [](nb::handle_t<HostMemory> self) {
            const std::span<std::byte> bytes = nb::cast<HostMemory&>(self).bytes();
            const std::size_t size = bytes.size();
            return AnyArray(nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(bytes.data(), {size}, self)));
          },
          "uint8 [size], a NumPy array of this memory.");

  nb::class_<BlockAllocator>(m, "BlockAllocator", "Block ids: who holds them, which are free, which may be taken back.")
      .def(nb::init<std::int32_t>(), nb::arg("num_blocks"))
      .def("allocate", &BlockAllocator::allocate, "A free block, else the oldest evictable one; None: all are held.")
      .def("retain", &BlockAllocator::retain, nb::arg("block"))
      .def("release", &BlockAllocator::release, nb::arg("block"))
      .def("publish", &BlockAllocator::publish, nb::arg("block"))
      .def("unpublish", &BlockAllocator::unpublish, nb::arg("block"))
      .def("reference_count", &BlockAllocator::reference_count, nb::arg("block"))
      .def("is_published", &BlockAllocator::is_published, nb::arg("block"))
      .def("is_immutable", &BlockAllocator::is_immutable, nb::arg("block"))
      .def("num_blocks", &BlockAllocator::num_blocks)
      .def("num_free", &BlockAllocator::num_free)
      .def("num_evictable", &BlockAllocator::num_evictable)
      .def("num_available", &BlockAllocator::num_available)
      .def("num_held", &BlockAllocator::num_held)
      .def("memory_bytes", [](const BlockAllocator& self) { return self.memory_bytes(); });
}

struct MaybeBias : nb::object {
  NB_OBJECT_DEFAULT(MaybeBias, nb::object, "kv4.typing.ArrayLike | None", any_object)
};

AnyArray pool_memory(const Device& device, const std::byte* base, std::int64_t bytes, nb::handle owner) {
  return export_memory(device, base, {bytes}, {1}, DType::u8, owner);
}

void bind_paged_pool(nb::module_& m) {
  nb::class_<KVPool>(m, "PagedKVPool", "Compressed entries and index keys of all layers behind block ids.")
      .def(nb::init<const CacheSchema&, std::shared_ptr<Device>>(), nb::arg("schema"), nb::arg("backend"))
      .def(
          "memory_bytes", [](const KVPool& self) { return self.pool->memory_bytes(); },
          "Exactly num_blocks * block_bytes.")
      .def(
          "base",
          [](nb::handle_t<KVPool> self) {
            const KVPool& pool = nb::cast<const KVPool&>(self);
            const std::int64_t bytes = pool.schema->options.num_blocks * pool.schema->block_bytes;
            return pool_memory(*pool.device, pool.pool->base(), bytes, self);
          },
          "uint8 [num_blocks * block_bytes], the pool's memory where the backend has it.")
      .def(
          "copy_block",
          [](const KVPool& self, BlockId from, BlockId to) {
            self.work([&](PagedKVPool& pool) { pool.copy_block(from, to); });
          },
          nb::arg("source"), nb::arg("target"))
      .def(
          "save_block",
          [](const KVPool& self, BlockId block, int tokens, const ArrayLike& out) {
            AnyArray array = out.is_none() ? new_bytes({self.schema->block_image_bytes}) : nb::object(out);
            const HostOutput target = host_output(array, self.schema->block_image_bytes, "out");
            self.work([&](PagedKVPool& pool) { pool.save_block(block, tokens, target.bytes); });
            return array;
          },
          nb::arg("block"), nb::arg("tokens"), nb::arg("out") = nb::none(),
          "The block as it is exported, rows of the first `tokens` tokens. out: uint8 [block_image_bytes]")
      .def(
          "load_block",
          [](const KVPool& self, BlockId block, const ArrayLike& image) {
            const HostBytes source = host_bytes(image, "image");
            self.work([&](PagedKVPool& pool) { pool.load_block(block, source.bytes); });
          },
          nb::arg("block"), nb::arg("image"), "image: uint8 [block_image_bytes]");
}

void bind_images(nb::module_& m) {
  nb::class_<CanonicalImage>(m, "CanonicalImage",
                             "What a request needs to go on: windows, then pending rows; the same whatever wrote it.")
      .def(
          "__init__",
          [](CanonicalImage* self, std::uint64_t layout_id, std::vector<std::int64_t> lengths, const ArrayLike& bytes) {
            const HostBytes source = host_bytes(bytes, "bytes");
            new (self) CanonicalImage{layout_id, std::move(lengths), {source.bytes.begin(), source.bytes.end()}};
          },
          nb::arg("layout_id"), nb::arg("lengths"), nb::arg("bytes"))
      .def_ro("layout_id", &CanonicalImage::layout_id)
      .def_ro("lengths", &CanonicalImage::lengths, "[1 + draft layers]: tokens of the backbone and of each draft stage")
      .def_prop_ro(
          "bytes",
          [](nb::handle_t<CanonicalImage> self) {
            CanonicalImage& image = nb::cast<CanonicalImage&>(self);
            const std::size_t size = image.bytes.size();
            return AnyArray(nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(image.bytes.data(), {size}, self)));
          },
          "uint8 [n], a NumPy array of the image's memory")
      .def(
          "__eq__", [](const CanonicalImage& a, const CanonicalImage& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"));
  m.def(
      "image_bytes",
      [](const CacheSchema& schema, const std::vector<std::int64_t>& lengths) { return image_bytes(schema, lengths); },
      nb::arg("schema"), nb::arg("lengths"), "Bytes of the image of a request with these lengths [1 + draft layers].");
}

void bind_state_pool(nb::module_& m) {
  nb::class_<StatePool>(m, "StateCachePool",
                        "Windows and pending rows: one fixed slot per running request, and spares for long steps.")
      .def(nb::init<const CacheSchema&, std::shared_ptr<Device>>(), nb::arg("schema"), nb::arg("backend"))
      .def(
          "memory_bytes", [](const StatePool& self) { return self.pool->memory_bytes(); },
          "Slots, undo rows, and 8 bytes per slot and layer.")
      .def("num_slots", [](const StatePool& self) { return self.pool->num_slots(); })
      .def("num_free", [](const StatePool& self) { return self.pool->num_free(); })
      .def(
          "base",
          [](nb::handle_t<StatePool> self) {
            const StatePool& pool = nb::cast<const StatePool&>(self);
            const std::int64_t slots = pool.pool->num_slots(), bytes = pool.schema->slot_bytes;
            return AnyArray(
                export_memory(*pool.device, pool.pool->base(), {slots, bytes}, {bytes, 1}, DType::u8, self));
          },
          "uint8 [num_slots, slot_bytes], the slots' memory where the backend has it.")
      .def(
          "acquire_slot",
          [](const StatePool& self) { return self.work([](StateCachePool& pool) { return pool.acquire_slot(); }); },
          "A free slot, or None.")
      .def(
          "release_slot",
          [](const StatePool& self, std::int32_t slot) { self.work([&](StateCachePool& p) { p.release_slot(slot); }); },
          nb::arg("slot"))
      .def(
          "reset_slot",
          [](const StatePool& self, std::int32_t slot) { self.work([&](StateCachePool& p) { p.reset_slot(slot); }); },
          nb::arg("slot"), "All zero: nothing of an earlier request remains.")
      .def(
          "copy_slot",
          [](const StatePool& self, std::int32_t from, std::int32_t to) {
            self.work([&](StateCachePool& pool) { pool.copy_slot(from, to); });
          },
          nb::arg("source"), nb::arg("target"))
      .def(
          "save",
          [](const StatePool& self, std::int32_t slot, const std::vector<std::int64_t>& lengths,
             const std::vector<MaybeBias>& bias) {
            Arguments arguments(*self.device);
            std::vector<const float*> pointers;
            for (const MaybeBias& array : bias)
              pointers.push_back(static_cast<const float*>(arguments.in(array, "bias").data));
            pointers.resize(self.schema->layers.size(), nullptr);
            return self.work([&](StateCachePool& pool) { return pool.save(slot, lengths, pointers); });
          },
          nb::arg("slot"), nb::arg("lengths"), nb::arg("bias") = std::vector<MaybeBias>(),
          "The CanonicalImage of a slot. bias: per owned layer the compressor's position bias, float32 [ratio, "
          "width],\n"
          "where the image needs one (an open HCA span), else None.")
      .def(
          "restore",
          [](const StatePool& self, std::int32_t slot, const CanonicalImage& image) {
            self.work([&](StateCachePool& pool) { pool.restore(slot, image); });
          },
          nb::arg("slot"), nb::arg("image"))
      .def(
          "check",
          [](const StatePool& self, const CanonicalImage& image) {
            self.work([&](StateCachePool& pool) { pool.check(image); });
          },
          nb::arg("image"), "Raises ArgumentError if the image is not one of this layout.");
}

}  // namespace

void bind_pools(nb::module_& m) {
  bind_backends(m);
  bind_paged_pool(m);
  bind_images(m);
  bind_state_pool(m);
}

}  // namespace kv4::python
