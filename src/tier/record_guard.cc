#include "tier/record_guard.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <type_traits>

#include "base/check.h"
#include "tier/little_endian.h"

namespace kv4::tier {

struct RecordGuard::RingKey {
  CacheKey key;
  KeyId id;
};

namespace {

constexpr std::size_t kNonceBytes = 12;
constexpr std::size_t kMaxContexts = 1024;  // cached context keys: each saves a derivation
constexpr std::string_view kIdInfo = "kv4 key id", kContextInfo = "kv4 context", kRecordInfo = "kv4 record",
                           kTenantInfoV1 = "kv4 tenant";

template <auto Release>
struct Releaser {
  template <class T>
  void operator()(T* object) const {
    Release(object);
  }
};
using KdfContext = std::unique_ptr<EVP_KDF_CTX, Releaser<EVP_KDF_CTX_free>>;
using CipherContext = std::unique_ptr<EVP_CIPHER_CTX, Releaser<EVP_CIPHER_CTX_free>>;

/// Bytes that the destructor wipes.
template <std::size_t N>
struct Secret {
  std::array<std::byte, N> bytes{};
  ~Secret() { OPENSSL_cleanse(bytes.data(), N); }
};

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

/// An algorithm that OpenSSL finds by name, looked up once and kept as long as the process lives. Where a lookup finds
/// no memory, the next call looks again.
template <auto Fetch, auto Release>
auto* fetched(const char* name) {
  using Algorithm = std::remove_pointer_t<decltype(Fetch(nullptr, name, nullptr))>;
  static std::atomic<Algorithm*> kept{nullptr};
  Algorithm* known = kept.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  Algorithm* const fresh = Fetch(nullptr, name, nullptr);
  if (fresh == nullptr || kept.compare_exchange_strong(known, fresh)) return fresh;
  Release(fresh);
  return known;
}

EVP_KDF* hkdf_algorithm() { return fetched<EVP_KDF_fetch, EVP_KDF_free>("HKDF"); }
EVP_MD* hash_algorithm() { return fetched<EVP_MD_fetch, EVP_MD_free>("SHA256"); }
EVP_CIPHER* cipher_algorithm() { return fetched<EVP_CIPHER_fetch, EVP_CIPHER_free>("AES-256-GCM"); }

bool hkdf(std::span<const std::byte> key, std::span<const std::byte> salt, std::string_view info,
          std::span<std::byte> out) {
  const KdfContext context(hkdf_algorithm() != nullptr ? EVP_KDF_CTX_new(hkdf_algorithm()) : nullptr);
  if (!context) return false;
  char digest[] = "SHA256";
  const auto octets = [](const char* name, std::span<const std::byte> bytes) {
    return OSSL_PARAM_construct_octet_string(name, const_cast<std::byte*>(bytes.data()), bytes.size());
  };
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0), octets(OSSL_KDF_PARAM_KEY, key),
      octets(OSSL_KDF_PARAM_INFO, std::as_bytes(std::span(info))),
      salt.empty() ? OSSL_PARAM_construct_end() : octets(OSSL_KDF_PARAM_SALT, salt), OSSL_PARAM_construct_end()};
  return EVP_KDF_derive(context.get(), raw(out.data()), out.size(), parameters) == 1;
}

std::string with_numbers(std::string_view text, std::initializer_list<std::uint64_t> numbers) {
  std::string info(text);
  for (const std::uint64_t number : numbers) {
    std::byte bytes[8];
    store_le(bytes, number);
    info.append(reinterpret_cast<const char*>(bytes), sizeof(bytes));
  }
  return info;
}

bool feed(EVP_CIPHER_CTX* context, std::span<const std::byte> from, std::byte* to) {
  int moved = 0;
  return from.empty() || (EVP_CipherUpdate(context, to != nullptr ? raw(to) : nullptr, &moved, raw(from.data()),
                                           static_cast<int>(from.size())) == 1 &&
                          moved == static_cast<int>(from.size()));
}

