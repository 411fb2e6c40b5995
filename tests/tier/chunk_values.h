// Chunks whose bytes follow from their number.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv4/chunk_store.h"
#include "tier/store_records.h"

namespace kv4::test {

inline tier::Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }

inline ChunkKey key(std::string_view text) { return std::as_bytes(std::span(text)); }
inline ChunkKey bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

/// Keys of all lengths; some differ in their last byte only.
inline std::string key_of(std::int64_t number) {
  constexpr std::int64_t kLengths[] = {1, 4, 31, 32, 33, 36, 64, 255, 256};
  std::string text(static_cast<std::size_t>(kLengths[number % 9]), 'k');
  if (text.size() > 1) text[0] = static_cast<char>('a' + number % 9);
  text.back() = static_cast<char>(number / 9);
  return text;
}

/// Values of all sizes, some with runs of zeros.
inline std::vector<std::byte> value_of(std::uint64_t seed, std::int64_t most = 40'000) {
  Random random(seed);
  std::vector<std::byte> value =
      random_bytes(random.next(), random.below(4) == 0 ? random.below(64) : random.below(most));
  if (random.below(3) == 0 && value.size() > 3000) std::fill(value.begin() + 1000, value.end() - 500, std::byte{0});
  return value;
}

}  // namespace kv4::test
