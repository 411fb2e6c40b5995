#include "golden_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "device_tensors.h"
#include "kv4/error.h"

namespace kv4::checks {
namespace {

struct StepRange {
  std::int64_t start = 0;
  std::int64_t count = 0;
  std::int64_t end() const { return start + count; }
};

std::vector<StepRange> split(std::int64_t tokens, const std::vector<int>& chunks) {
  std::vector<StepRange> steps;
  for (std::int64_t start = 0; start < tokens; start = steps.back().end()) {
    const std::int64_t wanted = steps.size() < chunks.size() ? chunks[steps.size()] : 1;
    steps.push_back({start, std::min(wanted, tokens - start)});
  }
  return steps;
}

ConstTensorView slice(const Matrix& matrix, const StepRange& step) {
  return matrix.rows == 0 ? ConstTensorView()
                          : ConstTensorView(matrix.values.data() + step.start * matrix.cols, {step.count, matrix.cols});
}

ConstTensorView whole(const Matrix& matrix) { return {matrix.values.data(), {matrix.rows, matrix.cols}}; }
ConstTensorView flat(const Matrix& matrix) { return {matrix.values.data(), {matrix.cols}}; }

LayerWeights weights_of(const Recording& recording) {
  LayerWeights weights;
  weights.position_bias = whole(recording.main.position_bias);
  weights.norm_weight = flat(recording.main.norm_weight);
  if (recording.kind == LayerKind::csa) {
    weights.index_position_bias = whole(recording.index.position_bias);
    weights.index_norm_weight = flat(recording.index.norm_weight);
  }
  return weights;
}

// The gathered rows of one item: rows first .. first + count - 1.
struct Gathered {
  Matrix rows;
  std::int32_t first = 0;
  std::int32_t count = 0;
};

// Keeps new rows and compares the others with their first gather.
void keep(const Gathered& got, std::int64_t known, Matrix& kept, Capture& capture) {
  for (std::int64_t i = 0; i < got.count; ++i) {
    const std::span<const float> row = got.rows.row(i);
    const std::span<float> place = kept.row(got.first + i);
    if (got.first + i >= known) {
      std::copy(row.begin(), row.end(), place.begin());
    } else if (std::memcmp(row.data(), place.data(), row.size_bytes()) != 0) {
      ++capture.changed_rows;
    }
  }
}

void gather_window(LayerCacheHandle& handle, const StepRange& step, DeviceTensors& tensors, Capture& capture) {
  const std::int64_t rows = std::min<std::int64_t>(step.start, capture.schema.config.window - 1) + step.count;
  Gathered got{Matrix(rows, capture.window.cols)};
  handle.gather_swa_kv(tensors.out(TensorView(got.rows.values.data(), {1, rows, got.rows.cols})),
                       tensors.out(TensorView(&got.count, {1})), tensors.out(TensorView(&got.first, {1})));
  tensors.read_back();
  if (got.count != rows || got.first != step.end() - rows) {
    ++capture.wrong_lengths;
    return;
  }
  keep(got, step.start, capture.window, capture);
}

void gather_rows(LayerCacheHandle& handle, const StepRange& step, bool index, DeviceTensors& tensors,
                 Capture& capture) {
  Matrix& kept = index ? capture.keys : capture.entries;
  const std::int64_t ratio = handle.schema().spec.rows[0].ratio;
  const std::int64_t wanted = step.end() / ratio;
  Gathered got{Matrix(std::max<std::int64_t>(wanted, 1), kept.cols)};
  const TensorView out = tensors.out(TensorView(got.rows.values.data(), {1, got.rows.rows, got.rows.cols}));
  const TensorView lens = tensors.out(TensorView(&got.count, {1}));
  if (index) {
    handle.gather_all_index_keys(out, lens);
  } else {
    handle.gather_all_compressed_kv(out, lens);
  }
  tensors.read_back();
  if (got.count != wanted) {
    ++capture.wrong_lengths;
    return;
  }
  keep(got, step.start / ratio, kept, capture);
}

// Gathers the recorded entries of each token of the step, with an unused place at the end of each list.
void gather_chosen(LayerCacheHandle& handle, const Recording& recording, const StepRange& step, DeviceTensors& tensors,
                   Capture& capture) {
  std::int64_t places = 1;
  for (std::int64_t t = step.start; t < step.end(); ++t) {
    places = std::max(places, static_cast<std::int64_t>(recording.idx_topk[t].size()) + 1);
  }
  std::vector<std::int32_t> indices(step.count * places, -1);
  for (std::int64_t t = step.start; t < step.end(); ++t) {
    const std::vector<std::int32_t>& chosen = recording.idx_topk[t];
    std::copy(chosen.begin(), chosen.end(), indices.begin() + (t - step.start) * places);
  }
  Matrix rows(step.count * places, capture.entries.cols);
  std::vector<std::uint8_t> valid(indices.size());
  handle.gather_compressed_kv(tensors.in(TensorView(indices.data(), {step.count, places})),
                              tensors.out(TensorView(rows.values.data(), {step.count, places, rows.cols})),
                              tensors.out(TensorView(valid.data(), DType::u8, {step.count, places})));
  tensors.read_back();
  const std::vector<float> zero(rows.cols);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::span<const float> want =
        indices[i] < 0 ? std::span<const float>(zero) : std::as_const(capture.entries).row(indices[i]);
    const bool same = std::memcmp(rows.row(static_cast<std::int64_t>(i)).data(), want.data(), want.size_bytes()) == 0;
    capture.wrong_chosen += same && (valid[i] != 0) == (indices[i] >= 0) ? 0 : 1;
  }
}

// [tokens, k] of lists, -1 fills the end.
std::vector<std::int32_t> padded_lists(const std::vector<std::vector<std::int32_t>>& lists, const StepRange& step,
                                       std::int64_t k) {
  std::vector<std::int32_t> out(step.count * k, -1);
  for (std::int64_t t = step.start; t < step.end(); ++t) {
    const std::vector<std::int32_t>& list = lists[t];
    std::copy(list.begin(), list.end(), out.begin() + (t - step.start) * k);
  }
  return out;
}

ConstTensorView heads_of(const Matrix& matrix, const StepRange& step, std::int64_t width) {
  return ConstTensorView(matrix.values.data() + step.start * matrix.cols, {step.count, matrix.cols / width, width});
}

void search(LayerCacheHandle& handle, const Recording& recording, const StepRange& step, DeviceTensors& tensors,
            Capture& capture) {
  Matrix weights(step.count, recording.idx_weights.cols);
  for (std::int64_t t = 0; t < step.count; ++t)
    for (std::int64_t h = 0; h < weights.cols; ++h)
      weights.row(t)[h] =
          recording.idx_weights.row(step.start + t)[h] * static_cast<float>(recording.index_softmax_scale);
  IndexInputs inputs;
  inputs.q = tensors.in(heads_of(recording.idx_q, step, recording.config.index_dim));
  inputs.weights = tensors.in(whole(weights));
  const std::int64_t k = recording.config.index_topk;
  Matrix scores(step.count, std::max<std::int64_t>(1, capture.scores.cols));
  std::vector<std::int32_t> indices(step.count * k, -7);
  handle.index_scores(inputs, tensors.out(TensorView(scores.values.data(), {scores.rows, scores.cols})));
  handle.index_topk(inputs, tensors.out(TensorView(indices.data(), {step.count, k})));
  tensors.read_back();
  for (std::int64_t t = 0; t < step.count; ++t) {
    std::copy_n(scores.row(t).begin(), capture.scores.cols, capture.scores.row(step.start + t).begin());
    const auto begin = indices.begin() + t * k;
    capture.topk[step.start + t].assign(begin, std::find(begin, begin + k, -1));
  }
}

void attend(LayerCacheHandle& handle, const Recording& recording, const StepRange& step, AttendTo to,
            DeviceTensors& tensors, Capture& capture) {
  AttendInputs inputs;
  inputs.q = tensors.in(heads_of(recording.q, step, recording.config.head_dim));
  inputs.sink = tensors.in(flat(recording.sinks));
  inputs.softmax_scale = static_cast<float>(recording.softmax_scale);
  std::vector<std::int32_t> chosen;
  if (recording.kind == LayerKind::csa) {
    const std::int64_t k = recording.config.index_topk;
    chosen = padded_lists(to == AttendTo::own ? capture.topk : recording.idx_topk, step, k);
    inputs.topk = tensors.in(TensorView(chosen.data(), {step.count, k}));
  }
  Matrix out(step.count, recording.q.cols);
  const std::int64_t width = recording.config.head_dim;
  handle.attend(inputs, tensors.out(TensorView(out.values.data(), {step.count, out.cols / width, width})));
  tensors.read_back();
  std::copy(out.values.begin(), out.values.end(), capture.attention.row(step.start).begin());
}

void read_window_view(LayerCacheHandle& handle, HostCopy& host, Matrix& kept) {
  const SWAView view = handle.read_swa_view();
  const PlaneView payload = host.plane(view.payload), scale = host.plane(view.scale);
  const std::int32_t* positions = host.array(view.positions, view.rows);
  const std::int32_t slot = host.array(view.slots, 1)[0];
  for (std::int32_t r = 0; r < view.rows; ++r) {
    if (positions[r] < 0) continue;
    const auto at = [&](const PlaneView& plane) {
      return plane.data + slot * plane.block_stride + r * plane.row_stride;
    };
    decode_row(handle.schema().window.row, at(payload), scale.data != nullptr ? at(scale) : nullptr,
               kept.row(positions[r]));
  }
}

struct PagedRows {
  PlaneView payload;
  PlaneView scale;
  const std::int32_t* blocks;  // of the first item
  std::int32_t rows_per_block;
};

void read_paged_view(const PagedRows& view, const RowSchema& row, Matrix& kept) {
  for (std::int64_t j = 0; j < kept.rows; ++j) {
    const std::int64_t block = view.blocks[j / view.rows_per_block];
    const std::int64_t slot = j % view.rows_per_block;
    const auto at = [&](const PlaneView& plane) {
      return plane.data + block * plane.block_stride + slot * plane.row_stride;
    };
    decode_row(row, at(view.payload), view.scale.data != nullptr ? at(view.scale) : nullptr, kept.row(j));
  }
}

void read_entry_views(LayerCacheHandle& handle, HostCopy& host, Capture& capture) {
  const std::vector<PageSchema>& pages = handle.schema().pages;
  const auto first_item = [&](const auto& view) {
    const std::int64_t row = host.array(view.request_rows, 1)[0];
    return host.array(view.block_table + row * view.blocks_per_request, view.blocks_per_request);
  };
  if (!pages.empty()) {
    const ClassicalView view = handle.read_classical_view();
    read_paged_view({host.plane(view.payload), host.plane(view.scale), first_item(view), view.rows_per_block},
                    pages[0].row, capture.entries_view);
  }
  if (pages.size() > 1) {
    const IndexerView view = handle.read_indexer_view();
    read_paged_view({host.plane(view.keys), host.plane(view.scales), first_item(view), view.rows_per_block},
                    pages[1].row, capture.keys_view);
  }
}

// Reads the main compressor's open rows from the request's state slot, if they are in an fp32 ring that holds them all.
void read_ring(const std::byte* slots, LayerCacheHandle& handle, HostCopy& host, std::int64_t tokens,
               Capture& capture) {
  if (handle.schema().pending.empty()) return;
  const PendingSchema& pending = handle.schema().pending[0];
  const std::int64_t open = tokens % handle.schema().spec.rows[0].ratio;
  if (pending.rows < open || pending.dtype != DType::f32) return;
  capture.ring_kv = Matrix(open, pending.columns);
  capture.ring_gate = Matrix(open, pending.columns);
  const std::int64_t slot = host.array(handle.read_swa_view().slots, 1)[0];
  const std::byte* ring = slots + slot * capture.schema.slot_bytes + pending.ring_offset;
  for (std::int64_t i = 0; i < open; ++i) {
    const std::byte* row = ring + (tokens - open + i) % pending.rows * pending.row_bytes;
    const std::span<float> kv = capture.ring_kv.row(i);
    const std::span<float> gate = capture.ring_gate.row(i);
    std::memcpy(kv.data(), row, kv.size_bytes());
    std::memcpy(gate.data(), row + kv.size_bytes(), gate.size_bytes());
  }
}

void append(LayerCacheHandle& handle, const Recording& recording, const StepRange& step, DeviceTensors& tensors) {
  AppendInputs inputs;
  inputs.raw_kv = slice(recording.swa_kv, step);
  inputs.kv = slice(recording.main.kv, step);
  inputs.gate = slice(recording.main.gate, step);
  inputs.index_kv = slice(recording.index.kv, step);
  inputs.index_gate = slice(recording.index.gate, step);
  handle.append(tensors.in(inputs));
}

template <class T>
const T& expect(const Expected<T>& value, const char* what) {
  if (!value)
    throw Error(ErrorCode::bad_state,
                fmt::format("golden replay: {} found no room ({})", what, to_string(value.error())));
  return *value;
}

Capture make_capture(const Recording& recording, const CacheSchema& schema) {
  Capture capture;
  capture.schema = schema;
  capture.window = capture.window_view = Matrix(recording.tokens, schema.config.head_dim);
  const std::int64_t entries = recording.ratio == 0 ? 0 : recording.tokens / recording.ratio;
  capture.entries = capture.entries_view = Matrix(entries, schema.config.head_dim);
  capture.keys = capture.keys_view = Matrix(recording.kind == LayerKind::csa ? entries : 0, schema.config.index_dim);
  capture.scores = Matrix(recording.tokens, recording.kind == LayerKind::csa ? entries : 0);
  capture.topk.resize(recording.tokens);
  capture.attention = Matrix(recording.tokens, recording.q.cols);
  return capture;
}

}  // namespace

