// Digests to compare identities and to find damage, not for security.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kv4 {

struct Digest128 {
  std::uint64_t low = 0, high = 0;
  friend bool operator==(const Digest128&, const Digest128&) = default;
};

std::uint64_t digest64(std::string_view bytes);
std::uint64_t digest64(std::span<const std::byte> bytes);
Digest128 digest128(std::span<const std::byte> bytes);

}  // namespace kv4
