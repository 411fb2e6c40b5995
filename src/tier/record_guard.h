// Protects the records that a tier writes and checks those it reads. Records are sealed with AES-256-GCM or
// authenticated with GMAC (the same cipher, the payload as additional data), with keys derived from the caller's cache
// keys.
//
//   key id = HKDF-SHA256(cache key, no salt, "kv4 key id"), 16 bytes
//   context key = HKDF-SHA256(cache key, no salt, "kv4 context" + tier's name + 0 + tenant + layout id), 32 bytes;
//                 the numbers as 8 bytes, little-endian
//   record key and nonce = HKDF-SHA256(context key, the record's salt, "kv4 record"), 32 + 12 bytes
//   additional data: bytes 0 to 335 of the header (magic to key id), then the payload where it is not sealed
//
// Why no nonce is used twice with a key: each record has its own key, from a salt of 192 bits. Among 2^64 records of a
// context two have the same salt with a probability of 2^-65. There is no counter that could start again after a crash,
// a restored backup or a fork, or where several processes write to one remote tier. The salt is the front of SHA-256
// over bytes 0 to 335 of the header, 24 random bytes and the time in nanoseconds. Copies of a virtual machine begin
// with the same random generator, and still have different salts for different records and times.
//
// Why GMAC: over blocks of 450 KB it is the fastest MAC of OpenSSL (docs/security.md has the figures), and there is one
// construction to review instead of two.
//
// Records of version 1 were sealed with keys from one master key, without the layout and the tier in the context. They
// are opened with any key of the list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kv4/cache_keys.h"
#include "tier/record_format.h"

namespace kv4::tier {

struct GuardOptions {
  std::string tier;                            // "disk", "remote", "session", ...
  std::vector<CacheKey> keys;                  // the first writes, all read; none: nothing is protected
  Protection protection = Protection::sealed;  // of written records, where there are keys
  bool accept_unauthenticated = false;         // with keys: records that no key protects count, too
};

Protection protection_of(RecordKind kind);

/// Any number of threads may use one guard.
class RecordGuard {
 public:
  /// Without keys: believes every record that can be read without a key.
  RecordGuard() : RecordGuard(GuardOptions{}) {}
  /// Throws Error: bad_argument for too many keys, or for keys with Protection::none; bad_state where OpenSSL has no
  /// HKDF or AES.
  explicit RecordGuard(const GuardOptions& options);
  ~RecordGuard();  // wipes the keys
  RecordGuard(const RecordGuard&) = delete;
  RecordGuard& operator=(const RecordGuard&) = delete;

  bool has_keys() const { return !ring_.empty(); }
  /// The kind of the records that it writes.
  RecordKind kind() const { return kind_; }
  Protection protection() const { return protection_of(kind_); }
  /// Whether a record of this kind can count at all; open() has the last word.
  bool believes(RecordKind kind) const {
    switch (kind) {
      case RecordKind::value: return ring_.empty() || accept_unauthenticated_;
      case RecordKind::sealed: return !ring_.empty();
      case RecordKind::authenticated: return true;
      case RecordKind::dead: break;
    }
    return false;
  }

  /// Sets the header's kind, key id, salt and tag; the caller has set all other fields but digest and place. Where
  /// kind() is sealed, `sealed` gets the ciphertext, as many bytes as the payload, and may be the payload's own memory;
  /// else it is not touched. False: the system gives no random bytes, or no memory.
  bool protect(RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed) const;
  /// As above, with a given salt, which was never used before.
  bool protect(RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed,
               const SealSalt& salt) const;

  /// Restores the payload that was put. `payload` has payload_bytes() of the header, and may be the memory of `stored`.
  /// On a result other than `none`, `payload` is zeros, or `stored` itself where that is readable without a key. The
  /// digest is not checked. Throws std::bad_alloc.
  RecordRefusal open(const RecordHeader& header, std::span<const std::byte> stored, std::span<std::byte> payload) const;
  /// As open(), without giving the payload; `scratch` may be used.
  RecordRefusal check(const RecordHeader& header, std::span<const std::byte> stored,
                      std::vector<std::byte>& scratch) const;

 private:
  struct RingKey;
  struct Context {
    std::size_t key = 0;
    std::uint64_t tenant = 0, layout_id = 0;
    friend bool operator==(const Context&, const Context&) = default;
  };
  struct ContextHash {
    std::size_t operator()(const Context& c) const;
  };

  bool context_key(const Context& context, CacheKey& out) const;
  RecordRefusal open_v1(const RecordHeader& header, std::span<const std::byte> stored,
                        std::span<std::byte> payload) const;

  std::string tier_;
  RecordKind kind_ = RecordKind::value;
  bool accept_unauthenticated_ = false;
  std::vector<RingKey> ring_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<Context, CacheKey, ContextHash> contexts_;  // under the lock; at most kMaxContexts
};

}  // namespace kv4::tier
