#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "device_tensors.h"
#include "golden_checks.h"
#include "golden_reference.h"
#include "golden_v41_recording.h"
#include "kv4/error.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::checks {
namespace {

constexpr std::int64_t kMaxRows = 1 << 16;
constexpr int kStep = 128;  // tokens: the window, so that its ring holds all rows of a step

template <class T>
const T& expect(const Expected<T>& value, const char* what) {
  if (!value) throw Error(ErrorCode::bad_state, fmt::format("golden codecs: {} found no room", what));
  return *value;
}

// The rows of one format: recorded ones, then rows whose groups are filled with each recorded amax.
struct FormatRows {
  std::string name;
  std::int64_t group = 0;     // channels per scale
  std::int64_t recorded = 0;  // rows
  Matrix in;
  Matrix out;           // the recorded rows, read back
  RecordedRows stored;  // the recorded rows
  std::vector<std::uint8_t> sweep;  // scale bytes by amax
  RecordedRows got;
  Matrix got_out;
};

FormatRows load_format(const SafeTensors& file, const std::string& name, std::int64_t group,
                       const std::vector<std::uint16_t>& amax) {
  FormatRows rows{name, group, 0, {}, {}, {}, {}, {}, {}};
  const StoredTensor in = file.tensor(name + ".in");
  if (in.shape.size() != 2 || in.shape[0] < 1 || in.shape[0] > kMaxRows || in.shape[1] < group ||
      in.shape[1] % group != 0)
    throw Error(ErrorCode::bad_file,
                fmt::format("{}: tensor '{}.in' needs shape [1 to {} rows, a multiple of {}]; record it again",
                            file.name(), name, kMaxRows, group));
  const std::int64_t width = in.shape[1], groups = width / group;
  const std::int64_t code_bytes = name == "fp8_tile32" ? width : width / 2;
  rows.recorded = in.shape[0];
  rows.stored = {rows.recorded, code_bytes, groups, file.octets(name + ".codes", {rows.recorded, code_bytes}),
                 file.octets(name + ".scales", {rows.recorded, groups})};
  rows.out = {rows.recorded, width, file.floats(name + ".out", {rows.recorded, width})};
  rows.sweep = file.octets("sweep." + name, {static_cast<std::int64_t>(amax.size())});
  const auto filled = static_cast<std::int64_t>(amax.size() + groups - 1) / groups;
  rows.in = Matrix(rows.recorded + filled, width);
  const std::vector<float> values = file.floats(name + ".in", in.shape);
  std::copy(values.begin(), values.end(), rows.in.values.begin());
  for (std::size_t i = 0; i < amax.size(); ++i) {
    const std::uint32_t bits = std::uint32_t{amax[i]} << 16;
    float x = 0;
    std::memcpy(&x, &bits, 4);
    std::fill_n(rows.in.values.begin() + rows.recorded * width + static_cast<std::int64_t>(i) * group, group, x);
  }
  rows.got = {rows.in.rows, code_bytes, groups, {}, {}};
  rows.got.codes.resize(rows.in.rows * code_bytes);
  rows.got.scales.resize(rows.in.rows * groups);
  rows.got_out = Matrix(rows.in.rows, width);
  return rows;
}

// A model whose first layer owns entries of every token and picks candidates; the second ranks within them.
ModelConfig two_layers(std::int64_t width, std::int64_t key_width, std::int64_t heads) {
  ModelConfig config = model_preset("v4.1-flash");
  config.name = "codecs of V4.1";
  config.num_layers = 2;
  config.kinds = {LayerKind::shared, LayerKind::shared};
  config.head_dim = static_cast<int>(width);
  config.index_dim = static_cast<int>(key_width);
  config.rope_dim = static_cast<int>(std::min({width, key_width, std::int64_t{64}}));
  config.index_heads = static_cast<int>(heads);
  config.window = kStep;
  config.draft_targets.clear();
  config.engram = {};
  config.sharing.ratios = {1, 1};
  config.sharing.owners = {0};
  config.sharing.index_sources = {0, 1};
  config.sharing.candidate_source = 0;
  return config;
}

CacheOptions one_request(std::int64_t tokens) {
  CacheOptions o;
  o.max_requests = 1;
  o.max_context = tokens;
  o.max_step_tokens = kStep;
  return o;
}

// Token t carries row t of each format: as its window row, its entry and its index key.
class CodecReplayV41 {
 public:
  CodecReplayV41(FormatRows& windows, FormatRows& entries, FormatRows& keys, const std::shared_ptr<Backend>& backend)
      : windows_(windows),
        entries_(entries),
        keys_(keys),
        backend_(backend),
        tensors_(backend),
        tokens_(std::max({windows.in.rows, entries.in.rows, keys.in.rows})),
        manager_(two_layers(windows.in.cols, keys.in.cols, 1), one_request(tokens_), backend) {}

