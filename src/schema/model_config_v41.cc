#include "schema/model_config_v41.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace kv4 {
namespace {

constexpr int kMaxDraftBlock = 1024;
constexpr int kMaxNgram = 1024;
constexpr std::int64_t kMaxTokenId = (std::int64_t{1} << 31) - 1;

std::vector<int> read_layer_ids(const Fields& f, const char* name) {
  std::vector<int> out;
  const Json& list = f.array(name);
  require(list.size() <= kMaxLayers, ErrorCode::bad_config, "config field '{}' has {} entries; at most {} are allowed",
          name, list.size(), kMaxLayers);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const bool fits = list[i].is_number_integer() && list[i] >= 0 && list[i] < kMaxLayers;
    require(fits, ErrorCode::bad_config, "{}[{}] is {}; it must be a layer, a whole number from 0 to {}", name, i,
            shown(list[i]), kMaxLayers - 1);
    out.push_back(list[i].get<int>());
  }
  return out;
}

void read_ratios(const Fields& f, ModelConfig& config) {
  const Json& list = ratio_list(f, config.num_layers);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Json& value = list[i];
    require(value.is_number_integer() && (value == 0 || value == 1 || value == 2), ErrorCode::bad_config,
            "compress_ratios[{}] is {}; V4.1 knows 0 (window only), 1 and 2", i, shown(value));
    const bool backbone = std::cmp_less(i, config.num_layers);
    require(backbone || value == 0, ErrorCode::bad_config,
            "compress_ratios[{}] is {}; layer {} is a draft stage, behind the {} of the backbone, and must have 0", i,
            shown(value), i, config.num_layers);
    if (!backbone) continue;
    config.sharing.ratios.push_back(value.get<int>());
    config.kinds.push_back(value == 0 ? LayerKind::swa : LayerKind::shared);
  }
  const char* drafts = f.spelling("num_nextn_predict_layers", "n_mtp_layers");
  config.draft_hint =
      f.has(drafts) ? f.small(drafts, 0, kMaxLayers) : static_cast<int>(list.size()) - config.num_layers;
}

void read_sharing(const Fields& f, ModelConfig& config) {
  EntrySharing& sharing = config.sharing;
  const bool none = std::all_of(sharing.ratios.begin(), sharing.ratios.end(), [](int ratio) { return ratio == 0; });
  const auto read_ids = [&](const char* name, const char* own, std::vector<int>& out) {
    const char* there = none ? f.spelling(name, own) : f.needed(name, own);
    if (f.has(there)) out = read_layer_ids(f, there);
  };
  read_ids("kv_source_layer_ids", "kv_source_layers", sharing.owners);
  read_ids("index_source_layer_ids", "index_source_layers", sharing.index_sources);
  if (!none) {
    config.index_heads = f.small("index_n_heads", 1, kMaxWidth);
    config.index_dim = f.small("index_head_dim", 1, kMaxWidth);
    config.index_topk = f.small("index_topk", 1, 1 << 20);
  }
  const char* source = f.spelling("candidate_source_layer_id", "candidate_source_layer");
  if (f.has(source)) sharing.candidate_source = std::max(f.small(source, INT32_MIN, kMaxLayers), -1);
  if (sharing.candidate_source < 0) return;
  sharing.candidate_block_size = f.small("candidate_block_size", 1, 1 << 20);
  sharing.candidate_topk_blocks = f.small("candidate_topk_blocks", 1, 1 << 24);
}

// DeepSeek's own names are flat, beside the other fields. Without an original length there is no scaling.
void read_own_rope(const Fields& f, ModelConfig& config) {
  config.rope_main.theta = f.real("rope_theta", kMinTheta, kMaxTheta);
  RopeSpec& rope = config.rope_compress;
  rope.theta = f.real("compress_rope_theta", kMinTheta, kMaxTheta);
  rope.original_length = f.real("original_seq_len", 0.0, 1e9);
  rope.yarn = rope.original_length > 0.0;
  if (!rope.yarn) {
    rope.original_length = RopeSpec{}.original_length;
    return;
  }
  rope.factor = f.real("rope_factor", 1.0, 1e6);
  if (f.has("beta_fast")) rope.beta_fast = f.real("beta_fast", 1e-3, 1e6);
  if (f.has("beta_slow")) rope.beta_slow = f.real("beta_slow", 1e-3, 1e6);
}

void read_drafts_and_engram(const Fields& f, ModelConfig& config) {
  if (f.has("dspark_block_size")) config.draft_block = f.small("dspark_block_size", 1, kMaxDraftBlock);
  const char* targets = f.spelling("dspark_target_layer_ids", "dspark_target_layers");
  if (f.has(targets)) config.draft_targets = read_layer_ids(f, targets);
  const char* layers = f.spelling("engram_layer_ids", "engram_layers");
  if (f.has(layers)) config.engram.layers = read_layer_ids(f, layers);
  if (config.engram.layers.empty()) return;
  config.engram.max_ngram = f.small("engram_max_ngram_size", 1, kMaxNgram);
  config.engram.pad_id = f.integer(f.needed("engram_pad_token_id", "engram_pad_id"), 0, kMaxTokenId);
}

