#include "tier/record_cipher.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr std::size_t kNonceBytes = 12;
constexpr std::string_view kTenantInfo = "kv4 tenant", kRecordInfo = "kv4 record";

template <auto Release>
struct Releaser {
  template <class T>
  void operator()(T* object) const {
    Release(object);
  }
};
using Kdf = std::unique_ptr<EVP_KDF, Releaser<EVP_KDF_free>>;
using KdfContext = std::unique_ptr<EVP_KDF_CTX, Releaser<EVP_KDF_CTX_free>>;
using CipherContext = std::unique_ptr<EVP_CIPHER_CTX, Releaser<EVP_CIPHER_CTX_free>>;

/// Bytes that are wiped.
template <std::size_t N>
struct Secret {
  std::array<std::byte, N> bytes{};
  ~Secret() { OPENSSL_cleanse(bytes.data(), N); }
};

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

bool hkdf(std::span<const std::byte> key, std::span<const std::byte> salt, std::span<const std::byte> info,
          std::span<std::byte> out) {
  const Kdf kdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  const KdfContext context(kdf ? EVP_KDF_CTX_new(kdf.get()) : nullptr);
  if (!context) return false;
  char digest[] = "SHA256";
  const auto octets = [](const char* name, std::span<const std::byte> bytes) {
    return OSSL_PARAM_construct_octet_string(name, const_cast<std::byte*>(bytes.data()), bytes.size());
  };
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
                                   octets(OSSL_KDF_PARAM_KEY, key), octets(OSSL_KDF_PARAM_INFO, info),
                                   salt.empty() ? OSSL_PARAM_construct_end() : octets(OSSL_KDF_PARAM_SALT, salt),
                                   OSSL_PARAM_construct_end()};
  return EVP_KDF_derive(context.get(), raw(out.data()), out.size(), parameters) == 1;
}

/// A context for one record, with key, nonce and additional data in place; null where something is refused.
CipherContext begin(std::span<const std::byte> master_key, const RecordHeader& header, std::span<const std::byte> salt,
                    bool encrypt) {
  std::array<std::byte, kTenantInfo.size() + 8> tenant_info;
  const auto text = std::as_bytes(std::span(kTenantInfo));
  std::copy(text.begin(), text.end(), tenant_info.begin());
  store_le(tenant_info.data() + text.size(), header.id.tenant);
  Secret<kCipherKeyBytes> tenant_key;
  Secret<kCipherKeyBytes + kNonceBytes> record_key;
  if (!hkdf(master_key, {}, tenant_info, tenant_key.bytes) ||
      !hkdf(tenant_key.bytes, salt, std::as_bytes(std::span(kRecordInfo)), record_key.bytes))
    return nullptr;

  std::array<std::byte, kRecordHeaderBytes> identity;
  encode_header(header, identity);
  CipherContext context(EVP_CIPHER_CTX_new());
  const unsigned char* key = raw(record_key.bytes.data());
  int ignored = 0;
  if (!context ||
      EVP_CipherInit_ex(context.get(), EVP_aes_256_gcm(), nullptr, key, key + kCipherKeyBytes, encrypt ? 1 : 0) != 1 ||
      EVP_CipherUpdate(context.get(), nullptr, &ignored, raw(identity.data()), kRecordIdentityBytes) != 1)
    return nullptr;
  return context;
}

bool run(EVP_CIPHER_CTX* context, std::span<const std::byte> from, std::span<std::byte> to) {
  int moved = 0;
  return from.empty() ||
         (EVP_CipherUpdate(context, raw(to.data()), &moved, raw(from.data()), static_cast<int>(from.size())) == 1 &&
          moved == static_cast<int>(from.size()));
}

}  // namespace

RecordCipher::RecordCipher(std::span<const std::byte, kCipherKeyBytes> master_key) {
  std::copy(master_key.begin(), master_key.end(), master_key_.begin());
}

RecordCipher::~RecordCipher() { OPENSSL_cleanse(master_key_.data(), master_key_.size()); }

bool RecordCipher::seal(const RecordHeader& header, std::span<const std::byte> payload,
                        std::span<std::byte> sealed) const {
  Salt salt;
  return RAND_bytes(raw(salt.data()), kSealSaltBytes) == 1 && seal(header, payload, sealed, salt);
}

bool RecordCipher::seal(const RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed,
                        const Salt& salt) const {
  const CipherContext context = begin(master_key_, header, salt, true);
  int ignored = 0;
  unsigned char none[kSealTagBytes];
  std::byte* behind = sealed.data() + payload.size();
  std::copy(salt.begin(), salt.end(), behind);
  return context && run(context.get(), payload, sealed) && EVP_CipherFinal_ex(context.get(), none, &ignored) == 1 &&
         EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_GET_TAG, kSealTagBytes, behind + kSealSaltBytes) == 1;
}

bool RecordCipher::open(const RecordHeader& header, std::span<const std::byte> sealed,
                        std::span<std::byte> payload) const {
  const std::span<const std::byte> ciphertext = sealed.first(payload.size());
  const std::span<const std::byte> salt = sealed.subspan(payload.size(), kSealSaltBytes);
  std::array<std::byte, kSealTagBytes> tag;
  std::copy_n(sealed.end() - kSealTagBytes, kSealTagBytes, tag.begin());
  const CipherContext context = begin(master_key_, header, salt, false);
  int ignored = 0;
  unsigned char none[kSealTagBytes];
  if (context && run(context.get(), ciphertext, payload) &&
      EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_SET_TAG, kSealTagBytes, tag.data()) == 1 &&
      EVP_CipherFinal_ex(context.get(), none, &ignored) == 1)
    return true;
  OPENSSL_cleanse(payload.data(), payload.size());
  return false;
}

}  // namespace kv4::tier
