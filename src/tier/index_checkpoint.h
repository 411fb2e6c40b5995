// The index of a store in one file, so that opening a large store does not read every header.
//
//   offset  size  meaning
//        0     8  "KV4IDX\r\n"
//        8     4  version, 2
//       12     4  zero
//       16     8  layout id of the store
//       24     8  bytes that follow the header
//       32     8  sequence of the next put
//       40    16  XXH3-128 of the bytes that follow, low half first
//       56     8  XXH3-64 of bytes 0 to 55
//       64        segments, each followed by its records; then zeros up to a multiple of 4,096
//
//   segment: id, nonce, bytes of the file, where its records end, flags (1: nothing is ever appended, 2: it has
//            damaged bytes), number of records; 8 bytes each
//   record:  tenant 8, key 32, offset / 4,096 4, kind 2, version 2, length 8, sequence 8
//
// Headers remain the truth. The file only says where to look:
//   1. Whatever is read through it is compared with its header, as always.
//   2. A segment counts only with its id, nonce and size: not a copy of another store, nor an id that was used again.
//   3. What is appended later lies behind `end` of a segment that is not sealed, and is scanned.
//   4. A record it names is tombstoned only after the file is durably unlinked (DiskStore::drop_checkpoint).
//   5. Torn, damaged or of another version or layout: as if it were not there.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tier/file_system.h"
#include "tier/segment_file.h"

namespace kv4::tier {

inline constexpr std::string_view kCheckpointName = "index.kv4";

struct CheckpointSegment {
  std::uint64_t id = 0, nonce = 0;
  std::int64_t bytes = 0, end = 0;
  bool sealed = false, damaged = false;
  std::span<const std::byte> records;  // encoded

  bool covers(const SegmentHeader& header) const {
    return header.id == id && header.nonce == nonce && header.bytes == bytes;
  }
};

struct CheckpointRecord {
  RecordId id;
  RecordKind kind = RecordKind::value;
  std::uint16_t version = kRecordVersion;
  std::int64_t offset = 0, length = 0;
  std::uint64_t sequence = 0;
};
inline constexpr std::int64_t kCheckpointRecordBytes = 64;
CheckpointRecord decode_checkpoint_record(std::span<const std::byte> bytes);

struct Checkpoint {
  BlockBuffer memory;  // where the records lie
  std::uint64_t next_sequence = 0;
  std::map<std::uint64_t, CheckpointSegment> segments;  // by id
};
/// A whole file; `checkpoint` names its bytes. False: it is none, of another layout, or damaged.
bool parse_checkpoint(std::span<const std::byte> file, std::uint64_t layout_id, Checkpoint& checkpoint);
/// The largest checkpoint of that many segments, with a record in every block: a longer file is none of theirs.
std::int64_t max_checkpoint_bytes(std::int64_t segments, std::int64_t segment_bytes);
std::optional<Checkpoint> read_checkpoint(FileSystem& files, const std::string& directory, std::uint64_t layout_id,
                                          std::int64_t max_bytes);

class CheckpointWriter {
 public:
  CheckpointWriter(std::int64_t segments, std::int64_t records);
  void add(const CheckpointSegment& segment, std::int64_t records);
  void add(const CheckpointRecord& record);
  /// As many as were announced have been added. Takes the place of an older one in one step.
  IoStatus write(FileSystem& files, const std::string& directory, std::uint64_t layout_id, std::uint64_t next_sequence);

 private:
  BlockBuffer memory_;
  std::span<std::byte> file_, free_;
};

}  // namespace kv4::tier
