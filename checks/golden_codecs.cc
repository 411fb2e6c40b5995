#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "codec/numeric.h"
#include "device_tensors.h"
#include "golden_checks.h"
#include "golden_reference.h"
#include "kv4/error.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::checks {
namespace {

template <class Wanted, class Encode>
void check_scalar(const SafeTensors& file, const std::string& name, const std::vector<Wanted>& wanted, Encode encode,
                  GoldenReport& report) {
  const std::vector<float> in = file.floats(name + ".in", {static_cast<std::int64_t>(wanted.size())});
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < in.size(); ++i) differing += encode(in[i]) == wanted[i] ? 0 : 1;
  report.check("codec." + name, static_cast<double>(differing), 0);
}

void check_scalars(const SafeTensors& file, GoldenReport& report) {
  check_scalar(file, "bf16", file.halves("bf16.out", {-1}), codec::bf16_bits, report);
  check_scalar(file, "e4m3", file.octets("e4m3.out", {-1}), codec::e4m3_bits, report);
  check_scalar(file, "e2m1", file.octets("e2m1.out", {-1}), codec::e2m1_bits, report);
  const std::vector<float> decoded = file.floats("e4m3.decode", {256});
  std::int64_t differing = 0;
  for (std::size_t code = 0; code < decoded.size(); ++code) {
    const float got = codec::e4m3_value(static_cast<std::uint8_t>(code));
    const bool same_bits = std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(decoded[code]);
    differing += same_bits || (std::isnan(got) && std::isnan(decoded[code])) ? 0 : 1;
  }
  report.check("codec.e4m3.decode", static_cast<double>(differing), 0);
}

// Rows as in the file: entries after rotation, index keys before the transform.
struct CodecRows {
  Matrix entries;
  Matrix keys;
  int rope_dim = 0;
};

CodecRows load_rows(const SafeTensors& file) {
  const auto matrix = [&](const std::string& name) {
    const StoredTensor tensor = file.tensor(name);
    if (tensor.shape.size() != 2 || tensor.shape[0] < 1) {
      throw Error(ErrorCode::bad_file,
                  fmt::format("{}: tensor '{}' needs shape [rows, width] with at least one row; record it again",
                              file.name(), name));
    }
    return Matrix(tensor.shape[0], tensor.shape[1], file.floats(name, tensor.shape));
  };
  CodecRows rows{matrix("entry.in"), matrix("index.in")};
  const StoredTensor rope = file.tensor("entry.rope");
  if (rope.shape.size() != 2 || rope.shape[1] >= rows.entries.cols) {
    throw Error(ErrorCode::bad_file,
                fmt::format("{}: tensor 'entry.rope' needs shape [rows, width] narrower than entry.in; record it again",
                            file.name()));
  }
  rows.rope_dim = static_cast<int>(rope.shape[1]);
  return rows;
}

// Bytes of a plane, row by row.
using Plane = std::vector<std::vector<std::byte>>;

// The rows in the cache's stored form: entries, window rows and index keys.
struct StoredPlanes {
  Plane entry_payload, entry_rope, entry_scale;
  Plane window_payload, window_rope, window_scale;
  Plane keys, key_scales;
};

void copy_row(const PlaneView& plane, std::int64_t block, std::int64_t row, std::vector<std::byte>& out) {
  const std::byte* at = plane.data + block * plane.block_stride + row * plane.row_stride;
  if (plane.data != nullptr) out.assign(at, at + plane.row_bytes);
}

ModelConfig codec_model(const CodecRows& rows) {
  ModelConfig config = model_preset("v4-flash");
  config.name = "codecs";
  config.num_layers = 1;
  config.kinds = {LayerKind::csa};
  config.draft_hint = 0;
  config.head_dim = static_cast<int>(rows.entries.cols);
  config.rope_dim = rows.rope_dim;
  config.index_dim = static_cast<int>(rows.keys.cols);
  return config;
}

// Token t carries row t / ratio: its last token closes the entry, and its window row lies in the ring when the step
// ends.
Matrix spread(const Matrix& rows, std::int64_t first_token, std::int64_t tokens, std::int64_t ratio) {
  Matrix out(tokens, rows.cols);
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t row = (first_token + i) / ratio;
    if (row < rows.rows) std::copy_n(rows.row(row).begin(), rows.cols, out.row(i).begin());
  }
  return out;
}

