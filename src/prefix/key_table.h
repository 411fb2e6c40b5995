// A hash table from block key to node: open addressing by the keys' own uniform bytes, sized once, at most half full.
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

  /// `matches(id)` compares the whole key; only nodes whose fingerprint agrees in 32 bits are compared.
  template <class Matches>
  NodeId find(const BlockKey& key, Matches&& matches) const {
    const std::uint64_t print = key_fingerprint(key);
    for (std::size_t i = home(print); cells_[i].id != kNoNode; i = next(i))
      if (cells_[i].tag == tag(print) && matches(cells_[i].id)) return cells_[i].id;
    return kNoNode;
  }

  /// Prefetches for keys that will be looked up soon: first the cell, then the node in it, most likely the key's.
  void prefetch(const BlockKey& key) const { __builtin_prefetch(&cells_[home(key_fingerprint(key))]); }
  NodeId home_node(const BlockKey& key) const { return cells_[home(key_fingerprint(key))].id; }

  void insert(const BlockKey& key, NodeId id) {
    const std::uint64_t print = key_fingerprint(key);
    std::size_t i = home(print);
    while (cells_[i].id != kNoNode) i = next(i);
    cells_[i] = {tag(print), id};
  }

  /// `key_of(id)` gives the keys of nodes that may move up into the gap.
  template <class KeyOf>
  void erase(const BlockKey& key, NodeId id, KeyOf&& key_of) {
    std::size_t gap = home(key_fingerprint(key));
    while (cells_[gap].id != id) gap = next(gap);
    for (std::size_t i = next(gap); cells_[i].id != kNoNode; i = next(i)) {
      const std::size_t wanted = home(key_fingerprint(key_of(cells_[i].id)));
      if (((i - wanted) & mask()) < ((i - gap) & mask())) continue;  // it would move before its home
      cells_[gap] = cells_[i];
      gap = i;
    }
    cells_[gap] = {};
  }

  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(cells_.size() * sizeof(Cell)); }

 private:
  struct Cell {
    std::uint32_t tag = 0;
    NodeId id = kNoNode;
  };
  static_assert(sizeof(Cell) == kPrefixCellBytes);
  std::size_t mask() const { return cells_.size() - 1; }
  std::size_t home(std::uint64_t print) const { return print & mask(); }
  std::size_t next(std::size_t i) const { return (i + 1) & mask(); }
  static std::uint32_t tag(std::uint64_t print) { return static_cast<std::uint32_t>(print >> 32); }

  std::vector<Cell> cells_;
};

}  // namespace kv4
