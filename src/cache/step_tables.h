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

  const ops::StepTableDesc& desc() const { return desc_; }
  std::int64_t max_items() const { return layout_.max_items; }
  std::byte* scratch() const { return scratch_.data(); }
  std::int64_t memory_bytes() const;
  ops::StepDesc describe(const Step& step) const;

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
  bool has_replays_;              // false: every window begins at 0
  std::vector<BlockId> blocks_;   // [max_requests, blocks_per_request]
  std::vector<Changed> changed_;  // [max_requests]
  std::vector<std::int32_t> changed_rows_;
  std::vector<ops::BlockRange> ranges_;  // of one transfer, with their values
  std::vector<BlockId> values_;
};

}  // namespace kv4
