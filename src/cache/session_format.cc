#include "cache/session_format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "tier/little_endian.h"

namespace kv4 {
namespace {

using tier::load_le;
using tier::store_le;

static_assert(std::endian::native == std::endian::little, "token ids are stored as they lie in memory");

constexpr char kMagic[] = {'K', 'V', '4', 'S', 'E', 'S', '\r', '\n'};
constexpr std::size_t kVersionAt = 8, kBlockTokensAt = 12, kConfigAt = 16, kRopeAt = 48, kRootAt = 80,
                      kNumLengthsAt = 112, kWeightsBytesAt = 116, kLayoutBytesAt = 120, kNumExtraAt = 124,
                      kImageBytesAt = 128, kOpenBytesAt = 136;
constexpr std::size_t kSnapshotSizeBytes = 8;  // behind the fixed part
static_assert(sizeof(kMagic) == kVersionAt && kConfigAt + sizeof(Sha256) == kRopeAt);
static_assert(kRopeAt + sizeof(Sha256) == kRootAt && kRootAt + sizeof(BlockKey) == kNumLengthsAt);
static_assert(kOpenBytesAt + 8 == kSessionFixedBytes);

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }
std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Takes bytes from the front of a payload, never more than it has.
struct Reader {
  std::span<const std::byte> left;

  std::span<const std::byte> take(std::uint64_t bytes, const char* what) {
    require(bytes <= left.size(), ErrorCode::bad_file, "the session's record has {} bytes left for {} of {}",
            left.size(), what, bytes);
    const auto taken = left.first(bytes);
    left = left.subspan(bytes);
    return taken;
  }
};

template <class Digest>
Digest digest_at(const std::byte* from) {
  Digest out;
  std::memcpy(out.data(), from, out.size());
  return out;
}

}  // namespace

bool is_session(std::span<const std::byte> payload) {
  return payload.size() >= sizeof(kMagic) && std::memcmp(payload.data(), kMagic, sizeof(kMagic)) == 0;
}

std::vector<std::byte> encode_session(const SessionParts& parts) {
  std::size_t bytes = kSessionFixedBytes + 8 * parts.lengths.size() + parts.weights_id.size() + parts.layout.size() +
                      parts.token_ids.size() + parts.image.size() + parts.open_block.size() + parts.snapshot.size() +
                      (parts.snapshot.empty() ? 0 : kSnapshotSizeBytes);
  for (const auto& extra : parts.block_extra) bytes += 4 + extra.size();
  require(bytes <= kMaxSessionRecordBytes, ErrorCode::bad_argument,
          "the session's own record would have {} bytes; a session's record has at most {}", bytes,
          kMaxSessionRecordBytes);

  std::vector<std::byte> out(bytes);
  std::byte* at = out.data();
  const auto count = [&](std::size_t place, std::size_t value) {
    store_le(at + place, static_cast<std::uint32_t>(value));
  };
  std::memcpy(at, kMagic, sizeof(kMagic));
  store_le(at + kVersionAt, parts.snapshot.empty() ? kSessionVersion : kSessionWithSnapshotVersion);
  store_le(at + kBlockTokensAt, parts.block_tokens);
  std::memcpy(at + kConfigAt, parts.config_digest.data(), sizeof(Sha256));
  std::memcpy(at + kRopeAt, parts.rope_digest.data(), sizeof(Sha256));
  std::memcpy(at + kRootAt, parts.root.data(), sizeof(BlockKey));
  count(kNumLengthsAt, parts.lengths.size());
  count(kWeightsBytesAt, parts.weights_id.size());
  count(kLayoutBytesAt, parts.layout.size());
  count(kNumExtraAt, parts.block_extra.size());
  store_le(at + kImageBytesAt, std::uint64_t{parts.image.size()});
  store_le(at + kOpenBytesAt, std::uint64_t{parts.open_block.size()});

  at += kSessionFixedBytes;
  if (!parts.snapshot.empty()) {
    store_le(at, std::uint64_t{parts.snapshot.size()});
    at += kSnapshotSizeBytes;
  }
  const auto add = [&](std::span<const std::byte> part) { at = std::copy(part.begin(), part.end(), at); };
  for (const std::int64_t length : parts.lengths) {
    store_le(at, static_cast<std::uint64_t>(length));
    at += 8;
  }
  add(bytes_of(parts.weights_id));
  add(bytes_of(parts.layout));
  for (const auto& extra : parts.block_extra) {
    store_le(at, static_cast<std::uint32_t>(extra.size()));
    at += 4;
    add(extra);
  }
  add(parts.token_ids);
  add(parts.image);
  add(parts.open_block);
  add(parts.snapshot);
  return out;
}

