#include "cache/step.h"

#include <algorithm>

#include "base/check.h"

namespace kv4 {

StepTables::StepTables(const CacheSchema& schema, std::shared_ptr<Backend> backend)
    : backend_(std::move(backend)), layout_(table_layout(schema)), blocks_per_request_(schema.blocks_per_request) {
  table_bytes_ = 4 * layout_.total;
  scratch_bytes_ = scratch_layout(schema).bytes;
  tables_ = reinterpret_cast<std::int32_t*>(backend_->allocate(table_bytes_));
  try {
    scratch_ = backend_->allocate(scratch_bytes_);
  } catch (...) {
    backend_->deallocate(reinterpret_cast<std::byte*>(tables_), table_bytes_);
    throw;
  }
  std::fill_n(array(layout_.block_table), layout_.total - layout_.block_table, -1);
}

StepTables::~StepTables() {
  backend_->deallocate(reinterpret_cast<std::byte*>(tables_), table_bytes_);
  backend_->deallocate(scratch_, scratch_bytes_);
}

ops::StepDesc StepTables::describe(const Step& step, int block_tokens) const {
  ops::StepDesc out;
  out.num_tokens = step.num_tokens;
  out.num_items = step.num_items;
  out.block_tokens = block_tokens;
  out.blocks_per_request = static_cast<std::int32_t>(blocks_per_request_);
  out.token_rows = array(layout_.token_rows);
  out.positions = array(layout_.positions);
  out.item_rows = array(layout_.item_rows);
  out.read_slots = array(layout_.read_slots);
  out.write_slots = array(layout_.write_slots);
  out.lengths = array(layout_.lengths);
  out.counts = array(layout_.counts);
  out.first_tokens = array(layout_.first_tokens);
  out.block_table = array(layout_.block_table);
  return out;
}

}  // namespace kv4
