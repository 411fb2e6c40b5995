#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/group.h"
#include "codec/codec.h"
#include "golden_checks.h"
#include "golden_reference.h"
#include "golden_v41_replay.h"

namespace kv4::checks {
namespace {

constexpr double kLatentSteps = 2;         // bf16 steps of a channel, where pooling was rounded to the other side
constexpr double kLatentShare = 1e-3;      // of all channels
constexpr double kEntryShare = 5e-3;       // of the bytes, from such latents
constexpr double kKeyShare = 5e-2;         // of the bytes, from a product in another order
constexpr double kScores = 1e-6;           // fp32 in the defined order against fp32 in any; relative to the largest
constexpr double kAttention = 2e-3;        // a GPU rounds P to bf16
constexpr double kOtherAttention = 1e-2;   // with entries that differ by kEntryShare
constexpr double kOtherScores = 5e-2;      // with keys that differ by kKeyShare

// Steps that mix long and short, as shares of a recording of 300 tokens; the rest follows one by one.
constexpr std::int64_t kChunkTokens = 300;
const std::vector<int> kLongFirst = {233, 1, 1, 3};
const std::vector<int> kOtherSplit = {97, 3, 1, 70, 2};

std::vector<int> scaled(std::vector<int> chunks, std::int64_t tokens, std::int64_t most) {
  const std::int64_t share = std::min(tokens, kChunkTokens);
  for (int& chunk : chunks)
    chunk = static_cast<int>(std::min(std::max<std::int64_t>(1, chunk * share / kChunkTokens), most));
  return chunks;
}

double differing(const std::vector<std::uint8_t>& got, const std::vector<std::uint8_t>& want) {
  if (got.size() != want.size()) return INFINITY;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < want.size(); ++i) count += got[i] != want[i];
  return static_cast<double>(count);
}

void check_bytes(const RecordedRows& got, const RecordedRows& want, const std::string& name, GoldenReport& report) {
  report.check(name + ".codes", differing(got.codes, want.codes), 0);
  report.check(name + ".scales", differing(got.scales, want.scales), 0);
}

void check_shares(const RecordedRows& got, const RecordedRows& want, double bound, const std::string& name,
                  GoldenReport& report) {
  const double bytes = std::max<double>(1, static_cast<double>(want.codes.size() + want.scales.size()));
  report.check(name, (differing(got.codes, want.codes) + differing(got.scales, want.scales)) / bytes, bound);
}

// Gathered rows against a plain reading of the stored bytes.
void check_values(const RowSchema& row, const RecordedRows& stored, const Matrix& got, const std::string& name,
                  GoldenReport& report) {
  std::int64_t count = 0;
  std::vector<float> want(row.width);
  for (std::int64_t i = 0; i < stored.rows; ++i) {
    decode_row(row, reinterpret_cast<const std::byte*>(stored.codes.data() + i * stored.code_bytes),
               reinterpret_cast<const std::byte*>(stored.scales.data() + i * stored.scale_bytes), want);
    for (int c = 0; c < row.width; ++c)
      count += got.row(i)[c] != want[c] && !(std::isnan(got.row(i)[c]) && std::isnan(want[c]));
  }
  report.check(name, static_cast<double>(count), 0);
}

// Rows as the codec of the library stores them.
RecordedRows encoded(Format format, const Matrix& rows, int width) {
  const codec::RowShape shape{width, 0};
  return codec::with_any_codec(format, [&](auto codec) {
    RecordedRows out{static_cast<std::int64_t>(rows.values.size()) / width, codec.payload_bytes(shape),
                     codec.scale_bytes(shape), {}, {}};
    out.codes.resize(out.rows * out.code_bytes);
    out.scales.resize(out.rows * out.scale_bytes);
    for (std::int64_t i = 0; i < out.rows; ++i)
      codec.encode(OneLane{}, shape, rows.values.data() + i * width, out.codes.data() + i * out.code_bytes,
                   out.scales.data() + i * out.scale_bytes, 1.0f);
    return out;
  });
}

void check_rope(const RecordingV41& recording, GoldenReport& report) {
  // The recorder multiplied angles in fp32, so its own error grows with the position: 0.75 * 2^-23 per token.
  const double bound = std::max(3e-5, 1e-7 * static_cast<double>(recording.tokens));
  const ModelConfig& config = recording.config;
  const auto check = [&](const std::string& name, const RopeSpec& rope, const Matrix& cos, const Matrix& sin) {
    const RopeTable table = build_rope_table(rope, config.rope_dim, 0, cos.rows);
    Worst worst;
    for (std::size_t i = 0; i < cos.values.size(); ++i) {
      worst.see(std::abs(static_cast<double>(table.cos[i]) - static_cast<double>(cos.values[i])));
      worst.see(std::abs(static_cast<double>(table.sin[i]) - static_cast<double>(sin.values[i])));
    }
    if (cos.rows > 0) report.check("rope." + name, worst.value(), bound);
  };
  check("main", config.rope_main, recording.main_cos, recording.main_sin);
  check("compress", config.rope_compress, recording.compress_cos, recording.compress_sin);
}

void check_latents(const CaptureLayerV41& got, const RecordedOwner& owner, const std::string& prefix,
                   GoldenReport& report) {
  Worst steps;
  std::int64_t others = 0;
  for (std::size_t i = 0; i < owner.latents.values.size(); ++i) {
    const double want = static_cast<double>(owner.latents.values[i]);
    const double error = std::abs(static_cast<double>(got.latents.values[i]) - want);
    if (error == 0) continue;
    ++others;
    steps.see(error / bf16_ulp(std::abs(want)));
  }
  report.check(prefix + "latents.steps", steps.value(), kLatentSteps);
  report.check(prefix + "latents.share",
               static_cast<double>(others) / std::max<double>(1, static_cast<double>(owner.latents.values.size())),
               kLatentShare);
  report.check(prefix + "latents.other_rows", static_cast<double>(got.changed_latents), 0);
}

double score_error(const RecordedRanker& ranker, const Matrix& got, bool masked) {
  std::vector<double> mine, wanted;
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    const float want = ranker.scores.values[i], score = got.values[i];
    if (std::isnan(want)) {  // not visible
      if (score != -INFINITY) return INFINITY;
      continue;
    }
    if (masked && score == -INFINITY) continue;  // no candidate; the recording has scores before the mask
    mine.push_back(static_cast<double>(score));
    wanted.push_back(static_cast<double>(want));
  }
  return wanted.empty() ? 0 : relative_error(std::span<const double>(mine), std::span<const double>(wanted));
}

