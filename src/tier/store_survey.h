// Surveys a store, sound or damaged, without changing it. For `kv4 store`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tier/file_system.h"
#include "tier/record_guard.h"
#include "tier/segment_file.h"
#include "tier/store_names.h"

namespace kv4::tier {

struct DamagedRecord {
  RecordId id;
  std::int64_t offset = 0, bytes = 0;  // `bytes`: of the payload
  std::optional<ChunkLabel> label;     // of a chunk
  RecordRefusal reason = RecordRefusal::none;
};

struct SegmentSurvey {
  std::string name;
  SegmentRefusal refusal = SegmentRefusal::none;  // else only `name` and `problem` are set
  std::string problem;                            // the refusal of the whole segment, in words
  SegmentHeader header;
  std::int64_t records = 0, payload_bytes = 0;                     // values, older ones of a key too
  std::int64_t sealed_records = 0, authenticated_records = 0;      // of these; no key protects the others
  std::int64_t chunks = 0, trimmed_chunks = 0, trimmed_bytes = 0;  // of the values; what trimming saves
  std::int64_t dead_records = 0;
  std::int64_t used_bytes = 0;  // up to the end of the last record
  std::vector<Gap> gaps;
  std::vector<DamagedRecord> damaged;  // empty unless payloads were read
};

struct StoreSurvey {
  std::vector<SegmentSurvey> segments;
  std::int64_t keys = 0, tenants = 0;    // distinct ones
  std::int64_t superseded_records = 0;   // older records of a key
  std::int64_t unfinished_segments = 0;  // files that a crash left behind, without records
  std::int64_t set_aside_files = 0;      // left alone: made by no store, or not files
  std::vector<SetAsideFile> set_aside;   // the first kMaxNamedFiles of them

  std::int64_t damaged_segments() const;     // includes unreadable ones
  std::int64_t unreadable_segments() const;  // these may hold sound records
  std::int64_t damaged_records() const;
  std::int64_t records(std::int64_t SegmentSurvey::*which) const;
  std::int64_t gaps() const;
  bool sound() const { return damaged_segments() + damaged_records() + gaps() + set_aside_files == 0; }
};
inline constexpr std::int64_t kMaxNamedFiles = 1000;

/// `read_payloads`: false reads headers only. Where `guard` has keys, records that none of them made count as damaged,
/// too, and trimmed chunks that do not expand, unless they are sealed and their key is not given. Throws Error where
/// there is no store, or another process has it.
StoreSurvey survey_store(FileSystem& files, const std::string& directory, bool read_payloads,
                         const RecordGuard& guard = {});

}  // namespace kv4::tier
