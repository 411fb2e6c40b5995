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

/// Reads a session's file record by record. The reader of the records checks the digests of payloads. The memory of a
/// record is bounded (kMaxSessionRecordBytes), even where the file has holes.
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

/// save_session and restore_session, without counting their time.
bool write_session(KVCacheManager& manager, RequestId request, const SessionIdentity& identity, RecordSink& sink,
                   const SessionProgress& progress);
Expected<RequestId> read_session(KVCacheManager& manager, const SessionIdentity& identity, RecordSource& source,
                                 const SessionProgress& progress);

/// save_session_file and restore_session_file, on any file system.
struct SessionFile {
  tier::FileSystem& files;
  std::string path;

  bool save(KVCacheManager& manager, RequestId request, const SessionIdentity& identity,
            const SessionProgress& progress = {}) const;
  Expected<RequestId> restore(KVCacheManager& manager, const SessionIdentity& identity,
                              const SessionProgress& progress = {}) const;
};

/// The contents of a session's file, as far as they can be read without its salt.
struct SessionSurvey {
  std::int64_t file_bytes = 0;
  Protection protection = Protection::none;  // of the session's own record
  bool authentic = false;                    // one of the given keys made it; `problems` lists other records
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

/// Uses the keys of `identity`, which a sealed session needs, and nothing else of it. Without keys an authenticated
/// session is read unverified. Throws Error(bad_file) where the file cannot be read or its first record is no
/// session's; later faults are among the problems.
SessionSurvey survey_session_file(tier::FileSystem& files, const std::string& path,
                                  const SessionIdentity& identity = {});

}  // namespace kv4
