// One record: a header of 128 bytes and a payload. The same bytes in every tier; docs/formats.md has the table in hex.
//
//   offset  size  meaning
//        0     8  "KV4REC\r\n"
//        8     4  version, 1
//       12     4  kind: 0 a value, 1 dead (its place is used up, its payload is gone), 2 a sealed value
//       (record_cipher.h) 16     8  layout id of the cache whose bytes these are 24     8  tenant 32    32  key 64 8
//       length of the payload 72     8  sequence: grows with every put of a store 80    16  XXH3-128 of the payload,
//       low half first 96     8  place: a digest of where a segment keeps it, 0 elsewhere. Bytes of a payload that look
//       like a record,
//                 and a record that was written to another place, have another one
//      104    16  zero
//      120     8  XXH3-64 of bytes 0 to 119
//      128        payload; on a disk it begins at 4,096, so that it can be read straight into aligned memory
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/digest.h"
#include "kv4/tier.h"

namespace kv4::tier {

inline constexpr std::int64_t kRecordHeaderBytes = 128;
inline constexpr std::int64_t kBlockBytes = 4096;  // what records on a disk are aligned to
inline constexpr std::int64_t kMaxPayloadBytes = std::int64_t{1} << 30;
inline constexpr std::uint32_t kRecordVersion = 1;
inline constexpr std::int64_t kRecordIdentityBytes = 80;  // of the header: what a seal is bound to
inline constexpr std::int64_t kSealBytes = 40;            // what a sealed payload is longer than what is in it

enum class RecordKind : std::uint32_t { value = 0, dead = 1, sealed = 2 };

struct RecordHeader {
  RecordKind kind = RecordKind::value;
  std::uint64_t layout_id = 0;
  RecordId id;
  std::int64_t length = 0;
  std::uint64_t sequence = 0;
  Digest128 payload_digest;
  std::uint64_t place = 0;
};

/// Why bytes are not taken for a record.
enum class RecordRefusal : std::uint8_t {
  none,
  too_short,          // fewer bytes than a header, or than header and payload
  foreign,            // another magic: never was a record, or its first bytes are damaged
  other_version,      // a record of another format version, or a damaged one
  damaged_header,     // the header's digest differs
  unknown_kind,       // a sound header of a kind that this version does not have
  reserved_not_zero,  // a sound header that uses bytes this version does not know
  bad_length,         // a sound header whose length no record has
  misplaced,          // a sound record that belongs elsewhere
  damaged_payload,    // the payload's digest differs
  dead,               // a value was expected
  other_record,       // another tenant or key than was asked for
  other_layout,       // bytes of a cache of another layout
  other_sequence,     // an older or newer record of the same key
  wrong_key           // sealed with another key; or not sealed where that is asked for, or the other way round
};

const char* to_string(RecordRefusal refusal);

/// `header` counts only where `refusal` is none.
struct ParsedHeader {
  RecordRefusal refusal = RecordRefusal::none;
  RecordHeader header;
};

void encode_header(const RecordHeader& header, std::span<std::byte, kRecordHeaderBytes> to);
ParsedHeader parse_header(std::span<const std::byte> bytes);

/// Header and payload; what follows them is not looked at.
ParsedHeader verify_record(std::span<const std::byte> bytes);

constexpr std::int64_t whole_blocks(std::int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

/// Of a payload of `length` bytes on a disk: a block with the header, the payload, zeros.
constexpr std::int64_t stored_bytes(std::int64_t length) { return kBlockBytes + whole_blocks(length); }

}  // namespace kv4::tier
