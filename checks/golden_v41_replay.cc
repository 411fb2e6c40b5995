#include "golden_v41_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>

#include "device_tensors.h"
#include "kv4/error.h"

namespace kv4::checks {
namespace {

template <class T>
const T& expect(const Expected<T>& value, const char* what) {
  if (!value)
    throw Error(ErrorCode::bad_state,
                fmt::format("golden replay: {} found no room ({})", what, to_string(value.error())));
  return *value;
}

float rounded_once(double x) {
  if (!std::isfinite(x) || x == 0) return static_cast<float>(x);
  const double step = bf16_ulp(std::abs(x));
  return static_cast<float>(std::nearbyint(x / step) * step);
}

// A latent as an entry: rotated at its first token with the model's own angles, rounded to bf16 once.
void rotate(std::span<float> row, std::span<const float> cos, std::span<const float> sin) {
  const std::size_t first = row.size() - 2 * cos.size();
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double a = row[first + 2 * i], b = row[first + 2 * i + 1];
    row[first + 2 * i] = rounded_once(a * cos[i] - b * sin[i]);
    row[first + 2 * i + 1] = rounded_once(b * cos[i] + a * sin[i]);
  }
}

ConstTensorView whole(const Matrix& matrix) { return {matrix.values.data(), {matrix.rows, matrix.cols}}; }
ConstTensorView flat(const Matrix& matrix) { return {matrix.values.data(), {matrix.cols}}; }
TensorView whole(Matrix& matrix) { return {matrix.values.data(), {matrix.rows, matrix.cols}}; }

void copy_row(const PlaneView& plane, std::int64_t block, std::int64_t row, std::uint8_t* to) {
  std::memcpy(to, plane.data + block * plane.block_stride + row * plane.row_stride, plane.row_bytes);
}

RecordedRows room_for(std::int64_t rows, const RowSchema& row) {
  RecordedRows out{rows, row.payload_bytes, row.scale_bytes, {}, {}};
  out.codes.resize(rows * row.payload_bytes);
  out.scales.resize(rows * row.scale_bytes);
  return out;
}

class Replay {
 public:
  Replay(const RecordingV41& recording, EntrySource source, const std::vector<int>& chunks,
         const std::shared_ptr<Backend>& backend)
      : recording_(recording),
        source_(source),
        chunks_(chunks),
        backend_(backend),
        bound_(backend),
        tensors_(backend),
        manager_(recording.config, options(), backend) {
    bind();
    make_capture();
  }

  CaptureV41 run() {
    request_ = expect(manager_.admit(), "admit");
    for (std::size_t i = 0; length() < recording_.tokens; ++i)
      step(static_cast<std::int32_t>(
          std::min<std::int64_t>(i < chunks_.size() ? chunks_[i] : 1, recording_.tokens - length())));
    out_.image = manager_.export_image(request_);
    if (recording_.draft) draft();
    return std::move(out_);
  }

 private:
  CacheOptions options() const {
    CacheOptions o;
    o.max_requests = 1;
    o.max_context = recording_.tokens + (recording_.draft ? recording_.draft->block : 0);
    o.max_rewind_tokens = recording_.draft ? static_cast<int>(recording_.draft->block) : 0;
    o.draft_layers = recording_.draft ? 1 : 0;
    o.max_step_tokens = std::max(64, *std::max_element(chunks_.begin(), chunks_.end()));
    return o;
  }

  std::int64_t length() const { return manager_.length(request_); }

