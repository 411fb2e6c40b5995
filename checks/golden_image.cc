#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "golden_checks.h"
#include "golden_reference.h"
#include "golden_replay.h"
#include "kv4/error.h"

// A canonical image of one layer at length n, w = n - n mod ratio:
//
//   [k, payload_bytes], [k, scale_bytes]   window rows of the last k = min(n, window) positions
//   overlap kinds   [ratio, 2 * width]     rows w - ratio .. w - 1: first-half kv, first-half gate     (if w > 0)
//                   [n - w, 4 * width]     rows w .. n - 1: kv, gate
//   other kinds     [3, width] fp32        max, denominator, numerator of the gate's running softmax   (if n > w)

namespace kv4::checks {
namespace {

constexpr double kCopied = 1e-6;  // stored unchanged
constexpr double kPooled = 1e-5;  // folded in fp32

class ImageReader {
 public:
  explicit ImageReader(const CanonicalImage& image) : bytes_(image.bytes) {}

  std::span<const std::byte> take(std::int64_t count) {
    if (count > static_cast<std::int64_t>(bytes_.size())) {
      throw Error(ErrorCode::bad_state, fmt::format("the canonical image ends {} bytes early", count - left()));
    }
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

  std::vector<float> take_floats(std::int64_t count) {
    std::vector<float> out(count);
    const auto taken = take(count * 4);
    if (count != 0) std::memcpy(out.data(), taken.data(), taken.size());
    return out;
  }

  std::int64_t left() const { return static_cast<std::int64_t>(bytes_.size()); }

 private:
  std::span<const std::byte> bytes_;
};

// Splits rows of [kv | gate] into two matrices.
struct PendingRows {
  Matrix kv;
  Matrix gate;
};

PendingRows take_rows(ImageReader& reader, std::int64_t rows, std::int64_t columns) {
  PendingRows out{Matrix(rows, columns), Matrix(rows, columns)};
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::vector<float> values = reader.take_floats(2 * columns);
    std::copy_n(values.begin(), columns, out.kv.row(i).begin());
    std::copy_n(values.begin() + columns, columns, out.gate.row(i).begin());
  }
  return out;
}

void check_tail(const RecordedCompressor& recorded, const PendingRows& open, const std::string& name,
                GoldenReport& report) {
  if (recorded.tail_kv.rows == 0) return;
  report.check(name + "_tail_kv", relative_error(open.kv.values, recorded.tail_kv.values), kCopied);
  report.check(name + "_tail_gate", relative_error(open.gate.values, recorded.tail_gate.values), kCopied);
}

void check_overlap(const RecordedCompressor& recorded, PendingRows previous, const std::string& name,
                   GoldenReport& report) {
  if (recorded.overlap_kv.rows == 0) return;
  for (std::int64_t i = 0; i < previous.gate.rows; ++i) {
    for (std::int64_t c = 0; c < previous.gate.cols; ++c) previous.gate.row(i)[c] += recorded.position_bias.row(i)[c];
  }
  report.check(name + "_overlap_kv", relative_error(previous.kv.values, recorded.overlap_kv.values), kCopied);
  report.check(name + "_overlap_gate", relative_error(previous.gate.values, recorded.overlap_gate_biased.values),
               kCopied);
}

void check_accumulator(const RecordedCompressor& recorded, ImageReader& reader, const std::string& name,
                       GoldenReport& report) {
  const std::int64_t width = recorded.kv.cols;
  const std::vector<float> max = reader.take_floats(width);
  const std::vector<float> denominator = reader.take_floats(width);
  const std::vector<float> numerator = reader.take_floats(width);
  if (recorded.tail_kv.rows == 0) return;
  const Pooled want = pool_rows(recorded.tail_kv, recorded.tail_gate, recorded.position_bias);
  std::vector<double> value;
  std::vector<double> log_sum;
  for (std::size_t c = 0; c < max.size(); ++c) {
    value.push_back(static_cast<double>(numerator[c]) / static_cast<double>(denominator[c]));
    log_sum.push_back(static_cast<double>(max[c]) + std::log(static_cast<double>(denominator[c])));
  }
  report.check(name + "_accumulator.pooled", relative_error(value, want.value), kPooled);
  report.check(name + "_accumulator.log_sum", relative_error(log_sum, want.log_sum), kPooled);
}

void check_kind(const Recording& recording, const RecordedCompressor& recorded, ImageReader& reader,
                const std::string& name, GoldenReport& report) {
  const std::int64_t open = recording.tokens % recording.ratio;
  if (recording.kind == LayerKind::hca) {
    if (open != 0) check_accumulator(recorded, reader, name, report);
    return;
  }
  const std::int64_t width = recorded.norm_weight.cols;
  const std::int64_t previous = recording.tokens >= recording.ratio ? recording.ratio : 0;
  check_overlap(recorded, take_rows(reader, previous, width), name, report);
  check_tail(recorded, take_rows(reader, open, 2 * width), name, report);
}

std::int64_t window_bytes(const Capture& capture) {
  const WindowSchema& window = capture.schema.layers[0].window;
  return std::min<std::int64_t>(capture.window.rows, capture.schema.config.window) * window.row.bytes();
}

// Decodes the image's window rows here and compares them with the last gathers.
std::int64_t differing_window_rows(const Capture& capture, ImageReader& reader) {
  const RowSchema& row = capture.schema.layers[0].window.row;
  const std::int64_t count = std::min<std::int64_t>(capture.window.rows, capture.schema.config.window);
  const auto payload = reader.take(count * row.payload_bytes);
  const auto scale = reader.take(count * row.scale_bytes);
  std::vector<float> decoded(row.width);
  std::int64_t differing = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    decode_row(row, payload.data() + i * row.payload_bytes, scale.data() + i * row.scale_bytes, decoded);
    const auto want = capture.window.row(capture.window.rows - count + i);
    differing += std::equal(want.begin(), want.end(), decoded.begin()) ? 0 : 1;
  }
  return differing;
}

}  // namespace

void check_image(const Recording& recording, const Capture& capture, const std::string& prefix, GoldenReport& report) {
  ImageReader reader(capture.image);
  const bool length_ok = capture.image.lengths == std::vector<std::int64_t>{recording.tokens};
  report.check(prefix + "image.window", static_cast<double>(differing_window_rows(capture, reader)), 0);
  if (recording.ratio != 0) check_kind(recording, recording.main, reader, prefix + "image.comp", report);
  if (recording.kind == LayerKind::csa) check_kind(recording, recording.index, reader, prefix + "image.idx", report);
  report.check(prefix + "image.extra_bytes", length_ok ? static_cast<double>(reader.left()) : INFINITY, 0);
}

std::int64_t differing_pending_bytes(const Capture& a, const Capture& b) {
  const auto pending = [](const Capture& capture) {
    return std::span(capture.image.bytes).subspan(window_bytes(capture));
  };
  const auto left = pending(a);
  const auto right = pending(b);
  const std::size_t common = std::min(left.size(), right.size());
  auto differing = static_cast<std::int64_t>(std::max(left.size(), right.size()) - common);
  for (std::size_t i = 0; i < common; ++i) differing += left[i] != right[i] ? 1 : 0;
  return differing;
}

}  // namespace kv4::checks
