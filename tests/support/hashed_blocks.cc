#include "support/hashed_blocks.h"

#include <openssl/evp.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace {

constexpr std::size_t kMostBytes = 4096;
std::array<std::atomic<std::int64_t>, kMostBytes + 1> updates;  // by size; longer updates are not counted

}  // namespace

// The linker redirects every update to __wrap_ (tests/CMakeLists.txt).
extern "C" {
int __real_EVP_DigestUpdate(EVP_MD_CTX* context, const void* bytes, std::size_t size);
int __wrap_EVP_DigestUpdate(EVP_MD_CTX* context, const void* bytes, std::size_t size) {
  if (size <= kMostBytes) ++updates[size];
  return __real_EVP_DigestUpdate(context, bytes, size);
}
}

namespace kv4::test {

std::int64_t hashed_blocks(int block_tokens) {
  return updates[static_cast<std::size_t>(block_tokens) * sizeof(std::int32_t)];
}

}  // namespace kv4::test