Capture replay(const Recording& recording, CacheOptions options, const std::vector<int>& chunks, AttendTo attend_to,
               const std::shared_ptr<Backend>& backend) {
  const std::vector<StepRange> steps = split(recording.tokens, chunks);
  options.max_requests = 1;
  options.max_context = recording.tokens;
  options.max_step_tokens = 1;
  for (const StepRange& step : steps)
    options.max_step_tokens = std::max(options.max_step_tokens, static_cast<int>(step.count));

  DeviceTensors weights(backend), tensors(backend);
  KVCacheManager manager(recording.config, options, backend);
  Capture capture = make_capture(recording, manager.schema());
  if (recording.kind != LayerKind::swa) manager.bind_weights(0, weights.in(weights_of(recording)));
  const RequestId request = expect(manager.admit(), "admit");
  std::vector<std::int32_t> ids(recording.tokens);
  std::iota(ids.begin(), ids.end(), 0);

  for (const StepRange& range : steps) {
    StepItem item;
    item.request = request;
    item.count = static_cast<std::int32_t>(range.count);
    item.token_ids = std::span(ids).subspan(range.start, range.count);
    item.position = range.start;
    const Step step = expect(manager.prepare_forward({&item, 1}), "prepare_forward");
    LayerCacheHandle handle = manager.acquire(0);
    append(handle, recording, range, tensors);
    gather_window(handle, range, tensors, capture);
    HostCopy host(backend);
    const std::byte* slots = host.array(manager.state_pool().base(), manager.state_pool().memory_bytes());
    read_window_view(handle, host, capture.window_view);
    if (recording.ratio != 0) gather_rows(handle, range, false, tensors, capture);
    if (recording.kind == LayerKind::csa) {
      gather_rows(handle, range, true, tensors, capture);
      gather_chosen(handle, recording, range, tensors, capture);
      search(handle, recording, range, tensors, capture);
    }
    attend(handle, recording, range, attend_to, tensors, capture);
    if (range.end() == recording.tokens) {
      host.array(manager.kv_pool().base(), manager.kv_pool().memory_bytes());
      read_entry_views(handle, host, capture);
      read_ring(slots, handle, host, recording.tokens, capture);
    }
    manager.commit(step);
    tensors.clear();
  }
  capture.image = manager.export_image(request);
  return capture;
}

}  // namespace kv4::checks
