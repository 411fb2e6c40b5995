#include "tier/segment_file.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <new>
#include <utility>

#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr char kMagic[] = {'K', 'V', '4', 'S', 'E', 'G', '\r', '\n'};
constexpr int kVersionAt = 8, kIdAt = 16, kNonceAt = 24, kLayoutAt = 32, kBytesAt = 40, kCreatedAt = 48, kDigestAt = 56;
constexpr std::string_view kNameSuffix = ".kv4";
constexpr std::int64_t kSearchBytes = 64 * kBlockBytes;  // read at once where the next record may be near
constexpr std::int64_t kWriteAgainBytes = 1 << 20;       // of adjacent records at once
constexpr std::int64_t kHugePageBytes = 2 << 20;
constexpr std::int64_t kHugePagesFrom = 256 << 10;  // buffers from this size on use huge pages

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

void encode_segment_header(const SegmentHeader& header, std::span<std::byte> block) {
  std::byte* at = block.data();
  std::memset(at, 0, block.size());
  std::memcpy(at, kMagic, sizeof(kMagic));
  store_le(at + kVersionAt, header.version);
  store_le(at + kIdAt, header.id);
  store_le(at + kNonceAt, header.nonce);
  store_le(at + kLayoutAt, header.layout_id);
  store_le(at + kBytesAt, static_cast<std::uint64_t>(header.bytes));
  store_le(at + kCreatedAt, static_cast<std::uint64_t>(header.created_ns));
  store_le(at + kDigestAt, digest64(std::span<const std::byte>(block.first(kDigestAt))));
}

struct ParsedSegmentHeader {
  SegmentRefusal refusal = SegmentRefusal::none;
  std::uint32_t version = kSegmentVersion;
  SegmentHeader header;
};

ParsedSegmentHeader parse_segment_header(std::span<const std::byte> block, std::uint64_t id) {
  const std::byte* at = block.data();
  ParsedSegmentHeader parsed{SegmentRefusal::damaged, kSegmentVersion, {}};
  if (std::memcmp(at, kMagic, sizeof(kMagic)) != 0) return parsed;
  parsed.version = load_le<std::uint32_t>(at + kVersionAt);
  if (parsed.version != kSegmentVersion &&
      parsed.version != kSegmentVersionV1Records) {  // another version may keep the digest elsewhere
    parsed.refusal = SegmentRefusal::other_version;
    return parsed;
  }
  const auto bytes = static_cast<std::int64_t>(load_le<std::uint64_t>(at + kBytesAt));
  if (load_le<std::uint64_t>(at + kDigestAt) != digest64(block.first(kDigestAt)) || !is_segment_size(bytes))
    return parsed;
  if (load_le<std::uint64_t>(at + kIdAt) != id) {
    parsed.refusal = SegmentRefusal::other_id;
    return parsed;
  }
  parsed.refusal = SegmentRefusal::none;
  parsed.header = {parsed.version,
                   id,
                   load_le<std::uint64_t>(at + kNonceAt),
                   load_le<std::uint64_t>(at + kLayoutAt),
                   bytes,
                   static_cast<std::int64_t>(load_le<std::uint64_t>(at + kCreatedAt))};
  return parsed;
}

OpenedSegment refused(SegmentRefusal refusal, IoStatus status = {}, std::uint32_t version = kSegmentVersion) {
  return {refusal, status, version, nullptr, 0};
}

}  // namespace

std::string segment_name(std::uint64_t id) { return fmt::format("{}{:016x}{}", kSegmentPrefix, id, kNameSuffix); }

std::optional<std::uint64_t> parse_segment_name(std::string_view name) {
  if (!name.starts_with(kSegmentPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kSegmentPrefix.size());
  std::uint64_t id = 0;
  (void)std::from_chars(digits.data(), digits.data() + digits.size(), id, 16);
  if (name != segment_name(id)) return std::nullopt;
  return id;
}

std::span<std::byte> BlockBuffer::get(std::int64_t bytes) {
  if (bytes > bytes_) {
    const bool large = bytes >= kHugePagesFrom;
    const std::int64_t alignment = large ? kHugePageBytes : kBlockBytes;
    const std::int64_t size = (bytes + alignment - 1) / alignment * alignment;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, size)));
    if (!memory_) throw std::bad_alloc();
    // A transfer pins every page: with huge pages, 512 times fewer.
    if (large) (void)::madvise(memory_.get(), size, MADV_HUGEPAGE);
    bytes_ = bytes;
  }
  return std::span(memory_.get(), bytes);
}

