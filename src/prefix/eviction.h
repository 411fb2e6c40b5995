// Eviction policies. A policy orders the nodes of an index; it holds no bytes and no keys, and
// every call is O(1) (a victim of S3-FIFO, a use in hit density: amortised).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kv4/prefix_cache.h"

namespace kv4 {

/// The number of a block in a prefix index; kNoNode: none.
using NodeId = std::int32_t;
inline constexpr NodeId kNoNode = -1;

/// One per node, owned by the index and shared by the policies of its tenants: a node is in one of them at most.
struct EvictionNode {
  NodeId prev = kNoNode;
  NodeId next = kNoNode;
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
  virtual void insert(NodeId id, std::uint64_t fingerprint) = 0;
  virtual void touch(NodeId id) = 0;
  /// A reference exists: the node is no victim until it is released.
  virtual void hold(NodeId id) = 0;
  /// The last reference has ended; counts as a touch.
  virtual void release(NodeId id) = 0;
  /// Blocks that others follow are held, and exposed, which is no touch, when the last of those has gone. Else they may
  /// be named as victims, and are held, then released.
  virtual bool leaves_only() const { return false; }
  virtual void expose(NodeId id) { release(id); }
  /// The node to evict next, which stays until evict(); kNoNode: none.
  virtual NodeId victim() = 0;
  /// Takes the victim out.
  virtual void evict(NodeId id, std::uint64_t fingerprint) = 0;
};

/// `nodes` outlive the policy. `capacity`: of the cache, in blocks.
std::unique_ptr<EvictionPolicy> make_eviction(EvictionKind kind, std::span<EvictionNode> nodes, std::int64_t capacity);

/// A doubly linked list through nodes.
class NodeQueue {
 public:
  void push(std::span<EvictionNode> nodes, NodeId id) {
    nodes[id].prev = last_;
    nodes[id].next = kNoNode;
    (last_ == kNoNode ? first_ : nodes[last_].next) = id;
    last_ = id;
    ++size_;
  }
  void remove(std::span<EvictionNode> nodes, NodeId id) {
    const EvictionNode& node = nodes[id];
    (node.prev == kNoNode ? first_ : nodes[node.prev].next) = node.next;
    (node.next == kNoNode ? last_ : nodes[node.next].prev) = node.prev;
    --size_;
  }
  NodeId first() const { return first_; }
  std::int64_t size() const { return size_; }

 private:
  NodeId first_ = kNoNode, last_ = kNoNode;
  std::int64_t size_ = 0;
};

}  // namespace kv4