  void bind() {
    if (recording_.compress_cos.rows >= manager_.schema().options.max_context)
      manager_.bind_rope_table(bound_.in(whole(recording_.compress_cos)), bound_.in(whole(recording_.compress_sin)));
    for (std::size_t i = 0; i < recording_.layers.size(); ++i) {
      if (!recording_.layers[i].owner) continue;
      const RecordedOwner& owner = *recording_.layers[i].owner;
      LayerWeights weights;
      weights.norm_weight = flat(owner.norm_weight);
      weights.index_norm_weight = flat(owner.key_norm_weight);
      if (source_ == EntrySource::projections)
        weights.index_key_weight = {
            owner.key_weight.data(), DType::bf16, {owner.key_norm_weight.cols, owner.norm_weight.cols}};
      manager_.bind_weights(static_cast<int>(i), bound_.in(weights));
    }
  }

  std::int64_t entries_of(const LayerSpec& spec) const {
    return spec.rows.empty() ? 0 : recording_.tokens / spec.rows[0].ratio;
  }

  void make_capture() {
    const CacheSchema& schema = manager_.schema();
    const ModelConfig& config = schema.config;
    out_.schema = schema;
    const auto queries = static_cast<std::int64_t>(recording_.layers[0].positions.size());
    for (std::size_t i = 0; i < recording_.layers.size(); ++i) {
      const LayerCacheSchema& layer = schema.layers[i];
      CaptureLayerV41& out = out_.layers.emplace_back();
      const std::int64_t entries = entries_of(layer.spec);
      const bool ranks = layer.spec.rows.size() > 1;
      out.window = room_for(recording_.tokens, layer.window.row);
      if (!layer.pages.empty()) out.entries = room_for(entries, layer.pages[0].row);
      if (!layer.pages.empty()) out.keys = room_for(entries, layer.pages[1].row);
      out.window_values = Matrix(recording_.tokens, config.head_dim);
      out.entry_values = Matrix(entries, config.head_dim);
      out.key_values = Matrix(ranks ? entries : 0, config.index_dim);
      out.latents = Matrix(layer.pages.empty() ? 0 : entries, config.head_dim);
      out.scores = Matrix(ranks ? queries : 0, entries);
      out.lists.resize(queries);
      out.candidates.resize(queries);
      out.attention = Matrix(queries, recording_.layers[i].q.cols);
    }
  }

  // --- a step

  // Index among the recorded queries; -1: none was recorded at this position.
  std::int64_t query_at(std::int64_t position) const {
    const std::vector<std::int32_t>& all = recording_.layers[0].positions;
    const auto at = std::lower_bound(all.begin(), all.end(), position);
    return at == all.end() || *at != position ? -1 : at - all.begin();
  }

  // Rows of recorded queries for the tokens of the step; zeros where none was recorded.
  Matrix queries_of(const Matrix& recorded) const {
    Matrix out(count_, recorded.cols);
    for (std::int64_t t = 0; t < count_; ++t)
      if (const std::int64_t query = query_at(first_ + t); query >= 0)
        std::copy_n(recorded.row(query).begin(), recorded.cols, out.row(t).begin());
    return out;
  }

  std::vector<std::uint8_t> octets_of(const std::vector<std::uint8_t>& recorded, std::int64_t bytes) const {
    std::vector<std::uint8_t> out(count_ * bytes);
    for (std::int64_t t = 0; t < count_; ++t)
      if (const std::int64_t query = query_at(first_ + t); query >= 0)
        std::copy_n(recorded.begin() + query * bytes, bytes, out.begin() + t * bytes);
    return out;
  }

  ConstTensorView slice(const Matrix& matrix) const {
    if (matrix.rows == 0) return {};
    return {matrix.values.data() + first_ * matrix.cols, {count_, matrix.cols}};
  }

  void step(std::int32_t count) {
    first_ = length();
    count_ = count;
    const std::vector<std::int32_t> ids(count, 1);
    const StepItem item{request_, count, ids, first_};
    const Step step = expect(manager_.prepare_forward({&item, 1}), "prepare_forward");
    lists_.assign(recording_.layers.size(), {});
    for (std::size_t i = 0; i < recording_.layers.size(); ++i) run_layer(i);
    manager_.commit(step);
  }