class CodecReplay {
 public:
  CodecReplay(const CodecRows& rows, Format row_format, Format index_format, std::shared_ptr<Backend> backend)
      : rows_(rows),
        backend_(std::move(backend)),
        ratio_(model_preset("v4-flash").csa_ratio),
        manager_(codec_model(rows), options(row_format, index_format), backend_) {}

  StoredPlanes run() {
    const Expected<RequestId> request = manager_.admit();
    if (!request) throw Error(ErrorCode::bad_state, "golden codecs: admit found no room");
    for (std::int64_t first = 0; first < tokens(); first += step_tokens()) {
      write(*request, first, std::min(step_tokens(), tokens() - first));
    }
    return std::move(out_);
  }

 private:
  std::int64_t tokens() const { return std::max(rows_.entries.rows, rows_.keys.rows) * ratio_; }
  std::int64_t step_tokens() const { return model_preset("v4-flash").window / ratio_ * ratio_; }

  CacheOptions options(Format row_format, Format index_format) const {
    CacheOptions options;
    options.row_format = row_format;
    options.index_format = index_format;
    options.hadamard = false;
    options.max_requests = 1;
    options.max_context = tokens();
    options.max_step_tokens = static_cast<int>(step_tokens());
    return options;
  }

  void write(RequestId request, std::int64_t first, std::int64_t count) {
    std::vector<std::int32_t> ids(count);
    std::iota(ids.begin(), ids.end(), static_cast<std::int32_t>(first));
    StepItem item;
    item.request = request;
    item.count = static_cast<std::int32_t>(count);
    item.token_ids = ids;
    const Expected<Step> step = manager_.prepare_forward({&item, 1});
    if (!step) throw Error(ErrorCode::bad_state, "golden codecs: prepare_forward found no room");
    LayerCacheHandle handle = manager_.acquire(0);
    const Matrix entries = spread(rows_.entries, first, count, ratio_);
    const Matrix keys = spread(rows_.keys, first, count, ratio_);
    DeviceTensors tensors(backend_);
    const ConstTensorView entry_rows = tensors.in(ConstTensorView(entries.values.data(), {count, entries.cols}));
    handle.write_swa(entry_rows);
    handle.flush_compression({entry_rows, tensors.in(ConstTensorView(keys.values.data(), {count, keys.cols})), {}});
    read_step(handle, first / ratio_, (first + count) / ratio_);
    manager_.commit(*step);
  }

  // Rows [begin, end) as the views show them.
  void read_step(LayerCacheHandle& handle, std::int64_t begin, std::int64_t end) {
    HostCopy host(backend_);
    host.array(manager_.state_pool().base(), manager_.state_pool().memory_bytes());
    host.array(manager_.kv_pool().base(), manager_.kv_pool().memory_bytes());
    const SWAView window = handle.read_swa_view();
    const ClassicalView entries = handle.read_classical_view();
    const IndexerView keys = handle.read_indexer_view();
    const std::int32_t slot = host.array(window.slots, 1)[0], row = host.array(entries.request_rows, 1)[0];
    const std::int32_t* blocks =
        host.array(entries.block_table + std::int64_t{row} * entries.blocks_per_request, entries.blocks_per_request);
    for (std::int64_t j = begin; j < std::min(end, rows_.entries.rows); ++j) {
      const std::int64_t ring_row = ((j + 1) * ratio_ - 1) % window.rows;
      copy_row(host.plane(window.payload), slot, ring_row, out_.window_payload.emplace_back());
      copy_row(host.plane(window.rope), slot, ring_row, out_.window_rope.emplace_back());
      copy_row(host.plane(window.scale), slot, ring_row, out_.window_scale.emplace_back());
      const std::int64_t block = blocks[j / entries.rows_per_block], at = j % entries.rows_per_block;
      copy_row(host.plane(entries.payload), block, at, out_.entry_payload.emplace_back());
      copy_row(host.plane(entries.rope), block, at, out_.entry_rope.emplace_back());
      copy_row(host.plane(entries.scale), block, at, out_.entry_scale.emplace_back());
    }
    for (std::int64_t j = begin; j < std::min(end, rows_.keys.rows); ++j) {
      const std::int64_t block = blocks[j / keys.rows_per_block], at = j % keys.rows_per_block;
      copy_row(host.plane(keys.keys), block, at, out_.keys.emplace_back());
      copy_row(host.plane(keys.scales), block, at, out_.key_scales.emplace_back());
    }
  }

  const CodecRows& rows_;
  const std::shared_ptr<Backend> backend_;
  const std::int64_t ratio_;
  KVCacheManager manager_;
  StoredPlanes out_;
};

