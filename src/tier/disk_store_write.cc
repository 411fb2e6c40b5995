// The store's way to the disk: appends, segments that come and go, and the order in which a flush makes things durable.
#include <algorithm>
#include <utility>

#include "tier/disk_store.h"

namespace kv4::tier {
namespace {

constexpr int kFlushAttempts = 4;  // each follows a segment that failed and was left

}  // namespace

IoStatus DiskStore::append(const RecordId& id, std::uint64_t sequence, std::span<const std::byte> payload,
                           Place& place) {
  RecordHeader header;
  header.layout_id = options_.layout_id;
  header.id = id;
  header.sequence = sequence;
  const SegmentFile::Appended appended = active_->file->append(header, payload, write_buffer_);
  active_->dirty = true;
  if (!appended.status.ok()) {
    if (!appended.place_is_clean) leave(*active_);
    return appended.status;
  }
  const auto length = static_cast<std::int64_t>(payload.size());
  place = {active_, appended.offset, length};
  active_->ids.push_back(id);
  active_->live_bytes += stored_bytes(length);
  active_->unsynced_bytes += stored_bytes(length);
  return {};
}

/// `may_evict`: not while records are moved out of a segment that leaves.
IoStatus DiskStore::make_active(std::int64_t record_bytes, bool may_evict) {
  if (active_ != nullptr && active_->file->room() >= record_bytes) return {};
  if (active_ != nullptr) sync_segment(*active_);
  active_ = nullptr;
  while (may_evict && total_bytes() + options_.segment_bytes > options_.capacity_bytes)
    if (!evict_oldest()) return {IoCode::no_space, 0};
  // Moving records out of a segment that was evicted on the way may have made a new one.
  if (active_ != nullptr && active_->file->room() >= record_bytes) return {};
  return add_segment();
}

IoStatus DiskStore::add_segment() {
  const SegmentHeader header{next_segment_++, files_.random64(), options_.layout_id, options_.segment_bytes,
                             files_.now_ns()};
  OpenedSegment made = SegmentFile::create(files_, options_.directory, header);
  if (!made.file) return made.status;
  auto segment = std::make_unique<Segment>();
  segment->id = header.id;
  segment->bytes = header.bytes;
  segment->file = std::move(made.file);
  segment->dirty = true;
  directory_dirty_ = true;
  active_ = segment.get();
  segments_[header.id] = std::move(segment);
  return {};
}

bool DiskStore::evict_oldest() {
  if (segments_.empty()) return false;
  Segment& oldest = *segments_.begin()->second;
  for (const RecordId& id : oldest.ids) {
    const auto found = index_.find(id);
    if (found == index_.end() || found->second.place.segment != &oldest) continue;
    counts_.evicted_records += found->second.set_aside ? 0 : 1;
    forget(id);
  }
  leave(oldest);
  const std::int64_t before = total_bytes();
  return settle() && total_bytes() < before;
}

void DiskStore::leave(Segment& segment) {
  segment.leaving = true;
  if (active_ == &segment) active_ = nullptr;
}

void DiskStore::sync_segment(Segment& segment) {
  if (segment.file->sync().ok()) {
    segment.dirty = false;
    segment.unsynced_bytes = 0;
  } else {
    ++counts_.dropped_segments;
    leave(segment);
  }
}

bool DiskStore::sync_segments() {
  bool all = true;
  for (auto& [id, segment] : segments_) {
    if (!segment->dirty || segment->leaving) continue;
    sync_segment(*segment);
    all = all && !segment->leaving;
  }
  return all;
}

bool DiskStore::sync_directory() {
  if (directory_dirty_) directory_failed_ = !files_.sync_directory(options_.directory).ok();
  directory_dirty_ = false;
  return !directory_failed_;
}

/// Out of a segment that leaves. False: some could not be written elsewhere and are still there.
bool DiskStore::move_records(Segment& segment) {
  for (const RecordId& id : segment.ids) {
    const auto found = index_.find(id);
    if (found == index_.end() || found->second.place.segment != &segment) continue;
    const Entry old = found->second;
    const ReadRecord record = read_entry(id, old);
    if (record.refusal != RecordRefusal::none) {
      ++counts_.lost_records;
      records_lost_ = true;
      forget(id);
      continue;
    }
    Entry moved{{}, old.sequence, false};
    if (!make_active(stored_bytes(old.place.length), false).ok() ||
        !append(id, old.sequence, record.payload, moved.place).ok())
      return false;
    forget(id);
    index_.emplace(id, moved);
  }
  segment.ids.clear();
  return true;
}

/// Durable when it returns true. A segment that fails leaves.
bool DiskStore::kill(std::vector<Place>& places) {
  for (const Place& place : places) {
    Segment& segment = *place.segment;
    if (segment.leaving) continue;  // they go with it
    segment.dirty = true;
    if (!segment.file->kill(place.offset, place.length, write_buffer_).ok()) leave(segment);
  }
  if (!sync_segments()) return false;
  std::erase_if(places, [](const Place& place) { return !place.segment->leaving; });
  return std::none_of(segments_.begin(), segments_.end(),
                      [](const auto& entry) { return entry.second->leaving && !entry.second->ids.empty(); });
}

/// Oldest first, one at a time: an older record must not outlive a newer one.
bool DiskStore::unlink_leaving() {
  for (auto at = segments_.begin(); at != segments_.end();) {
    Segment& segment = *at->second;
    if (!segment.leaving) {
      ++at;
      continue;
    }
    const IoStatus status = files_.unlink(options_.directory + "/" + segment_name(segment.id));
    if (!status.ok() && status.code != IoCode::not_found) return false;
    directory_dirty_ = true;
    const auto in_segment = [&](const Place& place) { return place.segment == &segment; };
    std::erase_if(superseded_, in_segment);
    std::erase_if(removed_, in_segment);
    at = segments_.erase(at);
    if (!sync_directory()) return false;
  }
  return true;
}

bool DiskStore::flush() {
  if (!lock_) return false;
  const bool durable = settle();
  records_lost_ = false;
  return durable;
}

// Each step may begin only when the one before is durable. A segment that fails on the way leaves, and all begins
// again.
bool DiskStore::settle() {
  for (int attempt = 0; attempt < kFlushAttempts && !directory_failed_; ++attempt) {
    std::vector<Segment*> leaving;
    for (auto& [id, segment] : segments_)
      if (segment->leaving) leaving.push_back(segment.get());
    if (!std::all_of(leaving.begin(), leaving.end(), [&](Segment* segment) { return move_records(*segment); }))
      continue;
    if (records_lost_) return false;  // what they superseded stays until the caller has heard of it
    if (!sync_segments() || !sync_directory()) continue;
    if (!kill(superseded_)) continue;
    if (!unlink_leaving()) continue;
    if (!kill(removed_)) continue;
    return true;
  }
  return false;
}

std::int64_t DiskStore::total_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [id, segment] : segments_) bytes += segment->bytes;
  return bytes;
}

}  // namespace kv4::tier
