// SWAView, ClassicalView, IndexerView: the cache's own memory as arrays, for kernels of the caller.
#include "views.h"

#include "bindings.h"

namespace kv4::python {
namespace {

class Exporter {
 public:
  Exporter(const Cache& cache, std::int64_t blocks)
      : device_(*cache.device), owner_(nb::find(cache)), blocks_(blocks) {}

  AnyArray plane(const PlaneView& plane, std::int64_t rows) const {
    if (plane.data == nullptr || plane.row_bytes == 0) return nb::none();
    return export_memory(device_, plane.data, {blocks_, rows, plane.row_bytes},
                         {plane.block_stride, plane.row_stride, 1}, DType::u8, owner_);
  }
  AnyArray per_block(const PlaneView& plane) const {
    if (plane.data == nullptr) return nb::none();
    return export_memory(device_, plane.data, {blocks_}, {plane.block_stride / 4}, DType::f32, owner_);
  }
  AnyArray ints(const std::int32_t* data, std::int64_t rows) const {
    return export_memory(device_, data, {rows}, {1}, DType::i32, owner_);
  }
  AnyArray ints(const std::int32_t* data, std::int64_t rows, std::int64_t columns) const {
    return export_memory(device_, data, {rows, columns}, {columns, 1}, DType::i32, owner_);
  }

 private:
  const Device& device_;
  nb::handle owner_;
  std::int64_t blocks_;
};

template <class View>
PagedArrays paged_arrays(const Exporter& exporter, const View& view, const Cache& cache) {
  return {exporter.ints(view.block_table, cache.manager->schema().options.max_requests, view.blocks_per_request),
          exporter.ints(view.request_rows, view.num_items),
          exporter.ints(view.lens, view.num_items),
          view.num_items,
          view.rows_per_block,
          view.blocks_per_request};
}

template <class View>
void def_paged(nb::class_<View>& view) {
  view.def_ro("block_table", &View::block_table, "int32 [max_requests, blocks_per_request], -1 padded")
      .def_ro("request_rows", &View::request_rows, "int32 [num_items]: row of block_table, -1: padded")
      .def_ro("lens", &View::lens, "int32 [num_items]: rows that exist after the step")
      .def_ro("num_items", &View::num_items)
      .def_ro("rows_per_block", &View::rows_per_block)
      .def_ro("blocks_per_request", &View::blocks_per_request);
}

}  // namespace

SWAArrays swa_arrays(const Cache& cache, const SWAView& view) {
  const Exporter exporter(cache, cache.manager->state_pool().num_slots());
  return {exporter.plane(view.payload, view.rows),
          exporter.plane(view.rope, view.rows),
          exporter.plane(view.scale, view.rows),
          exporter.ints(view.slots, view.num_items),
          exporter.ints(view.positions, view.num_items, view.rows),
          exporter.ints(view.head, view.num_items),
          view.num_items,
          view.rows};
}

ClassicalArrays classical_arrays(const Cache& cache, const ClassicalView& view) {
  const Exporter exporter(cache, cache.manager->allocator().num_blocks());
  return {paged_arrays(exporter, view, cache), exporter.plane(view.payload, view.rows_per_block),
          exporter.plane(view.rope, view.rows_per_block), exporter.plane(view.scale, view.rows_per_block)};
}

IndexerArrays indexer_arrays(const Cache& cache, const IndexerView& view) {
  const Exporter exporter(cache, cache.manager->allocator().num_blocks());
  return {paged_arrays(exporter, view, cache), exporter.plane(view.keys, view.rows_per_block),
          exporter.plane(view.scales, view.rows_per_block), exporter.per_block(view.global_scale)};
}

void bind_views(nb::module_& m) {
  nb::class_<SWAArrays>(
      m, "SWAView",
      "A layer's windows, without a copy, until the step ends. Planes are uint8 [slots, rows, bytes], a "
      "row is position mod rows.\nOn the CPU these are NumPy arrays, on a GPU objects for "
      "torch.from_dlpack. Do not write them.")
      .def_ro("payload", &SWAArrays::payload)
      .def_ro("rope", &SWAArrays::rope, "the bf16 tail inside the payload")
      .def_ro("scale", &SWAArrays::scale, "None where the format has none")
      .def_ro("slots", &SWAArrays::slots, "int32 [num_items], -1: padded")
      .def_ro("positions", &SWAArrays::positions,
              "int32 [num_items, rows]: which position each row holds after the step, -1: none")
      .def_ro("head", &SWAArrays::head, "int32 [num_items]: the row that the token after the step will take")
      .def_ro("num_items", &SWAArrays::num_items)
      .def_ro("rows", &SWAArrays::rows);

  nb::class_<ClassicalArrays> classical(
      m, "ClassicalView",
      "A layer's entries, without a copy, until the step ends. Planes are uint8 [num_blocks, rows_per_block, bytes].");
  classical.def_ro("payload", &ClassicalArrays::payload)
      .def_ro("rope", &ClassicalArrays::rope, "the bf16 tail inside the payload")
      .def_ro("scale", &ClassicalArrays::scale, "None where the format has none");
  def_paged(classical);

  nb::class_<IndexerArrays> indexer(m, "IndexerView",
                                    "A layer's index keys, without a copy, until the step ends. Planes are uint8 "
                                    "[num_blocks, rows_per_block, bytes].");
  indexer.def_ro("keys", &IndexerArrays::keys)
      .def_ro("scales", &IndexerArrays::scales, "None where the format has none")
      .def_ro("global_scale", &IndexerArrays::global_scale, "nvfp4: float32 [num_blocks], else None");
  def_paged(indexer);
}

}  // namespace kv4::python