using Lists = std::vector<std::vector<std::int32_t>>;

double differing_lists(const Lists& got, const Lists& want) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < want.size(); ++i) count += got[i] != want[i];
  return static_cast<double>(count);
}

// Entries outside of the blocks that are kept must score -infinity, all others must not.
double wrong_masks(const RecordedLayerV41& layer, const CaptureLayerV41& got, const Lists& kept, std::int64_t block,
                   int ratio) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const std::int64_t visible = (std::int64_t{layer.positions[i]} + 1) / ratio;
    for (std::int64_t j = 0; j < visible; ++j) {
      const bool is_kept = std::binary_search(kept[i].begin(), kept[i].end(), static_cast<std::int32_t>(j / block));
      count += (got.scores.row(static_cast<std::int64_t>(i))[j] == -INFINITY) == is_kept;
    }
  }
  return static_cast<double>(count);
}

// The windows of all layers, then the pending rows of the owners of ratio 2, as docs/formats.md has them. Where entries
// came in finished there are no pending rows to compare, only their room.
void check_image(const RecordingV41& recording, const CaptureV41& got, EntrySource source, const std::string& prefix,
                 GoldenReport& report) {
  std::span<const std::byte> left = got.image.bytes;
  const auto take = [&](std::int64_t bytes) {
    const auto taken = left.first(std::min<std::size_t>(left.size(), bytes));
    left = left.subspan(taken.size());
    return taken;
  };
  const auto same = [](std::span<const std::byte> a, const void* b, std::size_t bytes) {
    return a.size() == bytes && (bytes == 0 || std::memcmp(a.data(), b, bytes) == 0);
  };
  const std::int64_t rows = std::min<std::int64_t>(recording.tokens, recording.config.window),
                     first = recording.tokens - rows;
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < recording.layers.size(); ++i) {
    const RecordedRows& stored = got.layers[i].window;
    const auto codes = take(rows * stored.code_bytes), scales = take(rows * stored.scale_bytes);
    wrong += !same(codes, stored.codes.data() + first * stored.code_bytes, rows * stored.code_bytes);
    wrong += !same(scales, stored.scales.data() + first * stored.scale_bytes, rows * stored.scale_bytes);
  }
  report.check(prefix + "image.windows", static_cast<double>(wrong), 0);
  wrong = 0;
  for (const RecordedLayerV41& layer : recording.layers) {
    if (!layer.owner || layer.owner->tail_kv.rows == 0) continue;
    const std::size_t bytes = 4 * layer.owner->tail_kv.values.size();
    const auto kv = take(static_cast<std::int64_t>(bytes)), gate = take(static_cast<std::int64_t>(bytes));
    wrong += !same(kv, layer.owner->tail_kv.values.data(), bytes);
    wrong += !same(gate, layer.owner->tail_gate.values.data(), bytes);
  }
  if (source == EntrySource::projections)
    report.check(prefix + "image.pending_rows", static_cast<double>(wrong), 0);
  report.check(prefix + "image.extra_bytes", static_cast<double>(left.size()), 0);
}