  void run_layer(std::size_t i) {
    LayerCacheHandle handle = manager_.acquire(static_cast<int>(i));
    const LayerSpec& spec = handle.schema().spec;
    append(handle, i);
    if (spec.rows.size() > 1) rank(handle, i);
    attend(handle, i);
    gather(handle, i);
    read_views(handle, i);
    tensors_.clear();
  }

  void append(LayerCacheHandle& handle, std::size_t i) {
    const RecordedLayerV41& layer = recording_.layers[i];
    AppendInputs inputs;
    inputs.raw_kv = slice(layer.swa_kv);
    if (!layer.owner) return handle.append(tensors_.in(inputs));
    const int ratio = handle.schema().spec.rows[0].ratio;
    if (source_ == EntrySource::latents) return write_entries(handle, *layer.owner, layer.swa_kv, ratio);
    inputs.kv = slice(layer.owner->kv);
    inputs.gate = slice(layer.owner->gate);
    const std::int64_t width = layer.owner->kv.cols;
    constexpr std::uint16_t kUntouched = 0x1234;
    std::vector<std::uint16_t> latents(count_ * width, kUntouched);
    handle.append(tensors_.in(inputs), tensors_.out(TensorView(latents.data(), DType::bf16, {count_, width})));
    tensors_.read_back();
    CaptureLayerV41& out = out_.layers[i];
    for (std::int64_t t = 0; t < count_; ++t) {
      const std::uint16_t* row = latents.data() + t * width;
      if ((first_ + t + 1) % ratio != 0) {
        out.changed_latents += std::any_of(row, row + width, [](std::uint16_t x) { return x != kUntouched; });
        continue;
      }
      for (std::int64_t c = 0; c < width; ++c) {
        const std::uint32_t bits = std::uint32_t{row[c]} << 16;
        std::memcpy(&out.latents.row((first_ + t) / ratio)[c], &bits, 4);
      }
    }
  }

  // Entries from the recorded latents, keys from the recorded projections; row i belongs to the entry of token i.
  void write_entries(LayerCacheHandle& handle, const RecordedOwner& owner, const Matrix& window, int ratio) {
    Matrix entries(count_, owner.latents.cols), keys(count_, owner.key_projections.cols);
    const Matrix &cos = table(true), &sin = table(false);
    for (std::int64_t t = 0; t < count_; ++t) {
      if ((first_ + t + 1) % ratio != 0) continue;
      const std::int64_t entry = (first_ + t) / ratio;
      std::copy_n(owner.latents.row(entry).begin(), entries.cols, entries.row(t).begin());
      rotate(entries.row(t), cos.row(entry * ratio), sin.row(entry * ratio));
      std::copy_n(owner.key_projections.row(entry).begin(), keys.cols, keys.row(t).begin());
    }
    handle.write_swa(tensors_.in(slice(window)));
    FlushInputs flush;
    flush.entries = tensors_.in(whole(std::as_const(entries)));
    handle.flush_compression(flush);
    handle.append_index_keys(tensors_.in(whole(std::as_const(keys))));
  }

  // The model's angles, or ours where the recording has none.
  const Matrix& table(bool cos) {
    const Matrix& recorded = cos ? recording_.compress_cos : recording_.compress_sin;
    if (recorded.rows >= recording_.tokens) return recorded;
    Matrix& own = cos ? own_cos_ : own_sin_;
    if (own.rows == 0) {
      const ModelConfig& config = recording_.config;
      RopeTable made = build_rope_table(config.rope_compress, config.rope_dim, 0, recording_.tokens);
      own = {recording_.tokens, config.rope_dim / 2, cos ? std::move(made.cos) : std::move(made.sin)};
    }
    return own;
  }

