#include "cache/layers.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "ops/layer_desc.h"

namespace kv4 {
namespace {

void check_constant(const ConstTensorView& t, DType type, std::initializer_list<std::int64_t> shape,
                    const std::string& name) {
  const ConstTensorView want(static_cast<const float*>(nullptr), shape);
  bool same = t.data != nullptr && t.dtype == type && t.ndim == want.ndim;
  for (int d = 0; same && d < t.ndim; ++d) same = t.shape[d] == want.shape[d] && t.strides[d] == want.strides[d];
  std::string dims;
  for (std::int64_t d : shape) dims += (dims.empty() ? "" : ", ") + std::to_string(d);
  require(same, ErrorCode::bad_argument, "{} must be a dense {} tensor [{}]", name, to_string(type), dims);
}

const float* checked_constant(const ConstTensorView& t, std::initializer_list<std::int64_t> shape,
                              const std::string& name) {
  check_constant(t, DType::f32, shape, name);
  return static_cast<const float*>(t.data);
}

// The digest of a dense table in the backend's memory.
std::string digest_table(Backend& backend, const ConstTensorView& table) {
  const std::int64_t bytes = table.shape[0] * table.shape[1] * static_cast<std::int64_t>(element_bytes(table.dtype));
  constexpr std::int64_t most = 1 << 16;  // docs/formats.md, "Block keys"
  backend.reserve_staging(most);
  std::vector<std::byte> part;
  std::string digests;
  BlockHasher hasher;
  for (std::int64_t at = 0; at < bytes; at += most) {
    part.resize(std::min(most, bytes - at));
    const ops::CopyPiece piece{static_cast<const std::uint8_t*>(table.data) + at,
                               reinterpret_cast<std::uint8_t*>(part.data()), std::ssize(part)};
    backend.read_pieces(std::span(&piece, 1), part);
    const Sha256 digest = hasher.digest({reinterpret_cast<const char*>(part.data()), part.size()});
    digests.append(digest.begin(), digest.end());
  }
  return digests;
}

}  // namespace

Layers::Layers(CacheMemory& memory) : memory_(memory) {
  const CacheSchema& schema = memory.schema;
  bool compresses = false, slides = false;
  for (int index = 0; index < std::ssize(schema.layers); ++index) {
    descs_.push_back(ops::describe_layer(
        schema, index,
        {memory.kv_pool.base(), memory.state_pool.base(), memory.state_pool.fold_watermarks(),
         memory.state_pool.undo_rows(), memory.state_pool.undo_positions(), memory.tables.scratch()}));
    (descs_.back().num_kinds > 0 ? compresses : slides) = true;
  }
  raw_norm_weights_.resize(descs_.size());
  key_weights_.resize(descs_.size());
  if (const CandidateLayout layout = candidate_layout(schema); layout.bytes > 0)
    candidates_ = {schema.config.sharing.candidate_block_size, schema.config.sharing.candidate_topk_blocks,
                   layout.stride, reinterpret_cast<std::int32_t*>(memory.candidates.data()),
                   reinterpret_cast<std::int32_t*>(memory.candidates.data() + layout.counts_at)};
  const ModelConfig& config = schema.config;
  swa_rope_.rope_dim = compress_rope_.rope_dim = config.rope_dim;
  if (slides) {
    swa_angles_.emplace(config.rope_main, config.rope_dim, schema.options.max_context, memory.backend);
    swa_rope_.angles = swa_angles_->view();
  }
  if (compresses) {
    compress_angles_.emplace(config.rope_compress, config.rope_dim, schema.options.max_context, memory.backend);
    compress_rope_.angles = compress_angles_->view();
  }
}

void Layers::bind_weights(int layer, const LayerWeights& weights, bool in_step) {
  const LayerCacheSchema& schema = memory_.schema.layer(layer);
  require(!schema.pages.empty() || !weights.raw_norm_weight.empty(), ErrorCode::bad_argument,
          "layer {} is {}: it has no compressor and takes only raw_norm_weight", layer, to_string(schema.spec.kind));
  require(!in_step, ErrorCode::bad_state, "weights cannot change during a step; commit or abort it first");
  const float* raw = nullptr;
  if (!weights.raw_norm_weight.empty())
    raw = checked_constant(weights.raw_norm_weight, {memory_.schema.config.head_dim},
                           fmt::format("layer {}: raw_norm_weight", layer));
  const std::ptrdiff_t index = &schema - memory_.schema.layers.data();
  if (memory_.schema.config.shares_entries() && !schema.pages.empty()) {
    bind_owner_weights(schema, weights, raw);
    return;
  }
  require(weights.index_key_weight.empty(), ErrorCode::bad_argument,
          "layer {} takes no index_key_weight; only V4.1's layers that own entries do", layer);
  const ConstTensorView* bias[] = {&weights.position_bias, &weights.index_position_bias};
  const ConstTensorView* norm[] = {&weights.norm_weight, &weights.index_norm_weight};
  const char* bias_name[] = {"position_bias", "index_position_bias"};
  const char* norm_name[] = {"norm_weight", "index_norm_weight"};
  const std::string where = fmt::format("layer {}: ", layer);
  const float* found[2][2] = {};
  for (std::size_t k = 0; k < schema.pages.size(); ++k) {
    found[k][0] =
        checked_constant(*bias[k], {schema.pages[k].kind.ratio, schema.pending[k].columns}, where + bias_name[k]);
    found[k][1] = checked_constant(*norm[k], {schema.pages[k].kind.width}, where + norm_name[k]);
  }
  raw_norm_weights_[index] = raw;
  for (std::size_t k = 0; k < schema.pages.size(); ++k) {
    descs_[index].kinds[k].bias = found[k][0];
    descs_[index].kinds[k].norm_weight = found[k][1];
  }
}

// V4.1: norm weights of entries and keys, and the projection from a latent to its key where keys are made here.
void Layers::bind_owner_weights(const LayerCacheSchema& schema, const LayerWeights& weights, const float* raw) {
  const std::string where = fmt::format("layer {}: ", schema.spec.layer);
  require(weights.position_bias.empty() && weights.index_position_bias.empty(), ErrorCode::bad_argument,
          "{}V4.1 has no position_bias and no index_position_bias; leave them empty", where);
  const std::int64_t width = schema.pages[0].kind.width, key_width = schema.pages[1].kind.width;
  const float* norm = checked_constant(weights.norm_weight, {width}, where + "norm_weight");
  const float* key_norm = checked_constant(weights.index_norm_weight, {key_width}, where + "index_norm_weight");
  if (!weights.index_key_weight.empty())
    check_constant(weights.index_key_weight, DType::bf16, {key_width, width}, where + "index_key_weight");
  const std::ptrdiff_t index = &schema - memory_.schema.layers.data();
  raw_norm_weights_[index] = raw;
  key_weights_[index] = static_cast<const std::uint16_t*>(weights.index_key_weight.data);
  descs_[index].kinds[0].norm_weight = norm;
  descs_[index].kinds[1].norm_weight = key_norm;
}

void Layers::bind_rope_table(const ConstTensorView& cos, const ConstTensorView& sin, bool in_step, PrefixCache* prefix,
                             int num_requests) {
  const int pairs = compress_rope_.rope_dim / 2;
  const std::int64_t positions = memory_.schema.options.max_context;
  require(!in_step, ErrorCode::bad_state, "the rope table cannot change during a step; commit or abort it first");
  require(cos.ndim == 2 && sin.ndim == 2 && cos.shape[0] >= positions && sin.shape[0] == cos.shape[0],
          ErrorCode::bad_argument,
          "the rope table must be two tensors [positions, {}] with at least max_context = {} positions", pairs,
          positions);
  const float* c = checked_constant(cos, {cos.shape[0], pairs}, "the rope table's cos");
  const float* s = checked_constant(sin, {sin.shape[0], pairs}, "the rope table's sin");
  if (prefix != nullptr) {
    require(num_requests == 0, ErrorCode::bad_state,
            "{} requests run; keys of blocks name the rope table: bind it before the first", num_requests);
    prefix->set_rope_digest(digest_table(*memory_.backend, cos) + digest_table(*memory_.backend, sin));
  }
  compress_rope_.cos = c;
  compress_rope_.sin = s;
}

std::int64_t Layers::memory_bytes() const {
  return (swa_angles_ ? swa_angles_->memory_bytes() : 0) + (compress_angles_ ? compress_angles_->memory_bytes() : 0);
}

}  // namespace kv4
