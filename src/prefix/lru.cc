#include "prefix/lru.h"

namespace kv4 {

void Lru::insert(NodeId id, std::uint64_t) { queue_.push(nodes_, id); }
void Lru::touch(NodeId id) {
  queue_.remove(nodes_, id);
  queue_.push(nodes_, id);
}
void Lru::hold(NodeId id) { queue_.remove(nodes_, id); }
void Lru::release(NodeId id) { queue_.push(nodes_, id); }
NodeId Lru::victim() { return queue_.first(); }
void Lru::evict(NodeId id, std::uint64_t) { queue_.remove(nodes_, id); }

}  // namespace kv4
