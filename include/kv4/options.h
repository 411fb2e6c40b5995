// Formats, layout and sizes of a cache.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "kv4/export.h"
#include "kv4/prefix_cache.h"
#include "kv4/tensor.h"

namespace kv4 {

/// Number formats of stored rows (docs/formats.md). Rows take fp8_tile64, fp8_row, bf16, and V4.1's fp8_tile32 and
/// nvfp4_row; index keys take bf16, mxfp4, nvfp4 and fp8.
enum class Format : std::uint8_t { fp8_tile64, fp8_row, bf16, mxfp4, nvfp4, fp8, fp8_tile32, nvfp4_row };
/// The open HCA span is kept in one of two ways: folded into an accumulator, or as raw rows.
enum class HcaMode : std::uint8_t { online, raw };
/// The order of pages in the pool: by block, then layer, or by layer, then block.
enum class Arrangement : std::uint8_t { block_major, layer_major };
/// Index scores: exact, the same bits on every backend; or fast, within the error bound of docs/formats.md. Where no
/// fast kernel exists, fast scores are the exact ones.
enum class ScoreMode : std::uint8_t { exact, fast };

/// The enumerator's name: "fp8_tile64", ... One spelling for C++, C, Python and the tool (kv4/names.h).
KV4_API const char* to_string(Format format);
/// "online", "raw".
KV4_API const char* to_string(HcaMode mode);
/// "block_major", "layer_major".
KV4_API const char* to_string(Arrangement arrangement);
/// "exact", "fast".
KV4_API const char* to_string(ScoreMode mode);
/// Throw Error(bad_argument) listing the names.
KV4_API Format parse_format(std::string_view name);
/// The inverse of to_string(); throws Error(bad_argument).
KV4_API HcaMode parse_hca_mode(std::string_view name);
/// The inverse of to_string(); throws Error(bad_argument).
KV4_API Arrangement parse_arrangement(std::string_view name);
/// The inverse of to_string(); throws Error(bad_argument).
KV4_API ScoreMode parse_score_mode(std::string_view name);
/// "f32" or "bf16", for CacheOptions::pending_dtype; throws Error(bad_argument).
KV4_API DType parse_pending_dtype(std::string_view name);

/// Formats, layout and sizes of a cache.
struct CacheOptions {
  // Formats. Rows without one have the model's own: fp8_tile64 for V4; fp8_tile32 (windows) and nvfp4_row (entries) for
  // V4.1. A schema has them filled in, and row_format where both are the same.
  std::optional<Format> row_format;     // window rows and entries: fp8_tile64, fp8_row, bf16, fp8_tile32, nvfp4_row
  std::optional<Format> window_format;  // window rows, whatever row_format is
  std::optional<Format> entry_format;   // entries, whatever row_format is
  Format index_format = Format::mxfp4;  // index keys: mxfp4, nvfp4, fp8, bf16
  bool hadamard = true;                 // transform V4's index keys before they are quantised; V4.1's never are
  float index_global_scale = 1.0f;      // nvfp4's second scale, stored in every page
  DType pending_dtype = DType::f32;     // f32 or bf16: compressor inputs are rounded to it before any use

  // Layout. None of these changes an exported byte.
  HcaMode hca_mode = HcaMode::online;
  Arrangement arrangement = Arrangement::block_major;
  int page_alignment = 64;    // bytes, a multiple of 64; 576 gives FlashMLA's page stride
  int block_tokens = 0;       // a multiple of every ratio; 0: 128, or the next multiple of the ratios' lcm
  int max_rewind_tokens = 0;  // R: how far a request can be rewound
  int draft_layers = 0;       // extra SWA-only stages, each with its own length
  std::vector<int> layers;    // the layers this cache owns (a pipeline rank); empty: all

  // Sizes. Everything is allocated when the cache is made.
  int max_requests = 16;
  int spare_slots = 1;              // requests that can take a step of more than R + 1 tokens at the same time
  std::int64_t max_context = 8192;  // tokens of the longest request
  std::int64_t num_blocks = 0;      // 0: compute_block_budget of max_requests x max_context
  int max_step_tokens = 512;        // tokens of the largest step, padding included
  int index_tile_tokens = 0;        // tokens whose index scores index_topk's workspace holds at a time; 0: as many as
                                    // 256 MiB have room for, and at least 128

  PrefixOptions prefix;  // blocks and snapshots of ended requests; off unless enabled
};

}  // namespace kv4
