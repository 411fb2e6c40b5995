// S3-FIFO (Yang et al., SOSP 2023): new blocks wait in a small queue, and only those hit there reach the main one.
// Blocks evicted from the small queue are remembered for a while (the ghosts); on return they go to the main one.
#pragma once

#include "prefix/eviction.h"
#include "prefix/ghost_list.h"

namespace kv4 {

class S3Fifo final : public EvictionPolicy {
 public:
  static constexpr int kSmallPercent = 10;
  static constexpr std::uint8_t kPromoteAt = 1;     // hits in the small queue
  static constexpr std::uint8_t kMaxFrequency = 3;  // rounds that a block can stay in the main queue without a hit

  /// As many ghosts as the cache has blocks.
  S3Fifo(std::span<EvictionNode> nodes, std::int64_t capacity)
      : nodes_(nodes), max_small_(capacity * kSmallPercent / 100), ghosts_(capacity) {}

  void insert(NodeId id, std::uint64_t fingerprint) override;
  void touch(NodeId id) override;
  void hold(NodeId id) override;
  void release(NodeId id) override;
  NodeId victim() override;
  void evict(NodeId id, std::uint64_t fingerprint) override;

 private:
  enum Queue : std::uint8_t { kSmall, kMain, kParked };
  EvictionNode& node(NodeId id) { return nodes_[id]; }
  void push(Queue queue, NodeId id);
  void unlink(NodeId id);

  std::span<EvictionNode> nodes_;
  NodeQueue queues_[2];  // kSmall and kMain, oldest first. A held node that reached the front is in neither: kParked
  std::int64_t max_small_;
  struct Nothing {};
  GhostList<Nothing> ghosts_;
};

}  // namespace kv4
