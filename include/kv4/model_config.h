// The model as its cache sees it: the rows that each layer keeps. From a Hugging Face config.json or a preset.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kv4/export.h"

namespace kv4 {

/// The rows that a layer keeps.
enum class LayerKind : std::uint8_t {
  swa,     // sliding window only
  csa,     // window + one overlapping entry and one index key per csa_ratio tokens
  hca,     // window + one entry per hca_ratio tokens
  shared,  // window + entries of an owner layer, itself or an earlier one, through a list (V4.1)
};

/// "SWA", "CSA", "HCA", "shared".
KV4_API const char* to_string(LayerKind kind);

/// Rotary frequencies: theta, and YaRN scaling when `yarn` is set (without amplitude factor).
struct RopeSpec {
  double theta = 10000.0;
  bool yarn = false;
  double factor = 1.0;
  double original_length = 65536.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
};

/// DeepSeek-V4.1's replacement of CSA and HCA. Few layers own entries and index keys, and few rank them. Layer L reads
/// the entries of the largest owner <= L; the largest index source <= L makes the list of them. Ids ascend.
struct EntrySharing {
  std::vector<int> ratios;         // [num_layers] tokens per entry: 1, 2, or 0 for a window only; empty: not V4.1
  std::vector<int> owners;         // layers with a compressor, entries and index keys
  std::vector<int> index_sources;  // layers that rank the keys of their owner; every owner is one
  int candidate_source = -1;       // later index sources rank within the blocks that it keeps; -1: none
  int candidate_block_size = 0;    // entries
  int candidate_topk_blocks = 0;   // blocks that are kept
};

/// V4.1's hash of the last token ids. The cache holds neither tables nor hashes, but the ids are a request's state.
struct Engram {
  std::vector<int> layers;
  int max_ngram = 0;  // token ids of the longest hash; a request keeps one less
  std::int64_t pad_id = 0;
};

/// The numbers of a model that decide its cache. Widths are in channels, ratios in tokens per entry.
struct ModelConfig {
  std::string name;
  int num_layers = 0;  // backbone layers
  int num_query_heads = 0;
  int head_dim = 0;  // width of a window row and of an entry; K = V
  int rope_dim = 0;  // its last channels, rotated; V4's row formats keep them bf16
  int window = 0;    // rows a query sees, itself included
  int index_heads = 0;
  int index_dim = 0;  // width of an index key
  int index_topk = 0;
  int csa_ratio = 4;
  int hca_ratio = 128;
  double rms_eps = 1e-6;
  std::int64_t max_positions = 1 << 20;
  RopeSpec rope_main;            // SWA layers
  RopeSpec rope_compress;        // layers with entries: q, window rows and entries alike
  std::vector<LayerKind> kinds;  // [num_layers]
  int draft_hint = 0;            // draft stages the config lists after the backbone; never built unless asked for
  EntrySharing sharing;            // V4.1
  int draft_block = 0;             // V4.1: queries of a draft; 0: not given
  std::vector<int> draft_targets;  // V4.1: the layers whose inputs a draft starts from
  Engram engram;

  /// Whether layers read entries of other layers: V4.1.
  bool shares_entries() const { return !sharing.ratios.empty(); }
  /// V4.1: the layer whose entries are the last ones made; the layers behind it are the decoder. -1: none.
  int last_owner() const { return sharing.owners.empty() ? -1 : sharing.owners.back(); }
};

/// Throws Error(bad_config) naming the field, its value and the values allowed. V4.1: reads the fields of `text_config`
/// where there is one, in Hugging Face's spelling or in that of DeepSeek's own inference/config.json.
KV4_API ModelConfig parse_model_config(std::string_view json);
/// The same from a file.
KV4_API ModelConfig load_model_config(const std::string& path);
/// Presets: "v4-flash", "v4-pro" and "v4.1-flash".
KV4_API ModelConfig model_preset(std::string_view name);
/// Checks every range. Parsed configs and presets pass; call it on a config built by hand.
KV4_API void validate(const ModelConfig& config);

/// The purpose of a stored row.
enum class RowRole : std::uint8_t { entry, index_key };

/// One kind of stored row of a layer.
struct RowKind {
  RowRole role = RowRole::entry;
  int ratio = 0;         // tokens per row
  bool overlap = false;  // pools the previous span's first-half columns too
  int width = 0;
  int owner_layer = 0;  // the layer whose pages hold the rows (itself, for every V4 layer; V4.1: or an earlier one)
};

/// A layer = a window + a list of row kinds that it reads: SWA none, HCA one, CSA two. V4.1: its owner's entries, and
/// for a layer that ranks its owner's keys too.
struct LayerSpec {
  int layer = 0;  // index in the model; draft stages follow the backbone
  LayerKind kind = LayerKind::swa;
  int group = 0;  // 0 = backbone; draft stage d has group d + 1: each group has its own length
  std::vector<RowKind> rows;
  int ranker = -1;            // the layer whose index list it reads; -1: none, it reads all its entries or has none
  int candidate_source = -1;  // of a layer that ranks: itself if it picks the candidate blocks; the layer that picked
                              // them if it ranks within them; -1: it ranks all entries
};

/// All backbone layers, then `draft_layers` SWA-only draft stages.
KV4_API std::vector<LayerSpec> layer_schedule(const ModelConfig& config, int draft_layers = 0);

/// cos and sin of `count` positions first, first + step, ...: two arrays [count, rope_dim / 2], computed in double,
/// rounded once.
struct RopeTable {
  std::vector<float> cos;
  std::vector<float> sin;
};
/// The table for given frequencies; `rope_dim` channels are rotated.
KV4_API RopeTable build_rope_table(const RopeSpec& rope, int rope_dim, std::int64_t first, std::int64_t count,
                                   std::int64_t step = 1);

}  // namespace kv4
