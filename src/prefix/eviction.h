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

/// One per node. The index owns them, and the policies of its tenants share them: a node is in at most one policy.
struct EvictionNode {
  NodeId prev = kNoNode;
  NodeId next = kNoNode;
  std::uint32_t used = 0;      // hit density: time of the last use, counted in uses
  std::uint8_t queue = 0;      // S3-FIFO: which queue it is in, if any; hit density: its class
  std::uint8_t frequency = 0;  // hits, capped
  std::uint8_t behind = 0;     // set by the index: blocks behind it in the chain that was unpinned last, at most 255
  bool held = false;           // S3-FIFO: a held node keeps its place until it reaches the front
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// Adds a block. `fingerprint` is that of its key: the policy may remember it.
  virtual void insert(NodeId id, std::uint64_t fingerprint) = 0;
  virtual void touch(NodeId id) = 0;
  /// A reference exists: the node is no victim until it is released.
  virtual void hold(NodeId id) = 0;
  /// The last reference has ended. Counts as a touch.
  virtual void release(NodeId id) = 0;
  /// True: the index holds a block while it has children, and exposes it (no touch) when the last child goes. False:
  /// victim() may name a block with children; the index then holds it until they are gone.
  virtual bool leaves_only() const { return false; }
  virtual void expose(NodeId id) { release(id); }
  /// The node to evict next; it stays until evict(). kNoNode: none.
  virtual NodeId victim() = 0;
  /// Removes the victim.
  virtual void evict(NodeId id, std::uint64_t fingerprint) = 0;
};

/// `nodes` outlive the policy. `capacity`: blocks of the cache.
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
