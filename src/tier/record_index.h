// The records of a store and their places: a hash table with open addressing and a seeded hash.
//
// Any thread may look records up or call set_aside(); one thread at a time makes other changes. No call waits for a
// disk.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tier/requests.h"

namespace kv4::tier {

struct StoreSegment;

struct RecordPlace {
  StoreSegment* segment = nullptr;
  std::int64_t offset = 0, length = 0;

  bool operator==(const RecordPlace&) const = default;
};

struct RecordEntry {
  RecordPlace place;
  std::uint64_t sequence = 0;
  RecordKind kind = RecordKind::value;
  std::uint16_t version = kRecordVersion;
  bool set_aside = false;  // a miss; the entry stays, so that the record is tombstoned when a newer one replaces it

  std::int64_t payload_bytes() const { return tier::payload_bytes(version, kind, place.length); }
};

class RecordIndex {
 public:
  /// `seed`: unpredictable, where others may write records.
  explicit RecordIndex(std::uint64_t seed = 0) : hash_{seed} {}

  std::optional<RecordEntry> find(const RecordId& id) const;
  /// Calls `use(entry)` under the lock, which keeps the entry's segment alive. False: there is no such record.
  template <class Use>
  bool visit(const RecordId& id, Use&& use) const {
    const std::lock_guard lock(mutex_);
    const std::uint32_t number = find_number(id);
    if (number != kNone) use(record(number).entry);
    return number != kNone;
  }
  /// Answers all requests: -1 where a record is missing or was set aside.
  void look_up(std::span<ExistsRequest> requests) const;

  /// Makes room for so many more records: so many calls of put() then allocate nothing, and cannot throw.
  void make_room(std::int64_t records);
  /// Returns the entry that was there before, if any.
  std::optional<RecordEntry> put(const RecordId& id, const RecordEntry& entry);
  void erase(const RecordId& id) noexcept;
  /// False: the record is no longer at that place, or is set aside already.
  bool set_aside(const RecordId& id, const RecordPlace& place);
  void clear();
  void reserve(std::int64_t records);

  /// Calls `use(id, entry)` for all records, in no order. For the thread that makes changes; the references stay valid
  /// until the record is erased.
  template <class Use>
  void for_each(Use&& use) const {
    const std::lock_guard lock(mutex_);
    for (const Cell& cell : cells_)
      if (cell.number != kNone) use(record(cell.number).id, record(cell.number).entry);
  }

  std::int64_t size() const;
  /// The number of records without those set aside.
  std::int64_t sound_records() const;
  std::int64_t payload_bytes() const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  static constexpr std::size_t kChunkRecords = 4096;
  struct Cell {
    std::uint32_t tag = 0;  // other bits of the hash
    std::uint32_t number = kNone;
  };
  struct Record {
    RecordId id;
    RecordEntry entry;
  };
  using Chunk = std::array<Record, kChunkRecords>;

  std::uint64_t hash(const RecordId& id) const { return hash_(id); }
  static std::uint32_t tag(std::uint64_t hash) { return static_cast<std::uint32_t>(hash); }
  std::size_t home(std::uint64_t hash) const { return (hash >> 32) & mask(); }
  std::size_t mask() const { return cells_.size() - 1; }
  Record& record(std::uint32_t number) const { return (*chunks_[number / kChunkRecords])[number % kChunkRecords]; }
  std::size_t find_cell(const RecordId& id, std::uint64_t hash) const;  // of the record, or where it would go
  std::uint32_t find_number(const RecordId& id) const { return cells_[find_cell(id, hash(id))].number; }
  void resize(std::size_t cells);
  void add_chunk();
  void count(const RecordEntry& entry, int sign);

  // Invariants:
  //   1. cells_ is a power of two and at most half full; every record is in the run of cells that begins at its home.
  //   2. A record number is in one cell, or in free_, or has never been used. free_ has room for all numbers, so that
  //      erase() allocates nothing.
  const SeededIdHash hash_;
  mutable std::mutex mutex_;
  std::vector<Cell> cells_ = std::vector<Cell>(1024);
  std::vector<std::unique_ptr<Chunk>> chunks_;  // records never move
  std::vector<std::uint32_t> free_;
  std::uint32_t next_number_ = 0;
  std::int64_t size_ = 0, sound_records_ = 0, payload_bytes_ = 0;
};

}  // namespace kv4::tier
