#include "kv4/layer_cache_handle.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "backend/nvtx_range.h"
#include "base/check.h"
#include "base/internal_key.h"
#include "cache/manager_impl.h"
#include "schema/attend_workspace.h"

namespace kv4 {

// A tensor in a message. Its text costs more than a small call, so it is made only where a check has failed.
template <class Void>
struct ShapeText {
  const BasicTensorView<Void>& tensor;

  std::string str() const {
    if (tensor.empty()) return "nothing";
    std::string out = std::string(to_string(tensor.dtype)) + " [";
    for (int d = 0; d < tensor.ndim; ++d) out += (d > 0 ? ", " : "") + std::to_string(tensor.shape[d]);
    return out + "]";
  }
};

}  // namespace kv4

template <class Void>
struct fmt::formatter<kv4::ShapeText<Void>> : fmt::formatter<std::string> {
  template <class Context>
  auto format(const kv4::ShapeText<Void>& shape, Context& context) const {
    return fmt::formatter<std::string>::format(shape.str(), context);
  }
};

namespace kv4 {
namespace {

template <class Void>
ShapeText<Void> shape_text(const BasicTensorView<Void>& t) {
  return {t};
}

bool is_float(DType type) { return type == DType::f32 || type == DType::bf16; }

// [rows, width] f32 or bf16, channels dense; rows may be strided.
ops::InputDesc float_rows(const ConstTensorView& t, std::int64_t rows, std::int64_t width, const char* name) {
  require(!t.empty() && t.ndim == 2 && is_float(t.dtype) && t.shape[0] == rows && t.shape[1] == width,
          ErrorCode::bad_argument, "{} must be f32 or bf16 [{}, {}] (tokens of the step, channels); got {}", name, rows,
          width, shape_text(t));
  require(t.strides[1] == 1 && t.strides[0] >= width, ErrorCode::bad_argument,
          "{}: channels must be dense and rows at least {} apart; strides are {}, {}", name, width, t.strides[0],
          t.strides[1]);
  return {t.data, t.dtype, t.strides[0]};
}

template <class Void>
void check_dense(const BasicTensorView<Void>& t, const char* name) {
  std::int64_t step = 1;
  bool dense = true;
  for (int d = t.ndim - 1; d >= 0; --d) {
    dense = dense && (t.strides[d] == step || t.shape[d] == 1);
    step *= t.shape[d];
  }
  require(dense, ErrorCode::bad_argument, "{} must be dense, last dimension fastest", name);
}

// [rows] or [rows, columns] of a given type, dense.
template <class T, class Void>
auto* dense_array(const BasicTensorView<Void>& t, DType type, std::int64_t rows, std::int64_t columns,
                  const char* name) {
  const bool flat = columns < 0;
  if (t.empty() || t.dtype != type || t.ndim != (flat ? 1 : 2) || t.shape[0] != rows ||
      (!flat && t.shape[1] != columns))
    fail(ErrorCode::bad_argument, "{} must be {} [{}{}]; got {}", name, to_string(type), rows,
         flat ? "" : ", " + std::to_string(columns), shape_text(t));
  check_dense(t, name);
  return static_cast<typename BasicTensorView<Void>::template Element<T>*>(t.data);
}

ops::OutputDesc float_output(const TensorView& t, std::int64_t first, std::int64_t width, const char* name) {
  require(
      !t.empty() && t.ndim == 3 && is_float(t.dtype) && t.shape[0] == first && t.shape[1] >= 0 && t.shape[2] == width,
      ErrorCode::bad_argument, "{} must be f32 or bf16 [{}, n, {}]; got {}", name, first, width, shape_text(t));
  check_dense(t, name);
  return {t.data, t.dtype};
}

// [tokens, heads, width], heads and channels dense; tokens may be strided.
ops::InputDesc head_rows(const ConstTensorView& t, std::int64_t tokens, std::int64_t width, std::int64_t max_heads,
                         const char* name) {
  require(!t.empty() && t.ndim == 3 && t.shape[0] == tokens && t.shape[1] >= 1 && t.shape[1] <= max_heads &&
              t.shape[2] == width,
          ErrorCode::bad_argument, "{} must be [{}, heads, {}] with 1 to {} heads; got {}", name, tokens, width,
          max_heads, shape_text(t));
  require(t.strides[2] == 1 && t.strides[1] == width && (tokens <= 1 || t.strides[0] >= t.shape[1] * width),
          ErrorCode::bad_argument, "{}: heads and channels must be dense; strides are {}, {}, {}", name, t.strides[0],
          t.strides[1], t.strides[2]);
  return {t.data, t.dtype, t.strides[0]};
}

PlaneView plane_view(const ops::Plane& plane, std::int64_t skip = 0) {
  if (plane.data == nullptr) return {};
  return {reinterpret_cast<std::byte*>(plane.data) + skip, plane.block_stride, plane.row_stride,
          plane.row_stride - skip};
}

// The bf16 channels at the end of a row format's payload.
PlaneView tail_view(const ops::RowPlanes& rows) {
  return plane_view(rows.payload, rows.payload.row_stride - 2 * rows.shape.tail);
}

}  // namespace

// The manager's parts, for every call; checks that the handle's own step is open.
struct HandleScope {
  KVCacheManager::Impl& m;
  const OneThread::Call call;
  const NvtxRange range;
  const LayerCacheSchema& schema;
  const ops::LayerDesc& desc;
  ops::StepDesc step;

