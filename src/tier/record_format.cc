#include "tier/record_format.h"

#include <algorithm>
#include <cstring>

#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr char kMagic[] = {'K', 'V', '4', 'R', 'E', 'C', '\r', '\n'};
constexpr int kVersionAt = 8, kKindAt = 12, kLayoutAt = 16, kTenantAt = 24;  // of both versions
static_assert(sizeof(kMagic) == kVersionAt);

namespace v2 {
constexpr int kCodingAt = 14, kLengthAt = 32, kDecodedLengthAt = 40, kSequenceAt = 48, kKeyBytesAt = 56, kChunkAt = 58,
              kZeroAt = 59, kKeyAt = 64, kKeyIdAt = 320, kSaltAt = 336, kTagAt = 360, kPlaceAt = 376,
              kPayloadDigestAt = 384, kEndZeroAt = 400, kDigestAt = 504;
static_assert(kKeyAt + kMaxChunkKeyBytes == kKeyIdAt && sizeof(Key) <= kMaxChunkKeyBytes);
static_assert(kKeyIdAt + sizeof(KeyId) == kRecordIdentityBytes && kSaltAt == kRecordIdentityBytes);
static_assert(kSaltAt + sizeof(SealSalt) == kTagAt && kTagAt + sizeof(SealTag) == kPlaceAt);
static_assert(kPayloadDigestAt + 16 == kEndZeroAt && kDigestAt + 8 == kRecordHeaderBytes);
}  // namespace v2

namespace v1 {
constexpr int kKeyAt = 32, kLengthAt = 64, kSequenceAt = 72, kPayloadDigestAt = 80, kPlaceAt = 96, kZeroAt = 104,
              kDigestAt = 120;
static_assert(kKeyAt + sizeof(Key) == kLengthAt && kRecordIdentityBytesV1 == kPayloadDigestAt);
static_assert(kDigestAt + 8 == kRecordHeaderBytesV1);
}  // namespace v1

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

template <std::size_t N>
void copy_from(const std::byte* at, std::array<std::byte, N>& to) {
  std::memcpy(to.data(), at, N);
}

void store_digest(std::byte* at, const Digest128& digest) {
  store_le(at, digest.low);
  store_le(at + 8, digest.high);
}

Digest128 load_digest(const std::byte* at) { return {load_le<std::uint64_t>(at), load_le<std::uint64_t>(at + 8)}; }

void encode_v2(const RecordHeader& header, std::byte* at) {
  store_le(at + kKindAt, static_cast<std::uint16_t>(header.kind));
  store_le(at + v2::kLengthAt, static_cast<std::uint64_t>(header.length));
  store_le(at + v2::kSequenceAt, header.sequence);
  if (header.label) {
    const ChunkLabel& label = *header.label;
    store_le(at + v2::kCodingAt, label.coding.coding);
    store_le(at + v2::kDecodedLengthAt, static_cast<std::uint64_t>(label.coding.decoded_bytes));
    store_le(at + v2::kKeyBytesAt, label.key_bytes);
    at[v2::kChunkAt] = std::byte{1};
    std::memcpy(at + v2::kKeyAt, label.key.data(), label.key_bytes);
  } else {
    store_le(at + v2::kDecodedLengthAt, static_cast<std::uint64_t>(header.length));
    store_le(at + v2::kKeyBytesAt, static_cast<std::uint16_t>(sizeof(Key)));
    std::memcpy(at + v2::kKeyAt, header.id.key.data(), sizeof(Key));
  }
  std::memcpy(at + v2::kKeyIdAt, header.key_id.data(), sizeof(KeyId));
  std::memcpy(at + v2::kSaltAt, header.salt.data(), sizeof(SealSalt));
  std::memcpy(at + v2::kTagAt, header.tag.data(), sizeof(SealTag));
  store_le(at + v2::kPlaceAt, header.place);
  store_digest(at + v2::kPayloadDigestAt, header.payload_digest);
  store_le(at + v2::kDigestAt, digest64({at, v2::kDigestAt}));
}

void encode_v1(const RecordHeader& header, std::byte* at) {
  store_le(at + kKindAt, static_cast<std::uint32_t>(header.kind));
  std::memcpy(at + v1::kKeyAt, header.id.key.data(), sizeof(Key));
  store_le(at + v1::kLengthAt, static_cast<std::uint64_t>(header.length));
  store_le(at + v1::kSequenceAt, header.sequence);
  store_digest(at + v1::kPayloadDigestAt, header.payload_digest);
  store_le(at + v1::kPlaceAt, header.place);
  store_le(at + v1::kDigestAt, digest64({at, v1::kDigestAt}));
}

