#include "prefix/eviction.h"

#include "base/check.h"
#include "prefix/hit_density.h"
#include "prefix/lru.h"
#include "prefix/s3_fifo.h"

namespace kv4 {

std::unique_ptr<EvictionPolicy> make_eviction(EvictionKind kind, std::span<EvictionNode> nodes, std::int64_t capacity) {
  if (kind == EvictionKind::lru) return std::make_unique<Lru>(nodes);
  if (kind == EvictionKind::s3fifo) return std::make_unique<S3Fifo>(nodes, capacity);
  return std::make_unique<HitDensity>(nodes, capacity);
}

}  // namespace kv4
