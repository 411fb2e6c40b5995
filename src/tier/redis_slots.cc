#include "tier/redis_slots.h"

#include <fmt/format.h>

#include <charconv>

namespace kv4::tier {
namespace {

void append_hex(std::string& to, std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (const std::byte b : bytes) {
    to += kDigits[std::to_integer<int>(b) >> 4];
    to += kDigits[std::to_integer<int>(b) & 15];
  }
}

bool parse_number(std::string_view text, int limit, int& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= 0 && number < limit;
}

}  // namespace

std::string redis_name(std::uint64_t layout_id, const RecordId& id) {
  std::string name = fmt::format("kv4:{:016x}:{:016x}:", layout_id, id.tenant);
  append_hex(name, id.key);
  return name;
}

int redis_slot(std::string_view name) {
  unsigned crc = 0;
  for (const char c : name) {
    crc ^= static_cast<unsigned>(static_cast<unsigned char>(c)) << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc << 1) ^ ((crc & 0x8000) ? 0x1021 : 0);
    crc &= 0xffff;
  }
  return static_cast<int>(crc % kRedisSlots);
}

std::string to_text(const RedisAddress& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", v6 ? "[" : "", address.host, v6 ? "]" : "", address.port);
}

RedisRedirect parse_redirect(std::string_view error, const RedisAddress& asked) {
  RedisRedirect redirect;
  const bool moved = error.starts_with("MOVED "), ask = error.starts_with("ASK ");
  if (!moved && !ask) return redirect;
  error.remove_prefix(moved ? 6 : 4);
  const auto space = error.find(' '), colon = error.rfind(':');
  if (space == std::string_view::npos || colon == std::string_view::npos || colon < space) return redirect;
  if (!parse_number(error.substr(0, space), kRedisSlots, redirect.slot)) return redirect;
  if (!parse_number(error.substr(colon + 1), 65536, redirect.to.port)) return redirect;
  redirect.to.host = error.substr(space + 1, colon - space - 1);
  if (redirect.to.host.empty()) redirect.to.host = asked.host;
  redirect.kind = moved ? RedisRedirect::Kind::moved : RedisRedirect::Kind::ask;
  return redirect;
}

}  // namespace kv4::tier
