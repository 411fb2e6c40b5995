// A recorded model of V4.1: the inputs of its cache by absolute position and layer, and the outputs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "golden_reference.h"
#include "kv4/model_config.h"
#include "safetensors.h"

namespace kv4::checks {

/// Stored rows as recorded: codes [rows, code_bytes], scales [rows, scale_bytes].
struct RecordedRows {
  std::int64_t rows = 0;  // 0: not recorded
  std::int64_t code_bytes = 0;
  std::int64_t scale_bytes = 0;
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
};

/// A layer that owns entries and index keys.
struct RecordedOwner {
  Matrix kv;                              // [tokens, head_dim]
  Matrix gate;                            // the same, ratio 2 only
  Matrix latents;                         // [entries, head_dim]
  Matrix key_projections;                 // [entries, index_dim]
  std::vector<std::uint16_t> key_weight;  // bf16 [index_dim, head_dim]
  Matrix norm_weight, key_norm_weight;    // [1, width]
  RecordedRows entries, keys;
  Matrix tail_kv, tail_gate;  // the pending row at the end, if there is one
};

/// A layer that makes an index list. M queries.
struct RecordedRanker {
  Matrix q;                // [M, index_heads * index_dim]
  RecordedRows encoded_q;  // [M * index_heads]
  Matrix weights;          // [M, index_heads]
  Matrix scores;           // [M, entries], NaN: not visible
  std::vector<std::vector<std::int32_t>> lists;       // [M]
  std::vector<std::vector<std::int32_t>> candidates;  // [M] blocks that are kept; the candidate source's only
};

struct RecordedLayerV41 {
  std::string name;
  Matrix swa_kv;                        // [tokens, head_dim]
  RecordedRows window;                  // the same rows as stored; may be missing
  std::vector<std::int32_t> positions;  // [M] of the queries
  Matrix q, attn_out;                   // [M, heads * head_dim]
  Matrix sinks;                         // [1, heads]
  std::optional<RecordedOwner> owner;
  std::optional<RecordedRanker> ranker;
};

/// A draft stage: D drafts of `block` queries.
struct RecordedDraft {
  Matrix swa_kv;                        // [tokens, head_dim]
  std::vector<std::int32_t> positions;  // [D] the last token in the ring
  std::int64_t block = 0;
  Matrix rows;        // [D * block, head_dim]
  RecordedRows stored;  // the same rows as quantised
  Matrix q, attn_out;   // [D * block, heads * head_dim]
  Matrix sinks;         // [1, heads]
};

struct RecordingV41 {
  ModelConfig config;
  std::int64_t tokens = 0;
  double softmax_scale = 0;
  std::vector<RecordedLayerV41> layers;  // of the schedule
  std::optional<RecordedDraft> draft;
  Matrix main_cos, main_sin, compress_cos, compress_sin;  // [positions, rope_dim / 2] the model's own; optional
};

/// Whether a file belongs to such a recording: its metadata has the schedule.
bool is_layer_of_v41(const SafeTensors& file);
/// `files`: those of one recording, in any order.
RecordingV41 load_recording_v41(const std::vector<SafeTensors>& files);

}  // namespace kv4::checks
