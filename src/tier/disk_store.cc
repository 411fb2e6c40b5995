#include "tier/disk_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr std::int64_t kMinSegmentBytes = 64 << 10;

void check(const StoreOptions& options) {
  require(!options.directory.empty(), ErrorCode::bad_argument, "a store needs a directory");
  require(options.segment_bytes >= kMinSegmentBytes && options.segment_bytes % kBlockBytes == 0,
          ErrorCode::bad_argument, "segments of {} bytes; they need a multiple of {} of at least {}",
          options.segment_bytes, kBlockBytes, kMinSegmentBytes);
  require(options.capacity_bytes / 2 >= options.segment_bytes, ErrorCode::bad_argument,
          "a capacity of {} bytes; two segments of {} are the least", options.capacity_bytes, options.segment_bytes);
  require(options.sync_every_bytes > 0, ErrorCode::bad_argument, "sync_every_bytes is {}; it must be positive",
          options.sync_every_bytes);
}

}  // namespace

// Keys are digests already.
std::size_t DiskStore::IdHash::operator()(const RecordId& id) const {
  return static_cast<std::size_t>(load_le<std::uint64_t>(id.key.data()) ^ (id.tenant * 0x9e3779b97f4a7c15u));
}

std::unique_ptr<DiskStore> DiskStore::open(FileSystem& files, const StoreOptions& options) {
  check(options);
  std::unique_ptr<DiskStore> store(new DiskStore(files, options));
  store->lock();
  store->open_segments();
  store->rebuild_index();
  return store;
}

DiskStore::~DiskStore() = default;

void DiskStore::lock() {
  const IoStatus made = files_.make_directory(options_.directory);
  require(made.ok(), ErrorCode::bad_file, "the store's directory {} cannot be made: {}", options_.directory,
          to_string(made));
  Opened<FileLock> locked = files_.lock(options_.directory + "/lock");
  require(locked.status.code != IoCode::in_use, ErrorCode::bad_state,
          "the store {} is in use by another process; a store has one user at a time", options_.directory);
  require(locked.status.ok(), ErrorCode::bad_file, "the store {} cannot be locked: {}", options_.directory,
          to_string(locked.status));
  lock_ = std::move(locked.handle);
}

void DiskStore::open_segments() {
  const Listing listing = files_.list(options_.directory);
  require(listing.status.ok(), ErrorCode::bad_file, "the store {} cannot be listed: {}", options_.directory,
          to_string(listing.status));
  for (const std::string& name : listing.names) {
    if (name.ends_with(kUnfinishedSuffix)) {
      (void)files_.unlink(options_.directory + "/" + name);
      continue;
    }
    const std::optional<std::uint64_t> id = parse_segment_name(name);
    if (!id) continue;
    OpenedSegment opened = SegmentFile::open(files_, options_.directory, *id, OpenMode::read_write);
    require(opened.refusal != SegmentRefusal::other_version, ErrorCode::bad_file,
            "{}/{} has format version {}, this build reads {}; use another directory, or delete the store",
            options_.directory, name, opened.version, kSegmentVersion);
    auto segment = std::make_unique<Segment>();
    segment->id = *id;
    segment->bytes = options_.segment_bytes;
    segment->damaged = opened.file == nullptr;
    if (opened.file) {
      require(opened.file->header().layout_id == options_.layout_id, ErrorCode::bad_file,
              "the store {} holds bytes of layout {:016x}, the cache has {:016x}; use another directory, or delete it",
              options_.directory, opened.file->header().layout_id, options_.layout_id);
      segment->bytes = opened.file->header().bytes;
      segment->file = std::move(opened.file);
      segment->dirty = true;  // a killed process may have left it in the page cache only
    }
    next_segment_ = std::max(next_segment_, *id + 1);
    segments_[*id] = std::move(segment);
  }
  directory_dirty_ = !segments_.empty();
}

void DiskStore::rebuild_index() {
  std::unordered_map<RecordId, std::vector<Entry>, IdHash> older;  // oldest first
  for (auto& [id, segment] : segments_) {
    if (!segment->file) continue;
    const SegmentContents contents = segment->file->scan(read_buffer_);
    segment->damaged = !contents.gaps.empty();
    for (const FoundRecord& found : contents.records) {
      const RecordHeader& header = found.header;
      next_sequence_ = std::max(next_sequence_, header.sequence + 1);
      if (header.kind != RecordKind::value || header.layout_id != options_.layout_id) continue;
      const Entry entry{{segment.get(), found.offset, header.length}, header.sequence, false};
      const auto [at, added] = index_.try_emplace(header.id, entry);
      if (!added) older[header.id].push_back(std::exchange(at->second, entry));
      segment->ids.push_back(header.id);
      segment->live_bytes += stored_bytes(header.length);
    }
    active_ = segment.get();  // the last one that can be read
  }
  for (auto& [id, entries] : older) choose_sound(id, std::move(entries));
}

// The newest may have been under way in a crash: its header there, its payload not.
void DiskStore::choose_sound(const RecordId& id, std::vector<Entry> older) {
  Entry& chosen = index_.at(id);
  older.push_back(chosen);
  auto sound = older.rbegin();
  while (sound != older.rend() && read_entry(id, *sound).refusal != RecordRefusal::none) ++sound;
  if (sound == older.rend()) sound = older.rbegin();
  chosen = *sound;
  for (const Entry& entry : older) {
    if (entry.place.segment == chosen.place.segment && entry.place.offset == chosen.place.offset) continue;
    entry.place.segment->live_bytes -= stored_bytes(entry.place.length);
    superseded_.push_back(entry.place);
  }
}