  void rank(LayerCacheHandle& handle, std::size_t i) {
    const RecordedRanker& recorded = *recording_.layers[i].ranker;
    CaptureLayerV41& out = out_.layers[i];
    const LayerSpec& spec = handle.schema().spec;
    const std::int64_t heads = recording_.config.index_heads, width = recording_.config.index_dim,
                       k = recording_.config.index_topk, entries = std::max<std::int64_t>(1, out.scores.cols);
    const Matrix q = queries_of(recorded.q), weights = queries_of(recorded.weights);
    const std::int64_t code_bytes = heads * recorded.encoded_q.code_bytes,
                       scale_bytes = heads * recorded.encoded_q.scale_bytes;
    const std::vector<std::uint8_t> codes = octets_of(recorded.encoded_q.codes, code_bytes),
                                    scales = octets_of(recorded.encoded_q.scales, scale_bytes);
    IndexInputs inputs;
    inputs.q = tensors_.in(ConstTensorView(q.values.data(), {count_, heads, width}));
    inputs.weights = tensors_.in(whole(weights));
    // The list first: later rankers need the source's candidates even for scores.
    std::vector<std::int32_t>& list = lists_[i];
    list.assign(count_ * k, -7);
    handle.index_topk(inputs, tensors_.out(TensorView(list.data(), {count_, k})));
    Matrix scores(count_, entries), again(count_, entries);
    handle.index_scores(inputs, tensors_.out(whole(scores)));
    inputs.q = tensors_.in(ConstTensorView(codes.data(), DType::u8, {count_, heads, recorded.encoded_q.code_bytes}));
    inputs.q_scale =
        tensors_.in(ConstTensorView(scales.data(), DType::u8, {count_, heads, recorded.encoded_q.scale_bytes}));
    handle.index_scores(inputs, tensors_.out(whole(again)));
    tensors_.read_back();
    if (spec.candidate_source == spec.layer) read_candidates(handle, out);
    for (std::int64_t t = 0; t < count_; ++t) {
      const std::int64_t query = query_at(first_ + t);
      if (query < 0) continue;
      std::copy_n(scores.row(t).begin(), out.scores.cols, out.scores.row(query).begin());
      for (std::int64_t j = 0; j < out.scores.cols; ++j)
        out.other_scores += std::memcmp(&scores.row(t)[j], &again.row(t)[j], 4) != 0;
      std::vector<std::int32_t>& chosen = out.lists[query];
      std::copy_if(list.begin() + t * k, list.begin() + (t + 1) * k, std::back_inserter(chosen),
                   [](std::int32_t j) { return j != -1; });
      std::sort(chosen.begin(), chosen.end());
    }
  }

  void read_candidates(LayerCacheHandle& handle, CaptureLayerV41& out) {
    const CandidateView view = handle.read_candidate_view();
    HostCopy host(backend_);
    const std::int32_t* blocks = host.array(view.blocks, view.num_tokens * view.stride);
    const std::int32_t* counts = host.array(view.counts, view.num_tokens);
    for (std::int64_t t = 0; t < count_; ++t)
      if (const std::int64_t query = query_at(first_ + t); query >= 0)
        out.candidates[query].assign(blocks + t * view.stride, blocks + t * view.stride + counts[t]);
  }

  void attend(LayerCacheHandle& handle, std::size_t i) {
    const RecordedLayerV41& layer = recording_.layers[i];
    const Matrix q = queries_of(layer.q);
    const std::int64_t width = recording_.config.head_dim, heads = q.cols / width;
    const int ranker = handle.schema().spec.ranker;
    AttendInputs inputs;
    inputs.q = tensors_.in(ConstTensorView(q.values.data(), {count_, heads, width}));
    inputs.sink = tensors_.in(flat(layer.sinks));
    inputs.softmax_scale = static_cast<float>(recording_.softmax_scale);
    std::vector<std::int32_t> list;
    if (ranker >= 0) {
      const std::int64_t k = recording_.config.index_topk;
      list = source_ == EntrySource::latents ? lists_[ranker] : recorded_list(*recording_.layers[ranker].ranker, k);
      inputs.topk = tensors_.in(ConstTensorView(list.data(), {count_, k}));
    }
    Matrix out(count_, q.cols);
    handle.attend(inputs, tensors_.out(TensorView(out.values.data(), {count_, heads, width})));
    tensors_.read_back();
    for (std::int64_t t = 0; t < count_; ++t)
      if (const std::int64_t query = query_at(first_ + t); query >= 0)
        std::copy_n(out.row(t).begin(), out.cols, out_.layers[i].attention.row(query).begin());
  }

