// CacheSchema, budgets and the memory plan, derived from model and options.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kv4/schema.h"

namespace kv4::python {

void bind_schema(nb::module_& m) {
  nb::class_<RowSchema>(m, "RowSchema", "One stored row; payload and scale lie in separate planes.")
      .def_ro("format", &RowSchema::format)
      .def_ro("width", &RowSchema::width, "channels")
      .def_ro("tail", &RowSchema::tail, "the last of them, kept bf16 by V4's row formats")
      .def_ro("payload_bytes", &RowSchema::payload_bytes)
      .def_ro("scale_bytes", &RowSchema::scale_bytes)
      .def("bytes", &RowSchema::bytes);
  nb::class_<PageSchema>(m, "PageSchema", "The page of one row kind of one layer: payloads, then scales.")
      .def_ro("kind", &PageSchema::kind)
      .def_ro("row", &PageSchema::row)
      .def_ro("rows_per_block", &PageSchema::rows_per_block)
      .def_ro("page_bytes", &PageSchema::page_bytes)
      .def_ro("content_bytes", &PageSchema::content_bytes, "what a block image holds of it")
      .def_ro("offset", &PageSchema::offset, "of block 0's page in the pool")
      .def_ro("block_stride", &PageSchema::block_stride)
      .def_ro("scale_offset", &PageSchema::scale_offset, "in the page")
      .def_ro("global_offset", &PageSchema::global_offset, "in the page: one fp32 (nvfp4), else -1");
  nb::class_<WindowSchema>(m, "WindowSchema", "The last rows of a request; the row of position p is at p mod rows.")
      .def_ro("row", &WindowSchema::row)
      .def_ro("rows", &WindowSchema::rows, "window + max_rewind_tokens")
      .def_ro("payload_offset", &WindowSchema::payload_offset, "in the state slot")
      .def_ro("scale_offset", &WindowSchema::scale_offset)
      .def_ro("undo_row_offset", &WindowSchema::undo_row_offset);
  nb::class_<PendingSchema>(m, "PendingSchema", "Compressor rows that wait for their entry: [kv | gate] by position.")
      .def_ro("columns", &PendingSchema::columns)
      .def_ro("rows", &PendingSchema::rows)
      .def_ro("dtype", &PendingSchema::dtype)
      .def_ro("row_bytes", &PendingSchema::row_bytes)
      .def_ro("ring_offset", &PendingSchema::ring_offset, "in the state slot")
      .def_ro("acc_offset", &PendingSchema::acc_offset)
      .def_ro("online", &PendingSchema::online);
  nb::class_<LayerCacheSchema>(m, "LayerCacheSchema", "Sizes and strides of one layer.")
      .def_ro("spec", &LayerCacheSchema::spec)
      .def_ro("window", &LayerCacheSchema::window)
      .def_ro("pages", &LayerCacheSchema::pages, "one per row kind that the layer owns")
      .def_ro("pending", &LayerCacheSchema::pending, "beside them")
      .def("tail_buffer_size_a", &LayerCacheSchema::tail_buffer_size_a)
      .def("tail_buffer_size_b", &LayerCacheSchema::tail_buffer_size_b)
      .def("needs_inv_scale", &LayerCacheSchema::needs_inv_scale, "whether a row carries one fp32 inverse scale");
  nb::class_<CacheSchema>(m, "CacheSchema", "Sizes and addresses of everything a cache stores.")
      .def_ro("config", &CacheSchema::config)
      .def_ro("options", &CacheSchema::options, "with every 0 = automatic filled in")
      .def_ro("layers", &CacheSchema::layers, "the owned ones, in model order, draft stages last")
      .def_ro("num_groups", &CacheSchema::num_groups, "backbone + draft stages")
      .def_ro("block_tokens", &CacheSchema::block_tokens)
      .def_ro("blocks_per_request", &CacheSchema::blocks_per_request, "of max_context")
      .def_ro("block_bytes", &CacheSchema::block_bytes, "one block in every layer")
      .def_ro("block_image_bytes", &CacheSchema::block_image_bytes, "the same as it is exported")
      .def_ro("slot_bytes", &CacheSchema::slot_bytes, "state of one request")
      .def_ro("undo_row_bytes", &CacheSchema::undo_row_bytes)
      .def_ro("layout_id", &CacheSchema::layout_id, "equal iff exported bytes mean the same")
      .def("layer", &CacheSchema::layer, nb::arg("model_layer"), nb::rv_policy::reference_internal,
           "The LayerCacheSchema of a layer of the model; raises where it is not owned.");
  m.def("build_schema", &build_schema, nb::arg("config"), nb::arg("options"),
        "Raises ConfigError where a width does not fit a format, a ratio does not divide the block, a size overflows.");

  nb::class_<BlockBudget>(m, "BlockBudget", "Blocks for requests x context tokens with 10 % headroom.")
      .def_ro("blocks_per_request", &BlockBudget::blocks_per_request)
      .def_ro("blocks", &BlockBudget::blocks)
      .def_ro("csa_entry_bytes", &BlockBudget::csa_entry_bytes)
      .def_ro("index_key_bytes", &BlockBudget::index_key_bytes)
      .def_ro("hca_entry_bytes", &BlockBudget::hca_entry_bytes)
      .def_ro("shared_entry_bytes", &BlockBudget::shared_entry_bytes, "V4.1's")
      .def_ro("bytes", &BlockBudget::bytes, "the sum");
  m.def("compute_block_budget", &compute_block_budget, nb::arg("schema"), nb::arg("requests"), nb::arg("context"),
        "Blocks for `requests` of `context` tokens, and their bytes by what they hold.");
  nb::class_<ContextBudget>(m, "ContextBudget", "What fits into a memory.")
      .def_ro("blocks", &ContextBudget::blocks)
      .def_ro("context", &ContextBudget::context, "tokens per request, whole blocks");
  m.def("compute_context_budget", &compute_context_budget, nb::arg("schema"), nb::arg("bytes"), nb::arg("requests"),
        "The inverse: blocks that fit into `bytes` beside the fixed parts, and the context each of `requests` gets.");
  nb::class_<MemoryPart>(m, "MemoryPart")
      .def_ro("name", &MemoryPart::name)
      .def_ro("bytes", &MemoryPart::bytes)
      .def_ro("note", &MemoryPart::note);
  nb::class_<MemoryPlan>(m, "MemoryPlan", "What a cache of a schema allocates, to the byte.")
      .def_ro("block_bytes", &MemoryPlan::block_bytes)
      .def_ro("bytes_per_token", &MemoryPlan::bytes_per_token)
      .def_ro("state_bytes_per_request", &MemoryPlan::state_bytes_per_request)
      .def_ro("draft_bytes_per_request", &MemoryPlan::draft_bytes_per_request)
      .def_ro("blocks", &MemoryPlan::blocks)
      .def_ro("total_bytes", &MemoryPlan::total_bytes)
      .def_ro("parts", &MemoryPlan::parts, "they add up to total_bytes");
  m.def("plan_memory", &plan_memory, nb::arg("schema"));
}

}  // namespace kv4::python
