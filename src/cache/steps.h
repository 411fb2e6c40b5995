// The open step of a cache with its changes, and the committed steps.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/blocks.h"
#include "cache/prefix_chains.h"
#include "cache/request_table.h"
#include "cache/snapshots.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {

class Steps {
 public:
  Steps(CacheMemory& memory, RequestTable& requests, Blocks& blocks, PrefixChains& chains, Snapshots& snapshots);

  // KVCacheManager documents these calls.
  Expected<Step> prepare(std::span<const StepItem> items, int group);
  void commit(const Step& step);
  void abort(const Step& step);
  bool finished(const Step& step) const;

  bool is_open() const { return is_open_; }
  /// The open step, and its items, padding included.
  const Step& open() const { return step_; }
  std::span<const ops::StepRecord> items() const { return items_; }
  /// V4.1: whether the decoder runs on fewer tokens, and the items as it sees them.
  bool narrowed() const { return narrowed_; }
  std::span<const ops::StepRecord> decoder_items() const { return narrowed_ ? decoder_items_ : items_; }
  /// Notes that an operation of the open step writes.
  void note_write();

 private:
  // A block that prepare put into a request's table at `index`, replacing `old_block` (-1: none).
  struct BlockChange {
    std::int32_t row = 0;
    std::int64_t index = 0;
    BlockId old_block = -1;
    BlockId new_block = -1;
  };
  // A request's part in the open step.
  struct Part {
    std::int32_t row = 0;
    std::int32_t count = 0;
    std::int32_t spare = -1;  // slot a long step writes; -1: in place
    bool narrowed = false;
  };
  struct Commit {
    std::int64_t step_id = 0;
    std::int64_t ticket = 0;
  };

  void check_items(std::span<const StepItem> items, int group);
  static bool is_narrowed(const StepItem& item) { return item.decoder_count > 0 && item.decoder_count < item.count; }
  // A narrowed item is a long one: the decoder's rows do not follow those of the state slot.
  bool is_long(const StepItem& item) const {
    return item.count > memory_.schema.options.max_rewind_tokens + 1 || is_narrowed(item);
  }
  void check_narrowed(const StepItem& item, std::size_t index, int group) const;
  void narrow(std::span<const StepItem> items);
  std::int64_t blocks_needed(const StepItem& item) const;  // new blocks and copies on write
  Shortage find_shortage(std::span<const StepItem> items, int group) const;
  void reserve(std::span<const StepItem> items, int group);
  void reserve_blocks(const StepItem& item, const Part& part);
  void check_open(const Step& step, const char* what) const;
  void close();

  CacheMemory& memory_;
  RequestTable& requests_;
  Blocks& blocks_;
  PrefixChains& chains_;
  Snapshots& snapshots_;

  bool is_open_ = false;
  bool written_ = false;   // some operation of the open step has written
  bool captured_ = false;  // operations were recorded: from then on a step may run without a call
  Step step_;
  std::vector<ops::StepRecord> items_;
  std::vector<std::int32_t> window_begins_;  // [num_items]
  bool narrowed_ = false;                    // by the step
  std::vector<ops::StepRecord> decoder_items_;
  std::vector<std::int32_t> decoder_begins_;
  std::vector<Part> parts_;
  std::vector<BlockChange> changes_;

  std::int64_t last_id_ = 0;
  std::vector<std::int64_t> seen_in_step_;  // [max_requests] step id that last named the row
  std::array<Commit, 64> commits_{};        // the latest ones, in rotation
  std::size_t num_commits_ = 0;
};

}  // namespace kv4
