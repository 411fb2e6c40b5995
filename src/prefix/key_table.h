// Block key -> slot: open addressing over the keys' own uniform bytes, sized once, at most half full.
#pragma once

#include <cstdint>
#include <vector>

#include "prefix/block_hash.h"
#include "prefix/eviction.h"
#include "schema/table_layout.h"

namespace kv4 {

class KeyTable {
 public:
  explicit KeyTable(std::int64_t capacity) : cells_(prefix_cells(capacity)) {}

  /// `matches(slot)` compares the whole key; it is asked for the few slots whose fingerprint agrees in 32 bits.
  template <class Matches>
  Slot find(const BlockKey& key, Matches&& matches) const {
    const std::uint64_t print = key_fingerprint(key);
    for (std::size_t i = home(print); cells_[i].slot != kNoSlot; i = next(i))
      if (cells_[i].tag == tag(print) && matches(cells_[i].slot)) return cells_[i].slot;
    return kNoSlot;
  }

  /// Prefetches for keys that will be looked up soon: first the cell, a little later the slot that it names, most
  /// likely the key's.
  void prefetch(const BlockKey& key) const { __builtin_prefetch(&cells_[home(key_fingerprint(key))]); }
  Slot home_slot(const BlockKey& key) const { return cells_[home(key_fingerprint(key))].slot; }

  void insert(const BlockKey& key, Slot slot) {
    const std::uint64_t print = key_fingerprint(key);
    std::size_t i = home(print);
    while (cells_[i].slot != kNoSlot) i = next(i);
    cells_[i] = {tag(print), slot};
  }

  /// `key_of(slot)`: the keys of the slots that move up into the gap.
  template <class KeyOf>
  void erase(const BlockKey& key, Slot slot, KeyOf&& key_of) {
    std::size_t gap = home(key_fingerprint(key));
    while (cells_[gap].slot != slot) gap = next(gap);
    for (std::size_t i = next(gap); cells_[i].slot != kNoSlot; i = next(i)) {
      const std::size_t wanted = home(key_fingerprint(key_of(cells_[i].slot)));
      if (((i - wanted) & mask()) < ((i - gap) & mask())) continue;  // it stands at or behind its home already
      cells_[gap] = cells_[i];
      gap = i;
    }
    cells_[gap] = {};
  }

  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(cells_.size() * sizeof(Cell)); }

 private:
  struct Cell {
    std::uint32_t tag = 0;
    Slot slot = kNoSlot;
  };
  static_assert(sizeof(Cell) == kPrefixCellBytes);
  std::size_t mask() const { return cells_.size() - 1; }
  std::size_t home(std::uint64_t print) const { return print & mask(); }
  std::size_t next(std::size_t i) const { return (i + 1) & mask(); }
  static std::uint32_t tag(std::uint64_t print) { return static_cast<std::uint32_t>(print >> 32); }

  std::vector<Cell> cells_;
};

}  // namespace kv4