  void run() {
    const RequestId request = expect(manager_.admit(), "admit");
    for (first_ = 0; first_ < tokens_; first_ += count_) {
      count_ = std::min<std::int64_t>(kStep, tokens_ - first_);
      const std::vector<std::int32_t> ids(count_, 1);
      const StepItem item{request, static_cast<std::int32_t>(count_), ids, first_};
      const Step step = expect(manager_.prepare_forward({&item, 1}), "prepare_forward");
      write_and_read();
      manager_.commit(step);
      tensors_.clear();
    }
  }

 private:
  Matrix rows_of(const FormatRows& rows) const {
    Matrix out(count_, rows.in.cols);
    for (std::int64_t t = 0; t < count_ && first_ + t < rows.in.rows; ++t)
      std::copy_n(rows.in.row(first_ + t).begin(), out.cols, out.row(t).begin());
    return out;
  }

  void write_and_read() {
    LayerCacheHandle handle = manager_.acquire(0);
    const Matrix windows = rows_of(windows_), entries = rows_of(entries_), keys = rows_of(keys_);
    const auto view = [&](const Matrix& m) {
      return tensors_.in(ConstTensorView(m.values.data(), {m.rows, m.cols}));
    };
    handle.write_swa(view(windows));
    handle.flush_compression({view(entries), view(keys), {}});
    HostCopy host(backend_);
    host.array(manager_.state_pool().base(), manager_.state_pool().memory_bytes());
    host.array(manager_.kv_pool().base(), manager_.kv_pool().memory_bytes());
    const SWAView window = handle.read_swa_view();
    const std::int32_t slot = host.array(window.slots, 1)[0];
    const PlaneView window_codes = host.plane(window.payload), window_scales = host.plane(window.scale);
    read(windows_, [&](std::int64_t t, std::uint8_t* codes, std::uint8_t* scales) {
      copy(window_codes, slot, t % window.rows, codes);
      copy(window_scales, slot, t % window.rows, scales);
    });
    const auto paged = [&](const auto& pages, const PlaneView& from_codes, const PlaneView& from_scales,
                           FormatRows& rows) {
      const std::int32_t row = host.array(pages.request_rows, 1)[0];
      const std::int32_t* blocks =
          host.array(pages.block_table + std::int64_t{row} * pages.blocks_per_request, pages.blocks_per_request);
      read(rows, [&](std::int64_t t, std::uint8_t* codes, std::uint8_t* scales) {
        copy(from_codes, blocks[t / pages.rows_per_block], t % pages.rows_per_block, codes);
        copy(from_scales, blocks[t / pages.rows_per_block], t % pages.rows_per_block, scales);
      });
    };
    const ClassicalView entry_view = handle.read_classical_view();
    paged(entry_view, host.plane(entry_view.payload), host.plane(entry_view.scale), entries_);
    const IndexerView key_view = handle.read_indexer_view();
    paged(key_view, host.plane(key_view.keys), host.plane(key_view.scales), keys_);
    gather(handle);
  }

  static void copy(const PlaneView& plane, std::int64_t block, std::int64_t row, std::uint8_t* to) {
    std::memcpy(to, plane.data + block * plane.block_stride + row * plane.row_stride, plane.row_bytes);
  }

  template <class Read>
  void read(FormatRows& rows, Read&& read_row) {
    for (std::int64_t t = first_; t < std::min(first_ + count_, rows.in.rows); ++t)
      read_row(t, rows.got.codes.data() + t * rows.got.code_bytes, rows.got.scales.data() + t * rows.got.scale_bytes);
  }

  void gather(LayerCacheHandle& handle) {
    const std::int64_t window_rows = std::min<std::int64_t>(first_, kStep - 1) + count_, all = first_ + count_;
    Matrix windows(window_rows, windows_.in.cols), entries(all, entries_.in.cols), keys(all, keys_.in.cols);
    std::array<std::int32_t, 4> lens{};
    const auto out = [&](Matrix& m) {
      return tensors_.out(TensorView(m.values.data(), {1, m.rows, m.cols}));
    };
    const auto len = [&](int i) { return tensors_.out(TensorView(&lens[i], {1})); };
    handle.gather_swa_kv(out(windows), len(0), len(1));
    handle.gather_all_compressed_kv(out(entries), len(2));
    handle.gather_all_index_keys(out(keys), len(3));
    tensors_.read_back();
    const auto keep = [&](const Matrix& got, std::int64_t first, FormatRows& rows) {
      for (std::int64_t t = first_; t < std::min(first_ + count_, rows.in.rows); ++t)
        std::copy_n(got.row(t - first).begin(), got.cols, rows.got_out.row(t).begin());
    };
    keep(windows, lens[1], windows_);
    keep(entries, 0, entries_);
    keep(keys, 0, keys_);
  }

