// Keys of blocks: a SHA-256 chain over token ids. Besides the tokens, the root covers everything that decides a block's
// bytes. So equal keys mean equal bytes, and another model, format or tenant never matches (docs/formats.md, "Block
// keys").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "kv4/prefix_cache.h"
#include "kv4/schema.h"

namespace kv4 {

inline constexpr std::uint32_t kCacheFormatVersion = 1;

using Sha256 = std::array<std::uint8_t, 32>;
static_assert(std::is_same_v<Sha256, BlockKey>);

/// The bytes are uniform already: the first eight serve as a hash.
inline std::uint64_t key_fingerprint(const BlockKey& key) {
  std::uint64_t out;
  std::memcpy(&out, key.data(), sizeof out);
  return out;
}
std::string to_hex(const BlockKey& key);

/// The inputs of a chain's root.
struct ChainIdentity {
  Sha256 config_digest{};
  Sha256 rope_digest{};     // of the angles in use: the library's own, or a bound table
  Sha256 layout_digest{};   // of the formats, not of the bytes' addresses
  std::string weights_id;   // the caller's name for the weights; new weights need a new one
  std::string tenant_salt;  // tenants with different salts never share
};

/// Covers also the values that the text of the layout id omits: index_topk, for example, decides what later layers see.
Sha256 digest_config(const ModelConfig& config);
/// The digest of the frequencies that the library builds its angles from.
Sha256 digest_rope(const ModelConfig& config);
/// Uses the schema's config, layout and own rope angles.
ChainIdentity identify_chain(const CacheSchema& schema, std::string weights_id, std::string tenant_salt);

/// Computes keys without an allocation per key. One thread at a time.
class BlockHasher {
 public:
  BlockHasher();
  ~BlockHasher();
  BlockHasher(const BlockHasher&) = delete;
  BlockHasher& operator=(const BlockHasher&) = delete;

  BlockKey root(const ChainIdentity& identity);
  /// `extra`: other inputs of the block's bytes, such as a LoRA id or hashes of images.
  BlockKey block(const BlockKey& parent, std::span<const std::int32_t> token_ids,
                 std::span<const std::byte> extra = {});
  /// The key of the snapshot at the block's end, in tiers.
  BlockKey snapshot(const BlockKey& block_key);
  Sha256 digest(std::string_view bytes);

 private:
  struct Engine;
  std::unique_ptr<Engine> engine_;
};

}  // namespace kv4
