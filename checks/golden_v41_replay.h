// Replays a recorded model of V4.1: its inputs go through a real cache of all its layers, step by step, and all outputs
// of the cache are kept for the checks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "golden_v41_recording.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::checks {

/// The source of entries and index keys: the compressors' inputs, with keys by the bound weight; or the recorded
/// latents and projections of keys.
enum class EntrySource : std::uint8_t { projections, latents };

/// The results of one layer. Of the recorded queries, M of them.
struct CaptureLayerV41 {
  RecordedRows window, entries, keys;  // as stored; entries and keys of owners
  Matrix window_values;                // [tokens, head_dim] as gathered
  Matrix entry_values, key_values;     // as gathered by this layer, an owner or not; by rankers keys, too
  Matrix latents;                      // [entries, head_dim] that append gave out
  std::int64_t changed_latents = 0;    // rows of tokens that complete no entry and were written
  Matrix scores;                                      // [M, entries]
  std::int64_t other_scores = 0;                      // scores of an encoded query that differ from the query's own
  std::vector<std::vector<std::int32_t>> lists;       // [M] ascending
  std::vector<std::vector<std::int32_t>> candidates;  // [M]
  Matrix attention;                                   // [M, heads * head_dim]
};

struct CaptureV41 {
  CacheSchema schema;
  std::vector<CaptureLayerV41> layers;
  Matrix draft_attention;  // [D * block, heads * head_dim]
  CanonicalImage image;    // before the drafts
};

/// Appends all tokens in steps of `chunks`, then one by one. Every layer attends to the list of its ranker: the
/// recorded list with EntrySource::projections, the cache's own one with EntrySource::latents.
CaptureV41 replay_v41(const RecordingV41& recording, EntrySource source, const std::vector<int>& chunks,
                      const std::shared_ptr<Backend>& backend);

}  // namespace kv4::checks