  FormatRows &windows_, &entries_, &keys_;
  const std::shared_ptr<Backend> backend_;
  DeviceTensors tensors_;
  const std::int64_t tokens_;
  KVCacheManager manager_;
  std::int64_t first_ = 0, count_ = 0;  // of the step
};

void check_format(const FormatRows& rows, GoldenReport& report) {
  const auto differing = [](const auto& got, const auto& want) {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < want.size(); ++i) count += got[i] != want[i];
    return static_cast<double>(count);
  };
  report.check("codec." + rows.name + ".codes", differing(rows.got.codes, rows.stored.codes), 0);
  report.check("codec." + rows.name + ".scales", differing(rows.got.scales, rows.stored.scales), 0);
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < rows.out.values.size(); ++i) {
    const float got = rows.got_out.values[i], want = rows.out.values[i];
    wrong += std::isnan(want) ? !std::isnan(got) : std::memcmp(&got, &want, 4) != 0;
  }
  report.check("codec." + rows.name + ".values", static_cast<double>(wrong), 0);
  const std::vector<std::uint8_t> sweep(rows.got.scales.begin() + rows.recorded * rows.got.scale_bytes,
                                        rows.got.scales.end());
  report.check("codec." + rows.name + ".sweep", differing(sweep, rows.sweep), 0);
}

// Keys with many equal scores: lists, candidates and lists within them.
class Ties {
 public:
  Ties(const SafeTensors& file, const std::shared_ptr<Backend>& backend) : backend_(backend), tensors_(backend) {
    const StoredTensor keys = file.tensor("ties.idx_keys.codes"), q = file.tensor("ties.idx_q.codes");
    if (keys.shape.size() != 2 || keys.shape[0] < 1 || keys.shape[0] > kMaxRows || keys.shape[1] < 16 ||
        keys.shape[1] % 16 != 0 || q.shape.size() != 3 || q.shape[0] < 1 || q.shape[1] < 1 || q.shape[1] > 64 ||
        q.shape[2] != keys.shape[1])
      throw Error(ErrorCode::bad_file,
                  fmt::format("{}: ties.idx_keys.codes needs shape [keys, n x 16] and ties.idx_q.codes [queries, 1 to "
                              "64 heads, as wide as a key]; record it again",
                              file.name()));
    tokens_ = keys.shape[0], code_bytes_ = keys.shape[1], queries_ = q.shape[0], heads_ = q.shape[1];
    scale_bytes_ = code_bytes_ / 16;
    keys_ = Matrix(tokens_, 2 * code_bytes_);
    const std::vector<std::uint8_t> codes = file.octets("ties.idx_keys.codes", {tokens_, code_bytes_}),
                                    scales = file.octets("ties.idx_keys.scales", {tokens_, scale_bytes_});
    RowSchema row;
    row.format = Format::mxfp4;
    row.width = static_cast<int>(keys_.cols);
    for (std::int64_t j = 0; j < tokens_; ++j)
      decode_row(row, reinterpret_cast<const std::byte*>(codes.data() + j * code_bytes_),
                 reinterpret_cast<const std::byte*>(scales.data() + j * scale_bytes_), keys_.row(j));
    q_ = file.octets("ties.idx_q.codes", {queries_, heads_, code_bytes_});
    q_scales_ = file.octets("ties.idx_q.scales", {queries_, heads_, scale_bytes_});
    weights_ = {queries_, heads_, file.floats("ties.idx_weights", {queries_, heads_})};
    positions_ = file.ints("ties.query_positions", {queries_});
    for (const std::int32_t position : positions_)
      if (position < 0 || position >= tokens_)
        throw Error(ErrorCode::bad_file, fmt::format("{}: ties.query_positions has {}, allowed are 0 to {}",
                                                     file.name(), position, tokens_ - 1));
    top_ = static_cast<int>(file.metadata_int("ties.index_topk", 1, 2048));
    config_ = two_layers(512, keys_.cols, heads_);
    config_.index_topk = top_;
    config_.sharing.candidate_block_size = static_cast<int>(file.metadata_int("ties.candidate_block_size", 1, 1 << 20));
    config_.sharing.candidate_topk_blocks =
        static_cast<int>(file.metadata_int("ties.candidate_topk_blocks", 1, 1 << 20));
  }

