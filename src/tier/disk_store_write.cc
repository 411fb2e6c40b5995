// The write side of the store: appends, creation and removal of segments, and the order in which a flush makes changes
// durable.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/undo.h"
#include "tier/disk_store.h"
#include "tier/store_names.h"

namespace kv4::tier {
namespace {

constexpr int kFlushAttempts = 4;  // a further one follows where a segment failed and retired
// A checkpoint is written after so many new bytes, in segments and per byte of the checkpoint.
constexpr std::int64_t kCheckpointSegments = 4, kAppendedPerCheckpointByte = 16;
constexpr std::int64_t kMergedBytes = 512 << 10;  // small records are merged into writes of up to so many bytes
constexpr std::size_t kMaxMergedRecords = 64;     // each has up to three pieces
constexpr int kMaxNameAttempts = 16;              // for a segment whose name another file has taken
// A put on a full disk evicts at most so many: another program may take the room that is freed.
constexpr std::int64_t kMaxEvictedSegmentsPerPut = 2;
constexpr std::int64_t kLeastSegments = 4;  // on a disk without room for whole ones, so that one can be evicted
static_assert(3 * kMaxMergedRecords <= kMaxIoPieces);

}  // namespace

void DiskStore::append(std::span<NewRecord> records) {
  Segment& segment = *active_;
  make_room(segment.ids, records.size());
  segment.dirty = true;
  std::vector<SegmentSync> syncs;
  for (auto& [id, due] : segments_) {
    if (!due->sync_due || due->retiring) continue;
    SegmentSync& sync = syncs.emplace_back();
    sync.file = &due->file->file();
    sync.kind = IoOp::Kind::sync;
    sync.segment = due.get();
    sync.bytes = due->unsynced_bytes;
  }
  writes_.reset();
  Undo leave_them([&] {
    leave(segment);
    for (const SegmentSync& sync : syncs)  // a failed sync is not repeated; one that was not made stays due
      if (!sync.moved.status.ok()) finish_sync(*sync.segment, sync.moved.status, sync.bytes);
  });
  std::size_t next = 0, next_sync = 0;
  run_transfers(
      *write_queue_,
      [&]() -> IoOp* {
        if (next_sync < syncs.size()) return &syncs[next_sync++];
        if (next == records.size()) return nullptr;
        std::size_t last = next;
        std::int64_t bytes = 0, buffer_bytes = 0;
        do {
          bytes += stored_bytes(records[last].header.length);
          buffer_bytes += RecordWrite::buffer_bytes(records[last].payload, records[last].guard);
        } while (++last < records.size() && last - next < kMaxMergedRecords &&
                 bytes + stored_bytes(records[last].header.length) <= kMergedBytes);
        RecordWrite* write = writes_.take(buffer_bytes);
        if (write == nullptr) return nullptr;
        write->start(*segment.file, segment.file->end(), buffer_bytes);
        write->first = next;
        write->last = last;
        for (; next < last; ++next) {
          NewRecord& record = records[next];
          const std::int64_t length = record.header.length;
          record.place = {&segment, segment.file->reserve(length), length};
          if (!write->add(record.header, record.payload, record.guard)) record.status = {IoCode::failed, 0};
        }
        return write;
      },
      [&](IoOp& op) {
        if (op.kind == IoOp::Kind::sync) return;
        const RecordWrite& write = static_cast<const RecordWrite&>(op);
        for (NewRecord& record : records.subspan(write.first, write.last - write.first))
          if (record.status.ok()) record.status = op.moved.status;
        writes_.give(op);
      });

  for (const NewRecord& record : records) {
    if (!record.status.ok()) {
      if (record.status.code == IoCode::unopened && record.status.too_many_open()) continue;  // nothing was written
      const IoStatus tombstoned = segment.file->tombstone(record.place.offset, record.place.length, write_buffer_);
      if (!tombstoned.ok()) leave(segment, tombstoned);
      continue;
    }
    const std::int64_t bytes = stored_bytes(record.header.length);
    segment.ids.push_back(record.header.id);
    segment.live_bytes += bytes;
    segment.unsynced_bytes += bytes;
    appended_bytes_ += bytes;
  }
  for (const SegmentSync& sync : syncs) {
    if (sync.moved.status.ok() && sync.segment != &segment) sync.segment->dirty = false;
    finish_sync(*sync.segment, sync.moved.status, sync.bytes);
  }
  leave_them.keep();
  if (segment.unsynced_bytes >= options_.sync_every_bytes) segment.sync_due = true;
}

/// `may_evict`: false while records move out of a retiring segment.
IoStatus DiskStore::make_active(std::int64_t record_bytes, bool may_evict) {
  if (active_ != nullptr && active_->file->room() >= record_bytes) return {};
  if (active_ != nullptr) active_->sync_due = true;
  active_ = nullptr;
  while (may_evict &&
         (total_bytes() + options_.segment_bytes > options_.capacity_bytes || segments_.size() >= kMaxSegments))
    if (!evict_oldest()) return {IoCode::no_space, 0};
  return add_segment(record_bytes);
}

std::uint64_t DiskStore::take_segment_id() {
  while (taken_ids_.count(next_segment_) != 0 || segments_.count(next_segment_) != 0) ++next_segment_;
  return next_segment_++;
}

IoStatus DiskStore::add_segment(std::int64_t record_bytes) {
  const std::int64_t whole = options_.segment_bytes,
                     least = std::max(kMinSegmentBytes, kSegmentDataOffset + record_bytes);
  const auto blocks = [](std::int64_t bytes) { return bytes / kBlockBytes * kBlockBytes; };
  std::int64_t bytes = small_segments_ ? std::min(whole, blocks(total_bytes() / kLeastSegments)) : whole;
  small_segments_ = small_segments_ && bytes < whole;
  IoStatus status = make_segment(std::max(bytes, least));
  if (!segments_.empty() || status.code != IoCode::no_space) return status;
  for (bytes = blocks(whole / 2); status.code == IoCode::no_space && bytes >= least; bytes = blocks(bytes / 2))
    status = make_segment(bytes);
  if (!status.ok() || std::exchange(small_segments_, true)) return status;
  speak([&] {
    log(LogLevel::warning, "store.small_segments",
        fmt::format("the disk of {} has no room for a segment of {} bytes: smaller ones are made while that is so; a "
                    "capacity that fits the disk prevents that",
                    options_.directory, whole),
        {{"directory", options_.directory}});
  });
  return status;
}

IoStatus DiskStore::make_segment(std::int64_t bytes) {
  SegmentHeader header;
  OpenedSegment made{SegmentRefusal::unreadable, {IoCode::exists, 0}, 0, nullptr, 0};
  for (int attempt = 0; attempt < kMaxNameAttempts && made.status.code == IoCode::exists; ++attempt) {
    header = {kSegmentVersion,    take_segment_id(),      files_.random64(),
              options_.layout_id, bytes,                  files_.now_ns()};
    made = SegmentFile::create(files_, options_.directory, header);
  }
  if (!made.file) return made.status;
  auto segment = std::make_shared<Segment>();
  segment->id = header.id;
  segment->bytes = header.bytes;
  segment->file = std::move(made.file);
  segment->dirty = true;
  directory_dirty_ = true;
  active_ = (segments_[header.id] = std::move(segment)).get();
  return {};
}

bool DiskStore::evict_oldest() {
  if (segments_.empty()) return false;
  Segment& oldest = *segments_.begin()->second;
  for (const RecordId& id : oldest.ids) {
    const std::optional<Entry> found = index_.find(id);
    if (!found || found->place.segment != &oldest) continue;
    counts_.evicted_records += found->set_aside ? 0 : 1;
    forget(id);
  }
  leave(oldest);
  oldest.ids.clear();
  // No record is older than these, so none has to be tombstoned. The records that replaced them are durable first.
  return sync_segments() && sync_directory() && drop_segment(oldest);
}

void DiskStore::put_again(std::span<PutRequest> requests) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    PutRequest& request = requests[i];
    const auto replaces = [&](const PutRequest& later) { return later.id == request.id; };
    if (request.status != PutStatus::no_space ||
        std::any_of(requests.begin() + static_cast<std::ptrdiff_t>(i) + 1, requests.end(), replaces))
      continue;
    std::int64_t evicted_bytes = 0;
    while (request.status == PutStatus::no_space && !segments_.empty() &&
           evicted_bytes < kMaxEvictedSegmentsPerPut * options_.segment_bytes) {
      const std::uint64_t id = segments_.begin()->first;
      const std::int64_t before = total_bytes();
      if (!evict_oldest()) break;
      evicted_bytes += before - total_bytes();
      if (log_wanted())
        log(LogLevel::warning, "store.disk_full",
            fmt::format("the disk is full: segment {} of {} made room, the oldest; a capacity that fits the disk "
                        "prevents that",
                        id, options_.directory),
            {{"directory", options_.directory}, {"segment", std::to_string(id)}});
      (void)put_some({&request, 1});
    }
  }
}