void check_session_front(std::span<const std::byte> front, std::int64_t payload_bytes) {
  if (!is_session(front) || front.size() < kSessionFixedBytes) return;  // parse_session names the fault
  const std::byte* const fixed = front.data();
  const auto most = static_cast<std::uint64_t>(payload_bytes);
  std::uint64_t bytes = kSessionFixedBytes;
  const auto add = [&](const char* what, std::uint64_t part) {
    require(part <= most && bytes + part <= most, ErrorCode::bad_file,
            "the session's record has {} bytes; {} of {} and what comes before it are more", most, what, part);
    bytes += part;
  };
  add("lengths", std::uint64_t{8} * load_le<std::uint32_t>(fixed + kNumLengthsAt));
  add("the weights id", load_le<std::uint32_t>(fixed + kWeightsBytesAt));
  add("the layout", load_le<std::uint32_t>(fixed + kLayoutBytesAt));
  add("lengths of extra bytes", std::uint64_t{4} * load_le<std::uint32_t>(fixed + kNumExtraAt));
  add("the image", load_le<std::uint64_t>(fixed + kImageBytesAt));
  add("the open block", load_le<std::uint64_t>(fixed + kOpenBytesAt));
}

SessionParts parse_session(std::span<const std::byte> payload) {
  require(is_session(payload), ErrorCode::bad_file, "not a session: its first record begins otherwise");
  Reader reader{payload};
  const std::byte* fixed = reader.take(kSessionFixedBytes, "its fixed part").data();
  // Checked first: another version may change the meaning of the rest.
  const auto version = load_le<std::uint32_t>(fixed + kVersionAt);
  require(version == kSessionVersion || version == kSessionWithSnapshotVersion, ErrorCode::bad_file,
          "a session of format version {}; this library reads {} and {}", version, kSessionVersion,
          kSessionWithSnapshotVersion);
  std::uint64_t snapshot_bytes = 0;
  if (version == kSessionWithSnapshotVersion) {
    snapshot_bytes = load_le<std::uint64_t>(reader.take(kSnapshotSizeBytes, "the snapshot's size").data());
    require(snapshot_bytes > 0, ErrorCode::bad_file, "the session says that it has a snapshot, and has none");
  }

  SessionParts parts;
  parts.block_tokens = load_le<std::uint32_t>(fixed + kBlockTokensAt);
  parts.config_digest = digest_at<Sha256>(fixed + kConfigAt);
  parts.rope_digest = digest_at<Sha256>(fixed + kRopeAt);
  parts.root = digest_at<BlockKey>(fixed + kRootAt);
  const auto lengths = load_le<std::uint32_t>(fixed + kNumLengthsAt);
  require(parts.block_tokens >= 1 && lengths >= 1, ErrorCode::bad_file,
          "the session has blocks of {} tokens and {} lengths; both are at least 1", parts.block_tokens, lengths);
  require(lengths <= kMaxSessionLengths, ErrorCode::bad_file, "the session has {} lengths; at most {} are read",
          lengths, kMaxSessionLengths);

  const auto length_bytes = reader.take(std::uint64_t{8} * lengths, "lengths");
  for (std::size_t i = 0; i < lengths; ++i) {
    const auto length = load_le<std::uint64_t>(length_bytes.data() + 8 * i);
    require(length <= static_cast<std::uint64_t>(tier::kMaxPayloadBytes), ErrorCode::bad_file,
            "the session's length {} is {}, which no record can hold", i, length);
    parts.lengths.push_back(static_cast<std::int64_t>(length));
  }
  require(parts.full_blocks() <= kMaxSessionBlocks, ErrorCode::bad_file,
          "the session has {} full blocks of {} tokens; at most {} are read", parts.full_blocks(), parts.block_tokens,
          kMaxSessionBlocks);
  const auto text = [&](std::size_t at, const char* what) {
    const auto bytes = load_le<std::uint32_t>(fixed + at);
    require(bytes <= kMaxSessionTextBytes, ErrorCode::bad_file, "{} of the session has {} bytes; at most {} are read",
            what, bytes, kMaxSessionTextBytes);
    return text_of(reader.take(bytes, what));
  };
  parts.weights_id = text(kWeightsBytesAt, "the weights id");
  parts.layout = text(kLayoutBytesAt, "the layout");
  const auto extras = load_le<std::uint32_t>(fixed + kNumExtraAt);
  require(extras <= parts.full_blocks(), ErrorCode::bad_file, "the session has extra bytes for {} of {} full blocks",
          extras, parts.full_blocks());
  for (std::uint32_t i = 0; i < extras; ++i) {
    const auto bytes = load_le<std::uint32_t>(reader.take(4, "a length of extra bytes").data());
    parts.block_extra.push_back(reader.take(bytes, "extra bytes"));
  }
  parts.token_ids = reader.take(std::uint64_t{4} * static_cast<std::uint64_t>(parts.lengths[0]), "token ids");
  parts.image = reader.take(load_le<std::uint64_t>(fixed + kImageBytesAt), "the image");
  parts.open_block = reader.take(load_le<std::uint64_t>(fixed + kOpenBytesAt), "the open block");
  parts.snapshot = reader.take(snapshot_bytes, "the snapshot");
  require(reader.left.empty(), ErrorCode::bad_file, "the session's record has {} bytes more than its parts",
          reader.left.size());
  return parts;
}