std::string describe(const OpenedSegment& opened) {
  switch (opened.refusal) {
    case SegmentRefusal::none: return "";
    case SegmentRefusal::unreadable: return fmt::format("cannot be read: {}", to_string(opened.status));
    case SegmentRefusal::not_a_file: return to_string(opened.status);
    case SegmentRefusal::damaged: return "both copies of its header are damaged";
    case SegmentRefusal::other_id: return "it is a copy of a segment of another name";
    case SegmentRefusal::other_version:
      return fmt::format("format version {}, this build reads {} and {}", opened.version, kSegmentVersionV1Records,
                         kSegmentVersion);
  }
  return "";
}

OpenedSegment SegmentFile::create(FileSystem& files, const std::string& directory, const SegmentHeader& header) {
  const std::string path = directory + "/" + segment_name(header.id),
                    unfinished = path + std::string(kUnfinishedSuffix);
  Opened<File> opened = files.open(unfinished, OpenMode::create);
  if (!opened.status.ok()) return refused(SegmentRefusal::unreadable, opened.status);
  BlockBuffer buffer;
  const std::span<std::byte> blocks = buffer.get(kSegmentDataOffset);
  encode_segment_header(header, blocks.first(kBlockBytes));
  encode_segment_header(header, blocks.last(kBlockBytes));
  IoStatus status = opened.handle->fallocate(header.bytes);
  if (status.ok()) status = write_all(*opened.handle, 0, blocks);
  if (status.ok()) status = opened.handle->fdatasync();
  if (status.ok()) status = opened.handle->rename_new(path);
  if (!status.ok()) {
    (void)files.unlink(unfinished);  // if that fails, the next open of the store removes it
    return refused(SegmentRefusal::unreadable, status);
  }
  return {SegmentRefusal::none,
          {},
          kSegmentVersion,
          std::unique_ptr<SegmentFile>(new SegmentFile(std::move(opened.handle), header)),
          header.bytes};
}

OpenedSegment SegmentFile::open(FileSystem& files, const std::string& directory, std::uint64_t id, OpenMode mode) {
  const std::string path = directory + "/" + segment_name(id);
  Opened<File> opened = files.open(path, mode);
  if (opened.status.code == IoCode::not_a_file) return refused(SegmentRefusal::not_a_file, opened.status);
  if (!opened.status.ok()) opened = files.open(path, mode);
  if (!opened.status.ok()) return refused(SegmentRefusal::unreadable, opened.status);

  BlockBuffer buffer;
  const std::span<std::byte> block = buffer.get(kBlockBytes);
  const std::int64_t size = std::min(opened.handle->size(), kMaxSegmentBytes);
  if (size < 0) return refused(SegmentRefusal::unreadable, {IoCode::failed, 0});
  OpenedSegment answer = refused(SegmentRefusal::damaged);
  IoStatus unread;
  for (int attempt = 0; attempt < 4; ++attempt) {  // both copies, each twice
    const std::int64_t offset = attempt % 2 * kBlockBytes;
    if (offset + kBlockBytes > size) continue;
    if (const IoStatus status = read_all(*opened.handle, offset, block); !status.ok()) {
      unread = status;
      continue;
    }
    const ParsedSegmentHeader parsed = parse_segment_header(block, id);
    if (parsed.refusal == SegmentRefusal::none)
      return {SegmentRefusal::none,
              {},
              kSegmentVersion,
              std::unique_ptr<SegmentFile>(new SegmentFile(std::move(opened.handle), parsed.header)),
              std::min(size, parsed.header.bytes)};
    if (answer.refusal != SegmentRefusal::other_version) answer = refused(parsed.refusal, {}, parsed.version);
  }
  if (!unread.ok() && answer.refusal == SegmentRefusal::damaged) return refused(SegmentRefusal::unreadable, unread);
  answer.bytes = size;
  return answer;
}

