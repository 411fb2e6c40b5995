#include "kv4/model_config.h"

#include <cmath>
#include <utility>

#include "base/input_file.h"
#include "schema/config_fields.h"
#include "schema/model_config_v41.h"

namespace kv4 {
namespace {

constexpr std::int64_t kMaxConfigBytes = 1 << 20;
constexpr const char* kSwaName = "sliding_attention";
constexpr const char* kCsaName = "compressed_sparse_attention";
constexpr const char* kHcaName = "heavily_compressed_attention";

// --- layers
// ---------------------------------------------------------------------------------------------------------------

void read_ratio_list(const Fields& f, ModelConfig& config) {
  const Json& list = ratio_list(f, config.num_layers);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Json& value = list[i];
    const bool known = value.is_number_integer() && (value == 0 || value == 4 || value == 128);
    require(known, ErrorCode::bad_config,
            "compress_ratios[{}] is {}; V4 knows 0 (SWA), 4 (CSA) and 128 (HCA). Other rates need 'layer_types' + "
            "'compress_rates'",
            i, shown(value));
    if (std::cmp_greater_equal(i, config.num_layers)) continue;  // draft stages
    config.kinds.push_back(value == 0 ? LayerKind::swa : value == 4 ? LayerKind::csa : LayerKind::hca);
  }
  config.draft_hint = static_cast<int>(list.size()) - config.num_layers;
}

void read_layer_types(const Fields& f, ModelConfig& config) {
  const Json& list = f.array("layer_types");
  require(std::ssize(list) >= config.num_layers, ErrorCode::bad_config,
          "config field 'layer_types' has {} entries for num_hidden_layers = {}; it needs one per layer", list.size(),
          config.num_layers);
  for (int i = 0; i < config.num_layers; ++i) {
    const Json& value = list[i];
    const std::string name = value.is_string() ? value.get<std::string>() : "";
    require(name == kSwaName || name == kCsaName || name == kHcaName, ErrorCode::bad_config,
            "layer_types[{}] is {}; it must be '{}', '{}' or '{}'", i, shown(value), kSwaName, kCsaName, kHcaName);
    config.kinds.push_back(name == kSwaName ? LayerKind::swa : name == kCsaName ? LayerKind::csa : LayerKind::hca);
  }
}

int read_rate(const Fields& f, const char* kind, const char* flat_name) {
  if (f.has(flat_name)) return f.small(flat_name, 1, kMaxRatio);
  require(f.has("compress_rates"), ErrorCode::bad_config,
          "config field 'compress_rates' is missing; with 'layer_types' it gives the tokens per entry of '{}' ('{}' "
          "also does)",
          kind, flat_name);
  return f.object("compress_rates").small(kind, 1, kMaxRatio);
}

bool has_kind(const ModelConfig& config, LayerKind kind) {
  for (LayerKind k : config.kinds)
    if (k == kind) return true;
  return false;
}

void read_layers(const Fields& f, ModelConfig& config) {
  if (!f.has("layer_types")) {
    require(f.has("compress_ratios"), ErrorCode::bad_config,
            "config has neither 'compress_ratios' nor 'layer_types'; one of them must say which layer compresses how");
    read_ratio_list(f, config);
    return;
  }
  read_layer_types(f, config);
  if (has_kind(config, LayerKind::csa)) config.csa_ratio = read_rate(f, kCsaName, "compress_rate_csa");
  if (has_kind(config, LayerKind::hca)) config.hca_ratio = read_rate(f, kHcaName, "compress_rate_hca");
  if (f.has("num_nextn_predict_layers")) config.draft_hint = f.small("num_nextn_predict_layers", 0, kMaxLayers);
}

// --- rotation
// -------------------------------------------------------------------------------------------------------------

RopeSpec read_rope(const Fields& scaling, double theta) {
  RopeSpec rope;
  rope.theta = theta;
  const char* key = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.has(key) ? scaling.text(key) : "default";
  require(type == "default" || type == "yarn", ErrorCode::bad_config,
          "rope type is '{}'; DeepSeek-V4 uses 'default' or 'yarn'", clipped(type));
  if (scaling.has("attention_factor")) scaling.real("attention_factor", 1.0, 1.0);
  if (type == "default") return rope;
  rope.yarn = true;
  rope.factor = scaling.real("factor", 1.0, 1e6);
  rope.original_length = scaling.real("original_max_position_embeddings", 1.0, 1e9);
  if (scaling.has("beta_fast")) rope.beta_fast = scaling.real("beta_fast", 1e-3, 1e6);
  if (scaling.has("beta_slow")) rope.beta_slow = scaling.real("beta_slow", 1e-3, 1e6);
  return rope;
}

int read_rope_dim(const Fields& f, int head_dim) {
  if (f.has("qk_rope_head_dim")) return f.small("qk_rope_head_dim", 2, head_dim);
  if (f.has("partial_rotary_factor")) return static_cast<int>(head_dim * f.real("partial_rotary_factor", 0.0, 1.0));
  if (f.has("rope_parameters") && f.object("rope_parameters").has("main"))
    return static_cast<int>(head_dim *
                            f.object("rope_parameters").object("main").real("partial_rotary_factor", 0.0, 1.0));
  fail(ErrorCode::bad_config, "config gives no rope width; it needs 'qk_rope_head_dim' or 'partial_rotary_factor'");
}

ModelConfig v4_preset(const char* name, int heads, int topk, std::vector<LayerKind> first, int pairs) {
  ModelConfig config;
  config.name = name;
  config.num_query_heads = heads;
  config.head_dim = 512;
  config.rope_dim = 64;
  config.window = 128;
  config.index_heads = 64;
  config.index_dim = 128;
  config.index_topk = topk;
  config.rope_compress = {.theta = 160000.0, .yarn = true, .factor = 16.0};
  config.kinds = std::move(first);
  for (int i = 0; i < pairs; ++i) config.kinds.insert(config.kinds.end(), {LayerKind::csa, LayerKind::hca});
  config.kinds.push_back(LayerKind::csa);
  config.num_layers = static_cast<int>(config.kinds.size());
  config.draft_hint = 1;
  validate(config);
  return config;
}

void check_rope(const char* name, const RopeSpec& rope) {
  require(rope.theta >= kMinTheta && rope.theta <= kMaxTheta, ErrorCode::bad_config,
          "{}.theta is {}; it must be from {} to {}", name, rope.theta, kMinTheta, kMaxTheta);
  require(
      !rope.yarn || (rope.factor >= 1.0 && rope.original_length >= 1.0 && rope.beta_fast > 0.0 && rope.beta_slow > 0.0),
      ErrorCode::bad_config, "{}: YaRN needs factor >= 1, original_length >= 1 and betas > 0; got {}, {}, {}, {}", name,
      rope.factor, rope.original_length, rope.beta_fast, rope.beta_slow);
}

// Whether the config is V4.1's: by its model types, or if it has none, by a field that only V4.1 has. `text`: the
// object with the text model's fields, inside `top` if `nested`.
bool is_v41(const Fields& top, const Fields& text, bool nested) {
  const auto says_v41 = [](const Fields& f, const std::string& where, bool may_be_top, bool may_be_text) {
    const std::string type = f.text("model_type");
    const bool v41 = (may_be_top && type == "deepseek_v41") || (may_be_text && type == "deepseek_v41_text");
    require(v41 || type == "deepseek_v4", ErrorCode::bad_config,
            "config field '{}model_type' is '{}'; this cache holds 'deepseek_v4' and '{}'", where, clipped(type),
            may_be_top ? "deepseek_v41" : "deepseek_v41_text");
    return v41;
  };
  const bool typed = top.has("model_type"), typed_text = nested && text.has("model_type");
  if (!typed && !typed_text) return text.has("kv_source_layer_ids") || text.has("kv_source_layers");
  const bool outer = typed && says_v41(top, "", true, !nested);
  const bool inner = typed_text && says_v41(text, "text_config.", false, true);
  if (typed && typed_text)
    require(outer == inner, ErrorCode::bad_config,
            "config fields 'model_type' and 'text_config.model_type' are '{}' and '{}'; they must name one model",
            clipped(top.text("model_type")), clipped(text.text("model_type")));
  return outer || inner;
}

ModelConfig read_v4(const Fields& f) {
  ModelConfig config;
  config.num_layers = f.small("num_hidden_layers", 1, kMaxLayers);
  config.num_query_heads = f.small("num_attention_heads", 1, kMaxWidth);
  config.head_dim = f.small("head_dim", 2, kMaxWidth);
  config.rope_dim = read_rope_dim(f, config.head_dim);
  config.window = f.small("sliding_window", 1, 1 << 20);
  config.rms_eps = f.real("rms_norm_eps", 0.0, 1.0);
  if (f.has("max_position_embeddings"))
    config.max_positions = f.integer("max_position_embeddings", 1, std::int64_t{1} << 30);
  read_layers(f, config);
  if (has_kind(config, LayerKind::csa)) {
    config.index_heads = f.small("index_n_heads", 1, kMaxWidth);
    config.index_dim = f.small("index_head_dim", 1, kMaxWidth);
    config.index_topk = f.small("index_topk", 1, 1 << 20);
  }
  read_ropes(f, config);
  return config;
}

// V4's schedule of the backbone: each layer makes all that it reads.
std::vector<LayerSpec> own_schedule(const ModelConfig& config) {
  std::vector<LayerSpec> layers;
  for (int i = 0; i < config.num_layers; ++i) {
    LayerSpec spec{.layer = i, .kind = config.kinds[i], .group = 0, .rows = {}};
    if (spec.kind == LayerKind::csa) {
      spec.ranker = i;
      spec.rows.push_back({RowRole::entry, config.csa_ratio, true, config.head_dim, i});
      spec.rows.push_back({RowRole::index_key, config.csa_ratio, true, config.index_dim, i});
    }
    if (spec.kind == LayerKind::hca) spec.rows.push_back({RowRole::entry, config.hca_ratio, false, config.head_dim, i});
    layers.push_back(std::move(spec));
  }
  return layers;
}

}  // namespace

