#include "prefix/s3_fifo.h"

#include <algorithm>

namespace kv4 {

void S3Fifo::push(Queue queue, NodeId id) {
  node(id).queue = queue;
  queues_[queue].push(nodes_, id);
}

void S3Fifo::unlink(NodeId id) { queues_[node(id).queue].remove(nodes_, id); }

void S3Fifo::insert(NodeId id, std::uint64_t fingerprint) {
  node(id).frequency = 0;
  node(id).held = false;
  push(ghosts_.recall(fingerprint) ? kMain : kSmall, id);
}

void S3Fifo::touch(NodeId id) {
  node(id).frequency = std::min<std::uint8_t>(node(id).frequency + 1, kMaxFrequency);
}

void S3Fifo::hold(NodeId id) { node(id).held = true; }

// A hit does not move a block in a FIFO. A block that reached the front while it was held goes to the main queue.
void S3Fifo::release(NodeId id) {
  touch(id);
  node(id).held = false;
  if (node(id).queue == kParked) push(kMain, id);
}

NodeId S3Fifo::victim() {
  while (queues_[kSmall].size() + queues_[kMain].size() > 0) {
    const bool from_small = queues_[kSmall].size() > max_small_ || queues_[kMain].size() == 0;
    const NodeId id = queues_[from_small ? kSmall : kMain].first();
    EvictionNode& oldest = node(id);
    if (!oldest.held && oldest.frequency < (from_small ? kPromoteAt : 1)) return id;
    unlink(id);
    if (oldest.held) {
      oldest.queue = kParked;
    } else {
      oldest.frequency = static_cast<std::uint8_t>(from_small ? 0 : oldest.frequency - 1);
      push(kMain, id);
    }
  }
  return kNoNode;
}

void S3Fifo::evict(NodeId id, std::uint64_t fingerprint) {
  unlink(id);
  if (node(id).queue == kSmall) ghosts_.remember(fingerprint, {});
}

}  // namespace kv4
