#include "tier/store_survey.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "base/check.h"

namespace kv4::tier {
namespace {

std::string describe(const OpenedSegment& opened) {
  switch (opened.refusal) {
    case SegmentRefusal::none: return "";
    case SegmentRefusal::unreadable: return fmt::format("cannot be read: {}", to_string(opened.status));
    case SegmentRefusal::damaged: return "both copies of its header are damaged";
    case SegmentRefusal::other_version:
      return fmt::format("format version {}, this build reads {}", opened.version, kSegmentVersion);
  }
  return "";
}

using Ids = std::set<std::pair<std::uint64_t, Key>>;

SegmentSurvey survey_segment(SegmentFile& file, bool read_payloads, Ids& ids) {
  SegmentSurvey survey;
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
    ids.emplace(found.header.id.tenant, found.header.id.key);
    if (!read_payloads) continue;
    const ReadRecord record = file.read(found.offset, found.header.length, buffer);
    const RecordRefusal refusal = record.status.ok() ? record.refusal : RecordRefusal::too_short;
    if (refusal != RecordRefusal::none)
      survey.damaged.push_back({found.header.id, found.offset, found.header.length, refusal});
  }
  return survey;
}

}  // namespace

std::int64_t StoreSurvey::damaged_segments() const {
  return std::count_if(segments.begin(), segments.end(),
                       [](const SegmentSurvey& s) { return s.refusal != SegmentRefusal::none; });
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

StoreSurvey survey_store(FileSystem& files, const std::string& directory, bool read_payloads) {
  const Listing listing = files.list(directory);
  require(listing.status.ok(), ErrorCode::bad_file, "the store {} cannot be read: {}", directory,
          to_string(listing.status));
  const auto& names = listing.names;
  const bool is_store = std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name == "lock" || parse_segment_name(name).has_value();
  });
  require(is_store, ErrorCode::bad_file, "there is no store in {}: it has no segments", directory);
  const Opened<FileLock> lock = files.lock(directory + "/lock");  // a store that cannot be written can be surveyed
  require(lock.status.code != IoCode::in_use, ErrorCode::bad_state,
          "the store {} is in use by another process; a store has one user at a time", directory);

  StoreSurvey survey;
  Ids ids;
  for (const std::string& name : names) {
    if (name.ends_with(kUnfinishedSuffix)) ++survey.unfinished_segments;
    const std::optional<std::uint64_t> id = parse_segment_name(name);
    if (!id) continue;
    OpenedSegment opened = SegmentFile::open(files, directory, *id, OpenMode::read);
    SegmentSurvey segment;
    if (opened.file) segment = survey_segment(*opened.file, read_payloads, ids);
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
