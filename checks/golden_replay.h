// Replays a recorded layer: its inputs go through a real one-layer cache, and all outputs of the cache are kept for the
// checks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "golden_recording.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::checks {

/// The results of one replay. Row i of `window` is position i; `_view` matrices are the same rows by the views' bytes.
struct Capture {
  CacheSchema schema;
  Matrix window, window_view;      // [tokens, head_dim]
  Matrix entries, entries_view;    // [tokens / ratio, head_dim]
  Matrix keys, keys_view;          // [tokens / ratio, index_dim]
  Matrix ring_kv, ring_gate;       // [tokens % ratio, columns]: the main compressor's open rows in the state slot
  std::int64_t changed_rows = 0;   // gathers of an earlier row that differ from its first gather
  std::int64_t wrong_lengths = 0;  // gathers whose number of rows differs from the model's
  std::int64_t wrong_chosen = 0;   // rows of chosen entries that are not the entry, or have a wrong mark
  // Results of the read operations, by token.
  Matrix scores;                                // [tokens, tokens / ratio], -infinity for entries that are not visible
  std::vector<std::vector<std::int32_t>> topk;  // [tokens]: entries
  Matrix attention;                             // [tokens, heads * head_dim]
  CanonicalImage image;
};

/// The source of the attended entries: the recording, or index_topk.
enum class AttendTo : std::uint8_t { recorded, own };

/// Appends all tokens in steps of `chunks`, then one by one.
Capture replay(const Recording& recording, CacheOptions options, const std::vector<int>& chunks, AttendTo attend_to,
               const std::shared_ptr<Backend>& backend);

}  // namespace kv4::checks
