#include "printable.h"

#include <fmt/format.h>

#include <cstdint>

namespace kv4::cli {
namespace {

/// Bytes of the UTF-8 character at the front; 0 where it is invalid.
std::size_t character_bytes(std::string_view text, std::uint32_t& code) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  const std::uint32_t first = byte(0);
  const std::size_t bytes = first < 0x80   ? 1
                            : first < 0xC2 ? 0
                            : first < 0xE0 ? 2
                            : first < 0xF0 ? 3
                            : first < 0xF5 ? 4
                                           : 0;
  if (bytes == 0 || bytes > text.size()) return 0;
  code = bytes == 1 ? first : first & (0xFFu >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = (code << 6) | (byte(i) & 0x3F);
  }
  const bool overlong = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
  return overlong || (code >= 0xD800 && code < 0xE000) || code > 0x10FFFF ? 0 : bytes;
}

bool is_harmless(std::uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool turns = code == 0x061C || code == 0x200E || code == 0x200F || (code >= 0x2028 && code <= 0x202E) ||
                     (code >= 0x2066 && code <= 0x2069);
  return !control && !turns;
}

}  // namespace

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    if (out.size() >= max_bytes) return out + "...";
    std::uint32_t code = 0;
    std::size_t bytes = character_bytes(text.substr(at), code);
    if (bytes > 0 && is_harmless(code)) {
      out += text.substr(at, bytes);
    } else {
      bytes = bytes == 0 ? 1 : bytes;
      for (std::size_t i = 0; i < bytes; ++i) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[at + i]));
    }
    at += bytes;
  }
  return out;
}

}  // namespace kv4::cli
