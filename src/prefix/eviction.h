// Eviction policies. A policy orders the slots of an index; it holds no bytes and no keys, and
// every call is O(1) (a victim of S3-FIFO, a use in hit density: amortised).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kv4/prefix_cache.h"

namespace kv4 {

/// A place in an index; kNoSlot is none.
using Slot = std::int32_t;
inline constexpr Slot kNoSlot = -1;

/// One per slot, owned by the index and shared by the policies of its tenants: a slot is in one of them at most.
struct EvictionNode {
  Slot prev = kNoSlot;
  Slot next = kNoSlot;
  std::uint32_t used = 0;      // hit density: when, in its own time
  std::uint8_t queue = 0;      // S3-FIFO: which queue it is in, if any; hit density: its class
  std::uint8_t frequency = 0;  // hits, capped
  std::uint8_t behind = 0;     // by the index: blocks behind it in the chain that was given back last, at most 255
  bool held = false;           // S3-FIFO: a held one is left where it stands until it comes up
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// A new block. `fingerprint` is of its key: a policy may know it from before.
  virtual void insert(Slot slot, std::uint64_t fingerprint) = 0;
  virtual void touch(Slot slot) = 0;
  /// A reference exists: the slot is no victim until it is released.
  virtual void hold(Slot slot) = 0;
  /// The last reference has ended; counts as a touch.
  virtual void release(Slot slot) = 0;
  /// Blocks that others follow are held, and exposed, which is no touch, when the last of those has gone. Else they may
  /// be named as victims, and are held, then released.
  virtual bool leaves_only() const { return false; }
  virtual void expose(Slot slot) { release(slot); }
  /// The slot to evict next, which stays until evict(); kNoSlot: none.
  virtual Slot victim() = 0;
  /// Takes the victim out.
  virtual void evict(Slot slot, std::uint64_t fingerprint) = 0;
};

/// `nodes` outlive the policy. `capacity`: of the cache, in blocks.
std::unique_ptr<EvictionPolicy> make_eviction(EvictionKind kind, std::span<EvictionNode> nodes, std::int64_t capacity);

/// A doubly linked list through nodes.
class SlotQueue {
 public:
  void push(std::span<EvictionNode> nodes, Slot slot) {
    nodes[slot].prev = last_;
    nodes[slot].next = kNoSlot;
    (last_ == kNoSlot ? first_ : nodes[last_].next) = slot;
    last_ = slot;
    ++size_;
  }
  void remove(std::span<EvictionNode> nodes, Slot slot) {
    const EvictionNode& node = nodes[slot];
    (node.prev == kNoSlot ? first_ : nodes[node.prev].next) = node.next;
    (node.next == kNoSlot ? last_ : nodes[node.next].prev) = node.prev;
    --size_;
  }
  Slot first() const { return first_; }
  std::int64_t size() const { return size_; }

 private:
  Slot first_ = kNoSlot, last_ = kNoSlot;
  std::int64_t size_ = 0;
};

}  // namespace kv4
