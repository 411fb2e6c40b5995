// The step's int32 tables: one allocation at a fixed address, so that captured work can read the next step's values.
#pragma once

#include <cstdint>
#include <vector>

#include "kv4/schema.h"

namespace kv4 {

/// Offsets in int32 elements from the start of the tables. M = max_step_tokens, I = max_items, Q = max_requests.
struct TableLayout {
  std::int64_t max_items = 0;
  // per token
  std::int64_t token_rows = 0;  // [M] row of the per-request arrays, -1: padded
  std::int64_t positions = 0;   // [M]
  // per item
  std::int64_t item_rows = 0;       // [I] -1: padded
  std::int64_t item_slots = 0;      // [I] state slot after the step, -1: padded
  std::int64_t csa_lens = 0;        // [I] entries after the step
  std::int64_t hca_lens = 0;        // [I]
  std::int64_t ring_heads = 0;      // [I]
  std::int64_t ring_positions = 0;  // [I, window + R]
  // per request
  std::int64_t read_slots = 0;    // [Q]
  std::int64_t write_slots = 0;   // [Q] differs from read_slots in a long step
  std::int64_t lengths = 0;       // [Q] committed length of the step's group
  std::int64_t counts = 0;        // [Q] tokens in the step
  std::int64_t first_tokens = 0;  // [Q] index of its first token in the step
  std::int64_t block_table = 0;   // [Q, blocks_per_request], -1 padded
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

}  // namespace kv4
