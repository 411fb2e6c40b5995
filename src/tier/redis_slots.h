// The place of a record in a Redis cluster: its name, its slot, and the server of the slot.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tier/record_format.h"

namespace kv4::tier {

inline constexpr int kRedisSlots = 16384;

/// "kv4:<layout>:<tenant>:<key>" in hex. Caches of different layouts share no names: neither sees or replaces the
/// other's records.
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

/// A redirect: "-MOVED 3999 127.0.0.1:6381" or "-ASK ...", without the minus. A node that does not know its own address
/// leaves it out; the address is then that of `asked`.
struct RedisRedirect {
  enum class Kind : std::uint8_t { none, moved, ask };
  Kind kind = Kind::none;
  int slot = 0;
  RedisAddress to;
};
RedisRedirect parse_redirect(std::string_view error, const RedisAddress& asked);

}  // namespace kv4::tier
