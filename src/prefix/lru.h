// Evicts the least recently used block.
#pragma once

#include "prefix/eviction.h"

namespace kv4 {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(std::span<EvictionNode> nodes) : nodes_(nodes) {}

  void insert(NodeId id, std::uint64_t fingerprint) override;
  void touch(NodeId id) override;
  void hold(NodeId id) override;
  void release(NodeId id) override;
  NodeId victim() override;
  void evict(NodeId id, std::uint64_t fingerprint) override;

 private:
  std::span<EvictionNode> nodes_;
  NodeQueue queue_;  // least recently used first; without held nodes
};

}  // namespace kv4