void read_ropes(const Fields& f, ModelConfig& config) {
  const bool nested = f.has("rope_parameters") && f.object("rope_parameters").has("compress");
  if (nested) {
    const Fields parameters = f.object("rope_parameters");
    const Fields main = parameters.object("main"), compress = parameters.object("compress");
    config.rope_main = read_rope(main, main.real("rope_theta", kMinTheta, kMaxTheta));
    config.rope_compress = read_rope(compress, compress.real("rope_theta", kMinTheta, kMaxTheta));
    return;
  }
  config.rope_main.theta = f.real("rope_theta", kMinTheta, kMaxTheta);
  const double theta = f.real("compress_rope_theta", kMinTheta, kMaxTheta);
  const char* name = f.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (f.has(name)) config.rope_compress = read_rope(f.object(name), theta);
  config.rope_compress.theta = theta;
}

const char* to_string(LayerKind kind) {
  switch (kind) {
    case LayerKind::swa: return "SWA";
    case LayerKind::csa: return "CSA";
    case LayerKind::hca: return "HCA";
    case LayerKind::shared: return "shared";
  }
  return "unknown";
}

void validate(const ModelConfig& config) {
  check_range("num_layers", config.num_layers, 1, kMaxLayers);
  require(std::ssize(config.kinds) == config.num_layers, ErrorCode::bad_config,
          "kinds has {} entries for num_layers = {}; it needs one per layer", config.kinds.size(), config.num_layers);
  check_range("num_query_heads (num_attention_heads)", config.num_query_heads, 1, kMaxWidth);
  check_range("head_dim", config.head_dim, 2, kMaxWidth);
  check_range("rope_dim (qk_rope_head_dim, or head_dim x partial_rotary_factor)", config.rope_dim, 2, config.head_dim);
  require(config.rope_dim % 2 == 0 && config.head_dim % 2 == 0, ErrorCode::bad_config,
          "head_dim {} and rope_dim (qk_rope_head_dim) {} must be even: channels are rotated in pairs", config.head_dim,
          config.rope_dim);
  check_range("window (sliding_window)", config.window, 1, 1 << 20);
  check_range("max_positions", config.max_positions, 1, std::int64_t{1} << 30);
  require(config.rms_eps >= 0.0 && config.rms_eps <= 1.0, ErrorCode::bad_config,
          "rms_eps (rms_norm_eps) is {}; it must be from 0 to 1", config.rms_eps);
  check_rope("rope_main", config.rope_main);
  check_rope("rope_compress", config.rope_compress);
  validate_sharing(config);
  if (has_kind(config, LayerKind::shared)) {
    check_range("index_heads (index_n_heads)", config.index_heads, 1, kMaxWidth);
    check_range("index_dim (index_head_dim, at least the rope width)", config.index_dim, config.rope_dim, kMaxWidth);
    check_range("index_topk", config.index_topk, 1, 1 << 20);
  }
  if (has_kind(config, LayerKind::csa)) {
    check_range("csa_ratio (compress_rates)", config.csa_ratio, 1, kMaxRatio);
    check_range("index_heads (index_n_heads)", config.index_heads, 1, kMaxWidth);
    check_range("index_dim (index_head_dim, at least the rope width)", config.index_dim, config.rope_dim, kMaxWidth);
    check_range("index_topk", config.index_topk, 1, 1 << 20);
  }
  if (has_kind(config, LayerKind::hca)) check_range("hca_ratio (compress_rates)", config.hca_ratio, 1, kMaxRatio);
}