  std::vector<std::int32_t> recorded_list(const RecordedRanker& ranker, std::int64_t k) const {
    std::vector<std::int32_t> out(count_ * k, -1);
    for (std::int64_t t = 0; t < count_; ++t)
      if (const std::int64_t query = query_at(first_ + t); query >= 0)
        std::copy(ranker.lists[query].begin(), ranker.lists[query].end(), out.begin() + t * k);
    return out;
  }

  void gather(LayerCacheHandle& handle, std::size_t i) {
    CaptureLayerV41& out = out_.layers[i];
    const std::int64_t rows = std::min<std::int64_t>(first_, recording_.config.window - 1) + count_;
    Matrix window(rows, out.window_values.cols);
    std::int32_t count = 0, first = 0;
    handle.gather_swa_kv(tensors_.out(TensorView(window.values.data(), {1, rows, window.cols})),
                         tensors_.out(TensorView(&count, {1})), tensors_.out(TensorView(&first, {1})));
    tensors_.read_back();
    for (std::int64_t r = 0; r < std::min<std::int64_t>(count, rows); ++r)
      std::copy_n(window.row(r).begin(), window.cols, out.window_values.row(first + r).begin());
    const auto gather_all = [&](Matrix& to, auto call) {
      const std::int64_t entries = std::max<std::int64_t>(1, to.rows);
      Matrix all(entries, to.cols);
      std::int32_t len = 0;
      call(tensors_.out(TensorView(all.values.data(), {1, entries, to.cols})), tensors_.out(TensorView(&len, {1})));
      tensors_.read_back();
      std::copy_n(all.values.begin(), std::min<std::int64_t>(len, to.rows) * to.cols, to.values.begin());
    };
    if (first_ + count_ < recording_.tokens) return;
    if (out.entry_values.rows > 0)
      gather_all(out.entry_values, [&](TensorView to, TensorView len) { handle.gather_all_compressed_kv(to, len); });
    if (out.key_values.rows > 0)
      gather_all(out.key_values, [&](TensorView to, TensorView len) { handle.gather_all_index_keys(to, len); });
  }

  // The step's window rows as far as the ring holds them; at the end all entries and keys.
  void read_views(LayerCacheHandle& handle, std::size_t i) {
    CaptureLayerV41& out = out_.layers[i];
    HostCopy host(backend_);
    host.array(manager_.state_pool().base(), manager_.state_pool().memory_bytes());
    const SWAView window = handle.read_swa_view();
    const PlaneView payload = host.plane(window.payload), scale = host.plane(window.scale);
    const std::int32_t slot = host.array(window.slots, 1)[0];
    const std::int32_t* positions = host.array(window.positions, window.rows);
    for (std::int32_t r = 0; r < window.rows; ++r) {
      if (positions[r] < first_) continue;
      copy_row(payload, slot, r, out.window.codes.data() + positions[r] * out.window.code_bytes);
      copy_row(scale, slot, r, out.window.scales.data() + positions[r] * out.window.scale_bytes);
    }
    if (first_ + count_ < recording_.tokens || handle.schema().pages.empty()) return;
    host.array(manager_.kv_pool().base(), manager_.kv_pool().memory_bytes());
    const auto read = [&](const auto& view, const PlaneView& codes, const PlaneView& scales, RecordedRows& to) {
      const std::int32_t row = host.array(view.request_rows, 1)[0];
      const std::int32_t* blocks =
          host.array(view.block_table + std::int64_t{row} * view.blocks_per_request, view.blocks_per_request);
      for (std::int64_t j = 0; j < to.rows; ++j) {
        const std::int64_t block = blocks[j / view.rows_per_block], at = j % view.rows_per_block;
        copy_row(codes, block, at, to.codes.data() + j * to.code_bytes);
        copy_row(scales, block, at, to.scales.data() + j * to.scale_bytes);
      }
    };
    const ClassicalView entries = handle.read_classical_view();
    read(entries, host.plane(entries.payload), host.plane(entries.scale), out.entries);
    const IndexerView keys = handle.read_indexer_view();
    read(keys, host.plane(keys.keys), host.plane(keys.scales), out.keys);
  }

