// The tables that a step's operations read, at fixed addresses.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/device_memory.h"
#include "kv4/kv_cache_manager.h"
#include "schema/table_layout.h"

namespace kv4 {

/// Owns the tables, the step's window scratch, and the host's copy of the block table. Changes of the block table go to
/// the device with the next step.
class StepTables {
 public:
  StepTables(const CacheSchema& schema, std::shared_ptr<Backend> backend);

  BlockId block(std::int32_t row, std::int64_t index) const { return blocks_[at(row, index)]; }
  const BlockId* row(std::int32_t row) const { return &blocks_[at(row, 0)]; }
  void set_block(std::int32_t row, std::int64_t index, BlockId block);

  /// Sets the block for entries that exist already (ops::StepTableDesc).
  void set_dummy_block(BlockId block) { desc_.dummy_block = block; }

  /// Sends items, the first position of each one's window, and changed blocks to the tables.
  void update(std::span<const ops::StepRecord> items, std::span<const std::int32_t> window_begins,
              std::int32_t num_tokens);

  /// A narrowed step's items with all their tokens, and as the decoder sees them: it begins later.
  struct Narrowed {
    std::span<const ops::StepRecord> items, decoder_items;
    std::span<const std::int32_t> decoder_begins;  // of their windows
    std::int32_t num_tokens = 0;
  };
  /// V4.1: sends what the last owner and the decoder read in a narrowed step, after update().
  void update_narrowed(const Narrowed& step);

  const ops::StepTableDesc& desc() const { return desc_; }
  std::int64_t max_items() const { return layout_.max_items; }
  std::byte* scratch() const { return scratch_.data(); }
  std::int64_t memory_bytes() const;
  ops::StepDesc describe(const Step& step) const;
  /// A narrowed step in the decoder: fewer tokens, and windows that begin with them.
  ops::StepDesc describe_decoder(const Step& step) const;
  /// The decoder's tokens as queries of a layer that has window rows of all tokens.
  ops::StepDesc describe_queries(const Step& step) const;

 private:
  // Entries [begin, end) of a row that differ from the device's; empty: none do.
  struct Changed {
    std::int32_t begin = 0, end = 0;
  };
  std::size_t at(std::int32_t row, std::int64_t index) const {
    return row * std::int64_t{desc_.blocks_per_request} + index;
  }
  void send(std::span<const ops::StepRecord> items, std::span<const std::int32_t> window_begins,
            std::int32_t num_tokens);

  std::shared_ptr<Backend> backend_;
  TableLayout layout_;
  DeviceMemory tables_;
  DeviceMemory scratch_;
  ops::StepTableDesc desc_;
  // Of a narrowed step, in the tables: items and tokens in the decoder, tokens as queries, begins of windows.
  const ops::StepRecord *decoder_items_ = nullptr, *decoder_tokens_ = nullptr, *query_tokens_ = nullptr;
  const std::int32_t* decoder_begins_ = nullptr;
  std::vector<std::int32_t> narrowed_;  // the same on the host
  bool has_replays_;                    // false: every window begins at 0
  std::vector<BlockId> blocks_;   // [max_requests, blocks_per_request]
  std::vector<Changed> changed_;  // [max_requests]
  std::vector<std::int32_t> changed_rows_;
  std::vector<ops::BlockRange> ranges_;  // of one transfer, with their values
  std::vector<BlockId> values_;
};

}  // namespace kv4
