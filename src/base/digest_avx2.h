// XXH3-128 by vectors twice as wide as those that every x86-64 has.
#pragma once

namespace kv4 {

struct Xxh128 {
  unsigned long low = 0, high = 0;
};

/// Only where the processor has AVX2.
Xxh128 xxh128_avx2(const void* data, unsigned long bytes);

}  // namespace kv4
