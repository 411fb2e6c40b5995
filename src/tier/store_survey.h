// What is in a store, sound or not, without changing it. For `kv4 store`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tier/file_system.h"
#include "tier/record_guard.h"
#include "tier/segment_file.h"
#include "tier/store_names.h"

namespace kv4::tier {

struct DamagedRecord {
  RecordId id;
  std::int64_t offset = 0, bytes = 0;  // of the payload
  RecordRefusal reason = RecordRefusal::none;
};

struct SegmentSurvey {
  std::string name;
  SegmentRefusal refusal = SegmentRefusal::none;  // else only `name` and `problem` count
  std::string problem;                            // of the whole segment, in words
  SegmentHeader header;
  std::int64_t records = 0, payload_bytes = 0;                 // values, older ones of a key too
  std::int64_t sealed_records = 0, authenticated_records = 0;  // of them; no key protects the others
  std::int64_t dead_records = 0;
  std::int64_t used_bytes = 0;  // up to the end of the last record
  std::vector<Gap> gaps;
  std::vector<DamagedRecord> damaged;  // where payloads were read
};

struct StoreSurvey {
  std::vector<SegmentSurvey> segments;
  std::int64_t keys = 0, tenants = 0;    // different ones
  std::int64_t superseded_records = 0;   // an older record of a key
  std::int64_t unfinished_segments = 0;  // files that a crash left behind; they hold nothing
  std::int64_t set_aside_files = 0;      // that no store has made, or which are no files: left alone
  std::vector<SetAsideFile> set_aside;   // the first kMaxNamedFiles of them

  std::int64_t damaged_segments() const;     // with those that cannot be read
  std::int64_t unreadable_segments() const;  // of these: they may hold sound records
  std::int64_t damaged_records() const;
  std::int64_t records(std::int64_t SegmentSurvey::*which) const;
  std::int64_t gaps() const;
  bool sound() const { return damaged_segments() + damaged_records() + gaps() + set_aside_files == 0; }
};
inline constexpr std::int64_t kMaxNamedFiles = 1000;

/// `read_payloads`: else headers only. With keys of `guard`, what none of them made is damaged, too. Throws Error where
/// there is no store, or another process has it.
StoreSurvey survey_store(FileSystem& files, const std::string& directory, bool read_payloads,
                         const RecordGuard& guard = {});

}  // namespace kv4::tier
