// The tables a step's operations read, at fixed addresses, and what must be undone if the step is aborted.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "kv4/kv_cache_manager.h"
#include "schema/table_layout.h"

namespace kv4 {

/// Owns the int32 tables and the step's window scratch.
class StepTables {
 public:
  StepTables(const CacheSchema& schema, std::shared_ptr<Backend> backend);
  ~StepTables();
  StepTables(const StepTables&) = delete;
  StepTables& operator=(const StepTables&) = delete;

  std::int32_t* array(std::int64_t offset) const { return tables_ + offset; }
  std::int32_t& block(std::int32_t row, std::int64_t index) const {
    return tables_[layout_.block_table + row * blocks_per_request_ + index];
  }
  const TableLayout& layout() const { return layout_; }
  std::byte* scratch() const { return scratch_; }
  std::int64_t memory_bytes() const { return table_bytes_ + scratch_bytes_; }
  ops::StepDesc describe(const Step& step, int block_tokens) const;

 private:
  std::shared_ptr<Backend> backend_;
  TableLayout layout_;
  std::int64_t blocks_per_request_ = 0;
  std::int64_t table_bytes_ = 0;
  std::int64_t scratch_bytes_ = 0;
  std::int32_t* tables_ = nullptr;
  std::byte* scratch_ = nullptr;
};

/// A block that prepare put into a request's table: at `index`, instead of `old_block` (-1: there was none).
struct BlockChange {
  std::int32_t row = 0;
  std::int64_t index = 0;
  BlockId old_block = -1;
  BlockId new_block = -1;
};

/// A request's part in the open step.
struct StepPart {
  std::int32_t row = 0;
  std::int32_t count = 0;
  std::int32_t first_token = 0;
  std::int32_t spare = -1;  // slot a long step writes; -1: in place
};

struct OpenStep {
  Step step;
  std::vector<StepPart> parts;
  std::vector<BlockChange> changes;
};

}  // namespace kv4
