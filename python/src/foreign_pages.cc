// Rows in the pools of other engines: copies exported bytes to their pages and back.
#include "kv4/foreign_pages.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "arrays.h"
#include "bindings.h"

namespace kv4::python {
namespace {

/// A RowsView and the memory it views; its maker keeps the schema alive.
struct Rows {
  HostOutput memory;
  RowsView view;
};

void bind_page_layout(nb::module_& m) {
  nb::class_<PageLayout> layout(
      m, "PageLayout",
      "How a pool lays out rows of one kind: row `slot` is row slot % rows_per_page of page slot // rows_per_page.");
  def_keyword_init<PageLayout>(layout);
  layout.def_rw("rows_per_page", &PageLayout::rows_per_page)
      .def_rw("page_bytes", &PageLayout::page_bytes, "from page to page")
      .def_rw("payload_at", &PageLayout::payload_at, "of row 0 in its page")
      .def_rw("payload_stride", &PageLayout::payload_stride)
      .def_rw("scale_at", &PageLayout::scale_at)
      .def_rw("scale_stride", &PageLayout::scale_stride);
  m.def(
      "planar_pages", &planar_pages, nb::arg("row"), nb::arg("rows_per_page"), nb::arg("alignment") = 1,
      "All payloads of a page, then all scales. alignment 576: the V4 pools of FlashMLA, vLLM and SGLang; 1: pools of\n"
      "index keys of 132 (fp8) or 68 bytes (mxfp4).");
  m.def("interleaved_pages", &interleaved_pages, nb::arg("row"), nb::arg("rows_per_page"),
        "Each row's payload, then its scale: rows of 584 bytes in one piece.");
}

}  // namespace

void bind_foreign_pages(nb::module_& m) {
  bind_page_layout(m);
  nb::class_<Rows>(m, "RowsView", "Rows of one kind and layer inside exported bytes, which it keeps alive.")
      .def_prop_ro(
          "row", [](const Rows& self) { return *self.view.row; }, "RowSchema")
      .def("__len__", [](const Rows& self) { return self.view.count; });
  m.def(
      "entry_rows",
      [](const CacheSchema& schema, int layer, RowRole role, const ArrayLike& blocks, std::int64_t length) {
        HostOutput memory = host_output(blocks, "blocks");
        const RowsView view = entry_rows(schema, layer, role, memory.bytes, length);
        return Rows{std::move(memory), view};
      },
      nb::arg("schema"), nb::arg("layer"), nb::arg("role"), nb::arg("blocks"), nb::arg("length"),
      nb::keep_alive<0, 1>(),
      "Entries or index keys of a layer in blocks as export_blocks gives them, uint8 [n, block_image_bytes]: the\n"
      "length // ratio rows that exist.");
  m.def(
      "window_rows",
      [](const CacheSchema& schema, int layer, const ArrayLike& image, const std::vector<std::int64_t>& lengths) {
        HostOutput memory = host_output(image, "image");
        const RowsView view = window_rows(schema, layer, memory.bytes, lengths);
        return Rows{std::move(memory), view};
      },
      nb::arg("schema"), nb::arg("layer"), nb::arg("image"), nb::arg("lengths"), nb::keep_alive<0, 1>(),
      "Window rows of a layer in an image (CanonicalImage.bytes), oldest first: the last positions before its length.\n"
      "lengths [1 + draft layers].");
  m.def(
      "copy_to_pages",
      [](const Rows& rows, const Slots& slots, const PageLayout& layout, const ArrayLike& pool) {
        const HostOutput to = host_output(pool, "pool");
        const std::vector<std::int64_t> at = slots_of(slots);
        const nb::gil_scoped_release no_gil;
        copy_to_pages(rows.view, at, layout, to.bytes);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("layout"), nb::arg("pool"),
      "Row i goes to slots[i] of a pool in host memory, uint8; a negative slot: it goes nowhere.");
  m.def(
      "copy_from_pages",
      [](const Rows& rows, const Slots& slots, const PageLayout& layout, const ArrayLike& pool) {
        const HostBytes from = host_bytes(pool, "pool");
        const std::vector<std::int64_t> at = slots_of(slots);
        const nb::gil_scoped_release no_gil;
        copy_from_pages(rows.view, at, layout, from.bytes);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("layout"), nb::arg("pool"),
      "Row i comes from slots[i] of a pool; a negative slot: it stays as it is.");
}

}  // namespace kv4::python
