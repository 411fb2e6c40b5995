// CacheOptions and PrefixOptions. Enum fields take the enum or its name.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <variant>

#include "bindings.h"
#include "kv4/error.h"
#include "kv4/names.h"

namespace kv4::python {
namespace {

/// Binds an enumeration under the library's own names.
template <class E>
nb::enum_<E> bind_names(nb::handle scope, const char* name, const char* doc = "") {
  nb::enum_<E> out(scope, name, doc);
  for (const Named<E>& each : names_of<E>()) out.value(each.name, each.value);
  return out;
}

template <auto field, auto parse, class Class>
void def_enum(Class& record, const char* name, const char* doc = "") {
  using Record = typename Class::Type;
  using Enum = std::remove_cvref_t<decltype(std::declval<Record>().*field)>;
  record.def_prop_rw(
      name, [](const Record& self) { return self.*field; },
      [](Record& self, const std::variant<Enum, std::string>& value) {
        self.*field = std::holds_alternative<Enum>(value) ? std::get<Enum>(value) : parse(std::get<std::string>(value));
      },
      doc);
}

/// The same for a format that may be None: the model's own.
template <auto field, class Class>
void def_row_format(Class& record, const char* name, const char* doc) {
  record.def_prop_rw(
      name, [](const CacheOptions& self) { return self.*field; },
      [](CacheOptions& self, const std::optional<std::variant<Format, std::string>>& value) {
        if (!value)
          self.*field = std::nullopt;
        else
          self.*field = std::holds_alternative<Format>(*value) ? std::get<Format>(*value)
                                                               : parse_format(std::get<std::string>(*value));
      },
      nb::for_setter(nb::arg("value").none()), doc);
}

}  // namespace

void bind_options(nb::module_& m) {
  bind_names<DType>(m, "DType");
  bind_names<Format>(m, "Format",
                     "Number formats of stored rows. Rows take fp8_tile64, fp8_row, bf16, fp8_tile32 and nvfp4_row,\n"
                     "index keys bf16, mxfp4, nvfp4 and fp8.");
  bind_names<HcaMode>(m, "HcaMode");
  bind_names<Arrangement>(m, "Arrangement");
  bind_names<EvictionKind>(m, "EvictionKind");
  bind_names<ScoreMode>(m, "ScoreMode", "How the sums of index scores are rounded: to the bit, or as is fastest.");

  nb::class_<SnapshotPolicy> snapshots(m, "SnapshotPolicy",
                                       "Where snapshots are kept, and what a hit then has to compute again.");
  bind_names<SnapshotPolicy::Kind>(
      snapshots, "Kind",
      "full: at every block boundary. checkpoint: at the last boundary of a prompt and of an output, and every\n"
      "period_tokens. none: nowhere, a hit replays.");
  def_keyword_init<SnapshotPolicy>(snapshots);
  def_enum<&SnapshotPolicy::kind, parse_snapshots>(snapshots, "kind");
  snapshots.def_rw("period_tokens", &SnapshotPolicy::period_tokens, "checkpoint: a multiple of the block")
      .def_rw("replay_tokens", &SnapshotPolicy::replay_tokens, "none: 0 is exact, window x layers");

  nb::class_<PrefixOptions> prefix(m, "PrefixOptions", "What stays of requests that have gone; off unless `enabled`.");
  def_keyword_init<PrefixOptions>(prefix);
  prefix.def_rw("enabled", &PrefixOptions::enabled)
      .def_rw("weights_id", &PrefixOptions::weights_id, "the caller's name for the weights; new weights need a new one")
      .def_rw("snapshots", &PrefixOptions::snapshots)
      .def_rw("num_snapshots", &PrefixOptions::num_snapshots, "places for snapshots in the backend's memory")
      .def_rw("max_events", &PrefixOptions::max_events, "of the stream; older ones are lost, and counted")
      .def_rw("tenant_shares", &PrefixOptions::tenant_shares,
              "blocks of each tenant that others cannot evict; assign a whole list to change it");
  def_enum<&PrefixOptions::eviction, parse_eviction>(prefix, "eviction", "lru, s3fifo or density");

  nb::class_<CacheOptions> options(
      m, "CacheOptions",
      "How a cache stores its rows, and how large it is. Enum attributes also take a name: row_format='bf16'.");
  def_keyword_init<CacheOptions>(options);
  def_row_format<&CacheOptions::row_format>(
      options, "row_format",
      "window rows and entries: fp8_tile64, fp8_row, bf16, fp8_tile32, nvfp4_row; None: the model's own");
  def_row_format<&CacheOptions::window_format>(options, "window_format", "window rows alone; None: row_format");
  def_row_format<&CacheOptions::entry_format>(options, "entry_format", "entries alone; None: row_format");
  def_enum<&CacheOptions::index_format, parse_format>(options, "index_format", "index keys: mxfp4, nvfp4, fp8, bf16");
  def_enum<&CacheOptions::pending_dtype, parse_pending_dtype>(options, "pending_dtype",
                                                              "of compressor inputs: f32 or bf16");
  def_enum<&CacheOptions::hca_mode, parse_hca_mode>(options, "hca_mode");
  def_enum<&CacheOptions::arrangement, parse_arrangement>(options, "arrangement");
  options
      .def_rw("hadamard", &CacheOptions::hadamard,
              "transform V4's index keys before they are quantised; V4.1's never are")
      .def_rw("index_global_scale", &CacheOptions::index_global_scale, "nvfp4's second scale")
      .def_rw("page_alignment", &CacheOptions::page_alignment, "bytes, a multiple of 64")
      .def_rw("block_tokens", &CacheOptions::block_tokens, "a multiple of every ratio; 0: chosen")
      .def_rw("max_rewind_tokens", &CacheOptions::max_rewind_tokens, "how far a request can be rewound")
      .def_rw("draft_layers", &CacheOptions::draft_layers, "extra SWA-only stages, each with its own length")
      .def_rw("layers", &CacheOptions::layers, "the layers this cache owns (a pipeline rank); empty: all")
      .def_rw("max_requests", &CacheOptions::max_requests)
      .def_rw("spare_slots", &CacheOptions::spare_slots,
              "requests that can take a step of more than max_rewind_tokens + 1 tokens at the same time")
      .def_rw("max_context", &CacheOptions::max_context, "tokens of the longest request")
      .def_rw("num_blocks", &CacheOptions::num_blocks, "0: what compute_block_budget says")
      .def_rw("max_step_tokens", &CacheOptions::max_step_tokens, "tokens of the largest step, padding included")
      .def_rw("index_tile_tokens", &CacheOptions::index_tile_tokens, "tokens whose index scores are kept at a time")
      .def_rw("prefix", &CacheOptions::prefix);
}

}  // namespace kv4::python