void DiskStore::tell_full(std::span<const PutRequest> requests) {
  for (const PutRequest& request : requests) {
    if (request.status == PutStatus::stored) full_told_ = false;
    if (request.status != PutStatus::no_space || std::exchange(full_told_, true)) continue;
    speak([&] {
      log(LogLevel::warning, "store.no_space",
          fmt::format("the disk of {} has no room for a segment of {} bytes, and evicting gives none: puts fail; free "
                      "some, or make segment_bytes smaller",
                      options_.directory, options_.segment_bytes),
          {{"directory", options_.directory}});
    });
  }
}

void DiskStore::leave(Segment& segment, const IoStatus& why) noexcept {
  segment.retiring = true;
  if (why.code == IoCode::unopened) segment.unopened = why;
  if (active_ == &segment) active_ = nullptr;
}

void DiskStore::sync_segment(Segment& segment) {
  const IoStatus status = segment.file->sync();
  if (status.ok()) segment.dirty = false;
  finish_sync(segment, status, segment.unsynced_bytes);
}

void DiskStore::finish_sync(Segment& segment, const IoStatus& status, std::int64_t bytes) noexcept {
  segment.sync_due = false;
  if (status.ok()) {
    segment.unsynced_bytes -= bytes;
  } else if (status.code == IoCode::unopened) {
    if (!status.too_many_open()) leave(segment, status);
  } else {
    ++counts_.dropped_segments;
    leave(segment);
    speak([&] {
      log(LogLevel::error, "store.sync_failed",
          fmt::format("segment {} of {} could not be made durable: {}; its records are written anew or lost",
                      segment.id, options_.directory, to_string(status)),
          {{"directory", options_.directory}, {"reason", to_string(status)}});
    });
  }
}

