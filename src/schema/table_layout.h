// The step's int32 tables: one allocation at a fixed address, so that captured work can read the next step's values.
#pragma once

#include <cstdint>
#include <vector>

#include "kv4/schema.h"

namespace kv4 {

/// Offsets in int32 elements from the start of the tables. M = max_step_tokens, I = max_items, Q = max_requests.
struct TableLayout {
  std::int64_t max_items = 0;
  std::int64_t items = 0;           // [I] StepRecord
  std::int64_t tokens = 0;          // [M] StepRecord
  std::int64_t item_rows = 0;       // [I], as ops::StepTableDesc from here on
  std::int64_t item_slots = 0;      // [I]
  std::int64_t csa_lens = 0;        // [I]
  std::int64_t hca_lens = 0;        // [I]
  std::int64_t ring_heads = 0;      // [I]
  std::int64_t ring_positions = 0;  // [I, window + R]
  std::int64_t window_begins = 0;   // [Q]
  std::int64_t narrowed = 0;        // V4.1, NarrowedTables: [I + 2 M] StepRecord, [Q]
  std::int64_t narrowed_count = 0;  // elements; 0: none
  std::int64_t block_table = 0;     // [Q, blocks_per_request]
  std::int64_t total = 0;
};

TableLayout table_layout(const CacheSchema& schema);

/// The quantised window rows of a step's tokens: for each owned layer payloads [M, p], then scales [M, s].
struct ScratchPart {
  std::int64_t payload_at = 0;
  std::int64_t scale_at = 0;
};
struct ScratchLayout {
  std::vector<ScratchPart> layers;
  std::int64_t bytes = 0;
};
ScratchLayout scratch_layout(const CacheSchema& schema);

/// The number of places for snapshots, and the bytes of one.
struct SnapshotPlaces {
  std::int64_t count = 0;
  std::int64_t bytes = 0;
};
SnapshotPlaces snapshot_places(const CacheSchema& schema);

constexpr std::int64_t kPrefixEntryBytes = 88, kPrefixEventBytes = 34, kPrefixCellBytes = 8;
/// Cells of the table of keys: at most half of them are in use.
constexpr std::int64_t prefix_cells(std::int64_t blocks) {
  std::int64_t cells = 4;
  while (cells < 2 * blocks) cells *= 2;
  return cells;
}
/// Bytes of the prefix index, with an int32 per block of the longest request and one more; 0 without a prefix index.
std::int64_t prefix_index_bytes(const CacheSchema& schema);

/// Tokens whose scores and queries the index workspace holds: what the options say, or a default by their bytes.
std::int64_t index_tile_tokens(const CacheSchema& schema);
/// Bytes of the scores and queries of index_tile_tokens tokens; 0 if no layer has index keys.
std::int64_t index_workspace_bytes(const CacheSchema& schema);
/// V4.1's candidates of a step: blocks of entries per token, and the bytes of all; 0 without a candidate source.
struct CandidateLayout {
  std::int64_t stride = 0;     // int32 elements of a token: the most blocks that it keeps
  std::int64_t counts_at = 0;  // offset of [max_step_tokens] int32, after the blocks
  std::int64_t bytes = 0;
};
CandidateLayout candidate_layout(const CacheSchema& schema);

/// Bytes for long lists of entries that attend reads whole; 0 if there are none.
std::int64_t attend_workspace_bytes(const CacheSchema& schema);

}  // namespace kv4