// A recorded tensor against a stored plane. The first `row_bytes` of each stored row are recorded. The rest is another
// tensor's (the rope tail in a payload) or, in a scale plane, padding.
struct PlaneCheck {
  const char* tensor;
  const char* name;
  std::int64_t row_bytes;
  const Plane& plane;
  bool padded = false;  // the rest of the row must be zero
};

void check_plane(const SafeTensors& file, const PlaneCheck& check, GoldenReport& report) {
  const StoredTensor wanted = file.tensor(check.tensor);
  const std::size_t row_bytes = check.row_bytes;
  if (wanted.bytes.size() != row_bytes * check.plane.size()) {
    throw Error(ErrorCode::bad_file,
                fmt::format("{}: tensor '{}' has {} bytes, wanted {} rows of {} as its input has; record it again",
                            file.name(), check.tensor, wanted.bytes.size(), check.plane.size(), row_bytes));
  }
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < check.plane.size(); ++i) {
    const std::vector<std::byte>& row = check.plane[i];
    const auto want = wanted.bytes.subspan(i * row_bytes, row_bytes);
    for (std::size_t b = 0; b < row_bytes; ++b) differing += b < row.size() && row[b] == want[b] ? 0 : 1;
    for (std::size_t b = row_bytes; check.padded && b < row.size(); ++b) differing += row[b] == std::byte{0} ? 0 : 1;
  }
  report.check(std::string("codec.") + check.name, static_cast<double>(differing), 0);
}

}  // namespace

void check_codecs(const SafeTensors& file, const std::shared_ptr<Backend>& backend, GoldenReport& report) {
  check_scalars(file, report);
  const CodecRows rows = load_rows(file);
  const std::int64_t body = rows.entries.cols - rows.rope_dim;
  const std::int64_t rope = 2 * rows.rope_dim;
  const std::int64_t key = rows.keys.cols;

  const StoredPlanes tile = CodecReplay(rows, Format::fp8_tile64, Format::mxfp4, backend).run();
  const StoredPlanes row = CodecReplay(rows, Format::fp8_row, Format::nvfp4, backend).run();
  const StoredPlanes plain = CodecReplay(rows, Format::bf16, Format::fp8, backend).run();
  for (const PlaneCheck& check : {
           PlaneCheck{"entry_ue8m0.bytes", "entry_ue8m0.bytes", body, tile.entry_payload},
           PlaneCheck{"entry_ue8m0.scales", "entry_ue8m0.scales", body / 64, tile.entry_scale, true},
           PlaneCheck{"entry.rope", "entry_ue8m0.rope", rope, tile.entry_rope},
           PlaneCheck{"entry_ue8m0.bytes", "window_ue8m0.bytes", body, tile.window_payload},
           PlaneCheck{"entry_ue8m0.scales", "window_ue8m0.scales", body / 64, tile.window_scale, true},
           PlaneCheck{"entry.rope", "window_ue8m0.rope", rope, tile.window_rope},
           PlaneCheck{"entry_fp32scale.bytes", "entry_fp32scale.bytes", body, row.entry_payload},
           PlaneCheck{"entry_fp32scale.inv_scale", "entry_fp32scale.inv_scale", 4, row.entry_scale, true},
           PlaneCheck{"entry.rope", "entry_fp32scale.rope", rope, row.entry_rope},
           PlaneCheck{"entry_fp32scale.bytes", "window_fp32scale.bytes", body, row.window_payload},
           PlaneCheck{"entry_fp32scale.inv_scale", "window_fp32scale.inv_scale", 4, row.window_scale, true},
           PlaneCheck{"entry.rope", "window_fp32scale.rope", rope, row.window_rope},
           PlaneCheck{"entry.rope", "entry_bf16.rope", rope, plain.entry_rope},
           PlaneCheck{"index_mxfp4.bytes", "index_mxfp4.bytes", key / 2, tile.keys, true},
           PlaneCheck{"index_mxfp4.scales", "index_mxfp4.scales", key / 32, tile.key_scales, true},
           PlaneCheck{"index_nvfp4.bytes", "index_nvfp4.bytes", key / 2, row.keys, true},
           PlaneCheck{"index_nvfp4.scales", "index_nvfp4.scales", key / 16, row.key_scales, true},
           PlaneCheck{"index_fp8.bytes", "index_fp8.bytes", key, plain.keys, true},
           PlaneCheck{"index_fp8.scale", "index_fp8.scale", 4, plain.key_scales, true},
       }) {
    check_plane(file, check, report);
  }
}

}  // namespace kv4::checks