/// A context for one record, with key, nonce and the header as additional data; null where OpenSSL refuses a step.
CipherContext begin(std::span<const std::byte> context_key, const RecordHeader& header, std::span<const std::byte> salt,
                    bool encrypt) {
  Secret<sizeof(CacheKey) + kNonceBytes> record_key;
  if (!hkdf(context_key, salt, kRecordInfo, record_key.bytes)) return nullptr;
  std::array<std::byte, kRecordHeaderBytes> identity;
  encode_header(header, identity);
  const std::int64_t identity_bytes = header.version == 1 ? kRecordIdentityBytesV1 : kRecordIdentityBytes;
  CipherContext context(EVP_CIPHER_CTX_new());
  const unsigned char* key = raw(record_key.bytes.data());
  if (!context || cipher_algorithm() == nullptr ||
      EVP_CipherInit_ex2(context.get(), cipher_algorithm(), key, key + sizeof(CacheKey), encrypt ? 1 : 0, nullptr) !=
          1 ||
      !feed(context.get(), std::span(identity).first(identity_bytes), nullptr))
    return nullptr;
  return context;
}

/// OpenSSL's random generator lives in the process's memory: two copies of a virtual machine that was saved while kv4
/// ran give the same random bytes. So the salt also depends on the record's header and the time.
bool make_salt(const RecordHeader& header, SealSalt& salt) {
  constexpr std::size_t kRandomAt = kRecordIdentityBytes, kTimeAt = kRandomAt + sizeof(SealSalt);
  std::array<std::byte, kRecordHeaderBytes> from;
  static_assert(kTimeAt + 8 <= sizeof(from));
  encode_header(header, from);
  if (RAND_bytes(raw(from.data() + kRandomAt), sizeof(SealSalt)) != 1) return false;
  store_le(from.data() + kTimeAt,
           static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()));
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned bytes = 0;
  if (EVP_Digest(from.data(), kTimeAt + 8, digest.data(), &bytes, hash_algorithm(), nullptr) != 1 ||
      bytes < salt.size())
    return false;
  std::memcpy(salt.data(), digest.data(), salt.size());
  return true;
}

bool finish(EVP_CIPHER_CTX* context) {
  unsigned char none[sizeof(SealTag)];
  int ignored = 0;
  return EVP_CipherFinal_ex(context, none, &ignored) == 1;
}

bool finish_with_tag(EVP_CIPHER_CTX* context, std::span<const std::byte> tag) {
  Secret<sizeof(SealTag)> copy;
  std::copy(tag.begin(), tag.end(), copy.bytes.begin());
  return EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, sizeof(SealTag), copy.bytes.data()) == 1 && finish(context);
}

}  // namespace

std::size_t RecordGuard::ContextHash::operator()(const Context& c) const {
  return (c.tenant * 0x9e3779b97f4a7c15u) ^ (c.layout_id + c.key);
}

RecordGuard::RecordGuard(const GuardOptions& options)
    : tier_(options.tier), accept_unauthenticated_(options.accept_unauthenticated) {
  require(options.keys.size() <= kMaxCacheKeys, ErrorCode::bad_argument, "{} cache keys; {} are the most",
          options.keys.size(), kMaxCacheKeys);
  if (options.keys.empty()) return;
  require(options.protection != Protection::none, ErrorCode::bad_argument,
          "there are cache keys, and the protection is none; set it to sealed or authenticated");
  kind_ = options.protection == Protection::sealed ? RecordKind::sealed : RecordKind::authenticated;
  for (const CacheKey& key : options.keys) {
    RingKey ring{key, {}};
    require(cipher_algorithm() != nullptr && hash_algorithm() != nullptr && hkdf(key, {}, kIdInfo, ring.id),
            ErrorCode::bad_state,
            "OpenSSL gives no HKDF, SHA-256 or AES-256-GCM, which cache keys need; load its default provider, or give "
            "it memory");
    ring_.push_back(ring);
  }
}

RecordGuard::~RecordGuard() {
  for (RingKey& ring : ring_) OPENSSL_cleanse(ring.key.data(), ring.key.size());
  for (auto& [context, key] : contexts_) OPENSSL_cleanse(key.data(), key.size());
}

Protection protection_of(RecordKind kind) {
  switch (kind) {
    case RecordKind::sealed: return Protection::sealed;
    case RecordKind::authenticated: return Protection::authenticated;
    case RecordKind::value:
    case RecordKind::dead: break;
  }
  return Protection::none;
}

bool RecordGuard::context_key(const Context& context, CacheKey& out) const {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = contexts_.find(context); found != contexts_.end()) {
      out = found->second;
      return true;
    }
  }
  std::string info(kContextInfo);
  info += tier_;
  info += '\0';
  if (!hkdf(ring_[context.key].key, {}, with_numbers(info, {context.tenant, context.layout_id}), out)) return false;
  const std::lock_guard lock(mutex_);
  if (contexts_.size() >= kMaxContexts) {
    for (auto& [other, key] : contexts_) OPENSSL_cleanse(key.data(), key.size());
    contexts_.clear();
  }
  contexts_.emplace(context, out);
  return true;
}

