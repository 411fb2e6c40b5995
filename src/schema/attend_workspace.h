// Layout of an attend workspace: arrival counters of a token's CTAs, then a partial output of each CTA: 64 heads of
// rows of that width, then the staged rows of a chunk. A cache's memory plan and the kernels share it.
#pragma once

#include <cstdint>

namespace kv4::ops {

constexpr std::int32_t kAttendPartialWidth = 512;
constexpr std::int64_t kAttendCounterBytes = 2048;   // of all arrival counters
constexpr std::int64_t kAttendPartialBytes = 67072;  // of one partial output, with its softmax statistics

// Staged rows: the item of each token, a block of zeros, then of each item its window rows and its entries, in bf16.
constexpr std::int64_t kStagedRowBytes = 2 * kAttendPartialWidth, kStagedBlockRows = 64;
/// Rows are staged for steps of so many tokens that meet a row so often on average. Measured on an H200 on 2026-11-20,
/// with 1,024 and 4,096 tokens: ten times gain 5 %, 19 times and more gain 15 to 25 %.
constexpr std::int64_t kFewestStagedTokens = 256, kFewestMeetings = 8;

constexpr std::int64_t whole_staged_blocks(std::int64_t rows) {
  return (rows + kStagedBlockRows - 1) / kStagedBlockRows * kStagedBlockRows;
}
constexpr std::int64_t staged_table_bytes(std::int64_t tokens) { return (4 * tokens + 1023) / 1024 * 1024; }
/// Number of the first entry, behind the zeros and the items' windows, each of which begins and ends within a block.
constexpr std::int64_t staged_entries_at(std::int64_t tokens, std::int64_t items, std::int64_t window_tokens) {
  return kStagedBlockRows + whole_staged_blocks(tokens + items * (window_tokens + 2 * kStagedBlockRows));
}
/// With so many entries of each item, in whole blocks.
constexpr std::int64_t staged_bytes(std::int64_t tokens, std::int64_t items, std::int64_t window_tokens,
                                    std::int64_t entries) {
  const std::int64_t rows = staged_entries_at(tokens, items, window_tokens) + items * whole_staged_blocks(entries);
  return staged_table_bytes(tokens) + rows * kStagedRowBytes;
}

}  // namespace kv4::ops
