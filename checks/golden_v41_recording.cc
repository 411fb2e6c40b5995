#include "golden_v41_recording.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kv4/error.h"

namespace kv4::checks {
namespace {

// The reference attends from every query to every token, and a window takes width x tokens, recorded or not.
constexpr std::int64_t kMaxTokens = 1 << 14;
constexpr std::int64_t kMaxWidth = 1 << 12;
constexpr std::int64_t kMaxLayers = 256;
constexpr std::int64_t kMaxDraft = 64;

[[noreturn]] void refuse(const SafeTensors& file, const std::string& what) {
  throw Error(ErrorCode::bad_file, fmt::format("{}: {}; record it again", file.name(), what));
}

Matrix load_matrix(const SafeTensors& file, const std::string& name, std::int64_t rows, std::int64_t cols) {
  return {rows, cols, file.floats(name, {rows, cols})};
}

RecordedRows load_rows(const SafeTensors& file, const std::string& name, std::vector<std::int64_t> shape,
                       std::int64_t code_bytes, std::int64_t scale_bytes) {
  RecordedRows out{1, code_bytes, scale_bytes, {}, {}};
  for (const std::int64_t size : shape) out.rows *= size;
  shape.push_back(code_bytes);
  out.codes = file.octets(name + ".codes", shape);
  shape.back() = scale_bytes;
  out.scales = file.octets(name + ".scales", shape);
  return out;
}

// One layer of the metadata's schedule.
struct Scheduled {
  int ratio = 0, owner = -1, ranker = -1, candidate_source = -1;
  std::string file;
};

std::vector<Scheduled> read_schedule(const SafeTensors& file) {
  const auto json = nlohmann::json::parse(file.metadata("schedule"), nullptr, false);
  const auto bad = [&] { refuse(file, "its schedule is no JSON list of layers with ratio, owner and file"); };
  if (!json.is_array() || json.empty() || json.size() > kMaxLayers) bad();
  std::vector<Scheduled> out;
  for (const auto& one : json) {
    if (!one.is_object() || !one.contains("file") || !one["file"].is_string()) bad();
    const auto number = [&](const char* key, int low, int high) {
      if (!one.contains(key) || !one[key].is_number_integer()) bad();
      const auto value = one[key].get<std::int64_t>();
      if (value < low || value > high)
        refuse(file, fmt::format("{} of layer {} is {}, allowed are {} to {}", key, out.size(), value, low, high));
      return static_cast<int>(value);
    };
    const int last = static_cast<int>(json.size()) - 1;
    out.push_back({number("ratio", 0, 2), number("owner", -1, last), number("index_source", -1, last),
                   number("candidate_source", -1, last), one["file"].get<std::string>()});
  }
  return out;
}

ModelConfig make_config(const SafeTensors& file, const std::vector<Scheduled>& schedule) {
  const auto size = [&](const char* key, std::int64_t most = kMaxWidth) {
    return static_cast<int>(file.metadata_int(key, 1, most));
  };
  ModelConfig config = model_preset("v4.1-flash");  // for its rotation
  config.name = "recording";
  config.num_layers = static_cast<int>(schedule.size());
  config.num_query_heads = size("heads");
  config.head_dim = size("head_dim");
  config.rope_dim = size("rope_dim");
  config.window = size("sliding_window");
  config.rms_eps = file.metadata_double("rms_norm_eps");
  config.index_heads = size("index_heads");
  config.index_dim = size("index_head_dim");
  config.index_topk = size("index_topk");
  config.kinds.clear();
  config.draft_targets.clear();
  config.engram = {};
  config.sharing = {};
  EntrySharing& sharing = config.sharing;
  const auto add = [](std::vector<int>& ids, int id) {
    if (id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  };
  for (const Scheduled& layer : schedule) {
    config.kinds.push_back(layer.ratio == 0 ? LayerKind::swa : LayerKind::shared);
    sharing.ratios.push_back(layer.ratio);
    add(sharing.owners, layer.owner);
    add(sharing.index_sources, layer.ranker);
    if (layer.candidate_source >= 0) sharing.candidate_source = layer.candidate_source;
  }
  if (sharing.candidate_source >= 0) {
    sharing.candidate_block_size = size("candidate_block_size", 1 << 20);
    sharing.candidate_topk_blocks = size("candidate_topk_blocks", 1 << 20);
  }
  std::sort(sharing.owners.begin(), sharing.owners.end());
  std::sort(sharing.index_sources.begin(), sharing.index_sources.end());
  validate(config);
  const std::vector<LayerSpec> layers = layer_schedule(config);
  for (std::size_t i = 0; i < schedule.size(); ++i) {
    const LayerSpec& made = layers[i];
    const int owner = made.rows.empty() ? -1 : made.rows[0].owner_layer;
    if (owner != schedule[i].owner || made.ranker != schedule[i].ranker)
      refuse(file, fmt::format("layer {} reads entries of layer {} and the list of layer {} by its schedule, of {} and "
                               "{} by the model",
                               i, schedule[i].owner, schedule[i].ranker, owner, made.ranker));
  }
  return config;
}

std::vector<std::vector<std::int32_t>> load_lists(const SafeTensors& file, const RecordedLayerV41& layer, int ratio,
                                                  std::int64_t k) {
  const auto queries = static_cast<std::int64_t>(layer.positions.size());
  const std::vector<std::int32_t> all = file.ints("idx_topk", {queries, k});
  std::vector<std::vector<std::int32_t>> out(queries);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t query = i / (all.size() / queries);
    const std::int64_t visible = (std::int64_t{layer.positions[query]} + 1) / ratio;
    if (all[i] < -1 || all[i] >= visible)
      refuse(file, fmt::format("idx_topk of query {} holds {}, allowed are -1 to {}", query, all[i], visible - 1));
    if (all[i] >= 0) out[query].push_back(all[i]);
  }
  for (std::vector<std::int32_t>& list : out) std::sort(list.begin(), list.end());
  return out;
}

RecordedRanker load_ranker(const SafeTensors& file, const ModelConfig& config, const RecordedLayerV41& layer, int ratio,
                           std::int64_t tokens, bool picks) {
  const auto queries = static_cast<std::int64_t>(layer.positions.size());
  const std::int64_t heads = config.index_heads, width = config.index_dim;
  RecordedRanker out;
  out.q = {queries, heads * width, file.floats("idx_q", {queries, heads, width})};
  out.encoded_q = load_rows(file, "idx_q", {queries, heads}, width / 2, width / 32);
  out.weights = load_matrix(file, "idx_weights", queries, heads);
  out.scores = load_matrix(file, "idx_scores", queries, tokens / ratio);
  out.lists = load_lists(file, layer, ratio, config.index_topk);
  if (!picks) return out;
  const std::vector<std::uint8_t> kept = file.octets("cand_blocks", {queries, -1});
  out.candidates.resize(queries);
  const std::size_t blocks = kept.size() / queries;
  for (std::size_t i = 0; i < kept.size(); ++i)
    if (kept[i] != 0) out.candidates[i / blocks].push_back(static_cast<std::int32_t>(i % blocks));
  return out;
}

RecordedOwner load_owner(const SafeTensors& file, const ModelConfig& config, int ratio, std::int64_t tokens) {
  const std::int64_t width = config.head_dim, key_width = config.index_dim, entries = tokens / ratio;
  RecordedOwner out;
  out.kv = load_matrix(file, "comp_kv", tokens, width);
  if (ratio > 1) out.gate = load_matrix(file, "comp_gate", tokens, width);
  out.latents = load_matrix(file, "comp_latent", entries, width);
  out.key_projections = load_matrix(file, "idx_k_proj", entries, key_width);
  out.key_weight = file.halves("idx_wk", {key_width, width});
  out.norm_weight = {1, width, file.floats("comp_norm_weight", {width})};
  out.key_norm_weight = {1, key_width, file.floats("idx_norm_weight", {key_width})};
  out.entries = load_rows(file, "comp_entries", {entries}, width / 2, width / 16);
  out.keys = load_rows(file, "idx_keys", {entries}, key_width / 2, key_width / 32);
  if (const std::int64_t open = tokens % ratio; open != 0) {
    out.tail_kv = load_matrix(file, "comp_tail_kv", open, width);
    out.tail_gate = load_matrix(file, "comp_tail_gate", open, width);
  }
  return out;
}

// Positions of queries, ascending.
std::vector<std::int32_t> load_positions(const SafeTensors& file, const std::string& name, std::int64_t tokens) {
  std::vector<std::int32_t> out = file.ints(name, {-1});
  if (out.empty()) refuse(file, name + " is empty");
  for (std::size_t i = 0; i < out.size(); ++i)
    if (out[i] < 0 || out[i] >= tokens || (i > 0 && out[i] <= out[i - 1]))
      refuse(file, fmt::format("{}[{}] is {}; positions must ascend within {} tokens", name, i, out[i], tokens));
  return out;
}

RecordedLayerV41 load_layer(const SafeTensors& file, const ModelConfig& config, const LayerSpec& spec,
                            std::int64_t tokens) {
  const std::int64_t width = config.head_dim, heads = config.num_query_heads;
  RecordedLayerV41 out;
  out.name = file.metadata("name");
  out.swa_kv = load_matrix(file, "swa_kv", tokens, width);
  if (file.contains("swa_kv.codes")) out.window = load_rows(file, "swa_kv", {tokens}, width, width / 32);
  out.positions = load_positions(file, "query_positions", tokens);
  const auto queries = static_cast<std::int64_t>(out.positions.size());
  out.q = {queries, heads * width, file.floats("q", {queries, heads, width})};
  out.attn_out = {queries, heads * width, file.floats("attn_out", {queries, heads, width})};
  out.sinks = {1, heads, file.floats("sinks", {heads})};
  if (spec.rows.empty()) return out;
  const int ratio = spec.rows[0].ratio;
  if (spec.rows[0].owner_layer == spec.layer) out.owner = load_owner(file, config, ratio, tokens);
  if (spec.ranker == spec.layer)
    out.ranker = load_ranker(file, config, out, ratio, tokens, spec.candidate_source == spec.layer);
  return out;
}

RecordedDraft load_draft(const SafeTensors& file, const ModelConfig& config, std::int64_t tokens) {
  const std::int64_t width = config.head_dim, heads = config.num_query_heads;
  RecordedDraft out;
  out.swa_kv = load_matrix(file, "swa_kv", tokens, width);
  out.positions = load_positions(file, "draft_positions", tokens);
  const StoredTensor rows = file.tensor("draft_kv");
  const auto drafts = static_cast<std::int64_t>(out.positions.size());
  if (rows.shape.size() != 3 || rows.shape[1] < 1 || rows.shape[1] > kMaxDraft)
    refuse(file, fmt::format("draft_kv needs shape [drafts, 1 to {}, {}]", kMaxDraft, width));
  out.block = rows.shape[1];
  out.rows = {drafts * out.block, width, file.floats("draft_kv", {drafts, out.block, width})};
  out.stored = load_rows(file, "draft_kv", {drafts, out.block}, width, width / 32);
  out.q = {out.rows.rows, heads * width, file.floats("q", {drafts, out.block, heads, width})};
  out.attn_out = {out.rows.rows, heads * width, file.floats("attn_out", {drafts, out.block, heads, width})};
  out.sinks = {1, heads, file.floats("sinks", {heads})};
  return out;
}

void load_table(const SafeTensors& file, const std::string& name, const ModelConfig& config, Matrix& cos, Matrix& sin) {
  if (cos.rows != 0 || !file.contains(name + ".cos")) return;
  const std::int64_t pairs = config.rope_dim / 2;
  const StoredTensor tensor = file.tensor(name + ".cos");
  const std::int64_t positions = tensor.shape.empty() ? 0 : tensor.shape[0];
  cos = load_matrix(file, name + ".cos", positions, pairs);
  sin = load_matrix(file, name + ".sin", positions, pairs);
}

}  // namespace

bool is_layer_of_v41(const SafeTensors& file) { return file.metadata().count("schedule") != 0; }

RecordingV41 load_recording_v41(const std::vector<SafeTensors>& files) {
  if (files.empty()) throw Error(ErrorCode::bad_file, "a recording of V4.1 has no layer");
  const std::vector<Scheduled> schedule = read_schedule(files[0]);
  RecordingV41 out;
  out.config = make_config(files[0], schedule);
  out.tokens = files[0].metadata_int("n_tokens", 1, kMaxTokens);
  out.softmax_scale = files[0].metadata_double("softmax_scale");
  const auto named = [&](const std::string& name) {
    return std::find_if(files.begin(), files.end(),
                        [&](const SafeTensors& file) { return file.metadata("name") == name; });
  };
  const std::vector<LayerSpec> specs = layer_schedule(out.config);
  for (std::size_t i = 0; i < schedule.size(); ++i) {
    const auto file = named(schedule[i].file);
    if (file == files.end())
      refuse(files[0], fmt::format("its schedule names '{}', which no file beside it is called", schedule[i].file));
    if (file->metadata_int("n_tokens", 1, kMaxTokens) != out.tokens)
      refuse(*file, fmt::format("it has another number of tokens than {}", files[0].name()));
    out.layers.push_back(load_layer(*file, out.config, specs[i], out.tokens));
  }
  for (const RecordedLayerV41& layer : out.layers)
    if (layer.positions != out.layers[0].positions)
      refuse(files[0], fmt::format("layers {} and {} have queries at other positions", out.layers[0].name, layer.name));
  if (const auto file = named("draft"); file != files.end()) out.draft = load_draft(*file, out.config, out.tokens);
  for (const SafeTensors& file : files) {
    load_table(file, "rope.main", out.config, out.main_cos, out.main_sin);
    load_table(file, "rope.compress", out.config, out.compress_cos, out.compress_sin);
  }
  return out;
}

}  // namespace kv4::checks
