#include "prefix/eviction.h"

#include "base/check.h"
#include "prefix/lru.h"
#include "prefix/s3_fifo.h"

namespace kv4 {

const char* to_string(EvictionKind kind) { return kind == EvictionKind::lru ? "lru" : "s3fifo"; }

EvictionKind parse_eviction(std::string_view name) {
  for (const EvictionKind kind : {EvictionKind::lru, EvictionKind::s3_fifo})
    if (name == to_string(kind)) return kind;
  fail(ErrorCode::bad_argument, "there is no eviction policy '{}'; there are lru and s3fifo", name);
}

std::unique_ptr<EvictionPolicy> make_eviction(EvictionKind kind, std::span<EvictionNode> nodes, std::int64_t capacity) {
  if (kind == EvictionKind::lru) return std::make_unique<Lru>(nodes);
  return std::make_unique<S3Fifo>(nodes, capacity);
}

}  // namespace kv4