  HandleScope(KVCacheManager::Impl& impl, int index, std::int64_t step_id, const char* name)
      : m(impl),
        call(impl.driver),
        range(name, !impl.on_host()),
        schema(impl.memory.schema.layers[index]),
        desc(impl.layers[index]) {
    require(m.steps.is_open() && m.steps.open().id == step_id, ErrorCode::bad_state,
            "the handle of layer {} belongs to step {}, which has ended; acquire a new one", schema.spec.layer,
            step_id);
    step = m.memory.tables.describe(m.steps.open());
    if (in_decoder()) step = m.memory.tables.describe_decoder(m.steps.open());
  }

  // A narrowed step: layers behind the last owner run on fewer tokens, and that owner has fewer queries.
  bool narrows(bool behind) const {
    const int owner = m.memory.schema.config.last_owner();
    return m.steps.narrowed() && (behind ? schema.spec.layer > owner : schema.spec.layer == owner);
  }
  bool in_decoder() const { return narrows(true); }
  bool narrows_queries() const { return narrows(false); }
  // The step of the last owner's reads; its window rows were those of all tokens, or the decoder's.
  void take_queries() {
    if (!narrows_queries()) return;
    const bool whole = m.whole_window_step == m.steps.open().id;
    step = whole ? m.memory.tables.describe_queries(m.steps.open())
                 : m.memory.tables.describe_decoder(m.steps.open());
  }
  std::span<const ops::StepRecord> step_items() const {
    return in_decoder() ? m.steps.decoder_items() : m.steps.items();
  }

  Backend& backend() const { return *m.memory.backend; }
  std::int64_t tokens() const { return step.num_tokens; }
  std::int64_t items() const { return step.num_items; }

  template <class Params>
  Params params() const {
    Params out;
    out.layer = desc;
    out.step = step;
    return out;
  }

  void set_front_end(ops::FrontEndDesc& front_end, int index) const {
    front_end.norm_weight = m.layers.raw_norm_weight(index);
    front_end.eps = desc.eps;
    front_end.rope = m.layers.rope(index);
    require(front_end.norm_weight != nullptr, ErrorCode::bad_state,
            "layer {} has no raw_norm_weight; bind_weights({}, ...) with one before raw_is_projection",
            schema.spec.layer, schema.spec.layer);
  }

  // Rows of raw_kv: those of the step's tokens, or the decoder's in the last owner of a narrowed step.
  std::int64_t window_tokens(const ConstTensorView& raw_kv) const {
    const std::int64_t decoder = m.steps.open().num_decoder_tokens;
    return narrows_queries() && raw_kv.ndim == 2 && raw_kv.shape[0] == decoder ? decoder : tokens();
  }

  // An owner's constants.
  void require_bound() const {
    require(desc.kinds[0].norm_weight != nullptr, ErrorCode::bad_state,
            "layer {} has no weights; call bind_weights({}, ...) before append", schema.spec.layer, schema.spec.layer);
  }

