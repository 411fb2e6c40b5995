// Software prefetch.
#pragma once

#include <cstdint>

namespace kv4::cpu {

/// Prefetches into L2: L1 has room for few lines in flight. Always inlined, because GCC drops calls of a function that
/// only prefetches: it takes the function for one without effect.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

}  // namespace kv4::cpu