std::uint64_t SegmentFile::place_of(std::int64_t offset) const {
  std::byte bytes[16];
  store_le(bytes, header_.nonce);
  store_le(bytes + 8, static_cast<std::uint64_t>(offset));
  return digest64(std::span<const std::byte>(bytes));
}

ParsedHeader SegmentFile::parse_at(std::int64_t offset, std::span<const std::byte> block) const {
  ParsedHeader parsed = parse_header(block);
  if (parsed.refusal != RecordRefusal::none) return parsed;
  if (parsed.header.place != place_of(offset)) parsed.refusal = RecordRefusal::misplaced;
  if (stored_bytes(parsed.header.length) > header_.bytes - offset) parsed.refusal = RecordRefusal::bad_length;
  return parsed;
}

SegmentContents SegmentFile::scan(BlockBuffer& buffer, std::int64_t from) {
  SegmentContents found;
  found.end = from;
  const std::int64_t size = file_->size();
  if (size < 0) found.unopened = {IoCode::unopened, 0};
  const std::int64_t limit = std::min(size, header_.bytes);
  std::span<std::byte> chunk;
  std::int64_t chunk_offset = 0;
  bool many = false;  // the next header may be near: the last block was no record, or a small one

  for (std::int64_t offset = from; offset + kBlockBytes <= limit;) {
    if (offset < chunk_offset || offset >= chunk_offset + static_cast<std::int64_t>(chunk.size())) {
      // Skips holes: they read as zeros, and may be as long as a file can be.
      offset = std::max(offset, file_->next_data(offset) / kBlockBytes * kBlockBytes);
      if (offset > limit - kBlockBytes) break;
      const std::int64_t blocks = (limit - offset) / kBlockBytes;
      chunk = buffer.get(many ? std::min(kSearchBytes, blocks * kBlockBytes) : kBlockBytes);
      chunk_offset = offset;
      // Where many blocks cannot be read together, reads them one by one; unreadable ones count as damaged.
      if (!read_all(*file_, offset, chunk).ok()) {
        chunk = chunk.first(kBlockBytes);
        const IoStatus status = read_all(*file_, offset, chunk);
        if (status.code == IoCode::unopened) {
          found.unopened = status;
          return found;
        }
        if (!status.ok()) {
          std::fill(chunk.begin(), chunk.end(), std::byte{0xff});
          found.whole = false;
        }
      }
    }
    const std::span<std::byte> block = chunk.subspan(offset - chunk_offset, kBlockBytes);
    ParsedHeader parsed = parse_at(offset, block);
    if (parsed.refusal != RecordRefusal::none && !is_zero(block) && read_all(*file_, offset, block).ok())
      parsed = parse_at(offset, block);

    if (parsed.refusal == RecordRefusal::none) {
      found.records.push_back({offset, parsed.header});
      offset += stored_bytes(parsed.header.length);
      found.end = offset;
      many = stored_bytes(parsed.header.length) < kSearchBytes / 8;
      continue;
    }
    if (!is_zero(block)) {
      if (found.gaps.empty() || found.gaps.back().offset < found.end) found.gaps.push_back({offset, 0, parsed.refusal});
      found.gaps.back().bytes = offset + kBlockBytes - found.gaps.back().offset;
    }
    offset += kBlockBytes;
    many = true;
  }
  end_ = found.end;
  return found;
}

std::int64_t SegmentFile::reserve(std::int64_t length) { return std::exchange(end_, end_ + stored_bytes(length)); }

void SegmentFile::encode_at(std::int64_t offset, RecordHeader header, std::span<std::byte> block) const {
  header.place = place_of(offset);
  std::fill(block.begin(), block.end(), std::byte{0});
  encode_header(header, block);
}

ReadRecord SegmentFile::check(std::int64_t offset, std::span<const std::byte> block,
                              std::span<const std::byte> payload) const {
  const ParsedHeader parsed = parse_at(offset, block);
  ReadRecord record{parsed.refusal, {}, parsed.header, payload};
  if (record.refusal != RecordRefusal::none) return record;
  if (parsed.header.kind == RecordKind::dead)
    record.refusal = RecordRefusal::dead;
  else if (parsed.header.length != static_cast<std::int64_t>(payload.size()))
    record.refusal = RecordRefusal::bad_length;
  else if (digest128(payload) != parsed.header.payload_digest)
    record.refusal = RecordRefusal::damaged_payload;
  return record;
}

