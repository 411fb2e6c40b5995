// XXH3-128 with vectors twice as wide as the baseline of x86-64.
#pragma once

namespace kv4 {

struct Xxh128 {
  unsigned long low = 0, high = 0;
};

/// Requires a processor with AVX2.
Xxh128 xxh128_avx2(const void* data, unsigned long bytes);

}  // namespace kv4