void DiskStore::put(std::span<PutRequest> requests) {
  for (PutRequest& request : requests) request.status = put_one(request.id, request.payload);
}

PutStatus DiskStore::put_one(const RecordId& id, std::span<const std::byte> payload) {
  if (!lock_ || directory_failed_) return PutStatus::failed;
  const auto length = static_cast<std::int64_t>(payload.size());
  if (length > kMaxPayloadBytes || stored_bytes(length) > options_.segment_bytes - kSegmentDataOffset)
    return PutStatus::too_large;
  IoStatus status = make_active(stored_bytes(length), true);
  Entry entry{{}, next_sequence_, false};
  if (status.ok()) status = append(id, next_sequence_, payload, entry.place);
  if (!status.ok()) return status.code == IoCode::no_space ? PutStatus::no_space : PutStatus::failed;
  ++next_sequence_;
  if (const auto old = index_.find(id); old != index_.end()) {
    superseded_.push_back(old->second.place);
    forget(id);
  }
  index_.emplace(id, entry);
  if (active_->unsynced_bytes >= options_.sync_every_bytes) sync_segment(*active_);
  return PutStatus::stored;
}

void DiskStore::get(std::span<GetRequest> requests) {
  for (GetRequest& request : requests) request.status = get_one(request);
}

GetStatus DiskStore::get_one(GetRequest& request) {
  request.bytes = 0;
  const auto found = index_.find(request.id);
  if (!lock_ || found == index_.end() || found->second.set_aside) return GetStatus::missing;
  request.bytes = found->second.place.length;
  if (static_cast<std::int64_t>(request.to.size()) < request.bytes) return GetStatus::too_small;
  const ReadRecord record = read_entry(request.id, found->second);
  if (!record.status.ok()) return GetStatus::failed;
  if (record.refusal != RecordRefusal::none) {
    set_aside(found->second);
    return GetStatus::damaged;
  }
  std::copy(record.payload.begin(), record.payload.end(), request.to.begin());
  return GetStatus::found;
}

ReadRecord DiskStore::read_entry(const RecordId& id, const Entry& entry) {
  ReadRecord record = entry.place.segment->file->read(entry.place.offset, entry.place.length, read_buffer_);
  if (!record.status.ok()) record.refusal = RecordRefusal::too_short;
  if (record.refusal != RecordRefusal::none) return record;
  if (record.header.id != id) record.refusal = RecordRefusal::other_record;
  if (record.header.layout_id != options_.layout_id) record.refusal = RecordRefusal::other_layout;
  if (record.header.sequence != entry.sequence) record.refusal = RecordRefusal::other_sequence;
  return record;
}

void DiskStore::set_aside(Entry& entry) {
  entry.set_aside = true;
  entry.place.segment->damaged = true;
  ++counts_.set_aside_records;
}

void DiskStore::forget(const RecordId& id) {
  const auto found = index_.find(id);
  found->second.place.segment->live_bytes -= stored_bytes(found->second.place.length);
  index_.erase(found);
}

void DiskStore::exists(std::span<ExistsRequest> requests) const {
  for (ExistsRequest& request : requests) {
    const auto found = index_.find(request.id);
    const bool there = lock_ && found != index_.end() && !found->second.set_aside;
    request.bytes = there ? found->second.place.length : -1;
  }
}

void DiskStore::remove(std::span<RemoveRequest> requests) {
  for (RemoveRequest& request : requests) {
    const auto found = index_.find(request.id);
    request.removed = lock_ && found != index_.end() && !found->second.set_aside;
    if (!lock_ || found == index_.end()) continue;
    removed_.push_back(found->second.place);
    forget(request.id);
  }
}

bool DiskStore::close() {
  if (!lock_) return false;
  const bool durable = flush();
  segments_.clear();
  index_.clear();
  superseded_.clear();
  removed_.clear();
  active_ = nullptr;
  lock_.reset();
  return durable;
}

CollectResult DiskStore::collect() {
  CollectResult result;
  if (!lock_) return result;
  const std::int64_t before = total_bytes();
  std::vector<RecordId> damaged;
  for (auto& [id, entry] : index_) {
    const ReadRecord record = read_entry(id, entry);
    if (record.status.ok() && record.refusal != RecordRefusal::none) damaged.push_back(id);
  }
  for (const RecordId& id : damaged) {
    removed_.push_back(index_.at(id).place);
    forget(id);
  }
  result.damaged_records = static_cast<std::int64_t>(damaged.size());
  result.durable = flush();
  std::vector<std::uint64_t> wasteful;
  for (const auto& [id, segment] : segments_) {
    const bool sparse = segment.get() != active_ && segment->live_bytes * 2 < segment->bytes;
    if (sparse || segment->damaged) wasteful.push_back(id);
  }
  for (const std::uint64_t id : wasteful) {  // one at a time: no more than one segment too many
    if (const auto found = segments_.find(id); found != segments_.end()) leave(*found->second);
    result.durable = flush() && result.durable;
    if (!result.durable) break;
  }
  result.freed_bytes = before - total_bytes();
  return result;
}

StoreStats DiskStore::stats() const {
  StoreStats stats = counts_;
  for (const auto& [id, entry] : index_) {
    if (entry.set_aside) continue;
    ++stats.records;
    stats.payload_bytes += entry.place.length;
  }
  stats.segments = static_cast<std::int64_t>(segments_.size());
  stats.segment_bytes = total_bytes();
  return stats;
}

}  // namespace kv4::tier
