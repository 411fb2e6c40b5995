// Requests of kv4/tier.h by id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kv4/tier.h"
#include "tier/little_endian.h"
#include "tier/record_format.h"

namespace kv4::tier {

/// The hash for ids that the cache itself asks for: their keys are digests already.
struct RecordIdHash {
  std::size_t operator()(const RecordId& id) const {
    return load_le<std::uint64_t>(id.key.data()) ^ (id.tenant * 0x9e3779b97f4a7c15u);
  }
};

/// The hash for ids that others may have written. Its seed is unpredictable: keys chosen to collide, so that a lookup
/// walks along all of them, collide no more often than others.
struct SeededIdHash {
  std::uint64_t seed = 0;

  std::size_t operator()(const RecordId& id) const {
    std::uint64_t words[sizeof(Key) / 8];  // in the machine's byte order: a hash stays in the process
    std::memcpy(words, id.key.data(), sizeof(words));
    const auto word = [&](std::size_t i) { return words[i] ^ seed ^ kOdd[i]; };
    const std::uint64_t key = fold(word(0), word(1)) ^ fold(word(2), word(3));
    return static_cast<std::size_t>(fold(key ^ kOdd[4], id.tenant ^ seed ^ kOdd[5]));
  }

 private:
  /// Xors both halves of the product, so that every bit of the result depends on both factors.
  static std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  static constexpr std::uint64_t kOdd[] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                           0xd6e8feb86659fd93, 0xa0761d6478bd642f, 0xe7037ed1a0b428db};
};

}  // namespace kv4::tier
