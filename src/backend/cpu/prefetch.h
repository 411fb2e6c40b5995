// Memory asked for before it is needed.
#pragma once

#include <cstdint>

namespace kv4::cpu {

/// Into the second cache level: the first has room for few lines under way. Always inlined: GCC takes a function that
/// only prefetches for one without effect and drops its calls.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

}  // namespace kv4::cpu
