// Chains of keys from words: each letter is a block.
#pragma once

#include <string_view>
#include <vector>

#include "prefix/block_hash.h"

namespace kv4::test {

inline std::vector<BlockKey> chain(std::string_view letters) {
  BlockHasher hasher;
  std::vector<BlockKey> keys;
  BlockKey key{};
  for (const char letter : letters) {
    const std::int32_t token = letter;
    keys.push_back(key = hasher.block(key, {&token, 1}));
  }
  return keys;
}

}  // namespace kv4::test
