// Keys that authenticate the bytes that leave the process: records on a disk, on a server and in tiers of your own,
// sessions and hand-over streams.
//
// A digest proves that a record is undamaged; it does not prove its writer. With keys, a record counts only if its
// writer had one of them. Any other record is a miss (in a tier) or Error(bad_file) (in a session). docs/security.md
// states the guarantees and their limits.
//
// The first key writes, all keys read. To rotate keys: put the new key first, keep the old one behind it until its
// records have been evicted or rewritten, then drop it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kv4/export.h"

namespace kv4 {

/// A secret of 256 bits; record keys are derived from it.
using CacheKey = std::array<std::byte, 32>;
inline constexpr std::size_t kMaxCacheKeys = 64;  // of one list

/// The protection that a key gives to a record.
enum class Protection : std::uint8_t {
  none,          // no key: only a digest, against accidental damage
  sealed,        // AES-256-GCM: nobody without the key reads or writes it
  authenticated  // GMAC: everybody reads it, nobody without the key writes it
};
/// "none", "sealed", "authenticated".
KV4_API const char* to_string(Protection protection);
/// The inverse of to_string(); throws Error(bad_argument) listing the names.
KV4_API Protection parse_protection(std::string_view name);

/// Reads lines of 64 hex digits, a key each, in the order of the list; empty lines are ignored. Throws Error(bad_file):
/// no such file, not a regular file, group or others can read it, a line that is no key, no key, more than
/// kMaxCacheKeys. Messages contain line numbers, never the file's text.
KV4_API std::vector<CacheKey> read_key_file(const std::string& path);

}  // namespace kv4
