// The running requests: their ids, lengths, state slots and prefix chains, one row each.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "cache/sequence.h"
#include "kv4/state_cache_pool.h"

namespace kv4 {

/// A row is also a request's place in the block table. Rows are [0, max_requests).
class RequestTable {
 public:
  explicit RequestTable(const CacheSchema& schema);

  /// The row of a running request; throws if it does not run.
  std::int32_t row_of(RequestId request) const;
  /// The same; throws as well if the request is in the open step. `what`: the refused call, for the message.
  std::int32_t idle_row_of(RequestId request, const char* what) const;
  /// The row of a request that is known to run.
  std::int32_t known_row_of(RequestId request) const { return request % max_requests(); }

  Sequence& operator[](std::int32_t row) { return sequences_[row]; }
  const Sequence& operator[](std::int32_t row) const { return sequences_[row]; }
  std::span<Sequence> rows() { return sequences_; }
  std::span<const Sequence> rows() const { return sequences_; }

  /// A layer group's progress; throws if there is no such group.
  const GroupProgress& progress(std::int32_t row, int group) const;
  GroupProgress& progress(std::int32_t row, int group);
  std::vector<std::int64_t> lengths_of(RequestId request) const;  // [groups]

  bool full() const { return free_rows_.empty(); }
  int num_running() const { return max_requests() - static_cast<int>(free_rows_.size()); }
  std::vector<RequestId> ids() const;

  /// Begins a request with this state slot and returns its row; a row must be free.
  std::int32_t start(std::int32_t slot);
  void end(std::int32_t row);

 private:
  std::int32_t max_requests() const { return schema_.options.max_requests; }

  const CacheSchema& schema_;
  std::vector<Sequence> sequences_;  // [max_requests]
  std::vector<std::int32_t> free_rows_;
  std::vector<std::int32_t> generations_;  // [max_requests] a row's ids differ from one request to the next
};

/// A slot for a new request, given back unless it is kept.
class NewSlot {
 public:
  explicit NewSlot(StateCachePool& pool) : pool_(pool), slot_(pool.acquire_slot().value_or(-1)) {}
  ~NewSlot() {
    if (slot_ >= 0) pool_.release_slot(slot_);
  }
  NewSlot(const NewSlot&) = delete;
  NewSlot& operator=(const NewSlot&) = delete;

  explicit operator bool() const { return slot_ >= 0; }  // false: all are taken
  std::int32_t operator*() const { return slot_; }
  std::int32_t keep() { return std::exchange(slot_, -1); }

 private:
  StateCachePool& pool_;
  std::int32_t slot_;  // -1: none
};

}  // namespace kv4