/// The key of a header of version 2, and whether its coding and lengths go together; `length`: as stored.
RecordRefusal parse_key(std::span<const std::byte> bytes, std::int64_t length, RecordHeader& header) {
  const std::byte* at = bytes.data();
  const auto coding = load_le<std::uint16_t>(at + v2::kCodingAt),
             key_bytes = load_le<std::uint16_t>(at + v2::kKeyBytesAt);
  const auto decoded = load_le<std::uint64_t>(at + v2::kDecodedLengthAt);
  const auto stored = static_cast<std::uint64_t>(length);
  const bool chunk = at[v2::kChunkAt] == std::byte{1};
  if (chunk ? key_bytes < 1 || key_bytes > kMaxChunkKeyBytes || coding > kTrimmed
            : key_bytes != sizeof(Key) || coding != kNotCoded)
    return RecordRefusal::unknown_kind;
  if (coding == kNotCoded ? decoded != stored : stored >= decoded) return RecordRefusal::bad_length;
  if (chunk && decoded > static_cast<std::uint64_t>(kMaxChunkBytes)) return RecordRefusal::bad_length;
  if (!is_zero(bytes.subspan(v2::kKeyAt + key_bytes, kMaxChunkKeyBytes - key_bytes)))
    return RecordRefusal::reserved_not_zero;
  if (chunk) {
    header.label = make_label(bytes.subspan(v2::kKeyAt, key_bytes), {coding, static_cast<std::int64_t>(decoded)});
    header.id.key = chunk_id(header.label->key_span());
  } else {
    copy_from(at + v2::kKeyAt, header.id.key);
  }
  return RecordRefusal::none;
}

/// Parses the rest of a header of version 2, after magic and version.
RecordRefusal parse_v2(std::span<const std::byte> bytes, RecordHeader& header) {
  if (bytes.size() < kRecordHeaderBytes) return RecordRefusal::too_short;
  const std::byte* at = bytes.data();
  if (load_le<std::uint64_t>(at + v2::kDigestAt) != digest64(bytes.first(v2::kDigestAt)))
    return RecordRefusal::damaged_header;
  const auto kind = load_le<std::uint16_t>(at + kKindAt);
  if (kind > static_cast<std::uint16_t>(RecordKind::authenticated)) return RecordRefusal::unknown_kind;
  header.kind = static_cast<RecordKind>(kind);
  const auto length = load_le<std::uint64_t>(at + v2::kLengthAt);
  if (length > static_cast<std::uint64_t>(kMaxPayloadBytes)) return RecordRefusal::bad_length;
  header.length = static_cast<std::int64_t>(length);
  if (const RecordRefusal refusal = parse_key(bytes, header.length, header); refusal != RecordRefusal::none)
    return refusal;
  const bool guarded = header.kind == RecordKind::sealed || header.kind == RecordKind::authenticated;
  const auto zero_between = [&](std::size_t from, std::size_t to) { return is_zero(bytes.subspan(from, to - from)); };
  if ((at[v2::kChunkAt] & ~std::byte{1}) != std::byte{0} || !zero_between(v2::kZeroAt, v2::kKeyAt) ||
      (!guarded && !zero_between(v2::kKeyIdAt, v2::kPlaceAt)) || !zero_between(v2::kEndZeroAt, v2::kDigestAt))
    return RecordRefusal::reserved_not_zero;
  header.sequence = load_le<std::uint64_t>(at + v2::kSequenceAt);
  copy_from(at + v2::kKeyIdAt, header.key_id);
  copy_from(at + v2::kSaltAt, header.salt);
  copy_from(at + v2::kTagAt, header.tag);
  header.place = load_le<std::uint64_t>(at + v2::kPlaceAt);
  header.payload_digest = load_digest(at + v2::kPayloadDigestAt);
  return RecordRefusal::none;
}