bool DiskStore::sync_segments() {
  bool all = true;
  for (auto& [id, segment] : segments_) {
    if (!segment->dirty || segment->retiring) continue;
    sync_segment(*segment);
    all = all && !segment->dirty;
  }
  return all;
}

bool DiskStore::sync_directory() {
  if (directory_dirty_) directory_failed_ = !files_.sync_directory(options_.directory).ok();
  directory_dirty_ = false;
  return !directory_failed_;
}

/// Moves the live records out of a retiring segment. False: some could not be written elsewhere and are still there.
bool DiskStore::move_records(Segment& segment) {
  for (const RecordId& id : segment.ids) {
    const std::optional<Entry> old = index_.find(id);
    if (!old || old->place.segment != &segment) continue;
    const ReadRecord record = read_entry(id, *old, read_buffer_);
    if (record.status.code == IoCode::unopened) {
      if (record.status.too_many_open()) return false;
      leave(segment, record.status);
    }
    if (record.refusal != RecordRefusal::none) {
      ++counts_.lost_records;
      records_lost_ = true;
      forget(id);
      continue;
    }
    if (!make_active(stored_bytes(old->place.length), false).ok()) return false;
    NewRecord moved{record.header, record.payload, nullptr, {}, {}};
    index_.make_room(1);
    append({&moved, 1});
    if (!moved.status.ok()) return false;
    old->place.segment->live_bytes -= stored_bytes(old->place.length);
    index_.put(id, Entry{moved.place, old->sequence, old->kind, old->version, old->set_aside});
  }
  segment.ids.clear();
  return true;
}

/// True: the tombstones are durable. A segment that fails retires.
bool DiskStore::tombstone(std::vector<RecordPlace>& places) {
  const bool named =
      std::any_of(places.begin(), places.end(), [](const RecordPlace& place) { return place.segment->named; });
  if (named && !drop_checkpoint()) return false;
  std::sort(places.begin(), places.end(), [](const RecordPlace& a, const RecordPlace& b) {
    return std::pair(a.segment->id, a.offset) < std::pair(b.segment->id, b.offset);
  });
  int unsynced = 0;
  const Segment* before = nullptr;
  for (const RecordPlace& place : places) {
    Segment& segment = *place.segment;
    if (segment.retiring) continue;  // its records go with it
    if (&segment != std::exchange(before, &segment) && ++unsynced % kMaxUnsyncedSegments == 0 && !sync_segments())
      return false;
    segment.dirty = true;
    IoStatus status = segment.file->tombstone(place.offset, place.length, write_buffer_);
    if (status.code == IoCode::unopened && status.too_many_open()) {  // segments written to since a sync are open
      if (!sync_segments()) return false;
      status = segment.file->tombstone(place.offset, place.length, write_buffer_);
      segment.dirty = true;
      if (status.code == IoCode::unopened && status.too_many_open()) return false;
    }
    if (!status.ok()) leave(segment, status);
  }
  if (!sync_segments()) return false;
  std::erase_if(places, [](const RecordPlace& place) { return !place.segment->retiring; });
  return std::none_of(segments_.begin(), segments_.end(),
                      [](const auto& entry) { return entry.second->retiring && !entry.second->ids.empty(); });
}

