// Sessions in files: records one after the other, each at a multiple of 4,096 bytes with zeros up to the next.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/session_format.h"
#include "kv4/session.h"
#include "tier/file_system.h"
#include "tier/segment_file.h"

namespace kv4 {

/// Reads a session's file record by record. Digests of payloads are whoever takes the records to check. What a record
/// takes of memory is bounded (kMaxSessionRecordBytes), also where the file has holes.
class SessionFileSource : public RecordSource {
 public:
  /// Throws Error(bad_file), here and below.
  SessionFileSource(tier::FileSystem& files, const std::string& path);

  std::span<const std::byte> next() override;
  std::int64_t file_bytes() const { return bytes_; }
  std::int64_t offset() const { return offset_; }  // of the next record

 private:
  void read(std::int64_t offset, std::span<std::byte> to);

  std::unique_ptr<tier::File> file_;
  std::int64_t bytes_ = 0, offset_ = 0;
  tier::BlockBuffer buffer_;
};

/// save_session and restore_session, whose time does not count.
bool write_session(KVCacheManager& manager, RequestId request, const SessionIdentity& identity, RecordSink& sink,
                   const SessionProgress& progress);
Expected<RequestId> read_session(KVCacheManager& manager, const SessionIdentity& identity, RecordSource& source,
                                 const SessionProgress& progress);

/// What save_session_file and restore_session_file do, on any file system.
struct SessionFile {
  tier::FileSystem& files;
  std::string path;

  bool save(KVCacheManager& manager, RequestId request, const SessionIdentity& identity,
            const SessionProgress& progress = {}) const;
  Expected<RequestId> restore(KVCacheManager& manager, const SessionIdentity& identity,
                              const SessionProgress& progress = {}) const;
};

/// What is in a session's file, as far as that can be told without its salt.
struct SessionSurvey {
  std::int64_t file_bytes = 0;
  Protection protection = Protection::none;  // of its own record
  bool authentic = false;                    // a key of those given made it; `problems` says of other records
  std::uint64_t layout_id = 0, tenant = 0;
  std::uint32_t block_tokens = 0;
  std::vector<std::int64_t> lengths;
  std::string weights_id, layout;
  std::int64_t full_blocks = 0, blocks_found = 0;
  std::int64_t image_bytes = 0, open_block_bytes = 0, snapshot_bytes = 0, block_bytes = 0, token_bytes = 0,
               extra_bytes = 0;
  std::vector<std::string> problems;  // empty: every record is sound and none is missing

  bool sound() const { return problems.empty(); }
};

/// With the keys of `identity`, which a sealed session needs; the rest of it does not count. Without keys an
/// authenticated session is read as it is. Throws Error(bad_file) where the file cannot be read or its first record is
/// no session's; what comes after that is among the problems.
SessionSurvey survey_session_file(tier::FileSystem& files, const std::string& path,
                                  const SessionIdentity& identity = {});

}  // namespace kv4
