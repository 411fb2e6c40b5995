// One record: a header of 512 bytes and a payload. The same bytes in every tier; docs/formats.md has the table in hex.
//
//   offset  size  meaning
//        0     8  "KV4REC\r\n"
//        8     4  version, 2
//       12     2  kind: 0 a value, 1 a tombstone (its place is used up, its payload is gone), 2 sealed, 3 authenticated
//                 (record_guard.h)
//       14     2  coding of the payload: 0 none, 1 trimmed (chunk_coding.h; chunks only); 2 zstd, 3 LZ4 are for later
//                 versions, refused by this one
//       16     8  layout id of the cache whose bytes these are
//       24     8  tenant
//       32     8  length of the payload as stored
//       40     8  length of the payload once decoded
//       48     8  sequence: grows with every put of a store
//       56     2  bytes of the key: 32 of a block's, 1 to 256 of a chunk's
//       58     1  1: the record is a chunk's, and its id is a hash of the key (chunk_key.h); 0: the key is the id
//       59     5  zero
//       64   256  key, then zeros
//      320    16  id of the cache key; zero where no key protects it
//      336    24  salt, random; likewise
//      360    16  tag; likewise
//      376     8  place: in a segment, a digest of the record's location; 0 elsewhere. It differs for a payload's bytes
//                 that look like a record, and for a record written to another location
//      384    16  XXH3-128 of the payload as stored, low half first
//      400   104  zero
//      504     8  XXH3-64 of bytes 0 to 503
//      512        payload; on a disk it begins at 4,096, so that it can be read straight into aligned memory
//
// A header of version 1 (0.1) has 128 bytes; the salt and tag of a sealed payload follow the payload. Records of
// version 1 are read, and move within a store as they are; new records are of version 2.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/digest.h"
#include "kv4/tier.h"
#include "tier/chunk_key.h"

namespace kv4::tier {

inline constexpr std::int64_t kRecordHeaderBytes = 512, kRecordHeaderBytesV1 = 128;
inline constexpr std::int64_t kBlockBytes = 4096;  // alignment of records on a disk
inline constexpr std::int64_t kMaxPayloadBytes = std::int64_t{1} << 30;
inline constexpr std::uint16_t kRecordVersion = 2;
/// The bytes of the header that a seal covers. They exclude the place, so that a record can move without being opened.
inline constexpr std::int64_t kRecordIdentityBytes = 336, kRecordIdentityBytesV1 = 80;
inline constexpr std::int64_t kSealBytesV1 = 40;  // salt and tag behind a payload that version 1 sealed
/// Of a chunk, decoded. A coded payload is shorter.
inline constexpr std::int64_t kMaxChunkBytes = std::int64_t{64} << 20;

enum class RecordKind : std::uint16_t { value = 0, dead = 1, sealed = 2, authenticated = 3 };

using KeyId = std::array<std::byte, 16>;
using SealSalt = std::array<std::byte, 24>;
using SealTag = std::array<std::byte, 16>;

struct RecordHeader {
  std::uint16_t version = kRecordVersion;
  RecordKind kind = RecordKind::value;
  std::uint64_t layout_id = 0;
  RecordId id;
  std::int64_t length = 0;  // bytes of the payload as stored
  std::uint64_t sequence = 0;
  KeyId key_id{};  // this and the next two: of a sealed or authenticated record of version 2
  SealSalt salt{};
  SealTag tag{};
  std::uint64_t place = 0;
  Digest128 payload_digest = {};
  std::optional<ChunkLabel> label = {};  // of a chunk, version 2 only; id.key is chunk_id() of its key

  ChunkCoding coding() const { return label ? label->coding : ChunkCoding{}; }
  /// Of a record that is put with this label, or null.
  void set_label(const ChunkLabel* given) {
    if (given != nullptr) label = *given;
  }
  std::int64_t header_bytes() const { return version == 1 ? kRecordHeaderBytesV1 : kRecordHeaderBytes; }
};

/// Bytes of the payload as it was put; `length`: bytes as stored.
constexpr std::int64_t payload_bytes(std::uint16_t version, RecordKind kind, std::int64_t length) {
  return version == 1 && kind == RecordKind::sealed ? length - kSealBytesV1 : length;
}

/// The reason why bytes are not accepted as a record.
enum class RecordRefusal : std::uint8_t {
  none,
  too_short,          // fewer bytes than a header, or than header and payload
  foreign,            // another magic: never was a record, or its first bytes are damaged
  other_version,      // a record of another format version, or a damaged one
  damaged_header,     // the header's digest differs
  unknown_kind,       // a sound header of a kind that this version does not have
  reserved_not_zero,  // a sound header that uses bytes that this version reserves
  bad_length,         // a sound header with a length that no record can have
  misplaced,          // a sound record that belongs elsewhere
  damaged_payload,    // the payload's digest differs
  dead,               // a value was expected
  other_record,       // another tenant or key than was asked for
  other_layout,       // bytes of a cache of another layout
  other_sequence,     // an older or newer record of the same key
  wrong_key,          // sealed or authenticated with a key that the reader does not have
  unauthenticated,    // no key protects it, and the reader believes only protected records
  forged              // it names one of the reader's keys, and that key did not make it
};

const char* to_string(RecordRefusal refusal);

/// `header` is valid only where `refusal` is none.
struct ParsedHeader {
  RecordRefusal refusal = RecordRefusal::none;
  RecordHeader header;
};

/// Writes header_bytes() to the front of `to`, in the format of the header's version.
void encode_header(const RecordHeader& header, std::span<std::byte> to);
/// Reads a header of either version.
ParsedHeader parse_header(std::span<const std::byte> bytes);

/// Checks header and payload; ignores bytes behind them.
ParsedHeader verify_record(std::span<const std::byte> bytes);

constexpr std::int64_t whole_blocks(std::int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

/// Bytes that a payload of `length` bytes takes on a disk: a block with the header, the payload, zeros.
constexpr std::int64_t stored_bytes(std::int64_t length) { return kBlockBytes + whole_blocks(length); }

}  // namespace kv4::tier