std::string listed(const std::vector<int>& ids) { return clipped(fmt::format("[{}]", fmt::join(ids, ", "))); }

bool lists(const std::vector<int>& ids, int layer) { return std::binary_search(ids.begin(), ids.end(), layer); }

// The largest id <= layer.
std::optional<int> last_up_to(const std::vector<int>& ids, int layer) {
  const auto next = std::upper_bound(ids.begin(), ids.end(), layer);
  return next == ids.begin() ? std::nullopt : std::optional(*std::prev(next));
}

void check_ids(const char* name, const std::vector<int>& ids, int num_layers) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    require(ids[i] >= 0 && ids[i] < num_layers, ErrorCode::bad_config,
            "{} names layer {}; the backbone has layers 0 to {}", name, ids[i], num_layers - 1);
    require(i == 0 || ids[i] > ids[i - 1], ErrorCode::bad_config,
            "{} names layer {} after layer {}; it must name each layer once, ascending", name, ids[i],
            ids[i ? i - 1 : 0]);
  }
}

void check_ratios(const ModelConfig& config) {
  const std::vector<int>& ratios = config.sharing.ratios;
  require(std::ssize(ratios) == config.num_layers, ErrorCode::bad_config,
          "sharing.ratios (compress_ratios) has {} entries for num_layers = {}; it needs one per layer", ratios.size(),
          config.num_layers);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    require(ratios[layer] >= 0 && ratios[layer] <= 2, ErrorCode::bad_config,
            "layer {} has ratio {} (compress_ratios); V4.1 knows 0 (window only), 1 and 2", layer, ratios[layer]);
    const LayerKind wanted = ratios[layer] == 0 ? LayerKind::swa : LayerKind::shared;
    require(config.kinds[layer] == wanted, ErrorCode::bad_config, "layer {} has ratio {} and kind {}; it must be {}",
            layer, ratios[layer], to_string(config.kinds[layer]), to_string(wanted));
  }
}

void check_owners(const EntrySharing& sharing) {
  for (const int owner : sharing.owners) {
    require(sharing.ratios[owner] > 0, ErrorCode::bad_config,
            "kv_source_layer_ids names layer {}, which has ratio 0; an owner of entries needs ratio 1 or 2", owner);
    require(lists(sharing.index_sources, owner), ErrorCode::bad_config,
            "layer {} owns entries (kv_source_layer_ids) and is not in index_source_layer_ids, {}; its indexer makes "
            "the keys, so it must be",
            owner, listed(sharing.index_sources));
  }
  for (int layer = 0; layer < static_cast<int>(sharing.ratios.size()); ++layer) {
    const int ratio = sharing.ratios[layer];
    if (ratio == 0) continue;
    const std::optional<int> owner = last_up_to(sharing.owners, layer);
    require(owner.has_value(), ErrorCode::bad_config,
            "layer {} has ratio {} and is not in kv_source_layer_ids, {}; the first layer with a ratio must own its "
            "entries",
            layer, ratio, listed(sharing.owners));
    require(sharing.ratios[*owner] == ratio, ErrorCode::bad_config,
            "layer {} has ratio {} and reads the entries of layer {}, whose ratio is {}; they must be equal", layer,
            ratio, *owner, sharing.ratios[*owner]);
  }
}

void check_candidates(const ModelConfig& config) {
  const EntrySharing& sharing = config.sharing;
  const int source = sharing.candidate_source;
  for (const int ranker : sharing.index_sources)
    require(sharing.ratios[ranker] > 0, ErrorCode::bad_config,
            "index_source_layer_ids names layer {}, which has ratio 0; a layer that ranks entries needs ratio 1 or 2",
            ranker);
  require(source >= -1, ErrorCode::bad_config, "candidate_source_layer_id is {}; it must be a layer, or -1 for none",
          source);
  if (source < 0) return;
  require(lists(sharing.index_sources, source), ErrorCode::bad_config,
          "candidate_source_layer_id is {}; it must be one of index_source_layer_ids, {}", source,
          listed(sharing.index_sources));
  check_range("candidate_block_size", sharing.candidate_block_size, 1, 1 << 20);
  check_range("candidate_topk_blocks", sharing.candidate_topk_blocks, 1, 1 << 24);
  const int owner = *last_up_to(sharing.owners, source);
  for (const int ranker : sharing.index_sources)
    require(ranker <= source || last_up_to(sharing.owners, ranker) == owner, ErrorCode::bad_config,
            "layer {} ranks within the candidates of layer {} and reads the entries of layer {}; the candidates are "
            "entries of layer {}",
            ranker, source, last_up_to(sharing.owners, ranker).value_or(-1), owner);
  // The candidate blocks are full except the last, which holds at least one entry.
  const std::int64_t least = std::int64_t{sharing.candidate_topk_blocks - 1} * sharing.candidate_block_size + 1;
  require(least >= config.index_topk, ErrorCode::bad_config,
          "layer {} keeps candidate_topk_blocks = {} blocks of candidate_block_size = {}, at least {} entries; "
          "index_topk = {} must not be more",
          source, sharing.candidate_topk_blocks, sharing.candidate_block_size, least, config.index_topk);
}

}  // namespace

