#include "tier/chunk_key.h"

#include <openssl/evp.h>

#include <atomic>
#include <memory>
#include <new>
#include <string_view>

#include "base/check.h"
#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr std::string_view kPurpose = "kv4chunk", kSpace = "kv4 chunk space 1\n";

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

/// Looked up once and kept as long as the process lives.
EVP_MD* sha256() {
  static std::atomic<EVP_MD*> kept{nullptr};
  EVP_MD* known = kept.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  EVP_MD* const fresh = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  if (fresh == nullptr || kept.compare_exchange_strong(known, fresh)) return fresh;
  EVP_MD_free(fresh);
  return known;
}

}  // namespace

void needs_sha256() {
  require(sha256() != nullptr, ErrorCode::bad_state,
          "OpenSSL gives no SHA-256, which the ids of chunks need; load its default provider, or give it memory");
}

std::uint64_t chunk_layout_id(const std::string& space) {
  const std::string text = std::string(kSpace) + space;
  return load_le<std::uint64_t>(chunk_id(std::as_bytes(std::span(text))).data());
}

Key chunk_id(std::span<const std::byte> key) {
  thread_local const std::unique_ptr<EVP_MD_CTX, FreeContext> context(EVP_MD_CTX_new());
  Key id;
  if (!context || EVP_DigestInit_ex2(context.get(), sha256(), nullptr) != 1 ||
      EVP_DigestUpdate(context.get(), kPurpose.data(), kPurpose.size()) != 1 ||
      EVP_DigestUpdate(context.get(), key.data(), key.size()) != 1 ||
      EVP_DigestFinal_ex(context.get(), reinterpret_cast<unsigned char*>(id.data()), nullptr) != 1)
    throw std::bad_alloc();
  return id;
}

}  // namespace kv4::tier
