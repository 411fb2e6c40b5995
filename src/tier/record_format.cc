#include "tier/record_format.h"

#include <algorithm>
#include <cstring>

#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr char kMagic[] = {'K', 'V', '4', 'R', 'E', 'C', '\r', '\n'};
constexpr int kVersionAt = 8, kKindAt = 12, kLayoutAt = 16, kTenantAt = 24, kKeyAt = 32, kLengthAt = 64,
              kSequenceAt = 72, kPayloadDigestAt = 80, kPlaceAt = 96, kZeroAt = 104, kDigestAt = 120;
static_assert(sizeof(kMagic) == kVersionAt && kKeyAt + sizeof(Key) == kLengthAt);
static_assert(kRecordIdentityBytes == kPayloadDigestAt);
static_assert(kZeroAt % 8 == 0 && kDigestAt + 8 == kRecordHeaderBytes);

ParsedHeader refused(RecordRefusal refusal) { return {refusal, {}}; }

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
    case RecordRefusal::wrong_key: return "sealed with another key";
  }
  return "unknown";
}

void encode_header(const RecordHeader& header, std::span<std::byte, kRecordHeaderBytes> to) {
  std::byte* at = to.data();
  std::memset(at, 0, to.size());
  std::memcpy(at, kMagic, sizeof(kMagic));
  store_le(at + kVersionAt, kRecordVersion);
  store_le(at + kKindAt, static_cast<std::uint32_t>(header.kind));
  store_le(at + kLayoutAt, header.layout_id);
  store_le(at + kTenantAt, header.id.tenant);
  std::memcpy(at + kKeyAt, header.id.key.data(), header.id.key.size());
  store_le(at + kLengthAt, static_cast<std::uint64_t>(header.length));
  store_le(at + kSequenceAt, header.sequence);
  store_le(at + kPayloadDigestAt, header.payload_digest.low);
  store_le(at + kPayloadDigestAt + 8, header.payload_digest.high);
  store_le(at + kPlaceAt, header.place);
  store_le(at + kDigestAt, digest64(to.first(kDigestAt)));
}

ParsedHeader parse_header(std::span<const std::byte> bytes) {
  if (bytes.size() < kRecordHeaderBytes) return refused(RecordRefusal::too_short);
  const std::byte* at = bytes.data();
  if (std::memcmp(at, kMagic, sizeof(kMagic)) != 0) return refused(RecordRefusal::foreign);
  // Before the digest: another version may keep it elsewhere.
  if (load_le<std::uint32_t>(at + kVersionAt) != kRecordVersion) return refused(RecordRefusal::other_version);
  if (load_le<std::uint64_t>(at + kDigestAt) != digest64(bytes.first(kDigestAt)))
    return refused(RecordRefusal::damaged_header);

  const auto kind = load_le<std::uint32_t>(at + kKindAt);
  if (kind > static_cast<std::uint32_t>(RecordKind::sealed)) return refused(RecordRefusal::unknown_kind);
  if (std::any_of(at + kZeroAt, at + kDigestAt, [](std::byte b) { return b != std::byte{0}; }))
    return refused(RecordRefusal::reserved_not_zero);
  const auto length = load_le<std::uint64_t>(at + kLengthAt);
  if (length > static_cast<std::uint64_t>(kMaxPayloadBytes) ||
      (kind == static_cast<std::uint32_t>(RecordKind::sealed) && length < kSealBytes))
    return refused(RecordRefusal::bad_length);

  ParsedHeader parsed;
  RecordHeader& header = parsed.header;
  header.kind = static_cast<RecordKind>(kind);
  header.layout_id = load_le<std::uint64_t>(at + kLayoutAt);
  header.id.tenant = load_le<std::uint64_t>(at + kTenantAt);
  std::memcpy(header.id.key.data(), at + kKeyAt, header.id.key.size());
  header.length = static_cast<std::int64_t>(length);
  header.sequence = load_le<std::uint64_t>(at + kSequenceAt);
  header.payload_digest = {load_le<std::uint64_t>(at + kPayloadDigestAt),
                           load_le<std::uint64_t>(at + kPayloadDigestAt + 8)};
  header.place = load_le<std::uint64_t>(at + kPlaceAt);
  return parsed;
}

ParsedHeader verify_record(std::span<const std::byte> bytes) {
  ParsedHeader parsed = parse_header(bytes);
  if (parsed.refusal != RecordRefusal::none) return parsed;
  if (parsed.header.kind == RecordKind::dead) return refused(RecordRefusal::dead);
  const auto payload = bytes.subspan(kRecordHeaderBytes);
  const auto length = static_cast<std::size_t>(parsed.header.length);
  if (payload.size() < length) return refused(RecordRefusal::too_short);
  if (digest128(payload.first(length)) != parsed.header.payload_digest) return refused(RecordRefusal::damaged_payload);
  return parsed;
}

}  // namespace kv4::tier
