#include "tier/index_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr char kMagic[] = {'K', 'V', '4', 'I', 'D', 'X', '\r', '\n'};
constexpr std::uint32_t kVersion = 2;
constexpr int kVersionAt = 8, kLayoutAt = 16, kBodyBytesAt = 24, kSequenceAt = 32, kBodyDigestAt = 40, kDigestAt = 56;
constexpr std::int64_t kHeaderBytes = 64, kSegmentBytes = 48;
constexpr std::uint64_t kSealed = 1, kDamaged = 2;
constexpr int kBlockAt = 40, kKindAt = 44, kRecordVersionAt = 46, kLengthAt = 48,
              kRecordSequenceAt = 56;  // of a record
static_assert(kRecordSequenceAt + 8 == kCheckpointRecordBytes);

struct Header {
  std::uint64_t body_bytes = 0, next_sequence = 0;
  Digest128 digest;
};

std::optional<Header> parse_header_of(std::span<const std::byte> file, std::uint64_t layout_id) {
  if (std::ssize(file) < kHeaderBytes) return std::nullopt;
  const std::byte* at = file.data();
  if (std::memcmp(at, kMagic, sizeof(kMagic)) != 0 || load_le<std::uint32_t>(at + kVersionAt) != kVersion ||
      load_le<std::uint64_t>(at + kLayoutAt) != layout_id ||
      load_le<std::uint64_t>(at + kDigestAt) != digest64(file.first(kDigestAt)))
    return std::nullopt;
  return Header{load_le<std::uint64_t>(at + kBodyBytesAt),
                load_le<std::uint64_t>(at + kSequenceAt),
                {load_le<std::uint64_t>(at + kBodyDigestAt), load_le<std::uint64_t>(at + kBodyDigestAt + 8)}};
}

/// Whether all fields are valid; the caller has checked the digests.
bool parse_segments(std::span<const std::byte> body, Checkpoint& checkpoint) {
  while (!body.empty()) {
    if (std::ssize(body) < kSegmentBytes) return false;
    const std::byte* at = body.data();
    const auto number = [&](int i) { return load_le<std::uint64_t>(at + 8 * i); };
    CheckpointSegment segment{number(0),
                              number(1),
                              static_cast<std::int64_t>(number(2)),
                              static_cast<std::int64_t>(number(3)),
                              (number(4) & kSealed) != 0,
                              (number(4) & kDamaged) != 0,
                              {}};
    const std::uint64_t records = number(5);
    body = body.subspan(kSegmentBytes);
    if (!is_segment_size(segment.bytes) || segment.end < kSegmentDataOffset || segment.end > segment.bytes ||
        segment.end % kBlockBytes != 0 || records > body.size() / kCheckpointRecordBytes)
      return false;
    segment.records = body.first(records * kCheckpointRecordBytes);
    body = body.subspan(segment.records.size());
    for (std::size_t i = 0; i < segment.records.size(); i += kCheckpointRecordBytes) {
      const CheckpointRecord record = decode_checkpoint_record(segment.records.subspan(i));
      if (record.offset < kSegmentDataOffset || record.length < 0 || record.length > kMaxPayloadBytes ||
          payload_bytes(record.version, record.kind, record.length) < 0 ||
          stored_bytes(record.length) > segment.end - record.offset)
        return false;
    }
    if (!checkpoint.segments.emplace(segment.id, segment).second) return false;
  }
  return true;
}

}  // namespace

CheckpointRecord decode_checkpoint_record(std::span<const std::byte> bytes) {
  const std::byte* at = bytes.data();
  CheckpointRecord record;
  record.id.tenant = load_le<std::uint64_t>(at);
  std::memcpy(record.id.key.data(), at + 8, record.id.key.size());
  record.offset = load_le<std::uint32_t>(at + kBlockAt) * kBlockBytes;
  record.kind = static_cast<RecordKind>(load_le<std::uint16_t>(at + kKindAt));
  record.version = load_le<std::uint16_t>(at + kRecordVersionAt);
  record.length = static_cast<std::int64_t>(load_le<std::uint64_t>(at + kLengthAt));
  record.sequence = load_le<std::uint64_t>(at + kRecordSequenceAt);
  return record;
}

bool parse_checkpoint(std::span<const std::byte> file, std::uint64_t layout_id, Checkpoint& checkpoint) {
  const std::optional<Header> header = parse_header_of(file, layout_id);
  if (!header || header->body_bytes > file.size() - kHeaderBytes) return false;
  checkpoint.next_sequence = header->next_sequence;
  const std::span<const std::byte> body = file.subspan(kHeaderBytes, header->body_bytes);
  return digest128(body) == header->digest && parse_segments(body, checkpoint);
}

