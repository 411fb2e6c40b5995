// What KVCacheManager and LayerCacheHandle share.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/one_thread.h"
#include "cache/prefix_cache.h"
#include "cache/rope_tables.h"
#include "cache/sequence.h"
#include "cache/step.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/statistics.h"

namespace kv4 {

// Invariants between calls:
// 1. A running request holds exactly ceil(length / block_tokens) blocks, the first entries of its block table row; the
// rest is -1. In a replay it also holds those up to its end.
// 2. It holds one state slot. Free slots are at least the free request rows + spare_slots, except while a step holds
// spares.
// 3. Only blocks with one holder that are not published are written; only by the request that holds them.
// 4. Of a request's blocks exactly the first chain.blocks are published; the index's slots up to chain.tail name them,
// and the request has one reference on each.
// 5. While a step is open its requests' lengths, blocks and slots change only through commit and abort.
// Whatever a call allocates, it allocates before it changes anything: where memory is refused, the cache is as it was.
struct KVCacheManager::Impl {
  OneThread driver;  // of every public call
  CacheSchema schema;
  std::shared_ptr<Backend> backend;
  BlockAllocator allocator;
  PagedKVPool kv_pool;
  StateCachePool state_pool;
  StepTables tables;
  DeviceMemory index_workspace, attend_workspace;
  std::unique_ptr<std::int32_t[]> token_ids;  // [num_blocks, block_tokens]
  std::optional<PrefixCache> prefix;

  std::vector<Sequence> sequences;  // [max_requests]
  std::vector<std::int32_t> free_rows;
  std::vector<std::int32_t> generations;  // [max_requests] a row's ids differ from one request to the next

  bool step_open = false;
  bool step_written = false;  // some operation of the open step has written
  bool captured = false;      // operations were recorded: from then on any step may have run without a call
  OpenStep open;
  std::int64_t last_step_id = 0;
  std::vector<std::int64_t> seen_in_step;  // [max_requests] step id that last named the row

  std::vector<ops::LayerDesc> layers;     // [owned layers]
  ImageLayout snapshot_parts;             // where snapshots have what
  std::vector<ops::Boundary> boundaries;  // of the open step, as a backend is told
  // Snapshots that a commit takes from the rings go in one copy. Room for them is made before anything changes.
  std::vector<ops::CopyPiece> snapshot_pieces;
  std::vector<SnapshotId> snapshot_targets;
  ImageLayout snapshot_at;            // of the one that is taken
  std::size_t pieces_per_snapshot{};  // at most
  // Rotation by layer: SWA layers turn at one base, the others, and their entries, at another.
  std::optional<RopeTables> swa_angles, compress_angles;
  ops::RopeDesc swa_rope, compress_rope;
  std::vector<const float*> raw_norm_weights;  // [owned layers], null: not bound

  CallTimes times;
  ShortageCounts admit_shortages, prepare_forward_shortages;

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

  /// A slot for a new request, given back unless it is kept.
  struct NewSlot {
    explicit NewSlot(StateCachePool& pool_in) : pool(pool_in), slot(pool.acquire_slot()) {}
    ~NewSlot() {
      if (slot) pool.release_slot(*slot);
    }
    NewSlot(const NewSlot&) = delete;
    NewSlot& operator=(const NewSlot&) = delete;
    std::int32_t keep() { return std::exchange(slot, std::nullopt).value(); }

    StateCachePool& pool;
    std::optional<std::int32_t> slot;  // none: all are taken
  };
  RequestId start_row(std::int32_t slot);
  void copy_block(BlockId from, BlockId to);
  void drop_blocks(std::int32_t row, std::int64_t keep);
  std::int64_t num_held(std::int32_t row) const;  // blocks of a request
  std::span<const std::int32_t> block_ids_of(BlockId block) const {
    return {&token_ids[std::int64_t{block} * block_tokens()], static_cast<std::size_t>(block_tokens())};
  }
  bool is_long(std::int32_t count) const { return count > schema.options.max_rewind_tokens + 1; }

  std::string digest_table(const TensorView& table) const;  // dense, in the backend's memory
  TenantId tenant_of(RequestId request) const {
    return sequences[static_cast<std::size_t>(request % schema.options.max_requests)].chain.tenant;
  }
  // manager_prefix.cc. Without a prefix cache every block is free or held.
  std::int64_t num_available(TenantId tenant) const;
  BlockId take_block(TenantId tenant);  // there is one
  void free_evicted(const Evicted& gone);
  void cut_chain(std::int32_t row, std::int64_t blocks);  // keeps the first `blocks`
  void end_chain(std::int32_t row);
  void fork_chain(PrefixChain parent, Sequence& child, std::int64_t shared_blocks);
  void begin_chain(std::int32_t row, PrefixIdentity name, std::uint16_t weights_slot);
  void restore_slot(std::int32_t slot, const PrefixMatch& match);
  void share_prefix(std::int32_t row, const PrefixMatch& match);
  void hold_chain(std::int32_t row, const KeptChain& kept);  // which is pinned for it
  void check_prompt(const Prompt& prompt) const;             // throws where it cannot be admitted
  /// `known`: keys of its first blocks, which are not hashed again.
  Expected<Admission> admit(const Prompt& prompt, PrefixIdentity name, std::span<const BlockKey> known);
  void check_replay(const StepItem& item, std::int32_t row) const;
  void publish(std::int32_t row);

  // manager_blocks.cc. The blocks of `keys` from `at` on, `count` of them or as many as there is room for; keys before
  // `at` are kept. `write` queues the bytes of the first blocks that were found room for, or of a place for a snapshot.
  std::int64_t insert_blocks(const Prompt& prompt, std::span<const BlockKey> keys, std::size_t at, std::size_t count,
                             const std::function<void(std::span<const BlockId>)>& write);
  bool insert_snapshot(const BlockKey& key, const std::function<void(std::uint8_t*)>& write);

  // Snapshots: of boundaries that the rings still hold at commit, and of those inside a long step.
  bool keeps_snapshot(const Sequence& s, std::int64_t position) const;
  bool wants_latest(std::int64_t position, std::int64_t length) const;
  void reserve_boundaries(std::size_t item, const StepPart& part);
  void describe_boundaries(std::size_t layer, ops::BoundaryParams& params);
  void reserve_snapshots(std::int64_t count);  // save_snapshots() of as many allocates nothing then
  void save_snapshots(std::int32_t row, std::int64_t old_length);
  void send_snapshots();
  SnapshotId take_snapshot(std::int32_t row, std::int64_t position);
  void leave_latest(Sequence& s);
  bool boundaries_saved() const;  // by every layer
  void give_boundaries();

  void check_items(std::span<const StepItem> items, int group);
  std::int64_t blocks_needed(const StepItem& item) const;  // new ones, and a copy on write
  Shortage find_shortage(std::span<const StepItem> items, int group) const;
  void reserve(std::span<const StepItem> items, int group);
  void check_open(const Step& step, const char* what) const;
  void close_step();
};

}  // namespace kv4
