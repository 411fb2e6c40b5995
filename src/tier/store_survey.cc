#include "tier/store_survey.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "tier/chunk_coding.h"
#include "tier/index_checkpoint.h"

namespace kv4::tier {
namespace {

using Ids = std::set<std::pair<std::uint64_t, Key>>;

/// Whether a sound record's payload is that of a value, as far as that can be known without its key.
bool expands(const ReadRecord& record, const RecordGuard& guard, std::vector<std::byte>& scratch) {
  const ChunkCoding coding = record.header.coding();
  const bool sealed = record.header.kind == RecordKind::sealed;
  if (coding.coding != kTrimmed || (sealed && !guard.has_keys())) return true;
  scratch.assign(coding.decoded_bytes, std::byte{0});
  const std::span<std::byte> payload = std::span(scratch).first(record.payload.size());
  return guard.open(record.header, record.payload, payload) == RecordRefusal::none &&
         expand(scratch, std::ssize(record.payload));
}

SegmentSurvey survey_segment(SegmentFile& file, bool read_payloads, const RecordGuard& guard, Ids& ids) {
  SegmentSurvey survey;
  std::vector<std::byte> scratch;
  BlockBuffer buffer;
  SegmentContents contents = file.scan(buffer);
  survey.header = file.header();
  survey.used_bytes = contents.end;
  survey.gaps = std::move(contents.gaps);
  for (const FoundRecord& found : contents.records) {
    if (found.header.kind == RecordKind::dead) {
      ++survey.dead_records;
      continue;
    }
    ++survey.records;
    survey.payload_bytes += found.header.length;
    survey.sealed_records += found.header.kind == RecordKind::sealed;
    survey.authenticated_records += found.header.kind == RecordKind::authenticated;
    if (const std::optional<ChunkLabel>& label = found.header.label) {
      ++survey.chunks;
      survey.trimmed_chunks += label->coding.coding == kTrimmed;
      survey.trimmed_bytes += label->coding.decoded_bytes - found.header.length;
    }
    ids.emplace(found.header.id.tenant, found.header.id.key);
    if (!read_payloads) continue;
    const ReadRecord record = file.read(found.offset, found.header.length, buffer);
    RecordRefusal refusal = record.status.ok() ? record.refusal : RecordRefusal::too_short;
    if (refusal == RecordRefusal::none && guard.has_keys())
      refusal = guard.check(record.header, record.payload, scratch);
    if (refusal == RecordRefusal::none && !expands(record, guard, scratch)) refusal = RecordRefusal::damaged_payload;
    if (refusal != RecordRefusal::none)
      survey.damaged.push_back({found.header.id, found.offset, found.header.length, found.header.label, refusal});
  }
  return survey;
}

}  // namespace

std::int64_t StoreSurvey::damaged_segments() const {
  return std::count_if(segments.begin(), segments.end(),
                       [](const SegmentSurvey& s) { return s.refusal != SegmentRefusal::none; });
}

std::int64_t StoreSurvey::unreadable_segments() const {
  return std::count_if(segments.begin(), segments.end(),
                       [](const SegmentSurvey& s) { return s.refusal == SegmentRefusal::unreadable; });
}

std::int64_t StoreSurvey::damaged_records() const {
  return std::accumulate(segments.begin(), segments.end(), std::int64_t{0}, [](std::int64_t sum, const auto& s) {
    return sum + static_cast<std::int64_t>(s.damaged.size());
  });
}

std::int64_t StoreSurvey::gaps() const {
  return std::accumulate(segments.begin(), segments.end(), std::int64_t{0}, [](std::int64_t sum, const auto& s) {
    return sum + static_cast<std::int64_t>(s.gaps.size());
  });
}

std::int64_t StoreSurvey::records(std::int64_t SegmentSurvey::*which) const {
  return std::accumulate(segments.begin(), segments.end(), std::int64_t{0},
                         [&](std::int64_t sum, const SegmentSurvey& s) { return sum + s.*which; });
}

StoreSurvey survey_store(FileSystem& files, const std::string& directory, bool read_payloads,
                         const RecordGuard& guard) {
  StoreNames names = list_store(files, directory);
  require(names.lock || !names.segments.empty() || !names.unusable.empty(), ErrorCode::bad_file,
          "there is no store in {}: it has no segments", directory);
  const std::string lock_path = directory + "/" + std::string(kLockName);
  const Opened<FileLock> lock = files.lock(lock_path);  // only in_use counts: a read-only store can be surveyed
  require(lock.status.code != IoCode::in_use, ErrorCode::bad_state,
          "the store {} is in use by another process; a store has one user at a time", directory);

  StoreSurvey survey;
  const auto set_aside = [&](std::string name, std::string reason) {
    if (++survey.set_aside_files <= kMaxNamedFiles) survey.set_aside.push_back({std::move(name), std::move(reason)});
  };
  const auto is_file = [&](const std::string& name) {
    const IoStatus status = files.look_at(directory + "/" + name);
    if (status.code == IoCode::not_a_file) set_aside(name, to_string(status));
    return status.code != IoCode::not_a_file;
  };
  for (SetAsideFile& file : names.unusable) set_aside(std::move(file.name), std::move(file.reason));
  for (const std::string& name : names.unfinished) survey.unfinished_segments += is_file(name) ? 1 : 0;
  if (names.lock) (void)is_file(std::string(kLockName));
  if (names.checkpoint) (void)is_file(std::string(kCheckpointName));
  Ids ids;
  std::optional<std::uint64_t> last;
  for (const std::uint64_t id : names.segments) {
    const std::string name = segment_name(id);
    if (!may_follow(last, id)) {
      set_aside(name, "its id is far beyond those of other segments");
      continue;
    }
    OpenedSegment opened = SegmentFile::open(files, directory, id, OpenMode::read);
    if (opened.refusal == SegmentRefusal::none || opened.refusal == SegmentRefusal::unreadable) last = id;
    if (opened.refusal == SegmentRefusal::other_id) {
      set_aside(name, describe(opened));
      continue;
    }
    SegmentSurvey segment;
    if (opened.file) segment = survey_segment(*opened.file, read_payloads, guard, ids);
    segment.name = name;
    segment.refusal = opened.refusal;
    segment.problem = describe(opened);
    survey.segments.push_back(std::move(segment));
  }
  std::set<std::uint64_t> tenants;
  for (const auto& [tenant, key] : ids) tenants.insert(tenant);
  survey.keys = static_cast<std::int64_t>(ids.size());
  survey.tenants = static_cast<std::int64_t>(tenants.size());
  for (const SegmentSurvey& segment : survey.segments) survey.superseded_records += segment.records;
  survey.superseded_records -= survey.keys;
  return survey;
}

}  // namespace kv4::tier
