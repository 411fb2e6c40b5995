// Transfers of records between the caller's memory and a segment. A payload at an address that is a multiple of 4,096
// moves without a copy, except for its last, partial block.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tier/file_system.h"
#include "tier/record_guard.h"
#include "tier/segment_file.h"

namespace kv4::tier {

/// Several records, one after the other, in one write.
class RecordWrite : public IoOp {
 public:
  /// Size of the buffer for one record. `guard`: null where the record is written as it is.
  static std::int64_t buffer_bytes(std::span<const std::byte> payload, const RecordGuard* guard);

  /// Begins a write at `at`; add() may take `needed_bytes` of the buffer.
  void start(SegmentFile& segment, std::int64_t at, std::int64_t needed_bytes);
  /// Adds the next record; `payload` stays until the write is done. Sets the header's protection and digest. False: the
  /// record could not be protected, and is written as a tombstone.
  bool add(RecordHeader header, std::span<const std::byte> payload, const RecordGuard* guard);

  std::size_t first = 0, last = 0;  // its range of the batch
  BlockBuffer buffer;

 private:
  std::span<std::byte> take(std::int64_t bytes);

  SegmentFile* segment_ = nullptr;
  std::int64_t end_ = 0;  // end of the last record, in the file
  std::span<std::byte> free_;
};

/// One record in one read.
class RecordRead : public IoOp {
 public:
  static std::int64_t buffer_bytes(std::span<const std::byte> to, std::int64_t length);

  /// Begins a read, straight into `to` where that is aligned and long enough.
  void start(SegmentFile& segment, std::int64_t at, std::int64_t length, std::span<std::byte> to);
  /// Call after the transfer. The payload lies in `to` where it was read there, else in the buffer.
  ReadRecord finish();
  /// Overwrites the payload with zeros, in `to` or the buffer.
  void clear();

  std::size_t index = 0;  // its place in the batch
  BlockBuffer buffer;

 private:
  SegmentFile* segment_ = nullptr;
  std::int64_t at_ = 0;
  std::span<std::byte> header_, payload_;
  std::span<const std::byte> rest_;  // of the payload, still in the buffer
};

/// A pool of transfers of one kind for a queue. Bounds the memory of their buffers, in flight and kept.
template <class Transfer>
class TransferPool {
 public:
  explicit TransferPool(int count) : all_(count) {}

  /// Begins a new batch; no transfer is under way.
  void reset() {
    free_.clear();
    for (Pooled& pooled : all_) free_.push_back(&pooled);
    used_bytes_ = 0;
  }
  /// Null: no transfer or no memory is free until one is given back.
  Transfer* take(std::int64_t buffer_bytes) {
    if (free_.empty() || (used_bytes_ > 0 && used_bytes_ + buffer_bytes > kMaxBytes)) return nullptr;
    Pooled* pooled = free_.back();
    free_.pop_back();
    used_bytes_ += pooled->bytes = buffer_bytes;
    return pooled;
  }
  void give(IoOp& op) {
    Pooled& pooled = static_cast<Pooled&>(op);
    used_bytes_ -= pooled.bytes;
    if (pooled.bytes > kKeptBytes) pooled.buffer = {};
    free_.push_back(&pooled);
  }

 private:
  static constexpr std::int64_t kMaxBytes = std::int64_t{64} << 20;  // in flight; a larger record goes alone
  static constexpr std::int64_t kKeptBytes = std::int64_t{1} << 20;  // per transfer

  struct Pooled : Transfer {
    std::int64_t bytes = 0;
  };
  std::vector<Pooled> all_;
  std::vector<Pooled*> free_;
  std::int64_t used_bytes_ = 0;
};

}  // namespace kv4::tier