  // A layer of V4.1 with entries, its own or another layer's.
  void append_shared(const AppendInputs& inputs, const TensorView& latents, ops::AppendParams& p, int index) const {
    const ConstTensorView& window = inputs.raw_kv;
    require(inputs.index_kv.empty() && inputs.index_gate.empty(), ErrorCode::bad_argument,
            "layer {} makes index keys from latents; leave index_kv and index_gate empty", schema.spec.layer);
    if (!is_owner()) {
      require(inputs.kv.empty() && inputs.gate.empty(), ErrorCode::bad_argument,
              "layer {} reads the entries of layer {}; leave kv and gate empty here", schema.spec.layer,
              schema.spec.rows[0].owner_layer);
      return append(p);
    }
    require_bound();
    ops::OwnerAppendParams out;
    const std::int64_t width = desc.kinds[0].page.shape.width;
    p.kv[0] = float_rows(inputs.kv, tokens(), width, "kv");
    if (desc.kinds[0].ratio == 1) {
      require(inputs.gate.empty(), ErrorCode::bad_argument,
              "layer {} makes an entry of each token; it pools nothing, so leave gate empty", schema.spec.layer);
    } else {
      p.gate[0] = float_rows(inputs.gate, tokens(), width, "gate");
      require(p.kv[0].dtype == p.gate[0].dtype, ErrorCode::bad_argument,
              "kv is {} and gate is {}; they must have one type", to_string(p.kv[0].dtype),
              to_string(p.gate[0].dtype));
    }
    out.key_weight = m.layers.key_weight(index);
    require(out.key_weight != nullptr || !latents.empty(), ErrorCode::bad_argument,
            "layer {} needs its index keys: bind index_key_weight, or take the latents of append and give the keys to "
            "append_index_keys",
            schema.spec.layer);
    if (!latents.empty()) {
      require(latents.ndim == 2 && latents.dtype == DType::bf16 && latents.shape[0] == tokens() &&
                  latents.shape[1] == width && latents.strides[1] == 1 && latents.strides[0] >= width,
              ErrorCode::bad_argument, "latents must be bf16 [{}, {}], channels dense; got {}", tokens(), width,
              shape_text(latents));
      out.latents = static_cast<std::uint16_t*>(latents.data);
      out.latent_stride = latents.strides[0];
    }
    p.rope = m.layers.compress_rope();
    if (narrows_queries()) append_decoder_rows(p, window);
    out.rows = p;
    m.steps.note_write();
    shared_entries().append_owner(out);
  }

  // The last owner in a narrowed step: window rows of all tokens, or of the decoder's.
  void append_decoder_rows(ops::AppendParams& p, const ConstTensorView& raw_kv) const {
    const bool whole = raw_kv.ndim == 2 && raw_kv.shape[0] == tokens();
    m.whole_window_step = whole ? m.steps.open().id : 0;
    if (whole) return;
    ops::AppendParams rows = p;
    rows.step = m.memory.tables.describe_decoder(m.steps.open());
    rows.window_rows = float_rows(raw_kv, rows.step.num_tokens, desc.window.ring.shape.width, "raw_kv");
    append(rows);
    p.window_rows = {};
  }

  void append(ops::AppendParams& p) const {
    p.rope = m.layers.compress_rope();
    m.steps.note_write();
    backend().append(p);
  }

  // Saves this layer's part of the snapshots at boundaries inside long steps. A recorded call would save them at the
  // same places for ever, so while calls are recorded nothing is saved.
  void save_boundaries(const ops::AppendParams& p, int index) const {
    if (!m.snapshots.has_boundaries() || backend().capturing()) return;
    ops::BoundaryParams params;
    params.layer = desc;
    std::copy_n(p.kv, ops::LayerDesc::kMaxKinds, params.kv);
    std::copy_n(p.gate, ops::LayerDesc::kMaxKinds, params.gate);
    const bool decoder = in_decoder() || (narrows_queries() && m.whole_window_step != m.steps.open().id);
    m.snapshots.describe_boundaries(index, decoder ? m.steps.decoder_items() : m.steps.items(), params);
    backend().save_boundaries(params);
    m.snapshots.note_saved(index);
  }

  SharedEntryOperations& shared_entries() const { return *backend().shared_entries(); }

  // V4.1's owner of entries.
  bool is_owner() const { return schema.spec.kind == LayerKind::shared && !schema.pages.empty(); }
  void require_owner(const char* what) const {
    require(is_owner(), ErrorCode::bad_argument, "layer {} owns no entries made from latents, so it has no {}; {}",
            schema.spec.layer, what,
            schema.spec.kind == LayerKind::shared
                ? fmt::format("layer {} owns those that it reads", schema.spec.rows[0].owner_layer)
                : "only layers of V4.1 do");
  }

