// A segment: a preallocated, append-only file of records, one after the other. docs/formats.md has the table.
//
//   offset  size   meaning
//        0  4,096  segment header: "KV4SEG\r\n", version, id, nonce, layout id, bytes, time, digest, zeros
//    4,096  4,096  the same again, so that one damaged block does not lose the segment
//    8,192         records, each at a multiple of 4,096: a block with its header (record_format.h), its payload, zeros
//
// A segment of version 2 (0.1) holds records of version 1. It is read, its records are tombstoned and moved, and
// nothing is appended to it: a build that does not know version 3 refuses the store instead of taking new records for
// damage.
//
// The nonce is random, and the records' places (`RecordHeader::place`) depend on it: a scan for the next record after a
// damaged one cannot take bytes of a payload for a record.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tier/file_system.h"
#include "tier/record_format.h"

namespace kv4::tier {

inline constexpr std::uint32_t kSegmentVersion = 3, kSegmentVersionV1Records = 2;
inline constexpr std::int64_t kSegmentDataOffset = 2 * kBlockBytes;
inline constexpr std::int64_t kMinSegmentBytes = 64 << 10;
inline constexpr std::int64_t kMaxSegmentBytes = std::int64_t{1} << 40;
/// A payload of up to so many bytes may lie in a file that takes fewer bytes of the disk, because of holes or of a file
/// system that packs. Records of a cache are far smaller. No memory is taken for a longer payload than the disk holds.
inline constexpr std::int64_t kMaxPackedPayloadBytes = 64 << 20;
constexpr bool is_segment_size(std::int64_t bytes) {
  return bytes >= kMinSegmentBytes && bytes <= kMaxSegmentBytes && bytes % kBlockBytes == 0;
}

struct SegmentHeader {
  std::uint32_t version = kSegmentVersion;
  std::uint64_t id = 0;
  std::uint64_t nonce = 0;
  std::uint64_t layout_id = 0;
  std::int64_t bytes = 0;  // size of the whole file
  std::int64_t created_ns = 0;
};

/// "segment-0000000000000001.kv4"
std::string segment_name(std::uint64_t id);
inline constexpr std::string_view kSegmentPrefix = "segment-";
/// The id in a name, only if the name is exactly that of segment_name(): no id has two names.
std::optional<std::uint64_t> parse_segment_name(std::string_view name);
/// The suffix of a segment that is being made. One found on opening was never finished.
inline constexpr std::string_view kUnfinishedSuffix = ".new";

/// Memory for reads past the page cache. It grows and never shrinks; growing loses its content.
class BlockBuffer {
 public:
  std::span<std::byte> get(std::int64_t bytes);
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::int64_t bytes_ = 0;
};

struct FoundRecord {
  std::int64_t offset = 0;
  RecordHeader header;
};

/// Bytes that are neither a record nor zeros: a damaged header, or a write that was never finished.
struct Gap {
  std::int64_t offset = 0, bytes = 0;
  RecordRefusal reason = RecordRefusal::none;  // for its first block
};

struct SegmentContents {
  std::vector<FoundRecord> records;  // dead ones too, in order; payloads are not checked
  std::vector<Gap> gaps;
  std::int64_t end = kSegmentDataOffset;  // end of the last record
  bool whole = true;                      // every block could be read
  IoStatus unopened;                      // not ok: the file could not be opened again, and its content is unknown
};

/// `header` is valid only where `refusal` is none; then `payload` lies in the caller's memory.
struct ReadRecord {
  RecordRefusal refusal = RecordRefusal::none;
  IoStatus status;
  RecordHeader header;
  std::span<const std::byte> payload;
};

enum class SegmentRefusal : std::uint8_t {
  none,
  unreadable,  // cannot be opened or read; its records may all be there
  damaged,     // read, and neither copy of the header is sound
  not_a_file,  // a directory, a pipe, a link
  other_id,    // sound, but with the id of another name: a copy
  other_version
};

class SegmentFile;

struct OpenedSegment {
  SegmentRefusal refusal = SegmentRefusal::none;
  IoStatus status;
  std::uint32_t version = 0;  // for other_version
  std::unique_ptr<SegmentFile> file;
  std::int64_t bytes = 0;  // size of the file, at most the size in its header
};
/// The reason for the refusal, in words.
std::string describe(const OpenedSegment& opened);

class SegmentFile {
 public:
  /// Makes a segment under its name. To be durable it needs sync() and a sync of the directory. Status `exists`: the
  /// name, or that of the unfinished segment, is taken.
  static OpenedSegment create(FileSystem& files, const std::string& directory, const SegmentHeader& header);
  static OpenedSegment open(FileSystem& files, const std::string& directory, std::uint64_t id, OpenMode mode);

  const SegmentHeader& header() const { return header_; }
  std::int64_t end() const { return end_; }  // where the next record goes
  std::int64_t room() const { return header_.bytes - end_; }

  void set_end(std::int64_t end) { end_ = end; }
  /// Reads headers only, from `from` on, and sets end().
  SegmentContents scan(BlockBuffer& buffer, std::int64_t from = kSegmentDataOffset);
  /// Reserves room for a payload at end(), and moves end() behind it. A place that is not written has to be tombstoned.
  std::int64_t reserve(std::int64_t length);
  /// The header of a tombstone that takes as much room as a record with a payload of `length` bytes.
  RecordHeader dead(std::int64_t length) const;
  /// Encodes the header for a record at `offset`.
  void encode_at(std::int64_t offset, RecordHeader header, std::span<std::byte> block) const;
  /// Checks that the bytes read from `offset` are a sound value that belongs there.
  ReadRecord check(std::int64_t offset, std::span<const std::byte> block, std::span<const std::byte> payload) const;
  /// A damaged record is read again once: the damage may be in the transfer.
  ReadRecord read(std::int64_t offset, std::int64_t length, BlockBuffer& buffer);
  /// Writes these records again in place, except damaged ones. A failed sync may have left them in the page cache only,
  /// marked clean, so that no later sync writes them.
  IoStatus write_again(std::span<const FoundRecord> records, BlockBuffer& buffer);
  /// Replaces the record by a tombstone and frees the room of its payload. One sector decides, so this is atomic.
  IoStatus tombstone(std::int64_t offset, std::int64_t length, BlockBuffer& buffer);
  IoStatus sync() { return file_->fdatasync(); }
  File& file() { return *file_; }

 private:
  SegmentFile(std::unique_ptr<File> file, const SegmentHeader& header) : file_(std::move(file)), header_(header) {}
  std::uint64_t place_of(std::int64_t offset) const;
  /// Called before memory is taken for a payload: checks only whether the file can hold one of `length` bytes.
  ReadRecord look_at(std::int64_t length);
  bool is_sound(const FoundRecord& record, std::span<const std::byte> bytes) const;
  ParsedHeader parse_at(std::int64_t offset, std::span<const std::byte> block) const;

  std::unique_ptr<File> file_;
  SegmentHeader header_;
  std::int64_t end_ = kSegmentDataOffset;
};

}  // namespace kv4::tier