bool RecordGuard::protect(RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed) const {
  SealSalt salt{};
  if (kind_ != RecordKind::value) {
    header.kind = kind_;
    header.key_id = ring_.front().id;
    if (!make_salt(header, salt)) return false;
  }
  return protect(header, payload, sealed, salt);
}

bool RecordGuard::protect(RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed,
                          const SealSalt& salt) const {
  header.kind = kind_;
  if (kind_ == RecordKind::value) return true;
  header.key_id = ring_.front().id;
  header.salt = salt;
  Secret<sizeof(CacheKey)> key;
  if (!context_key({0, header.id.tenant, header.layout_id}, key.bytes)) return false;
  const CipherContext context = begin(key.bytes, header, salt, true);
  return context && feed(context.get(), payload, kind_ == RecordKind::sealed ? sealed.data() : nullptr) &&
         finish(context.get()) &&
         EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_GET_TAG, sizeof(SealTag), header.tag.data()) == 1;
}

RecordRefusal RecordGuard::open(const RecordHeader& header, std::span<const std::byte> stored,
                                std::span<std::byte> payload) const {
  const auto give = [&] {
    if (!payload.empty() && payload.data() != stored.data()) std::memmove(payload.data(), stored.data(), stored.size());
    return RecordRefusal::none;
  };
  if (header.kind == RecordKind::value) return believes(header.kind) ? give() : RecordRefusal::unauthenticated;
  if (header.kind == RecordKind::dead) return RecordRefusal::dead;
  if (header.version == 1) return open_v1(header, stored, payload);
  if (ring_.empty() && header.kind == RecordKind::authenticated) return give();

  const auto ring = std::find_if(ring_.begin(), ring_.end(), [&](const RingKey& k) { return k.id == header.key_id; });
  if (ring == ring_.end()) return RecordRefusal::wrong_key;
  const bool sealed = header.kind == RecordKind::sealed;
  Secret<sizeof(CacheKey)> key;
  const Context where{static_cast<std::size_t>(ring - ring_.begin()), header.id.tenant, header.layout_id};
  CipherContext context;
  if (context_key(where, key.bytes)) context = begin(key.bytes, header, header.salt, false);
  if (!context) throw std::bad_alloc();  // the record is not judged
  if (feed(context.get(), stored, sealed ? payload.data() : nullptr) && finish_with_tag(context.get(), header.tag))
    return sealed ? RecordRefusal::none : give();
  if (sealed) OPENSSL_cleanse(payload.data(), payload.size());
  return RecordRefusal::forged;
}

RecordRefusal RecordGuard::check(const RecordHeader& header, std::span<const std::byte> stored,
                                 std::vector<std::byte>& scratch) const {
  scratch.resize(stored.size());
  const std::int64_t bytes = payload_bytes(header.version, header.kind, header.length);
  const RecordRefusal refusal = open(header, stored, std::span(scratch).first(bytes));
  OPENSSL_cleanse(scratch.data(), scratch.size());
  return refusal;
}

RecordRefusal RecordGuard::open_v1(const RecordHeader& header, std::span<const std::byte> stored,
                                   std::span<std::byte> payload) const {
  const std::size_t bytes = payload.size();
  SealTag tag;
  SealSalt salt;
  std::copy_n(stored.begin() + static_cast<std::ptrdiff_t>(bytes), salt.size(), salt.begin());
  std::copy_n(stored.end() - static_cast<std::ptrdiff_t>(tag.size()), tag.size(), tag.begin());
  for (const RingKey& ring : ring_) {
    Secret<sizeof(CacheKey)> key;
    CipherContext context;
    if (hkdf(ring.key, {}, with_numbers(kTenantInfoV1, {header.id.tenant}), key.bytes))
      context = begin(key.bytes, header, salt, false);
    if (!context) throw std::bad_alloc();
    if (feed(context.get(), stored.first(bytes), payload.data()) && finish_with_tag(context.get(), tag))
      return RecordRefusal::none;
    OPENSSL_cleanse(payload.data(), payload.size());
    if (payload.data() == stored.data()) break;  // the ciphertext was wiped with the payload
  }
  return RecordRefusal::wrong_key;
}

}  // namespace kv4::tier