  enum class Candidates : std::uint8_t { none, picks, within };
  Candidates candidates() const {
    const int source = schema.spec.candidate_source;
    return source < 0 ? Candidates::none : source == schema.spec.layer ? Candidates::picks : Candidates::within;
  }
  void require_candidates() const {
    require(m.candidates_step == m.steps.open().id, ErrorCode::bad_state,
            "layer {} ranks within the candidates of layer {}, which has made no list in this step; call index_topk or "
            "select_topk of layer {} first",
            schema.spec.layer, schema.spec.candidate_source, schema.spec.candidate_source);
  }
  void note_candidates() const { m.candidates_step = m.steps.open().id; }

  void require_entries(const char* what) const {
    require(desc.num_kinds > 0, ErrorCode::bad_argument, "layer {} is {}: it has no entries to {}", schema.spec.layer,
            to_string(schema.spec.kind), what);
  }
  void require_keys(const char* what) const {
    require(desc.num_kinds > 1, ErrorCode::bad_argument, "layer {} is {}: it has no index keys to {}",
            schema.spec.layer, to_string(schema.spec.kind), what);
  }

  const std::int32_t* lens() const {
    const ops::StepTableDesc& t = m.memory.tables.desc();
    return desc.kinds[0].ratio == t.csa_ratio ? t.csa_lens : t.hca_lens;
  }

  std::int64_t longest(std::int64_t per_item) const {
    std::int64_t most = 0;
    for (const ops::StepRecord& item : m.steps.items())
      if (!item.padded()) most = std::max(most, item.end() / per_item);
    return most;
  }

  ops::IndexParams index_params() {
    require_keys("search");
    take_queries();
    auto params = this->params<ops::IndexParams>();
    params.workspace = reinterpret_cast<std::uint8_t*>(m.memory.index_workspace.data());
    params.workspace_bytes = m.memory.index_workspace.bytes();
    return params;
  }

  void set_queries(const IndexInputs& inputs, ops::IndexParams& params) const {
    const RowSchema& key = m.memory.schema.layer(schema.spec.rows[1].owner_layer).pages[1].row;
    const bool encoded = inputs.q.dtype == DType::u8;
    require(encoded || is_float(inputs.q.dtype), ErrorCode::bad_argument,
            "q must be f32, bf16 or, encoded as keys are, u8; got {}", shape_text(inputs.q));
    params.q = head_rows(inputs.q, tokens(), encoded ? key.payload_bytes : key.width, ops::kMaxIndexHeads, "q");
    params.num_heads = static_cast<std::int32_t>(inputs.q.shape[1]);
    if (encoded && key.scale_bytes > 0) {
      require(inputs.q_scale.dtype == DType::u8, ErrorCode::bad_argument, "q_scale must be u8; got {}",
              shape_text(inputs.q_scale));
      params.q_scale = head_rows(inputs.q_scale, tokens(), key.scale_bytes, ops::kMaxIndexHeads, "q_scale");
      require(inputs.q_scale.shape[1] == inputs.q.shape[1], ErrorCode::bad_argument, "q has {} heads, q_scale {}",
              inputs.q.shape[1], inputs.q_scale.shape[1]);
    }
    params.weights = float_rows(inputs.weights, tokens(), params.num_heads, "weights");
    require(inputs.weights.dtype == DType::f32, ErrorCode::bad_argument, "weights must be f32; got {}",
            shape_text(inputs.weights));
  }

  // index_scores writes scores, select_topk only reads them.
  template <class Void>
  void set_scores(const BasicTensorView<Void>& scores, ops::IndexParams& params) const {
    const std::int64_t most = longest(desc.kinds[1].ratio);
    require(scores.ndim == 2 && scores.shape[1] >= most, ErrorCode::bad_argument,
            "scores must be f32 [{}, n], n at least {} (entries of the longest item); got {}", tokens(), most,
            shape_text(scores));
    params.scores = const_cast<float*>(dense_array<float>(scores, DType::f32, tokens(), scores.shape[1], "scores"));
    params.score_stride = scores.shape[1];
  }

