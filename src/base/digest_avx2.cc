// Compiled for AVX2. Includes no C++ standard headers: their inline functions would be compiled for AVX2 too, and might
// be linked for all processors.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/digest_avx2.h"

namespace kv4 {

Xxh128 xxh128_avx2(const void* data, unsigned long bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  return {hash.low64, hash.high64};
}

}  // namespace kv4