  void check(const SafeTensors& file, GoldenReport& report) {
    const std::int64_t size = config_.sharing.candidate_block_size, blocks = (tokens_ + size - 1) / size;
    const std::vector<std::int32_t> lists = file.ints("ties.idx_topk", {queries_, top_}),
                                    masked = file.ints("ties.idx_topk_masked", {queries_, top_});
    const std::vector<std::uint8_t> kept = file.octets("ties.cand_blocks", {queries_, blocks});
    KVCacheManager manager(config_, one_request(tokens_), backend_);
    const RequestId request = expect(manager.admit(), "admit");
    std::int64_t wrong_lists = 0, wrong_masked = 0, wrong_blocks = 0;
    std::vector<std::int32_t> ids(tokens_, 1);
    for (std::int64_t t = 0; t < tokens_; ++t) {  // one by one: each query sees the keys up to its position
      const StepItem item{request, 1, std::span(ids).first(1), t};
      const Step step = expect(manager.prepare_forward({&item, 1}), "prepare_forward");
      write(manager, t);
      for (std::int64_t i = 0; i < queries_; ++i) {
        if (positions_[i] != t) continue;
        LayerCacheHandle source = manager.acquire(0), ranker = manager.acquire(1);
        wrong_lists += rank(source, i) != sorted(lists, i);
        wrong_masked += rank(ranker, i) != sorted(masked, i);
        const CandidateView view = source.read_candidate_view();
        HostCopy host(backend_);
        const std::int32_t* got = host.array(view.blocks, view.stride);
        const std::int32_t count = host.array(view.counts, 1)[0];
        for (std::int64_t b = 0; b < blocks; ++b)
          if (std::binary_search(got, got + count, static_cast<std::int32_t>(b)) != (kept[i * blocks + b] != 0)) {
            ++wrong_blocks;
            break;
          }
      }
      tensors_.clear();
      manager.commit(step);
    }
    report.check("ties.lists", static_cast<double>(wrong_lists), 0);
    report.check("ties.candidates", static_cast<double>(wrong_blocks), 0);
    report.check("ties.masked_lists", static_cast<double>(wrong_masked), 0);
  }

 private:
  void write(KVCacheManager& manager, std::int64_t t) {
    const std::vector<float> row(config_.head_dim);
    const ConstTensorView zeros = tensors_.in(ConstTensorView(row.data(), {1, config_.head_dim}));
    const ConstTensorView key = tensors_.in(ConstTensorView(keys_.row(t).data(), {1, keys_.cols}));
    manager.acquire(0).flush_compression({zeros, key, {}});
  }

  std::vector<std::int32_t> rank(LayerCacheHandle& handle, std::int64_t query) {
    IndexInputs inputs;
    inputs.q = tensors_.in(
        ConstTensorView(q_.data() + query * heads_ * code_bytes_, DType::u8, {1, heads_, code_bytes_}));
    inputs.q_scale = tensors_.in(
        ConstTensorView(q_scales_.data() + query * heads_ * scale_bytes_, DType::u8, {1, heads_, scale_bytes_}));
    inputs.weights = tensors_.in(ConstTensorView(weights_.row(query).data(), {1, heads_}));
    std::vector<std::int32_t> list(top_, -7);
    handle.index_topk(inputs, tensors_.out(TensorView(list.data(), {1, top_})));
    tensors_.read_back();
    return sorted(list, 0);
  }

  std::vector<std::int32_t> sorted(const std::vector<std::int32_t>& lists, std::int64_t i) const {
    std::vector<std::int32_t> out(lists.begin() + i * top_, lists.begin() + (i + 1) * top_);
    std::sort(out.begin(), out.end());
    return out;
  }

  const std::shared_ptr<Backend> backend_;
  DeviceTensors tensors_;
  ModelConfig config_;
  std::int64_t tokens_ = 0, queries_ = 0, heads_ = 0, code_bytes_ = 0, scale_bytes_ = 0;
  int top_ = 0;
  Matrix keys_, weights_;
  std::vector<std::uint8_t> q_, q_scales_;
  std::vector<std::int32_t> positions_;
};

}  // namespace

void check_codecs_v41(const SafeTensors& file, const std::shared_ptr<Backend>& backend, GoldenReport& report) {
  const std::vector<std::uint16_t> amax = file.halves("sweep.amax", {-1});
  FormatRows windows = load_format(file, "fp8_tile32", 32, amax), entries = load_format(file, "nvfp4_row", 16, amax),
             keys = load_format(file, "mxfp4", 32, amax);
  if (windows.in.cols != entries.in.cols)
    throw Error(ErrorCode::bad_file,
                fmt::format("{}: rows of fp8_tile32 are {} wide, rows of nvfp4_row {}; record it again", file.name(),
                            windows.in.cols, entries.in.cols));
  CodecReplayV41(windows, entries, keys, backend).run();
  for (const FormatRows* rows : {&windows, &entries, &keys}) check_format(*rows, report);
  Ties(file, backend).check(file, report);
}

}  // namespace kv4::checks
