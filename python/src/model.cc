// ModelConfig and what follows from it alone.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <filesystem>

#include <nanobind/stl/filesystem.h>

#include "arrays.h"
#include "bindings.h"
#include "kv4/model_config.h"

namespace kv4::python {

void bind_model(nb::module_& m) {
  nb::enum_<LayerKind>(m, "LayerKind", "What a layer keeps.")
      .value("swa", LayerKind::swa, "a sliding window only")
      .value("csa", LayerKind::csa, "window + one overlapping entry and one index key per csa_ratio tokens")
      .value("hca", LayerKind::hca, "window + one entry per hca_ratio tokens")
      .value("shared", LayerKind::shared, "window + entries of an owner layer, itself or an earlier one (V4.1)");
  nb::enum_<RowRole>(m, "RowRole").value("entry", RowRole::entry).value("index_key", RowRole::index_key);

  nb::class_<RopeSpec> rope(m, "RopeSpec", "Rotary frequencies: theta, and YaRN scaling where `yarn` is set.");
  def_keyword_init<RopeSpec>(rope);
  rope.def_rw("theta", &RopeSpec::theta)
      .def_rw("yarn", &RopeSpec::yarn)
      .def_rw("factor", &RopeSpec::factor)
      .def_rw("original_length", &RopeSpec::original_length)
      .def_rw("beta_fast", &RopeSpec::beta_fast)
      .def_rw("beta_slow", &RopeSpec::beta_slow);

  nb::class_<EntrySharing> sharing(m, "EntrySharing", "V4.1: which layers own entries, which rank them.");
  def_keyword_init<EntrySharing>(sharing);
  sharing.def_rw("ratios", &EntrySharing::ratios, "tokens per entry, by layer: 1, 2, or 0; empty: not V4.1")
      .def_rw("owners", &EntrySharing::owners, "layers with a compressor, entries and index keys")
      .def_rw("index_sources", &EntrySharing::index_sources, "layers that rank the keys of their owner")
      .def_rw("candidate_source", &EntrySharing::candidate_source, "picks the candidate blocks; -1: none")
      .def_rw("candidate_block_size", &EntrySharing::candidate_block_size, "entries")
      .def_rw("candidate_topk_blocks", &EntrySharing::candidate_topk_blocks, "blocks that are kept");
  nb::class_<Engram> engram(m, "Engram", "V4.1: the hash of the last token ids, as far as a request keeps them.");
  def_keyword_init<Engram>(engram);
  engram.def_rw("layers", &Engram::layers)
      .def_rw("max_ngram", &Engram::max_ngram, "token ids of the longest hash; a request keeps one less")
      .def_rw("pad_id", &Engram::pad_id);

  nb::class_<ModelConfig> config(m, "ModelConfig", "What a model demands of its cache: which layer keeps what.");
  def_keyword_init<ModelConfig>(config);
  config.def_rw("name", &ModelConfig::name)
      .def_rw("num_layers", &ModelConfig::num_layers, "backbone layers")
      .def_rw("num_query_heads", &ModelConfig::num_query_heads)
      .def_rw("head_dim", &ModelConfig::head_dim, "width of a window row and of an entry; K = V")
      .def_rw("rope_dim", &ModelConfig::rope_dim, "its last channels, rotated; V4's row formats keep them bf16")
      .def_rw("window", &ModelConfig::window, "rows a query sees, itself included")
      .def_rw("index_heads", &ModelConfig::index_heads)
      .def_rw("index_dim", &ModelConfig::index_dim, "width of an index key")
      .def_rw("index_topk", &ModelConfig::index_topk)
      .def_rw("csa_ratio", &ModelConfig::csa_ratio)
      .def_rw("hca_ratio", &ModelConfig::hca_ratio)
      .def_rw("rms_eps", &ModelConfig::rms_eps)
      .def_rw("max_positions", &ModelConfig::max_positions)
      .def_rw("rope_main", &ModelConfig::rope_main, "SWA layers")
      .def_rw("rope_compress", &ModelConfig::rope_compress, "layers with entries: q, window rows and entries alike")
      .def_rw("kinds", &ModelConfig::kinds, "list of LayerKind [num_layers]; assign a whole list to change it")
      .def_rw("draft_hint", &ModelConfig::draft_hint, "draft stages the config lists after the backbone")
      .def_rw("sharing", &ModelConfig::sharing, "V4.1")
      .def_rw("draft_block", &ModelConfig::draft_block, "V4.1: queries of a draft; 0: not told")
      .def_rw("draft_targets", &ModelConfig::draft_targets, "V4.1: the layers whose inputs a draft starts from")
      .def_rw("engram", &ModelConfig::engram)
      .def("shares_entries", &ModelConfig::shares_entries, "Whether layers read entries of other layers: V4.1.");

  m.def("parse_model_config", &parse_model_config, nb::arg("json"), "A ModelConfig from the text of a config.json.");
  m.def(
      "load_model_config", [](const std::filesystem::path& path) { return load_model_config(path.string()); },
      nb::arg("path"), "A ModelConfig from a Hugging Face config.json.");
  m.def("model_preset", &model_preset, nb::arg("name"), "A ModelConfig by name: 'v4-flash', 'v4-pro' or 'v4.1-flash'.");
  m.def("validate", &validate, nb::arg("config"), "Checks every range; for a config built by hand.");

  nb::class_<RowKind>(m, "RowKind", "One kind of stored row of a layer.")
      .def_ro("role", &RowKind::role)
      .def_ro("ratio", &RowKind::ratio, "tokens per row")
      .def_ro("overlap", &RowKind::overlap, "pools the previous span's first-half columns too")
      .def_ro("width", &RowKind::width)
      .def_ro("owner_layer", &RowKind::owner_layer, "the layer whose pages hold the rows");
  nb::class_<LayerSpec>(m, "LayerSpec", "A window and a list of row kinds that the layer reads.")
      .def_ro("layer", &LayerSpec::layer, "index in the model; draft stages follow the backbone")
      .def_ro("kind", &LayerSpec::kind)
      .def_ro("group", &LayerSpec::group, "0: backbone; draft stage d has group d + 1")
      .def_ro("rows", &LayerSpec::rows)
      .def_ro("ranker", &LayerSpec::ranker, "the layer whose index list it reads; -1: none")
      .def_ro("candidate_source", &LayerSpec::candidate_source,
              "of a layer that ranks: itself where it picks the candidate blocks, or the one that did; -1: none");
  m.def("layer_schedule", &layer_schedule, nb::arg("config"), nb::arg("draft_layers") = 0,
        "All backbone layers, then `draft_layers` SWA-only draft stages.");
  m.def(
      "build_rope_table",
      [](const RopeSpec& spec, int rope_dim, std::int64_t first, std::int64_t count, std::int64_t step) {
        RopeTable table = build_rope_table(spec, rope_dim, first, count, step);
        const std::size_t rows = count, pairs = rope_dim / 2;
        return array_tuple(AnyArray(own_array(std::move(table.cos), {rows, pairs})),
                           AnyArray(own_array(std::move(table.sin), {rows, pairs})));
      },
      nb::arg("rope"), nb::arg("rope_dim"), nb::arg("first"), nb::arg("count"), nb::arg("step") = 1,
      "(cos, sin), float32 [count, rope_dim / 2] each, of positions first, first + step, ...");
}

}  // namespace kv4::python
