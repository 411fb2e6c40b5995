// The least recently used block goes first.
#pragma once

#include "prefix/eviction.h"

namespace kv4 {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(std::span<EvictionNode> nodes) : nodes_(nodes) {}

  void insert(Slot slot, std::uint64_t fingerprint) override;
  void touch(Slot slot) override;
  void hold(Slot slot) override;
  void release(Slot slot) override;
  Slot victim() override;
  void evict(Slot slot, std::uint64_t fingerprint) override;

 private:
  std::span<EvictionNode> nodes_;
  SlotQueue queue_;  // least recently used first; without those held
};

}  // namespace kv4
