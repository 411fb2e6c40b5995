// One recorded layer: the inputs of its cache by absolute position, and the outputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "golden_reference.h"
#include "kv4/model_config.h"
#include "safetensors.h"

namespace kv4::checks {

/// One compressor of the layer: projections by absolute position, constants, and recorded outputs.
struct RecordedCompressor {
  Matrix kv;             // [tokens, columns]
  Matrix gate;           // [tokens, columns]
  Matrix position_bias;  // [ratio, columns]
  Matrix norm_weight;    // [1, width]
  Matrix entries;        // [tokens / ratio, width]
  Matrix tail_kv;        // [tokens % ratio, columns]
  Matrix tail_gate;
  Matrix overlap_kv;           // [ratio, width] or empty: the previous span's next-entry columns
  Matrix overlap_gate_biased;  // with position bias added
};

struct Recording {
  std::string file;
  LayerKind kind = LayerKind::swa;
  ModelConfig config;  // one layer
  std::int64_t tokens = 0;
  std::int64_t ratio = 0;  // 0: no compressor
  double softmax_scale = 0;
  double index_softmax_scale = 0;
  Matrix swa_kv;                                    // [tokens, head_dim]
  Matrix q;                                         // [tokens, heads * head_dim]
  Matrix sinks;                                     // [1, heads]
  Matrix attn_out;                                  // [tokens, heads * head_dim]
  RecordedCompressor main;                          // CSA, HCA
  RecordedCompressor index;                         // CSA
  Matrix idx_q;                                     // [tokens, index_heads * index_dim]
  Matrix idx_weights;                               // [tokens, index_heads]
  Matrix idx_scores;                                // [tokens, tokens / ratio], NaN: not recorded
  std::vector<std::vector<std::int32_t>> idx_topk;  // [tokens]: the chosen entries
};

Recording load_recording(const SafeTensors& file, LayerKind kind);

}  // namespace kv4::checks
