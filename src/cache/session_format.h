// The bytes of a session's own record, and the keys of its blocks (docs/formats.md, "Sessions").
//
//   offset  size  meaning
//        0     8  "KV4SES\r\n"
//        8     4  version: 1, or 2 with a snapshot
//       12     4  tokens of a block
//       16    32  SHA-256 of the model config
//       48    32  SHA-256 of the rope frequencies
//       80    32  root of the block keys
//      112     4  lengths: 1 + draft stages
//      116     4  bytes of the weights id
//      120     4  bytes of the layout's text
//      124     4  full blocks that extra bytes are given for
//      128     8  bytes of the canonical image
//      136     8  bytes of the open block: 0, or those of a block image
//      144        in version 2: bytes of the snapshot, 8 bytes
//                 lengths, 8 bytes each
//                 weights id; text of the layout
//                 extra bytes, each with its length in 4 bytes before it
//                 token ids, 4 bytes each; as many as the first length says
//                 canonical image; open block; snapshot
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kv4/session.h"
#include "prefix/block_hash.h"
#include "tier/record_format.h"
#include "tier/record_guard.h"

namespace kv4 {

inline constexpr std::uint32_t kSessionVersion = 1, kSessionWithSnapshotVersion = 2;
inline constexpr std::size_t kSessionFixedBytes = 144;

// Limits of records that were written elsewhere: a key per block takes 8 times a token's bytes if a block has one
// token.
inline constexpr std::int64_t kMaxSessionBlocks = 1 << 18;  // full ones: 2^25 tokens by 128
inline constexpr std::uint32_t kMaxSessionLengths = 1 + 64;
// The largest payload of a record of a session. V4-Pro with 1M tokens in bf16: 25 MB for the session's own, 2 MB for a
// block.
inline constexpr std::int64_t kMaxSessionRecordBytes = 64 << 20;
inline constexpr std::uint32_t kMaxSessionTextBytes = 1 << 20;  // of the weights id and of the layout, each

/// A session's own record, parsed into views of its payload.
struct SessionParts {
  std::uint32_t block_tokens = 0;
  Sha256 config_digest{}, rope_digest{};
  BlockKey root{};
  std::vector<std::int64_t> lengths;  // [1 + draft stages]
  std::string_view weights_id;
  std::string_view layout;                              // describe_layout()
  std::vector<std::span<const std::byte>> block_extra;  // of the first full blocks
  std::span<const std::byte> token_ids;                 // [lengths[0]] int32
  std::span<const std::byte> image, open_block;
  std::span<const std::byte> snapshot;  // at the end of the last full block; empty: none

  std::int64_t full_blocks() const { return lengths[0] / block_tokens; }
};

std::vector<std::byte> encode_session(const SessionParts& parts);
/// Whether the payload begins as a session's.
bool is_session(std::span<const std::byte> payload);
/// Checks the front of a payload before the rest takes memory: throws Error(bad_file) if it is a session's whose parts
/// cannot be `payload_bytes` long. Reads at least kSessionFixedBytes, or none.
void check_session_front(std::span<const std::byte> front, std::int64_t payload_bytes);
/// Throws Error(bad_file) unless encode_session gives this payload for the parts.
SessionParts parse_session(std::span<const std::byte> payload);

std::vector<std::int32_t> token_ids_of(const SessionParts& parts);

/// The key of the session's own record: it changes with every token and every length, and differs from every block's.
BlockKey session_key(BlockHasher& hasher, const SessionParts& parts, std::span<const std::int32_t> token_ids);
/// The keys of the full blocks.
std::vector<BlockKey> chain_keys(BlockHasher& hasher, const SessionParts& parts,
                                 std::span<const std::int32_t> token_ids);

/// The guard of files and streams alike: a file may be sent as a stream, and a stream kept as a file.
std::shared_ptr<const tier::RecordGuard> session_guard(const SessionIdentity& identity);

/// Protects the payload behind the header's place in `record`, and writes the header there. Throws Error(out_of_memory)
/// if the system has no random bytes or no memory for that.
void finish_record(const tier::RecordGuard& guard, const tier::RecordHeader& header, std::span<std::byte> record);

/// A sound record of a session, exactly as long as it says and accepted by the guard.
struct SessionRecord {
  tier::RecordHeader header;
  std::span<const std::byte> payload;  // in the record, or in the given memory
};
/// Throws Error(bad_file) with the reason. `memory`: for the payload of a sealed record.
SessionRecord open_record(const tier::RecordGuard& guard, std::span<const std::byte> record,
                          std::vector<std::byte>& memory);

tier::Key record_key(const BlockKey& key);
BlockKey block_key(const tier::Key& key);

}  // namespace kv4
