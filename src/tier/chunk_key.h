// The key of a chunk and its record's id. Tiers know records by ids of 32 bytes; a chunk's key has up to 256, and its
// id is a SHA-256 of them: nobody finds two keys of one id. The key itself stands in the record's header.
//
//   id = SHA-256("kv4chunk", key)
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kv4/tier.h"

namespace kv4::tier {

inline constexpr std::size_t kMaxChunkKeyBytes = 256;
/// Codings of a payload (RecordHeader), as they are stored.
inline constexpr std::uint16_t kNotCoded = 0, kTrimmed = 1;

struct ChunkLabel {
  std::uint16_t key_bytes = 0;  // 1 to kMaxChunkKeyBytes
  std::array<std::byte, kMaxChunkKeyBytes> key{};
  ChunkCoding coding;

  std::span<const std::byte> key_span() const { return std::span(key).first(key_bytes); }
};

/// `key`: at most kMaxChunkKeyBytes.
inline ChunkLabel make_label(std::span<const std::byte> key, const ChunkCoding& coding) {
  ChunkLabel label;
  label.key_bytes = static_cast<std::uint16_t>(key.size());
  std::copy(key.begin(), key.end(), label.key.begin());
  label.coding = coding;
  return label;
}

/// The layout id of a store of chunks of this space.
std::uint64_t chunk_layout_id(const std::string& space);
/// Any thread. Throws std::bad_alloc where OpenSSL finds no memory; needs_sha256() comes first.
Key chunk_id(std::span<const std::byte> key);
/// Throws Error(bad_state) where OpenSSL has no SHA-256.
void needs_sha256();

}  // namespace kv4::tier