ModelConfig read_v41(const Fields& f) {
  ModelConfig config;
  config.num_layers = f.small(f.needed("num_hidden_layers", "n_layers"), 1, kMaxLayers);
  config.num_query_heads = f.small(f.needed("num_attention_heads", "n_heads"), 1, kMaxWidth);
  config.head_dim = f.small("head_dim", 2, kMaxWidth);
  config.rope_dim = f.small(f.needed("qk_rope_head_dim", "rope_head_dim"), 2, config.head_dim);
  config.window = f.small(f.needed("sliding_window", "window_size"), 1, 1 << 20);
  config.rms_eps = f.real(f.needed("rms_norm_eps", "norm_eps"), 0.0, 1.0);
  if (f.has("max_position_embeddings"))
    config.max_positions = f.integer("max_position_embeddings", 1, std::int64_t{1} << 30);
  read_ratios(f, config);
  read_sharing(f, config);
  const bool nested_rope = f.has("rope_scaling") || f.has("rope_parameters");
  if (!nested_rope && (f.has("original_seq_len") || f.has("rope_factor")))
    read_own_rope(f, config);
  else
    read_ropes(f, config);
  read_drafts_and_engram(f, config);
  return config;
}

void validate_sharing(const ModelConfig& config) {
  if (!config.shares_entries()) {
    const auto shared = std::find(config.kinds.begin(), config.kinds.end(), LayerKind::shared);
    require(shared == config.kinds.end(), ErrorCode::bad_config,
            "layer {} is of kind shared and sharing.ratios is empty; it must have one ratio per layer",
            shared - config.kinds.begin());
    return;
  }
  check_ratios(config);
  check_ids("sharing.owners (kv_source_layer_ids)", config.sharing.owners, config.num_layers);
  check_ids("sharing.index_sources (index_source_layer_ids)", config.sharing.index_sources, config.num_layers);
  check_ids("draft_targets (dspark_target_layer_ids)", config.draft_targets, config.num_layers);
  check_ids("engram.layers (engram_layer_ids)", config.engram.layers, config.num_layers);
  check_owners(config.sharing);
  check_candidates(config);
}

ModelConfig v41_flash_preset() {
  ModelConfig config;
  config.name = "v4.1-flash";
  config.num_layers = 40;
  config.num_query_heads = 64;
  config.head_dim = 512;
  config.rope_dim = 64;
  config.window = 128;
  config.index_heads = 32;
  config.index_dim = 128;
  config.index_topk = 512;
  config.rms_eps = 1e-20;
  config.rope_compress = {.theta = 160000.0, .yarn = true, .factor = 16.0};
  EntrySharing& sharing = config.sharing;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    sharing.ratios.push_back(layer < 2 ? 0 : layer < 20 ? 2 : 1);
    config.kinds.push_back(layer < 2 ? LayerKind::swa : LayerKind::shared);
  }
  sharing.owners = {2, 8, 14, 20};
  sharing.index_sources = {2, 8, 14, 20, 24, 28, 32, 36};
  sharing.candidate_source = 20;
  sharing.candidate_block_size = 8;
  sharing.candidate_topk_blocks = 2048;
  config.draft_hint = 3;
  config.draft_block = 5;
  config.draft_targets = {37, 38, 39};
  config.engram = {.layers = {1, 14}, .max_ngram = 4, .pad_id = 2};
  validate(config);
  return config;
}

std::vector<LayerSpec> shared_schedule(const ModelConfig& config) {
  const EntrySharing& sharing = config.sharing;
  std::vector<LayerSpec> layers;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    LayerSpec spec{.layer = layer, .kind = config.kinds[layer], .group = 0, .rows = {}};
    if (const int ratio = sharing.ratios[layer]; ratio > 0) {
      const int owner = *last_up_to(sharing.owners, layer);
      spec.ranker = *last_up_to(sharing.index_sources, layer);
      const bool ranks = spec.ranker == layer;
      spec.rows.push_back({RowRole::entry, ratio, false, config.head_dim, owner});
      if (ranks) spec.rows.push_back({RowRole::index_key, ratio, false, config.index_dim, owner});
      if (ranks && sharing.candidate_source >= 0 && layer >= sharing.candidate_source)
        spec.candidate_source = sharing.candidate_source;
    }
    layers.push_back(std::move(spec));
  }
  return layers;
}

}  // namespace kv4