RecordRefusal parse_v1(std::span<const std::byte> bytes, RecordHeader& header) {
  const std::byte* at = bytes.data();
  if (load_le<std::uint64_t>(at + v1::kDigestAt) != digest64(bytes.first(v1::kDigestAt)))
    return RecordRefusal::damaged_header;
  const auto kind = load_le<std::uint32_t>(at + kKindAt);
  if (kind > static_cast<std::uint32_t>(RecordKind::sealed)) return RecordRefusal::unknown_kind;
  if (!is_zero(bytes.subspan(v1::kZeroAt, v1::kDigestAt - v1::kZeroAt))) return RecordRefusal::reserved_not_zero;
  header.kind = static_cast<RecordKind>(kind);
  const auto length = load_le<std::uint64_t>(at + v1::kLengthAt);
  if (length > static_cast<std::uint64_t>(kMaxPayloadBytes) ||
      (header.kind == RecordKind::sealed && length < static_cast<std::uint64_t>(kSealBytesV1)))
    return RecordRefusal::bad_length;
  header.length = static_cast<std::int64_t>(length);
  copy_from(at + v1::kKeyAt, header.id.key);
  header.sequence = load_le<std::uint64_t>(at + v1::kSequenceAt);
  header.payload_digest = load_digest(at + v1::kPayloadDigestAt);
  header.place = load_le<std::uint64_t>(at + v1::kPlaceAt);
  return RecordRefusal::none;
}

}  // namespace

const char* to_string(RecordRefusal refusal) {
  switch (refusal) {
    case RecordRefusal::none: return "sound";
    case RecordRefusal::too_short: return "too short";
    case RecordRefusal::foreign: return "not a record";
    case RecordRefusal::other_version: return "other format version";
    case RecordRefusal::damaged_header: return "damaged header";
    case RecordRefusal::unknown_kind: return "unknown kind";
    case RecordRefusal::reserved_not_zero: return "reserved bytes in use";
    case RecordRefusal::bad_length: return "impossible length";
    case RecordRefusal::misplaced: return "in a wrong place";
    case RecordRefusal::damaged_payload: return "damaged payload";
    case RecordRefusal::dead: return "dead";
    case RecordRefusal::other_record: return "another record";
    case RecordRefusal::other_layout: return "other layout";
    case RecordRefusal::other_sequence: return "another sequence";
    case RecordRefusal::wrong_key: return "protected by a key that is not among those given";
    case RecordRefusal::unauthenticated: return "not authenticated by any key";
    case RecordRefusal::forged: return "not what its key made: forged or damaged";
  }
  return "unknown";
}

void encode_header(const RecordHeader& header, std::span<std::byte> to) {
  std::byte* at = to.data();
  std::memset(at, 0, header.header_bytes());
  std::memcpy(at, kMagic, sizeof(kMagic));
  store_le(at + kVersionAt, std::uint32_t{header.version});
  store_le(at + kLayoutAt, header.layout_id);
  store_le(at + kTenantAt, header.id.tenant);
  header.version == 1 ? encode_v1(header, at) : encode_v2(header, at);
}

ParsedHeader parse_header(std::span<const std::byte> bytes) {
  ParsedHeader parsed{RecordRefusal::too_short, {}};
  if (bytes.size() < kRecordHeaderBytesV1) return parsed;
  const std::byte* at = bytes.data();
  parsed.refusal = RecordRefusal::foreign;
  if (std::memcmp(at, kMagic, sizeof(kMagic)) != 0) return parsed;
  // Checked before the digest, which another version may keep elsewhere.
  const auto version = load_le<std::uint32_t>(at + kVersionAt);
  parsed.refusal = RecordRefusal::other_version;
  if (version != 1 && version != kRecordVersion) return parsed;
  parsed.header.version = static_cast<std::uint16_t>(version);
  parsed.header.layout_id = load_le<std::uint64_t>(at + kLayoutAt);
  parsed.header.id.tenant = load_le<std::uint64_t>(at + kTenantAt);
  parsed.refusal = version == 1 ? parse_v1(bytes, parsed.header) : parse_v2(bytes, parsed.header);
  return parsed;
}

ParsedHeader verify_record(std::span<const std::byte> bytes) {
  ParsedHeader parsed = parse_header(bytes);
  if (parsed.refusal != RecordRefusal::none) return parsed;
  const std::size_t header_bytes = parsed.header.header_bytes();
  const std::size_t length = parsed.header.length;
  if (parsed.header.kind == RecordKind::dead)
    parsed.refusal = RecordRefusal::dead;
  else if (bytes.size() < header_bytes + length)
    parsed.refusal = RecordRefusal::too_short;
  else if (digest128(bytes.subspan(header_bytes, length)) != parsed.header.payload_digest)
    parsed.refusal = RecordRefusal::damaged_payload;
  return parsed;
}

}  // namespace kv4::tier
