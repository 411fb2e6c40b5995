#include "prefix/s3_fifo.h"

#include <algorithm>

namespace kv4 {

void S3Fifo::push(Queue queue, Slot slot) {
  node(slot).queue = queue;
  queues_[queue].push(nodes_, slot);
}

void S3Fifo::unlink(Slot slot) { queues_[node(slot).queue].remove(nodes_, slot); }

void S3Fifo::insert(Slot slot, std::uint64_t fingerprint) {
  node(slot).frequency = 0;
  node(slot).held = false;
  push(ghosts_.recall(fingerprint) ? kMain : kSmall, slot);
}

void S3Fifo::touch(Slot slot) {
  node(slot).frequency = std::min<std::uint8_t>(node(slot).frequency + 1, kMaxFrequency);
}

void S3Fifo::hold(Slot slot) { node(slot).held = true; }

// A hit does not move a block in a FIFO; one that came up while it was held has proved itself.
void S3Fifo::release(Slot slot) {
  touch(slot);
  node(slot).held = false;
  if (node(slot).queue == kParked) push(kMain, slot);
}

Slot S3Fifo::victim() {
  while (queues_[kSmall].size() + queues_[kMain].size() > 0) {
    const bool from_small = queues_[kSmall].size() > max_small_ || queues_[kMain].size() == 0;
    const Slot slot = queues_[from_small ? kSmall : kMain].first();
    EvictionNode& oldest = node(slot);
    if (!oldest.held && oldest.frequency < (from_small ? kPromoteAt : 1)) return slot;
    unlink(slot);
    if (oldest.held) {
      oldest.queue = kParked;
    } else {
      oldest.frequency = static_cast<std::uint8_t>(from_small ? 0 : oldest.frequency - 1);
      push(kMain, slot);
    }
  }
  return kNoSlot;
}

void S3Fifo::evict(Slot slot, std::uint64_t fingerprint) {
  unlink(slot);
  if (node(slot).queue == kSmall) ghosts_.remember(fingerprint, {});
}

}  // namespace kv4
