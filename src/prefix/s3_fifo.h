// S3-FIFO (Yang et al., SOSP 2023): new blocks wait in a small queue, and only those hit there reach the main one. What
// left the small queue is remembered for a while (the ghosts) and goes to the main queue when it comes back.
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

  void insert(Slot slot, std::uint64_t fingerprint) override;
  void touch(Slot slot) override;
  void hold(Slot slot) override;
  void release(Slot slot) override;
  Slot victim() override;
  void evict(Slot slot, std::uint64_t fingerprint) override;

 private:
  enum Queue : std::uint8_t { kSmall, kMain, kParked };
  EvictionNode& node(Slot slot) { return nodes_[slot]; }
  void push(Queue queue, Slot slot);
  void unlink(Slot slot);

  std::span<EvictionNode> nodes_;
  SlotQueue queues_[2];  // kSmall and kMain, oldest first. A held slot that came up is in neither: kParked
  std::int64_t max_small_;
  struct Nothing {};
  GhostList<Nothing> ghosts_;
};

}  // namespace kv4