  void set_choice(const TensorView& indices, const TensorView& slots, ops::IndexParams& params) const {
    require(indices.ndim == 2 && indices.shape[1] >= 1 && indices.shape[1] <= ops::kMaxTopk, ErrorCode::bad_argument,
            "indices must be i32 [{}, k] with k from 1 to {}; got {}", tokens(), ops::kMaxTopk, shape_text(indices));
    params.top = static_cast<std::int32_t>(indices.shape[1]);
    params.indices = dense_array<std::int32_t>(indices, DType::i32, tokens(), params.top, "indices");
    if (!slots.empty()) params.slots = dense_array<std::int32_t>(slots, DType::i32, tokens(), params.top, "slots");
  }

  ops::AttendParams attend_params(const AttendInputs& inputs, const TensorView& out, const TensorView& lse,
                                  int index) const {
    auto params = this->params<ops::AttendParams>();
    const std::int64_t width = desc.window.ring.shape.width;
    require(is_float(inputs.q.dtype), ErrorCode::bad_argument, "q must be f32 or bf16; got {}", shape_text(inputs.q));
    params.q = head_rows(inputs.q, tokens(), width, ops::kMaxQueryHeads, "q");
    params.num_heads = static_cast<std::int32_t>(inputs.q.shape[1]);
    params.softmax_scale =
        inputs.softmax_scale != 0.0f ? inputs.softmax_scale : 1.0f / std::sqrt(static_cast<float>(width));
    if (!inputs.sink.empty()) params.sink = dense_array<float>(inputs.sink, DType::f32, params.num_heads, -1, "sink");
    if (!inputs.topk.empty()) {
      require_entries("choose");
      require(inputs.topk.ndim == 2 && inputs.topk.dtype == DType::i32 && inputs.topk.shape[0] == tokens() &&
                  inputs.topk.strides[1] == 1,
              ErrorCode::bad_argument, "topk must be i32 [{}, k], k dense; got {}", tokens(), shape_text(inputs.topk));
      params.chosen = {inputs.topk.data, DType::i32, inputs.topk.strides[0]};
      params.num_chosen = static_cast<std::int32_t>(inputs.topk.shape[1]);
    }
    params.out = float_output(out, tokens(), width, "out");
    require(out.shape[1] == params.num_heads, ErrorCode::bad_argument, "out has {} heads, q {}", out.shape[1],
            params.num_heads);
    if (!lse.empty()) params.lse = dense_array<float>(lse, DType::f32, tokens(), params.num_heads, "lse");
    if (inputs.inverse_rope) params.inverse_rope = m.layers.rope(index);
    params.workspace = reinterpret_cast<std::uint8_t*>(m.memory.attend_workspace.data());
    params.workspace_bytes = m.memory.attend_workspace.bytes();
    // A captured step is launched again with other lengths.
    if (tokens() >= ops::kFewestStagedTokens && !backend().capturing())
      params.step.max_length = static_cast<std::int32_t>(longest(1));
    return params;
  }

