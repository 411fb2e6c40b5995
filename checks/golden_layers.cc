#include <algorithm>
#include <cmath>

#include "base/group.h"
#include "codec/codec.h"
#include "golden_checks.h"
#include "golden_reference.h"
#include "golden_replay.h"
#include "ops/compress_row.h"

namespace kv4::checks {
namespace {

constexpr double kUlps = 2;           // bf16 rounding points of an entry, in ulps of its largest channel
constexpr double kScoreBound = 1e-2;  // relative to the largest, bf16 rows
constexpr double kTopkBound = 1e-2;   // share of chosen entries that differ
constexpr double kAttentionBound = 1e-2;
constexpr double kSameRows = 1e-5;  // fp32 against double on the same rows
constexpr double kStoredAttention = 2e-3;
constexpr double kFarBound = 0.05;

// Steps that mix long and short; the remaining tokens follow one by one. Recordings shorter than `kChunkTokens` scale
// the chunks down.
constexpr std::int64_t kChunkTokens = 300;
const std::vector<int> kLongFirst = {150, 1, 1, 66, 3};  // as recorded
const std::vector<int> kOtherSplit = {100, 3, 1, 70, 2};

std::vector<int> scaled(std::vector<int> chunks, std::int64_t tokens, std::int64_t most) {
  const std::int64_t share = std::min(tokens, kChunkTokens);
  for (int& chunk : chunks)
    chunk = static_cast<int>(std::min(std::max<std::int64_t>(1, chunk * share / kChunkTokens), most));
  return chunks;
}

void check_rope(const SafeTensors& file, const Recording& recording, GoldenReport& report, const std::string& prefix) {
  const int rope_dim = recording.config.rope_dim;
  const std::vector<std::int32_t> far = file.ints("rope_far.positions", {-1});
  const auto far_count = static_cast<std::int64_t>(far.size());
  // The recorder multiplied angles in fp32, so its own error grows with the position: 0.75 * 2^-23 per token.
  const double recorded_bound = std::max(3e-5, 1e-7 * static_cast<double>(recording.tokens));
  for (const auto& [name, spec] :
       {std::pair("main", recording.config.rope_main), std::pair("compress", recording.config.rope_compress)}) {
    const RopeTable table = build_rope_table(spec, rope_dim, 0, recording.tokens);
    RopeTable far_table;
    for (std::int32_t position : far) {
      const RopeTable one = build_rope_table(spec, rope_dim, position, 1);
      far_table.cos.insert(far_table.cos.end(), one.cos.begin(), one.cos.end());
      far_table.sin.insert(far_table.sin.end(), one.sin.begin(), one.sin.end());
    }
    const auto compare = [&](const std::string& tensor, const std::vector<float>& got, std::int64_t rows,
                             double bound) {
      const std::vector<float> want = file.floats(tensor, {rows, rope_dim / 2});
      Worst worst;
      for (std::size_t i = 0; i < want.size(); ++i)
        worst.see(std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
      report.check(prefix + tensor, worst.value(), bound);
    };
    compare(std::string("rope.") + name + ".cos", table.cos, recording.tokens, recorded_bound);
    compare(std::string("rope.") + name + ".sin", table.sin, recording.tokens, recorded_bound);
    compare(std::string("rope_far.") + name + ".cos", far_table.cos, far_count, kFarBound);
    compare(std::string("rope_far.") + name + ".sin", far_table.sin, far_count, kFarBound);
  }
}

double worst_ulps(const Matrix& got, const Matrix& want) {
  Worst worst;
  for (std::int64_t i = 0; i < want.rows; ++i) {
    const double ulp = bf16_ulp(largest_magnitude(want.row(i)));
    for (std::int64_t c = 0; c < want.cols; ++c) {
      worst.see(std::abs(static_cast<double>(got.row(i)[c]) - static_cast<double>(want.row(i)[c])) / ulp);
    }
  }
  return worst.value();
}

// The largest error as a share of the channel's allowed error. The slack is `slack_ulps` of the row's largest channel,
// or of `floor`'s if that is larger.
double worst_share(const RowSchema& row, const Matrix& got, const Matrix& want, double slack_ulps,
                   const Matrix& floor) {
  Worst worst;
  for (std::int64_t i = 0; i < want.rows; ++i) {
    const double largest = std::max(largest_magnitude(want.row(i)), largest_magnitude(floor.row(i)));
    const std::vector<double> allowed = allowed_error(row, want.row(i), slack_ulps * bf16_ulp(largest));
    for (std::size_t c = 0; c < allowed.size(); ++c) {
      const double difference = std::abs(static_cast<double>(got.row(i)[c]) - static_cast<double>(want.row(i)[c]));
      worst.see(difference == 0 ? 0 : difference / allowed[c]);
    }
  }
  return worst.value();
}

Matrix rounded(const Matrix& rows) {
  Matrix out = rows;
  for (float& x : out.values) x = nearest_bf16(x);
  return out;
}

double differing_values(const Matrix& a, const Matrix& b) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < b.values.size(); ++i) count += a.values[i] == b.values[i] ? 0 : 1;
  return static_cast<double>(count);
}

using Choice = std::vector<std::vector<std::int32_t>>;  // [tokens]: entries

Choice choose(const Recording& recording, const std::vector<double>& scores) {
  Choice chosen;
  const std::size_t columns = recording.tokens / recording.ratio;
  for (std::int64_t t = 0; t < recording.tokens; ++t) {
    const auto row = std::span(scores).subspan(t * columns, columns);
    chosen.push_back(top_k(row, (t + 1) / recording.ratio, recording.config.index_topk));
  }
  return chosen;
}

// HCA: every visible entry. SWA: none.
Choice choose_all(const Recording& recording) {
  Choice chosen(recording.tokens);
  if (recording.ratio == 0) return chosen;
  for (std::int64_t t = 0; t < recording.tokens; ++t) {
    for (std::int32_t j = 0; j < (t + 1) / recording.ratio; ++j) chosen[t].push_back(j);
  }
  return chosen;
}

// Share of the chosen entries that are in only one of the two choices.
double differing_share(const Choice& got, const Choice& want) {
  std::size_t total = 0;
  std::size_t shared = 0;
  for (std::size_t t = 0; t < want.size(); ++t) {
    total += std::max(got[t].size(), want[t].size());
    for (std::int32_t j : want[t]) shared += std::find(got[t].begin(), got[t].end(), j) != got[t].end() ? 1 : 0;
  }
  return total == 0 ? 0 : 1 - static_cast<double>(shared) / static_cast<double>(total);
}

std::vector<double> widened(const Matrix& rows) { return {rows.values.begin(), rows.values.end()}; }

// Error over the visible scores; `want` may lack some (NaN).
double visible_error(const Recording& recording, const Matrix& scores, std::span<const double> want) {
  std::vector<double> got, wanted;
  for (std::int64_t t = 0; t < recording.tokens; ++t)
    for (std::int64_t j = 0; j < (t + 1) / recording.ratio; ++j) {
      const double w = want[t * scores.cols + j];
      if (std::isnan(w)) continue;
      got.push_back(static_cast<double>(scores.row(t)[j]));
      wanted.push_back(w);
    }
  return relative_error(got, wanted);
}

double score_error(const Recording& recording, const Matrix& scores) {
  return visible_error(recording, scores, widened(recording.idx_scores));
}

// Index queries with a key's roundings: transformed, encoded and decoded.
Matrix as_keys(Matrix rows, const RowSchema& row) {
  std::vector<std::uint8_t> payload(row.payload_bytes);
  std::vector<std::uint8_t> scale(row.scale_bytes);
  const codec::RowShape shape{row.width, row.tail};
  for (std::size_t at = 0; at < rows.values.size(); at += row.width) {
    float* x = rows.values.data() + at;
    for (int c = 0; c < row.width; ++c) x[c] = nearest_bf16(x[c]);
    ops::hadamard_row(OneLane{}, row.width, x);
    codec::with_codec(row.format, [&](auto codec) {
      codec.encode(OneLane{}, shape, x, payload.data(), scale.data(), 1.0f);
      codec.decode(OneLane{}, shape, payload.data(), scale.data(), 1.0f, x);
    });
  }
  return rows;
}

std::vector<double> attend_all(const Recording& recording, const Matrix& window, const Matrix& entries,
                               const Choice& chosen) {
  std::vector<double> out;
  out.reserve(recording.q.values.size());
  std::vector<std::span<const float>> rows;
  for (std::int64_t t = 0; t < recording.tokens; ++t) {
    rows.clear();
    for (std::int64_t p = std::max<std::int64_t>(0, t - recording.config.window + 1); p <= t; ++p)
      rows.push_back(window.row(p));
    for (std::int32_t j : chosen[t]) rows.push_back(entries.row(j));
    const std::vector<double> one = attend({recording.q.row(t), recording.sinks.row(0), recording.softmax_scale}, rows);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

// bf16 rows and keys, no transform, raw HCA rows: the closest that a cache of 16-bit rows comes to the recording.
CacheOptions plain_options() {
  CacheOptions options;
  options.row_format = Format::bf16;
  options.index_format = Format::bf16;
  options.hadamard = false;
  options.hca_mode = HcaMode::raw;
  return options;
}

void check_gathers(const Recording& recording, const Capture& got, const std::string& prefix, GoldenReport& report) {
  report.check(prefix + "gather.lengths", static_cast<double>(got.wrong_lengths), 0);
  report.check(prefix + "gather.changed_rows", static_cast<double>(got.changed_rows), 0);
  if (recording.kind != LayerKind::csa) return;
  report.check(prefix + "gather.chosen_rows", static_cast<double>(got.wrong_chosen), 0);
}

void check_plain(const Recording& recording, const Capture& got, const std::string& prefix, GoldenReport& report) {
  check_gathers(recording, got, prefix, report);
  report.check(prefix + "window", differing_values(got.window, rounded(recording.swa_kv)), 0);
  if (recording.ratio != 0) report.check(prefix + "entries", worst_ulps(got.entries, recording.main.entries), kUlps);
  if (recording.kind == LayerKind::csa) {
    report.check(prefix + "index_keys", worst_ulps(got.keys, recording.index.entries), kUlps);
    report.check(prefix + "scores", score_error(recording, got.scores), kScoreBound);
    report.check(prefix + "topk", differing_share(got.topk, recording.idx_topk), kTopkBound);
  }
  // Uses the recorded choice, so that a tie broken differently does not count twice.
  report.check(prefix + "attention", relative_error(got.attention.values, recording.attn_out.values), kAttentionBound);
  if (recording.main.tail_kv.rows != 0) {
    report.check(prefix + "ring.kv", relative_error(got.ring_kv.values, recording.main.tail_kv.values), 1e-6);
    report.check(prefix + "ring.gate", relative_error(got.ring_gate.values, recording.main.tail_gate.values), 1e-6);
  }
}

void check_stored_rows(const Recording& recording, const Capture& got, const std::string& prefix,
                       GoldenReport& report) {
  const LayerCacheSchema& layer = got.schema.layers[0];
  const Matrix window = rounded(recording.swa_kv);
  check_gathers(recording, got, prefix, report);
  report.check(prefix + "window", worst_share(layer.window.row, got.window, window, 0, window), 1);
  report.check(prefix + "view.window", differing_values(got.window_view, got.window), 0);
  if (recording.ratio == 0) return;
  const Matrix& entries = recording.main.entries;
  report.check(prefix + "entries", worst_share(layer.pages[0].row, got.entries, entries, kUlps, entries), 1);
  report.check(prefix + "view.entries", differing_values(got.entries_view, got.entries), 0);
  if (recording.kind != LayerKind::csa) return;
  // Compared after the transform, where the key was quantised. It also has the rounding from before the transform.
  const Matrix keys = hadamard(recording.index.entries, recording.config.index_dim);
  report.check(prefix + "index_keys", worst_share(layer.pages[1].row, got.keys, keys, kUlps, recording.index.entries),
               1);
  report.check(prefix + "view.index_keys", differing_values(got.keys_view, got.keys), 0);
}

// Scores and attention against the reference on exactly the stored rows. The distance to the recording is the error of
// the formats and is only reported.
void check_stored(const Recording& recording, const Capture& got, const std::string& prefix, GoldenReport& report) {
  check_stored_rows(recording, got, prefix, report);
  Choice chosen = choose_all(recording);
  if (recording.kind == LayerKind::csa) {
    const Matrix q = as_keys(recording.idx_q, got.schema.layers[0].pages[1].row);
    const std::vector<double> scores =
        index_scores({q, recording.idx_weights, recording.index_softmax_scale}, got.keys);
    report.check(prefix + "scores", visible_error(recording, got.scores, scores), kSameRows);
    report.check(prefix + "topk", differing_share(got.topk, choose(recording, widened(got.scores))), 0);
    report.note(prefix + "scores.recording", score_error(recording, got.scores));
    report.note(prefix + "topk.recording", differing_share(got.topk, recording.idx_topk));
    chosen = got.topk;
  }
  report.check(prefix + "attention",
               relative_error(widened(got.attention), attend_all(recording, got.window, got.entries, chosen)),
               kStoredAttention);
  report.note(prefix + "attention.recording", relative_error(got.attention.values, recording.attn_out.values));
}

}  // namespace

void check_layer(const SafeTensors& file, LayerKind kind, const std::string& name,
                 const std::shared_ptr<Backend>& backend, GoldenReport& report) {
  const std::string prefix = name + ".";
  const Recording recording = load_recording(file, kind);
  check_rope(file, recording, report, prefix);
  const Capture plain = replay(recording, plain_options(), scaled(kLongFirst, recording.tokens, recording.tokens),
                               AttendTo::recorded, backend);
  check_plain(recording, plain, prefix + "bf16.", report);
  check_image(recording, plain, prefix + "bf16.", report);
  // No step is longer than the window: every window row then lies in the ring when its step ends, where the views show
  // it.
  const Capture stored = replay(recording, CacheOptions(),
                                scaled(kOtherSplit, recording.tokens, recording.config.window), AttendTo::own, backend);
  check_stored(recording, stored, prefix + "default.", report);
  check_image(recording, stored, prefix + "default.", report);
  report.check(prefix + "image.pending_bytes", static_cast<double>(differing_pending_bytes(plain, stored)), 0);
}

}  // namespace kv4::checks