std::int64_t max_checkpoint_bytes(std::int64_t segments, std::int64_t segment_bytes) {
  return whole_blocks(kHeaderBytes + segments * kSegmentBytes + segment_bytes / kBlockBytes * kCheckpointRecordBytes);
}

std::optional<Checkpoint> read_checkpoint(FileSystem& files, const std::string& directory, std::uint64_t layout_id,
                                          std::int64_t max_bytes) {
  const Opened<File> opened = files.open(directory + "/" + std::string(kCheckpointName), OpenMode::read);
  if (!opened.status.ok()) return std::nullopt;
  Checkpoint checkpoint;
  const std::span<std::byte> block = checkpoint.memory.get(kBlockBytes);
  if (!read_all(*opened.handle, 0, block).ok()) return std::nullopt;
  const std::optional<Header> header = parse_header_of(block, layout_id);
  // A checkpoint is written whole, without holes. A file with holes could take far more memory than room on the disk.
  const std::int64_t size = std::min(opened.handle->size(), max_bytes);
  if (!header || size < kHeaderBytes || header->body_bytes > static_cast<std::uint64_t>(size - kHeaderBytes) ||
      opened.handle->has_holes())
    return std::nullopt;
  const std::span<std::byte> all =
      checkpoint.memory.get(whole_blocks(kHeaderBytes + static_cast<std::int64_t>(header->body_bytes)));
  if (!read_all(*opened.handle, 0, all).ok() || !parse_checkpoint(all, layout_id, checkpoint)) return std::nullopt;
  return checkpoint;
}

CheckpointWriter::CheckpointWriter(std::int64_t segments, std::int64_t records)
    : file_(memory_.get(whole_blocks(kHeaderBytes + segments * kSegmentBytes + records * kCheckpointRecordBytes))),
      free_(file_.subspan(kHeaderBytes)) {}

void CheckpointWriter::add(const CheckpointSegment& segment, std::int64_t records) {
  const std::uint64_t numbers[] = {segment.id,
                                   segment.nonce,
                                   static_cast<std::uint64_t>(segment.bytes),
                                   static_cast<std::uint64_t>(segment.end),
                                   (segment.sealed ? kSealed : 0) | (segment.damaged ? kDamaged : 0),
                                   static_cast<std::uint64_t>(records)};
  for (const std::uint64_t number : numbers) {
    store_le(free_.data(), number);
    free_ = free_.subspan(sizeof(number));
  }
}

void CheckpointWriter::add(const CheckpointRecord& record) {
  std::byte* at = free_.data();
  store_le(at, record.id.tenant);
  std::memcpy(at + 8, record.id.key.data(), record.id.key.size());
  store_le(at + kBlockAt, static_cast<std::uint32_t>(record.offset / kBlockBytes));
  store_le(at + kKindAt, static_cast<std::uint16_t>(record.kind));
  store_le(at + kRecordVersionAt, record.version);
  store_le(at + kLengthAt, static_cast<std::uint64_t>(record.length));
  store_le(at + kRecordSequenceAt, record.sequence);
  free_ = free_.subspan(kCheckpointRecordBytes);
}

IoStatus CheckpointWriter::write(FileSystem& files, const std::string& directory, std::uint64_t layout_id,
                                 std::uint64_t next_sequence) {
  const std::span<const std::byte> body = file_.subspan(kHeaderBytes, file_.size() - kHeaderBytes - free_.size());
  const Digest128 digest = digest128(body);
  std::byte* at = file_.data();
  std::memset(at, 0, kHeaderBytes);
  std::memcpy(at, kMagic, sizeof(kMagic));
  store_le(at + kVersionAt, kVersion);
  store_le(at + kLayoutAt, layout_id);
  store_le(at + kBodyBytesAt, static_cast<std::uint64_t>(body.size()));
  store_le(at + kSequenceAt, next_sequence);
  store_le(at + kBodyDigestAt, digest.low);
  store_le(at + kBodyDigestAt + 8, digest.high);
  store_le(at + kDigestAt, digest64(std::span<const std::byte>(file_.first(kDigestAt))));
  std::fill(free_.begin(), free_.end(), std::byte{0});

  const std::string path = directory + "/" + std::string(kCheckpointName),
                    unfinished = path + std::string(kUnfinishedSuffix);
  if (const IoStatus there = files.look_at(unfinished); there.code == IoCode::not_a_file) return there;
  (void)files.unlink(unfinished);  // left by a failed attempt
  Opened<File> opened = files.open(unfinished, OpenMode::create);
  if (!opened.status.ok()) return opened.status;
  IoStatus status = write_all(*opened.handle, 0, file_);
  if (status.ok()) status = opened.handle->fdatasync();
  if (status.ok()) status = files.rename(unfinished, path);
  if (!status.ok()) (void)files.unlink(unfinished);
  return status;
}

}  // namespace kv4::tier
