#include "golden_recording.h"

#include <fmt/format.h>

#include "kv4/error.h"

namespace kv4::checks {
namespace {

// The reference attends from every token to every token, and a window takes width x tokens, recorded or not.
constexpr std::int64_t kMaxTokens = 1 << 14;
constexpr std::int64_t kMaxWidth = 1 << 12;

Matrix load_matrix(const SafeTensors& file, const std::string& name, std::int64_t rows, std::int64_t cols) {
  return {rows, cols, file.floats(name, {rows, cols})};
}

Matrix load_heads(const SafeTensors& file, const std::string& name, std::int64_t rows, std::int64_t heads,
                  std::int64_t width) {
  return {rows, heads * width, file.floats(name, {rows, heads, width})};
}

RecordedCompressor load_compressor(const SafeTensors& file, const std::string& prefix, const Recording& recording,
                                   std::int64_t width) {
  const std::int64_t tokens = recording.tokens;
  const std::int64_t ratio = recording.ratio;
  const bool overlap = recording.kind == LayerKind::csa;
  const std::int64_t columns = overlap ? 2 * width : width;
  RecordedCompressor out;
  out.kv = load_matrix(file, prefix + "_kv", tokens, columns);
  out.gate = load_matrix(file, prefix + "_gate", tokens, columns);
  out.position_bias = load_matrix(file, prefix + "_position_bias", ratio, columns);
  out.norm_weight = {1, width, file.floats(prefix + "_norm_weight", {width})};
  out.entries = load_matrix(file, prefix + "_entries", tokens / ratio, width);
  if (const std::int64_t open = tokens % ratio; open != 0) {
    out.tail_kv = load_matrix(file, prefix + "_tail_kv", open, columns);
    out.tail_gate = load_matrix(file, prefix + "_tail_gate", open, columns);
  }
  if (overlap && tokens >= ratio) {
    out.overlap_kv = load_matrix(file, prefix + "_overlap_kv", ratio, width);
    out.overlap_gate_biased = load_matrix(file, prefix + "_overlap_gate_biased", ratio, width);
  }
  return out;
}

ModelConfig load_config(const SafeTensors& file, LayerKind kind) {
  const auto size = [&](const char* key) { return static_cast<int>(file.metadata_int(key, 1, kMaxWidth)); };
  ModelConfig config = model_preset("v4-flash");  // the files' metadata has no rotation
  config.name = file.name();
  config.num_layers = 1;
  config.kinds = {kind};
  config.draft_hint = 0;
  config.num_query_heads = size("heads");
  config.head_dim = size("head_dim");
  config.rope_dim = size("rope_dim");
  config.window = size("sliding_window");
  config.rms_eps = file.metadata_double("rms_norm_eps");
  if (kind == LayerKind::csa) {
    config.index_heads = size("index_heads");
    config.index_dim = size("index_head_dim");
    config.index_topk = size("index_topk");
  }
  if (kind != LayerKind::swa) {
    const StoredTensor bias = file.tensor("comp_position_bias");
    const std::int64_t ratio = bias.shape.empty() ? 0 : bias.shape[0];
    if (ratio < 1 || ratio > kMaxWidth) {
      throw Error(
          ErrorCode::bad_file,
          fmt::format("{}: comp_position_bias has {} rows, allowed are 1 to {}; it needs one per token of an entry",
                      file.name(), ratio, kMaxWidth));
    }
    (kind == LayerKind::csa ? config.csa_ratio : config.hca_ratio) = static_cast<int>(ratio);
  }
  return config;
}

void load_indexer(const SafeTensors& file, Recording& out) {
  const ModelConfig& config = out.config;
  out.index_softmax_scale = file.metadata_double("index_softmax_scale");
  out.index = load_compressor(file, "idx", out, config.index_dim);
  out.idx_q = load_heads(file, "idx_q", out.tokens, config.index_heads, config.index_dim);
  out.idx_weights = load_matrix(file, "idx_weights", out.tokens, config.index_heads);
  out.idx_scores = load_matrix(file, "idx_scores", out.tokens, out.tokens / out.ratio);
  const std::vector<std::int32_t> chosen = file.ints("idx_topk", {out.tokens, -1});
  const std::size_t places = chosen.size() / out.tokens;
  out.idx_topk.resize(out.tokens);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const auto t = i / places;
    if (chosen[i] < 0) continue;
    if (chosen[i] >= (static_cast<std::int64_t>(t) + 1) / out.ratio) {
      throw Error(ErrorCode::bad_file,
                  fmt::format("{}: idx_topk of token {} holds {}, allowed are -1 to {}; record it again", file.name(),
                              t, chosen[i], (static_cast<std::int64_t>(t) + 1) / out.ratio - 1));
    }
    out.idx_topk[t].push_back(chosen[i]);
  }
}

}  // namespace

Recording load_recording(const SafeTensors& file, LayerKind kind) {
  Recording out;
  out.file = file.name();
  out.kind = kind;
  out.config = load_config(file, kind);
  out.tokens = file.metadata_int("n_tokens", 1, kMaxTokens);
  out.ratio = kind == LayerKind::swa ? 0 : kind == LayerKind::csa ? out.config.csa_ratio : out.config.hca_ratio;
  out.softmax_scale = file.metadata_double("softmax_scale");
  const std::int64_t heads = out.config.num_query_heads;
  const std::int64_t width = out.config.head_dim;
  out.swa_kv = load_matrix(file, "swa_kv", out.tokens, width);
  out.q = load_heads(file, "q", out.tokens, heads, width);
  out.attn_out = load_heads(file, "attn_out", out.tokens, heads, width);
  out.sinks = {1, heads, file.floats("sinks", {heads})};
  if (kind != LayerKind::swa) out.main = load_compressor(file, "comp", out, width);
  if (kind == LayerKind::csa) load_indexer(file, out);
  return out;
}

}  // namespace kv4::checks
