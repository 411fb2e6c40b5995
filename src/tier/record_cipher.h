// Payloads sealed with AES-256-GCM, the same way in every tier. A key and the header's identity open them, nothing
// else.
//
//   tenant key = HKDF-SHA256(master key, no salt, "kv4 tenant" + tenant as 8 bytes, little-endian), 32 bytes
//   record key and nonce = HKDF-SHA256(tenant key, salt, "kv4 record"), 32 + 12 bytes
//
//   sealed payload: ciphertext, as long as the payload | salt, 24 random bytes | tag, 16 bytes
//   additional data: bytes 0 to 79 of the record's header (magic, version, kind, layout, tenant, key, length, sequence)
//
// Why no nonce is used twice with a key: each record has a key of its own, from 192 random bits. Among 2^64 records of
// a tenant two have the same salt with a chance of 2^-65. Nothing is counted, so nothing can begin again: not after a
// crash, a restored backup or a forked process, and not where several processes write to one remote tier. (96 random
// bits with one key would reach 2^-32 at 2^32 records; a counter would have to be durable before every put.)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tier/record_format.h"

namespace kv4::tier {

inline constexpr std::int64_t kCipherKeyBytes = 32, kSealSaltBytes = 24, kSealTagBytes = 16;
static_assert(kSealSaltBytes + kSealTagBytes == kSealBytes);

/// Any number of threads may use one.
class RecordCipher {
 public:
  using Salt = std::array<std::byte, kSealSaltBytes>;

  explicit RecordCipher(std::span<const std::byte, kCipherKeyBytes> master_key);
  ~RecordCipher();  // forgets the key
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  /// `header` as it will be stored: of kind `sealed`, with the length of `sealed`, which is kSealBytes longer than
  /// `payload`. False: the system gives no random bytes, or no memory.
  bool seal(const RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed) const;
  /// With a salt that was never used before.
  bool seal(const RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed,
            const Salt& salt) const;
  /// kSealBytes fewer than `sealed`. False: another key, another record, or other bytes; `payload` is zeros then.
  bool open(const RecordHeader& header, std::span<const std::byte> sealed, std::span<std::byte> payload) const;

 private:
  std::array<std::byte, kCipherKeyBytes> master_key_;
};

}  // namespace kv4::tier
