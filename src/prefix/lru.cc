#include "prefix/lru.h"

namespace kv4 {

void Lru::insert(Slot slot, std::uint64_t) { queue_.push(nodes_, slot); }
void Lru::touch(Slot slot) {
  queue_.remove(nodes_, slot);
  queue_.push(nodes_, slot);
}
void Lru::hold(Slot slot) { queue_.remove(nodes_, slot); }
void Lru::release(Slot slot) { queue_.push(nodes_, slot); }
Slot Lru::victim() { return queue_.first(); }
void Lru::evict(Slot slot, std::uint64_t) { queue_.remove(nodes_, slot); }

}  // namespace kv4