std::vector<std::int32_t> token_ids_of(const SessionParts& parts) {
  std::vector<std::int32_t> out(parts.token_ids.size() / sizeof(std::int32_t));
  if (!out.empty()) std::memcpy(out.data(), parts.token_ids.data(), parts.token_ids.size());
  return out;
}

BlockKey session_key(BlockHasher& hasher, const SessionParts& parts, std::span<const std::int32_t> token_ids) {
  std::vector<std::byte> extra(sizeof(kMagic) + 8 * parts.lengths.size());
  std::memcpy(extra.data(), kMagic, sizeof(kMagic));
  for (std::size_t i = 0; i < parts.lengths.size(); ++i)
    store_le(extra.data() + sizeof(kMagic) + 8 * i, static_cast<std::uint64_t>(parts.lengths[i]));
  return hasher.block(parts.root, token_ids, extra);
}

std::vector<BlockKey> chain_keys(BlockHasher& hasher, const SessionParts& parts,
                                 std::span<const std::int32_t> token_ids) {
  std::vector<BlockKey> keys;
  BlockKey key = parts.root;
  for (std::int64_t i = 0; i < parts.full_blocks(); ++i) {
    key = hasher.block(key, token_ids.subspan(i * parts.block_tokens, parts.block_tokens),
                       i < std::ssize(parts.block_extra) ? parts.block_extra[i] : std::span<const std::byte>{});
    keys.push_back(key);
  }
  return keys;
}

std::shared_ptr<const tier::RecordGuard> session_guard(const SessionIdentity& identity) {
  return std::make_shared<tier::RecordGuard>(
      tier::GuardOptions{"session", identity.keys, identity.protection, identity.accept_unauthenticated});
}

void finish_record(const tier::RecordGuard& guard, const tier::RecordHeader& header, std::span<std::byte> record) {
  tier::RecordHeader finished = header;
  const auto payload = record.subspan(tier::kRecordHeaderBytes);
  finished.length = static_cast<std::int64_t>(payload.size());
  require(guard.protect(finished, payload, payload), ErrorCode::out_of_memory,
          "the system has no random bytes, or no memory, to protect a record of {} bytes", payload.size());
  finished.payload_digest = digest128(payload);
  tier::encode_header(finished, record);
}

SessionRecord open_record(const tier::RecordGuard& guard, std::span<const std::byte> record,
                          std::vector<std::byte>& memory) {
  const auto [damage, header] = tier::verify_record(record);
  require(damage == tier::RecordRefusal::none, ErrorCode::bad_file, "{}", to_string(damage));
  require(header.place == 0, ErrorCode::bad_file, "{}: it is a segment's", to_string(tier::RecordRefusal::misplaced));
  const std::size_t bytes = header.header_bytes() + header.length;
  require(record.size() == bytes, ErrorCode::bad_file, "{} bytes more than it says", record.size() - bytes);
  SessionRecord opened{header, record.subspan(header.header_bytes())};
  if (header.kind == tier::RecordKind::sealed) {
    memory.resize(tier::payload_bytes(header.version, header.kind, header.length));
    const tier::RecordRefusal refusal = guard.open(header, opened.payload, memory);
    opened.payload = memory;
    require(refusal == tier::RecordRefusal::none, ErrorCode::bad_file,
            "{}; a sealed session needs the key of its writer", to_string(refusal));
    return opened;
  }
  // The payload stays in place: open() does not copy it into the memory that it reads.
  const tier::RecordRefusal refusal =
      guard.open(header, opened.payload, {const_cast<std::byte*>(opened.payload.data()), opened.payload.size()});
  require(refusal != tier::RecordRefusal::unauthenticated, ErrorCode::bad_file,
          "{}, and only what the given keys made is believed; accept_unauthenticated lets it in", to_string(refusal));
  require(refusal == tier::RecordRefusal::none, ErrorCode::bad_file, "{}", to_string(refusal));
  return opened;
}

tier::Key record_key(const BlockKey& key) { return std::bit_cast<tier::Key>(key); }
BlockKey block_key(const tier::Key& key) { return std::bit_cast<BlockKey>(key); }

}  // namespace kv4
