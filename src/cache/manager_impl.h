// What KVCacheManager and LayerCacheHandle share.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "cache/rope_tables.h"
#include "cache/sequence.h"
#include "cache/step.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {

// Invariants between calls:
// 1. A running request holds exactly ceil(length / block_tokens) blocks, the first entries of its block table row; the
// rest is -1.
// 2. It holds one state slot. Free slots are at least the free request rows + spare_slots, except while a step holds
// spares.
// 3. Only blocks with one holder that are not published are written; only by the request that holds them.
// 4. While a step is open its requests' lengths, blocks and slots change only through commit and abort.
struct KVCacheManager::Impl {
  CacheSchema schema;
  std::shared_ptr<Backend> backend;
  BlockAllocator allocator;
  PagedKVPool kv_pool;
  StateCachePool state_pool;
  StepTables tables;
  DeviceMemory index_workspace;
  std::unique_ptr<std::int32_t[]> token_ids;  // [num_blocks, block_tokens]

  std::vector<Sequence> sequences;  // [max_requests]
  std::vector<std::int32_t> free_rows;
  std::vector<std::int32_t> generations;  // [max_requests] a row's ids differ from one request to the next

  bool step_open = false;
  bool step_written = false;  // some operation of the open step has written
  bool captured = false;      // operations were recorded: from then on any step may have run without a call
  OpenStep open;
  std::int64_t last_step_id = 0;
  std::vector<std::int64_t> seen_in_step;  // [max_requests] step id that last named the row

  std::vector<ops::LayerDesc> layers;  // [owned layers]
  // Rotation by layer: SWA layers turn at one base, the others, and their entries, at another.
  std::optional<RopeTables> swa_angles, compress_angles;
  ops::RopeDesc swa_rope, compress_rope;
  std::vector<const float*> raw_norm_weights;  // [owned layers], null: not bound

  struct Commit {
    std::int64_t step_id = 0;
    std::int64_t ticket = 0;
  };
  std::array<Commit, 64> commits{};  // the latest ones, in rotation
  std::size_t num_commits = 0;

  Impl(const ModelConfig& config, const CacheOptions& options, std::shared_ptr<Backend> backend_in);

  int block_tokens() const { return schema.block_tokens; }
  std::int64_t num_blocks_of(std::int64_t length) const;
  std::int32_t row_of(RequestId request) const;                         // throws if it does not run
  std::int32_t idle_row_of(RequestId request, const char* what) const;  // throws if it is in the open step
  GroupProgress& progress(std::int32_t row, int group);
  std::vector<std::int64_t> lengths_of(RequestId request) const;  // [groups]

  RequestId start_row(std::int32_t slot);
  void copy_block(BlockId from, BlockId to);
  void drop_blocks(std::int32_t row, std::int64_t keep, std::int64_t have);
  bool is_long(std::int32_t count) const { return count > schema.options.max_rewind_tokens + 1; }

  void check_items(std::span<const StepItem> items, int group);
  Shortage find_shortage(std::span<const StepItem> items, int group) const;
  void reserve(std::span<const StepItem> items, int group);
  void check_open(const Step& step, const char* what) const;
  void close_step();
};

}  // namespace kv4
