#include "prefix/eviction.h"

#include "base/check.h"
#include "prefix/hit_density.h"
#include "prefix/lru.h"
#include "prefix/s3_fifo.h"

namespace kv4 {

const char* to_string(EvictionKind kind) {
  switch (kind) {
    case EvictionKind::lru: return "lru";
    case EvictionKind::s3_fifo: return "s3fifo";
    case EvictionKind::hit_density: return "density";
  }
  return "?";
}

EvictionKind parse_eviction(std::string_view name) {
  for (const EvictionKind kind : kEvictionKinds)
    if (name == to_string(kind)) return kind;
  fail(ErrorCode::bad_argument, "there is no eviction policy '{}'; there are lru, s3fifo and density", name);
}

std::unique_ptr<EvictionPolicy> make_eviction(EvictionKind kind, std::span<EvictionNode> nodes, std::int64_t capacity) {
  if (kind == EvictionKind::lru) return std::make_unique<Lru>(nodes);
  if (kind == EvictionKind::s3_fifo) return std::make_unique<S3Fifo>(nodes, capacity);
  return std::make_unique<HitDensity>(nodes, capacity);
}

}  // namespace kv4