  // All stored rows of a kind: entries or index keys.
  void gather_all(int kind, const TensorView& out, const TensorView& lens_out) const {
    const ops::KindDesc& k = desc.kinds[kind];
    auto params = this->params<ops::GatherParams>();
    params.kind = kind;
    params.out = float_output(out, items(), k.page.shape.width, "out");
    params.lens = dense_array<std::int32_t>(lens_out, DType::i32, items(), -1, "lens");
    params.rows_per_item = out.shape[1];
    require(out.shape[1] >= longest(k.ratio), ErrorCode::bad_argument,
            "out has room for {} rows per item; the longest item has {}", out.shape[1], longest(k.ratio));
    backend().gather_all(params);
  }
};

#define KV4_SCOPE(name) HandleScope scope(manager_->impl(InternalKey()), index_, step_, name)

int LayerCacheHandle::layer() const { return schema().spec.layer; }
int LayerCacheHandle::num_query_heads() const { return manager_->schema().config.num_query_heads; }
int LayerCacheHandle::head_dim() const { return manager_->schema().config.head_dim; }
const LayerCacheSchema& LayerCacheHandle::schema() const { return manager_->schema().layers[index_]; }

void LayerCacheHandle::append(const AppendInputs& inputs) { append(inputs, TensorView()); }

void LayerCacheHandle::append(const AppendInputs& inputs, const TensorView& latents) {
  KV4_SCOPE("kv4 append");
  auto params = scope.params<ops::AppendParams>();
  const std::int64_t window_tokens = scope.window_tokens(inputs.raw_kv);
  params.window_rows = float_rows(inputs.raw_kv, window_tokens, scope.desc.window.ring.shape.width, "raw_kv");
  const ConstTensorView* kv[] = {&inputs.kv, &inputs.index_kv};
  const ConstTensorView* gate[] = {&inputs.gate, &inputs.index_gate};
  const char* kv_name[] = {"kv", "index_kv"};
  const char* gate_name[] = {"gate", "index_gate"};
  const bool shares = scope.schema.spec.kind == LayerKind::shared;
  if (!latents.empty()) scope.require_owner("latents");
  if (inputs.raw_is_projection) scope.set_front_end(params.front_end, index_);
  if (shares) {
    scope.append_shared(inputs, latents, params, index_);
    return scope.save_boundaries(params, index_);
  }
  for (int k = 0; k < scope.desc.num_kinds; ++k) {
    require(scope.desc.kinds[k].bias != nullptr, ErrorCode::bad_state,
            "layer {} has no weights; call bind_weights({}, ...) before append", scope.schema.spec.layer,
            scope.schema.spec.layer);
    const std::int64_t columns = scope.desc.kinds[k].pending.columns;
    params.kv[k] = float_rows(*kv[k], scope.tokens(), columns, kv_name[k]);
    params.gate[k] = float_rows(*gate[k], scope.tokens(), columns, gate_name[k]);
    require(params.kv[k].dtype == params.gate[k].dtype, ErrorCode::bad_argument,
            "{} is {} and {} is {}; they must have one type", kv_name[k], to_string(params.kv[k].dtype), gate_name[k],
            to_string(params.gate[k].dtype));
  }
  scope.append(params);
  scope.save_boundaries(params, index_);
}

void LayerCacheHandle::append_index_keys(const ConstTensorView& index_keys) {
  KV4_SCOPE("kv4 append_index_keys");
  scope.require_owner("index keys");
  scope.require_bound();
  auto params = scope.params<ops::KeyAppendParams>();
  params.rope = scope.m.layers.compress_rope();
  params.keys = float_rows(index_keys, scope.tokens(), scope.desc.kinds[1].page.shape.width, "index_keys");
  scope.m.steps.note_write();
  scope.shared_entries().append_keys(params);
}

void LayerCacheHandle::write_swa(const ConstTensorView& raw_kv) {
  KV4_SCOPE("kv4 write_swa");
  auto params = scope.params<ops::AppendParams>();
  const std::int64_t window_tokens = scope.window_tokens(raw_kv);
  params.window_rows = float_rows(raw_kv, window_tokens, scope.desc.window.ring.shape.width, "raw_kv");
  if (scope.narrows_queries()) scope.append_decoder_rows(params, raw_kv);
  if (params.window_rows.data != nullptr) scope.append(params);
}

void LayerCacheHandle::flush_compression(const FlushInputs& inputs) {
  KV4_SCOPE("kv4 flush_compression");
  scope.require_entries("flush");
  const bool shares = scope.schema.spec.kind == LayerKind::shared;
  if (shares) scope.require_owner("entries to flush");
  auto params = scope.params<ops::FlushParams>();
  params.rows[0] = float_rows(inputs.entries, scope.tokens(), scope.desc.kinds[0].page.shape.width, "entries");
  if (scope.desc.num_kinds > 1 && !(shares && inputs.index_keys.empty()))
    params.rows[1] = float_rows(inputs.index_keys, scope.tokens(), scope.desc.kinds[1].page.shape.width, "index_keys");
  if (!inputs.valid.empty())
    params.valid = dense_array<std::uint8_t>(inputs.valid, DType::u8, scope.tokens(), -1, "valid");
  scope.m.steps.note_write();
  scope.backend().flush(params);
}

KVPair LayerCacheHandle::gather_compressed_kv(const ConstTensorView& indices, const TensorView& out,
                                              const TensorView& valid) {
  KV4_SCOPE("kv4 gather_compressed_kv");
  scope.take_queries();
  scope.require_entries("gather");
  require(!indices.empty() && indices.ndim == 2 && indices.dtype == DType::i32 && indices.shape[0] == scope.tokens() &&
              indices.strides[1] == 1,
          ErrorCode::bad_argument, "indices must be i32 [{}, k], k dense; got {}", scope.tokens(), shape_text(indices));
  auto params = scope.params<ops::GatherParams>();
  params.rows_per_item = indices.shape[1];
  params.indices = {indices.data, DType::i32, indices.strides[0]};
  params.out = float_output(out, scope.tokens(), scope.desc.kinds[0].page.shape.width, "out");
  require(out.shape[1] == indices.shape[1], ErrorCode::bad_argument, "out has {} rows per token, indices {}",
          out.shape[1], indices.shape[1]);
  if (!valid.empty())
    params.valid = dense_array<std::uint8_t>(valid, DType::u8, scope.tokens(), indices.shape[1], "valid");
  scope.backend().gather_chosen(params);
  return {out, out};
}

KVPair LayerCacheHandle::gather_all_compressed_kv(const TensorView& out, const TensorView& lens) {
  KV4_SCOPE("kv4 gather_all_compressed_kv");
  scope.require_entries("gather");
  scope.gather_all(0, out, lens);
  return {out, out};
}

TensorView LayerCacheHandle::gather_all_index_keys(const TensorView& out, const TensorView& lens) {
  KV4_SCOPE("kv4 gather_all_index_keys");
  scope.require_keys("gather");
  scope.gather_all(1, out, lens);
  return out;
}

KVPair LayerCacheHandle::gather_swa_kv(const TensorView& out, const TensorView& lens, const TensorView& first) {
  KV4_SCOPE("kv4 gather_swa_kv");
  if (scope.narrows_queries() && scope.m.whole_window_step != scope.m.steps.open().id) scope.take_queries();
  auto params = scope.params<ops::GatherParams>();
  params.out = float_output(out, scope.items(), scope.desc.window.ring.shape.width, "out");
  params.rows_per_item = out.shape[1];
  params.lens = dense_array<std::int32_t>(lens, DType::i32, scope.items(), -1, "lens");
  params.first = dense_array<std::int32_t>(first, DType::i32, scope.items(), -1, "first");
  std::int64_t need = 0;
  for (const ops::StepRecord& item : scope.step_items())
    if (!item.padded())
      need = std::max<std::int64_t>(need, std::min(item.length, scope.desc.window_tokens - 1) + item.count);
  require(out.shape[1] >= need, ErrorCode::bad_argument, "out has room for {} rows per item; the step needs {}",
          out.shape[1], need);
  scope.backend().gather_window(params);
  return {out, out};
}

void LayerCacheHandle::index_scores(const IndexInputs& inputs, const TensorView& scores, ScoreMode mode) {
  KV4_SCOPE("kv4 index_scores");
  ops::IndexParams params = scope.index_params();
  params.mode = mode;
  scope.set_queries(inputs, params);
  scope.set_scores(scores, params);
  if (scope.candidates() != HandleScope::Candidates::within) return scope.backend().index_scores(params);
  scope.require_candidates();
  scope.shared_entries().index_scores_within(params, scope.m.layers.candidates());
}

void LayerCacheHandle::select_topk(const ConstTensorView& scores, const TensorView& indices, const TensorView& slots) {
  KV4_SCOPE("kv4 select_topk");
  ops::IndexParams params = scope.index_params();
  scope.set_scores(scores, params);
  scope.set_choice(indices, slots, params);
  using Candidates = HandleScope::Candidates;
  switch (scope.candidates()) {
    case Candidates::none: return scope.backend().select_topk(params);
    case Candidates::picks:
      scope.shared_entries().select_topk_and_candidates(params, scope.m.layers.candidates());
      return scope.note_candidates();
    case Candidates::within:
      scope.require_candidates();
      return scope.shared_entries().select_topk_within(params, scope.m.layers.candidates());
  }
}

void LayerCacheHandle::index_topk(const IndexInputs& inputs, const TensorView& indices, const TensorView& slots,
                                  ScoreMode mode) {
  KV4_SCOPE("kv4 index_topk");
  ops::IndexParams params = scope.index_params();
  params.mode = mode;
  scope.set_queries(inputs, params);
  scope.set_choice(indices, slots, params);
  using Candidates = HandleScope::Candidates;
  switch (scope.candidates()) {
    case Candidates::none: return scope.backend().index_topk(params);
    case Candidates::picks:
      scope.shared_entries().index_topk_and_candidates(params, scope.m.layers.candidates());
      return scope.note_candidates();
    case Candidates::within:
      scope.require_candidates();
      return scope.shared_entries().index_topk_within(params, scope.m.layers.candidates());
  }
}

void LayerCacheHandle::attend(const AttendInputs& inputs, const TensorView& out, const TensorView& lse) {
  KV4_SCOPE("kv4 attend");
  scope.take_queries();
  scope.backend().attend(scope.attend_params(inputs, out, lse, index_));
}

void LayerCacheHandle::attend_draft(const DraftInputs& inputs, const TensorView& out, const TensorView& lse) {
  KV4_SCOPE("kv4 attend_draft");
  require(scope.m.memory.schema.config.shares_entries() && scope.schema.spec.group != 0, ErrorCode::bad_argument,
          "layer {} is no draft stage of V4.1; only its queries see the later rows of their draft",
          scope.schema.spec.layer);
  require(inputs.attend.topk.empty(), ErrorCode::bad_argument, "layer {} has no entries; leave topk empty",
          scope.schema.spec.layer);
  ops::DraftParams params;
  params.attend = scope.attend_params(inputs.attend, out, lse, index_);
  params.rows = float_rows(inputs.raw_kv, scope.tokens(), scope.desc.window.ring.shape.width, "raw_kv");
  if (inputs.raw_is_projection) scope.set_front_end(params.front_end, index_);
  scope.shared_entries().attend_draft(params);
}

CandidateView LayerCacheHandle::read_candidate_view() {
  KV4_SCOPE("kv4 read_candidate_view");
  scope.take_queries();
  require(scope.candidates() != HandleScope::Candidates::none, ErrorCode::bad_argument,
          "layer {} neither picks candidates nor ranks within them", scope.schema.spec.layer);
  scope.require_candidates();
  const ops::CandidateDesc& c = scope.m.layers.candidates();
  return {c.block_entries, scope.step.num_tokens, c.stride, c.blocks, c.counts};
}

SWAView LayerCacheHandle::read_swa_view() {
  KV4_SCOPE("kv4 read_swa_view");
  require(!scope.in_decoder() && !scope.narrows_queries(), ErrorCode::bad_state,
          "layer {} has no view of its window in a narrowed step; use attend or gather_swa_kv",
          scope.schema.spec.layer);
  const ops::StepTableDesc& t = scope.m.memory.tables.desc();
  SWAView view;
  view.payload = plane_view(scope.desc.window.ring.payload);
  view.rope = tail_view(scope.desc.window.ring);
  view.scale = plane_view(scope.desc.window.ring.scale);
  view.num_items = scope.step.num_items;
  view.rows = scope.desc.window.rows;
  view.slots = t.item_slots;
  view.positions = t.ring_positions;
  view.head = t.ring_heads;
  return view;
}

ClassicalView LayerCacheHandle::read_classical_view() {
  KV4_SCOPE("kv4 read_classical_view");
  scope.require_entries("view");
  const ops::KindDesc& kind = scope.desc.kinds[0];
  ClassicalView view;
  view.payload = plane_view(kind.page.payload);
  view.rope = tail_view(kind.page);
  view.scale = plane_view(kind.page.scale);
  view.num_items = scope.step.num_items;
  view.rows_per_block = kind.rows_per_block;
  view.blocks_per_request = scope.step.blocks_per_request;
  view.block_table = scope.step.block_table;
  view.request_rows = scope.m.memory.tables.desc().item_rows;
  view.lens = scope.lens();
  return view;
}

IndexerView LayerCacheHandle::read_indexer_view() {
  KV4_SCOPE("kv4 read_indexer_view");
  scope.require_keys("view");
  const ops::KindDesc& kind = scope.desc.kinds[1];
  IndexerView view;
  view.keys = plane_view(kind.page.payload);
  view.scales = plane_view(kind.page.scale);
  view.global_scale = plane_view(kind.page.global);
  if (view.global_scale.data != nullptr) view.global_scale.row_bytes = 4;
  view.num_items = scope.step.num_items;
  view.rows_per_block = kind.rows_per_block;
  view.blocks_per_request = scope.step.blocks_per_request;
  view.block_table = scope.step.block_table;
  view.request_rows = scope.m.memory.tables.desc().item_rows;
  view.lens = scope.lens();
  return view;
}

}  // namespace kv4
