// Digests do not depend on the instruction set: one machine reads the bytes that another has stored.
#include "base/digest.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kv4 {
namespace {

TEST(Digest, OfEveryLengthAsTheLibrarysOwn) {
  std::mt19937_64 random(3);
  std::vector<std::byte> bytes(70'000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t size = 0; size <= bytes.size(); size += size < 2'200 ? 1 : 997) {
    const std::span<const std::byte> part(bytes.data() + bytes.size() - size, size);  // at any address
    const XXH128_hash_t expected = XXH3_128bits(part.data(), part.size());
    const Digest128 digest = digest128(part);
    ASSERT_EQ(digest.low, expected.low64) << size << " bytes";
    ASSERT_EQ(digest.high, expected.high64) << size << " bytes";
  }
}

}  // namespace
}  // namespace kv4