// From the inputs of the compressors, with keys by the bound weight.
void check_projections(const RecordingV41& recording, const CaptureV41& got, GoldenReport& report) {
  for (std::size_t i = 0; i < recording.layers.size(); ++i) {
    const RecordedLayerV41& layer = recording.layers[i];
    const CaptureLayerV41& mine = got.layers[i];
    const std::string prefix = layer.name + ".projections.";
    if (layer.window.rows > 0)
      check_values(got.schema.layers[i].window.row, layer.window, mine.window_values, prefix + "gather.window", report);
    if (layer.owner) {
      check_latents(mine, *layer.owner, prefix, report);
      check_shares(mine.entries, layer.owner->entries, kEntryShare, prefix + "entries", report);
      check_shares(mine.keys, layer.owner->keys, kKeyShare, prefix + "keys", report);
    }
    if (layer.ranker) {
      const bool masked = got.schema.layers[i].spec.candidate_source >= 0 &&
                          got.schema.layers[i].spec.candidate_source != got.schema.layers[i].spec.layer;
      report.check(prefix + "scores", score_error(*layer.ranker, mine.scores, masked), kOtherScores);
      report.note(prefix + "lists", differing_lists(mine.lists, layer.ranker->lists));
    }
    report.check(prefix + "attention", relative_error(mine.attention.values, layer.attn_out.values), kOtherAttention);
  }
  check_image(recording, got, EntrySource::projections, "projections.", report);
}

// From the recorded latents and projections of keys: every stored byte, list and candidate is the recorded one.
void check_stored(const RecordingV41& recording, const CaptureV41& got, GoldenReport& report) {
  for (std::size_t i = 0; i < recording.layers.size(); ++i) {
    const RecordedLayerV41& layer = recording.layers[i];
    const LayerCacheSchema& schema = got.schema.layers[i];
    const LayerSpec& spec = schema.spec;
    const CaptureLayerV41& mine = got.layers[i];
    const std::string prefix = layer.name + ".latents.";
    if (layer.window.rows > 0) check_bytes(mine.window, layer.window, prefix + "window", report);
    check_values(schema.window.row, mine.window, mine.window_values, prefix + "gather.window", report);
    if (layer.owner) {
      check_bytes(mine.entries, layer.owner->entries, prefix + "entries", report);
      check_bytes(mine.keys, layer.owner->keys, prefix + "keys", report);
    }
    if (!spec.rows.empty()) {
      const std::size_t owner = spec.rows[0].owner_layer;
      const std::vector<PageSchema>& pages = got.schema.layers[owner].pages;
      check_values(pages[0].row, got.layers[owner].entries, mine.entry_values, prefix + "gather.entries", report);
      if (spec.rows.size() > 1)
        check_values(pages[1].row, got.layers[owner].keys, mine.key_values, prefix + "gather.keys", report);
    }
    if (layer.ranker) {
      const bool masked = spec.candidate_source >= 0 && spec.candidate_source != spec.layer;
      report.check(prefix + "scores", score_error(*layer.ranker, mine.scores, masked), kScores);
      check_bytes(encoded(Format::mxfp4, layer.ranker->q, recording.config.index_dim), layer.ranker->encoded_q,
                  prefix + "queries", report);
      report.check(prefix + "scores.encoded_queries", static_cast<double>(mine.other_scores), 0);
      report.check(prefix + "lists", differing_lists(mine.lists, layer.ranker->lists), 0);
      if (spec.candidate_source == spec.layer)
        report.check(prefix + "candidates", differing_lists(mine.candidates, layer.ranker->candidates), 0);
      if (masked)
        report.check(prefix + "masks",
                     wrong_masks(layer, mine, recording.layers[spec.candidate_source].ranker->candidates,
                                 recording.config.sharing.candidate_block_size, spec.rows[0].ratio),
                     0);
    }
    report.check(prefix + "attention", relative_error(mine.attention.values, layer.attn_out.values), kAttention);
  }
  check_image(recording, got, EntrySource::latents, "latents.", report);
}

}  // namespace

void check_model_v41(const std::vector<SafeTensors>& files, const std::shared_ptr<Backend>& backend,
                     GoldenReport& report) {
  const RecordingV41 recording = load_recording_v41(files);
  check_rope(recording, report);
  const std::int64_t tokens = recording.tokens;
  check_projections(
      recording, replay_v41(recording, EntrySource::projections, scaled(kLongFirst, tokens, tokens), backend), report);
  // No step is longer than the window: every window row then lies in the ring when its step ends, where the views show
  // it.
  const CaptureV41 stored = replay_v41(recording, EntrySource::latents,
                                       scaled(kOtherSplit, tokens, recording.config.window), backend);
  check_stored(recording, stored, report);
  if (!recording.draft) return;
  check_bytes(encoded(Format::fp8_tile32, recording.draft->rows, recording.config.head_dim), recording.draft->stored,
              "draft.rows", report);
  report.check("draft.attention", relative_error(stored.draft_attention.values, recording.draft->attn_out.values),
               kAttention);
}

}  // namespace kv4::checks