  // --- drafts

  void draft_step(std::int32_t count, const std::function<void(LayerCacheHandle&)>& run, bool keep) {
    const StepItem item{request_, count, {}, -1};
    const Step step = expect(manager_.prepare_forward({&item, 1}, 1), "prepare_forward");
    LayerCacheHandle handle = manager_.acquire(recording_.config.num_layers);
    run(handle);
    tensors_.clear();
    keep ? manager_.commit(step) : manager_.abort(step);
  }

  void draft() {
    const RecordedDraft& draft = *recording_.draft;
    const std::int64_t width = recording_.config.head_dim, heads = draft.q.cols / width;
    out_.draft_attention = Matrix(draft.q.rows, draft.q.cols);
    for (std::size_t d = 0; d < draft.positions.size(); ++d) {
      while (manager_.length(request_, 1) <= draft.positions[d]) {
        first_ = manager_.length(request_, 1);
        count_ = std::min<std::int64_t>(draft.positions[d] + 1 - first_, 64);
        AppendInputs inputs;
        inputs.raw_kv = slice(draft.swa_kv);
        draft_step(static_cast<std::int32_t>(count_),
                   [&](LayerCacheHandle& handle) { handle.append(tensors_.in(inputs)); }, true);
      }
      const std::int64_t row = static_cast<std::int64_t>(d) * draft.block;
      DraftInputs inputs;
      inputs.raw_kv = ConstTensorView(draft.rows.values.data() + row * width, {draft.block, width});
      inputs.attend.q = ConstTensorView(draft.q.values.data() + row * draft.q.cols, {draft.block, heads, width});
      inputs.attend.sink = flat(draft.sinks);
      inputs.attend.softmax_scale = static_cast<float>(recording_.softmax_scale);
      float* to = out_.draft_attention.row(row).data();
      draft_step(static_cast<std::int32_t>(draft.block), [&](LayerCacheHandle& handle) {
        inputs.raw_kv = tensors_.in(inputs.raw_kv);
        inputs.attend.q = tensors_.in(inputs.attend.q);
        inputs.attend.sink = tensors_.in(inputs.attend.sink);
        handle.attend_draft(inputs, tensors_.out(TensorView(to, {draft.block, heads, width})));
        tensors_.read_back();
      }, false);
    }
  }

  const RecordingV41& recording_;
  const EntrySource source_;
  const std::vector<int>& chunks_;
  const std::shared_ptr<Backend> backend_;
  DeviceTensors bound_, tensors_;
  KVCacheManager manager_;
  RequestId request_ = kNoRequest;
  std::int64_t first_ = 0, count_ = 0;              // of the step
  std::vector<std::vector<std::int32_t>> lists_;  // [layers] of the step: [tokens, k] of rankers
  Matrix own_cos_, own_sin_;
  CaptureV41 out_;
};

}  // namespace

CaptureV41 replay_v41(const RecordingV41& recording, EntrySource source, const std::vector<int>& chunks,
                      const std::shared_ptr<Backend>& backend) {
  return Replay(recording, source, chunks, backend).run();
}

}  // namespace kv4::checks