/// Unlinks a segment without live records, or sets it aside where it could not be opened. False: the disk failed.
bool DiskStore::drop_segment(Segment& segment) {
  const std::string name = segment_name(segment.id);
  if (segment.unopened.ok()) {
    const IoStatus status = files_.unlink(options_.directory + "/" + name);
    if (!status.ok() && status.code != IoCode::not_found) return false;
    directory_dirty_ = true;
  } else {
    set_aside(name, to_string(segment.unopened));
    ++counts_.unopened_segments;
    taken_ids_.insert(segment.id);
  }
  const auto in_segment = [&](const RecordPlace& place) { return place.segment == &segment; };
  std::erase_if(superseded_, in_segment);
  std::erase_if(removed_, in_segment);
  segments_.erase(segments_.find(segment.id));
  return sync_directory();
}

/// Oldest first, one at a time: an older record must not outlive a newer one.
bool DiskStore::unlink_retiring() {
  for (auto at = segments_.begin(); at != segments_.end();) {
    Segment& segment = *at++->second;
    if (segment.retiring && !drop_segment(segment)) return false;
  }
  return true;
}

bool DiskStore::flush() {
  if (!usable()) return false;
  const bool durable = settle();
  records_lost_ = false;
  const std::int64_t checkpoint_bytes = index_.size() * kCheckpointRecordBytes;
  if (durable && appended_bytes_ >= std::max(kCheckpointSegments * options_.segment_bytes,
                                             kAppendedPerCheckpointByte * checkpoint_bytes))
    write_checkpoint();
  return durable;
}

/// Only after a flush: every record in the index is synced, and every other one is tombstoned. Where the write fails,
/// the older checkpoint stays valid for the segments it covers.
void DiskStore::write_checkpoint() {
  if (checkpoint_set_aside_) return;
  std::vector<std::pair<const Entry*, const RecordId*>> entries;
  std::map<const Segment*, std::int64_t> counts;
  index_.for_each([&](const RecordId& id, const Entry& entry) {
    entries.emplace_back(&entry, &id);
    ++counts[entry.place.segment];
  });
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    const RecordPlace &x = a.first->place, &y = b.first->place;
    return std::pair(x.segment->id, x.offset) < std::pair(y.segment->id, y.offset);
  });
  CheckpointWriter writer(std::ssize(segments_), std::ssize(entries));
  auto next = entries.begin();
  for (auto& [id, segment] : segments_) {
    if (!segment->file) continue;
    const SegmentHeader& header = segment->file->header();
    writer.add({id, header.nonce, header.bytes, segment->file->end(), segment.get() != active_, segment->damaged, {}},
               counts[segment.get()]);
    for (; next != entries.end() && next->first->place.segment == segment.get(); ++next) {
      const auto& [entry, record] = *next;
      writer.add({*record, entry->kind, entry->version, entry->place.offset, entry->place.length, entry->sequence});
    }
  }
  for (auto& [id, segment] : segments_) segment->named = true;
  checkpoint_there_ = true;
  if (writer.write(files_, options_.directory, options_.layout_id, next_sequence_).ok()) appended_bytes_ = 0;
}

bool DiskStore::drop_checkpoint() {
  const IoStatus status = files_.unlink(options_.directory + "/" + std::string(kCheckpointName));
  if (!status.ok() && status.code != IoCode::not_found) return false;
  directory_dirty_ = true;
  if (!sync_directory()) return false;
  for (auto& [id, segment] : segments_) segment->named = false;
  checkpoint_there_ = false;
  return true;
}

// Each step may begin only when the one before is durable. Where a segment fails it retires, and all steps begin again.
bool DiskStore::settle() {
  for (int attempt = 0; attempt < kFlushAttempts && !directory_failed_; ++attempt) {
    std::vector<Segment*> retiring;
    for (auto& [id, segment] : segments_)
      if (segment->retiring) retiring.push_back(segment.get());
    if (!std::all_of(retiring.begin(), retiring.end(), [&](Segment* segment) { return move_records(*segment); }))
      continue;
    if (records_lost_) return false;  // the records that they superseded stay until the caller knows of the loss
    if (!sync_segments() || !sync_directory()) continue;
    if (!tombstone(superseded_)) continue;
    if (!unlink_retiring()) continue;
    if (!tombstone(removed_)) continue;
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
