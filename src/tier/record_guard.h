// What a tier believes, and how it protects what it writes: records sealed with AES-256-GCM or authenticated with GMAC
// (the same cipher, the payload as additional data), with keys that follow from the caller's cache keys.
//
//   key id = HKDF-SHA256(cache key, no salt, "kv4 key id"), 16 bytes
//   context key = HKDF-SHA256(cache key, no salt, "kv4 context" + tier's name + 0 + tenant + layout id), 32 bytes;
//                 the numbers as 8 bytes, little-endian
//   record key and nonce = HKDF-SHA256(context key, the record's salt, "kv4 record"), 32 + 12 bytes
//   additional data: bytes 0 to 335 of the header (magic to key id), then the payload where it is not sealed
//
// Why no nonce is used twice with a key: each record has a key of its own, from a salt of 192 bits. Among 2^64 records
// of a context two have the same salt with a chance of 2^-65. Nothing is counted, so nothing can begin again: not after
// a crash, a restored backup or a forked process, and not where several processes write to one remote tier. The salt is
// the front of SHA-256 over bytes 0 to 335 of the header, 24 random bytes and the time in nanoseconds: copies of a
// virtual machine begin with the same random generator, and still have other salts for other records and other times.
//
// Why GMAC: over blocks of 450 KB it is the fastest of what OpenSSL has (docs/security.md has the figures), and there
// is one construction to look at instead of two.
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
  Protection protection = Protection::sealed;  // of what is written, where there are keys
  bool accept_unauthenticated = false;         // with keys: records that none protects count, too
};

Protection protection_of(RecordKind kind);

/// Any number of threads may use one.
class RecordGuard {
 public:
  /// Without keys: believes everything that can be read without one.
  RecordGuard() : RecordGuard(GuardOptions{}) {}
  /// Throws Error: bad_argument for too many keys, or keys that are to protect nothing; bad_state where OpenSSL
  /// has no HKDF or AES.
  explicit RecordGuard(const GuardOptions& options);
  ~RecordGuard();  // forgets the keys
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

  /// Sets the header's kind, key id, salt and tag; all else of it is there but for digest and place. `sealed` gets the
  /// ciphertext, as many bytes as the payload, where kind() is sealed, and may be the payload itself; else it is not
  /// touched. False: the system gives no random bytes, or no memory.
  bool protect(RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed) const;
  /// With a salt that was never used before.
  bool protect(RecordHeader& header, std::span<const std::byte> payload, std::span<std::byte> sealed,
               const SealSalt& salt) const;

  /// `payload` has payload_bytes() of the header and gets what was put; it may be the memory of `stored`. Anything but
  /// `none`: `payload` is zeros, or `stored` itself where that is readable without a key. The digest is not looked at.
  /// Throws std::bad_alloc.
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
  mutable std::unordered_map<Context, CacheKey, ContextHash> contexts_;  // with the lock; at most kMaxContexts
};

}  // namespace kv4::tier