ReadRecord SegmentFile::look_at(std::int64_t length) {
  const std::int64_t held = length <= kMaxPackedPayloadBytes ? length : file_->allocated_bytes();
  if (held < 0) return {RecordRefusal::too_short, {IoCode::unopened, 0}, {}, {}};
  return {held < length ? RecordRefusal::bad_length : RecordRefusal::none, {}, {}, {}};
}

ReadRecord SegmentFile::read(std::int64_t offset, std::int64_t length, BlockBuffer& buffer) {
  ReadRecord record = look_at(length);
  if (record.refusal != RecordRefusal::none) return record;
  const std::span<std::byte> bytes = buffer.get(stored_bytes(length));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const IoStatus status = read_all(*file_, offset, bytes);
    if (!status.ok()) return {RecordRefusal::too_short, status, {}, {}};
    record = check(offset, bytes.first(kBlockBytes), bytes.subspan(kBlockBytes, length));
    if (record.refusal == RecordRefusal::none) break;
  }
  return record;
}

bool SegmentFile::is_sound(const FoundRecord& record, std::span<const std::byte> bytes) const {
  const std::span<const std::byte> block = bytes.first(kBlockBytes);
  if (record.header.kind != RecordKind::dead)
    return check(record.offset, block, bytes.subspan(kBlockBytes, record.header.length)).refusal == RecordRefusal::none;
  const ParsedHeader parsed = parse_at(record.offset, block);
  return parsed.refusal == RecordRefusal::none && parsed.header.kind == RecordKind::dead;
}

IoStatus SegmentFile::write_again(std::span<const FoundRecord> records, BlockBuffer& buffer) {
  // Behind the header, a dead record is a hole.
  const auto bytes_of = [](const FoundRecord& record) {
    return record.header.kind == RecordKind::dead ? kBlockBytes : stored_bytes(record.header.length);
  };
  while (!records.empty()) {
    const std::int64_t offset = records.front().offset;
    std::int64_t bytes = 0;
    std::size_t count = 0;
    do bytes += bytes_of(records[count++]);
    while (count < records.size() && records[count].offset == offset + bytes &&
           bytes + bytes_of(records[count]) <= kWriteAgainBytes);
    const ReadRecord seen = look_at(bytes - kBlockBytes);
    if (!seen.status.ok()) return seen.status;
    if (seen.refusal != RecordRefusal::none) {  // a single record: merged ones are far shorter
      records = records.subspan(count);
      continue;
    }
    const std::span<const FoundRecord> some = records.first(count);
    const std::span<std::byte> chunk = buffer.get(bytes);
    bool sound = false;
    for (int attempt = 0; attempt < 2 && !sound; ++attempt) {  // the damage may be in the transfer
      if (const IoStatus status = read_all(*file_, offset, chunk); !status.ok()) return status;
      sound = std::all_of(some.begin(), some.end(), [&](const FoundRecord& record) {
        return is_sound(record, chunk.subspan(record.offset - offset, bytes_of(record)));
      });
    }
    IoStatus status;
    if (sound) status = write_all(*file_, offset, chunk);
    for (std::size_t i = 0; i < count && count > 1 && !sound && status.ok(); ++i)
      status = write_again(some.subspan(i, 1), buffer);
    if (!status.ok()) return status;
    records = records.subspan(count);
  }
  return {};
}

RecordHeader SegmentFile::dead(std::int64_t length) const {
  RecordHeader header;
  header.version = header_.version == kSegmentVersionV1Records ? 1 : kRecordVersion;
  header.kind = RecordKind::dead;
  header.layout_id = header_.layout_id;
  header.length = length;
  return header;
}

IoStatus SegmentFile::tombstone(std::int64_t offset, std::int64_t length, BlockBuffer& buffer) {
  const std::span<std::byte> block = buffer.get(kBlockBytes);
  encode_at(offset, dead(length), block);
  const IoStatus status = write_all(*file_, offset, block);
  const std::int64_t rest = stored_bytes(length) - kBlockBytes;
  if (status.ok() && rest > 0)
    (void)file_->punch(offset + kBlockBytes, rest);  // if that fails, its room comes back with the segment
  return status;
}

}  // namespace kv4::tier
