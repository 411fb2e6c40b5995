// Where a Redis cluster keeps a key: which name a record has there, which slot that is, and who serves the slot.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tier/record_format.h"

namespace kv4::tier {

inline constexpr int kRedisSlots = 16384;

/// "kv4:<layout>:<tenant>:<key>" in hex. Caches of another layout share no names: neither sees nor replaces the
/// other's.
std::string redis_name(std::uint64_t layout_id, const RecordId& id);

/// CRC-16/XMODEM of the name, modulo 16,384. Our names have no braces, so the whole name counts.
int redis_slot(std::string_view name);

struct RedisAddress {
  std::string host;  // a name or a numeric address
  int port = 0;
  friend bool operator==(const RedisAddress&, const RedisAddress&) = default;
};
/// "host:port", "[::1]:port".
std::string to_text(const RedisAddress& address);

/// "-MOVED 3999 127.0.0.1:6381" and "-ASK ...", without the minus; a node that does not know its own address leaves it
/// out, and then it is `asked`'s.
struct RedisRedirect {
  enum class Kind : std::uint8_t { none, moved, ask };
  Kind kind = Kind::none;
  int slot = 0;
  RedisAddress to;
};
RedisRedirect parse_redirect(std::string_view error, const RedisAddress& asked);

}  // namespace kv4::tier
