// Numbers at fixed offsets of stored bytes, little-endian on every machine.
#pragma once

#include <concepts>
#include <cstddef>

namespace kv4::tier {

template <std::unsigned_integral T>
T load_le(const std::byte* from) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(std::to_integer<T>(from[i]) << (8 * i));
  return value;
}

template <std::unsigned_integral T>
void store_le(std::byte* to, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

}  // namespace kv4::tier
