#include "base/digest.h"

#if defined(KV4_DIGEST_AVX2)
#include "base/digest_avx2.h"
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kv4 {

std::uint64_t digest64(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::uint64_t digest64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

Digest128 digest128(std::span<const std::byte> bytes) {
#if defined(KV4_DIGEST_AVX2)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide) {
    const Xxh128 hash = xxh128_avx2(bytes.data(), bytes.size());
    return {hash.low, hash.high};
  }
#endif
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

}  // namespace kv4