ModelConfig parse_model_config(std::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, false);
  require(!json.is_discarded(), ErrorCode::bad_config, "the config is not valid JSON ({} bytes)", text.size());
  require(json.is_object(), ErrorCode::bad_config, "the config is {}; it must be a JSON object", shown(json));
  const Fields top(json, "");
  const bool nested = top.has("text_config");
  const Fields text_model = nested ? top.object("text_config") : top;
  ModelConfig config = is_v41(top, text_model, nested) ? read_v41(text_model) : read_v4(top);
  const bool named = top.has("_name_or_path") && !top.text("_name_or_path").empty();
  config.name = named ? top.text("_name_or_path") : "config";
  validate(config);
  return config;
}

ModelConfig load_model_config(const std::string& path) {
  const std::string text = read_input_file(path, kMaxConfigBytes, "a config.json");
  try {
    return parse_model_config(text);
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", path, e.what());
  }
}

ModelConfig model_preset(std::string_view name) {
  if (name == "v4-flash") return v4_preset("v4-flash", 64, 512, {LayerKind::swa, LayerKind::swa}, 20);
  if (name == "v4-pro") return v4_preset("v4-pro", 128, 1024, {LayerKind::hca, LayerKind::hca}, 29);
  if (name == "v4.1-flash") return v41_flash_preset();
  fail(ErrorCode::bad_argument, "model '{}' is unknown; use v4-flash, v4-pro or v4.1-flash, or give a config.json",
       name);
}

std::vector<LayerSpec> layer_schedule(const ModelConfig& config, int draft_layers) {
  validate(config);
  check_range("draft_layers", draft_layers, 0, 64);
  std::vector<LayerSpec> layers = config.shares_entries() ? shared_schedule(config) : own_schedule(config);
  for (int d = 0; d < draft_layers; ++d)
    layers.push_back({.layer = config.num_layers + d, .kind = LayerKind::swa, .group = d + 1, .rows = {}});
  return layers;
}

}  // namespace kv4
