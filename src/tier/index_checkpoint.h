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
// The headers of records stay authoritative. The checkpoint only says where to look:
//   1. A record that is found through it is compared with its header, as always.
//   2. A segment counts only with its id, nonce and size: not a copy from another store, nor a reused id.
//   3. Later records lie behind `end` of a segment that is not sealed, and are found by a scan.
//   4. A record that it names is tombstoned only after the file is durably unlinked (DiskStore::drop_checkpoint).
//   5. A torn or damaged file, or one of another version or layout, is ignored.
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
/// Parses a whole file; `checkpoint` refers to its bytes. False: no checkpoint, one of another layout, or damaged.
bool parse_checkpoint(std::span<const std::byte> file, std::uint64_t layout_id, Checkpoint& checkpoint);
/// The size of the largest checkpoint of so many segments, with a record in every block: a longer file is not theirs.
std::int64_t max_checkpoint_bytes(std::int64_t segments, std::int64_t segment_bytes);
std::optional<Checkpoint> read_checkpoint(FileSystem& files, const std::string& directory, std::uint64_t layout_id,
                                          std::int64_t max_bytes);

class CheckpointWriter {
 public:
  CheckpointWriter(std::int64_t segments, std::int64_t records);
  void add(const CheckpointSegment& segment, std::int64_t records);
  void add(const CheckpointRecord& record);
  /// Writes the file, after as many records were added as were announced. Replaces an older checkpoint atomically.
  IoStatus write(FileSystem& files, const std::string& directory, std::uint64_t layout_id, std::uint64_t next_sequence);

 private:
  BlockBuffer memory_;
  std::span<std::byte> file_, free_;
};

}  // namespace kv4::tier
