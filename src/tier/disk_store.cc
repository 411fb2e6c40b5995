#include "tier/disk_store.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "tier/store_names.h"

namespace kv4::tier {
namespace {

constexpr std::int64_t kMaxLoggedFiles = 32;  // set-aside files that the log names
// Higher sequences in a header or a checkpoint are ignored, so that the next ones never wrap. Sequences only tell
// records of a key apart.
constexpr std::uint64_t kMaxSequence = std::uint64_t{1} << 63;
constexpr int kMaxQueueDepth = 4096, kMaxReadThreads = 64;

void check(const StoreOptions& options) {
  require(!options.directory.empty(), ErrorCode::bad_argument, "a store needs a directory");
  require(is_segment_size(options.segment_bytes), ErrorCode::bad_argument,
          "segments of {} bytes; they need a multiple of {} from {} to {}", options.segment_bytes, kBlockBytes,
          kMinSegmentBytes, kMaxSegmentBytes);
  require(options.capacity_bytes / 2 >= options.segment_bytes, ErrorCode::bad_argument,
          "a capacity of {} bytes; two segments of {} are the least", options.capacity_bytes, options.segment_bytes);
  require(options.sync_every_bytes > 0, ErrorCode::bad_argument, "sync_every_bytes is {}; it must be positive",
          options.sync_every_bytes);
  require(options.queue_depth >= 1 && options.queue_depth <= kMaxQueueDepth, ErrorCode::bad_argument,
          "a queue depth of {}; it must be 1 to {}", options.queue_depth, kMaxQueueDepth);
  require(options.read_threads >= 1 && options.read_threads <= kMaxReadThreads, ErrorCode::bad_argument,
          "{} threads that read; there must be 1 to {}", options.read_threads, kMaxReadThreads);
}

}  // namespace

std::unique_ptr<DiskStore> DiskStore::open(FileSystem& files, const StoreOptions& options) {
  check(options);
  std::unique_ptr<DiskStore> store(new DiskStore(files, options));
  store->lock();
  store->open_segments();
  store->rebuild_index();
  speak([&] { store->report_opened(); });
  return store;
}

void DiskStore::report_opened() {
  const StoreStats found = stats();
  log(LogLevel::info, "store.opened",
      fmt::format("the store {} has {} records in {} segments", options_.directory, found.records, found.segments),
      {{"directory", options_.directory},
       {"records", std::to_string(found.records)},
       {"segments", std::to_string(found.segments)}});
}

DiskStore::DiskStore(FileSystem& files, const StoreOptions& options)
    : files_(files),
      options_(options),
      hash_{files.random64()},
      index_(hash_.seed),
      older_(0, hash_),
      writes_(options.queue_depth + 1) {
  if (!options_.guard) options_.guard = std::make_shared<RecordGuard>();
}

DiskStore::~DiskStore() = default;

void DiskStore::lock() {
  const IoStatus made = files_.make_directory(options_.directory);
  require(made.ok(), ErrorCode::bad_file, "the store's directory {} cannot be made: {}", options_.directory,
          to_string(made));
  Opened<FileLock> locked = files_.lock(options_.directory + "/" + std::string(kLockName));
  require(locked.status.code != IoCode::in_use, ErrorCode::bad_state,
          "the store {} is in use by another process; a store has one user at a time", options_.directory);
  require(locked.status.ok(), ErrorCode::bad_file, "the store {} cannot be locked: {}", options_.directory,
          to_string(locked.status));
  lock_ = std::move(locked.handle);
  for (int i = 0; i < options_.read_threads; ++i)
    readers_.push_back(
        {files_.make_queue(options_.queue_depth, lock_.get()), TransferPool<RecordRead>(options_.queue_depth + 1), {}});
  for (Reader& reader : readers_) idle_readers_.push_back(&reader);
  write_queue_ = files_.make_queue(options_.queue_depth, lock_.get());
}

void DiskStore::open_segments() {
  const StoreNames names = list_store(files_, options_.directory);
  for (const SetAsideFile& file : names.unusable) set_aside(file.name, file.reason);
  for (const std::string& name : names.unfinished) {
    const std::string path = options_.directory + "/" + name;
    if (files_.look_at(path).code == IoCode::not_a_file)
      set_aside(name, to_string(IoStatus{IoCode::not_a_file}));
    else
      (void)files_.unlink(path);
  }
  const auto look_at = [&](std::string_view name) {
    const IoStatus status = files_.look_at(options_.directory + "/" + std::string(name));
    if (status.code == IoCode::not_a_file) set_aside(std::string(name), to_string(status));
    return status.code != IoCode::not_a_file;
  };
  if (names.lock) (void)look_at(kLockName);
  checkpoint_there_ = names.checkpoint && look_at(kCheckpointName);
  checkpoint_set_aside_ = names.checkpoint && !checkpoint_there_;

  std::optional<std::uint64_t> last;
  for (const std::uint64_t id : names.segments) {
    if (may_follow(last, id)) {
      if (open_segment(id)) last = id;
    } else {
      set_aside(segment_name(id), "its id is far beyond those of other segments");
      taken_ids_.insert(id);
    }
  }
  next_segment_ = last.value_or(0) + 1;
  directory_dirty_ = true;  // an earlier process may have unlinked segments, even all, and died before its sync
}

bool DiskStore::open_segment(std::uint64_t id) {
  const std::string name = segment_name(id);
  OpenedSegment opened = SegmentFile::open(files_, options_.directory, id, OpenMode::read_write);
  require(opened.refusal != SegmentRefusal::other_version, ErrorCode::bad_file,
          "{}/{} has format version {}, this build reads {} and {}; use another directory, or delete the store",
          options_.directory, name, opened.version, kSegmentVersionV1Records, kSegmentVersion);
  if (opened.refusal != SegmentRefusal::none && opened.refusal != SegmentRefusal::damaged) {
    set_aside(name, describe(opened));
    taken_ids_.insert(id);
    // An unreadable segment may be sound, and new puts have to count after its records.
    const bool unopened = opened.refusal == SegmentRefusal::unreadable;
    counts_.unopened_segments += unopened ? 1 : 0;
    return unopened;
  }
  require(!opened.file || opened.file->header().layout_id == options_.layout_id, ErrorCode::bad_file,
          "the store {} holds bytes of layout {:016x}, the cache has {:016x}; use another directory, or delete it",
          options_.directory, opened.file ? opened.file->header().layout_id : 0, options_.layout_id);
  auto segment = std::make_shared<Segment>();
  segment->id = id;
  segment->bytes = opened.bytes;
  segment->damaged = opened.file == nullptr;
  segment->dirty = opened.file != nullptr;  // a killed process may have left it in the page cache only
  segment->file = std::move(opened.file);
  const bool sound = segment->file != nullptr;
  segments_[id] = std::move(segment);
  return sound;
}

void DiskStore::set_aside(const std::string& name, const std::string& reason) {
  if (++counts_.set_aside_files > kMaxLoggedFiles || !log_wanted()) return;
  const bool more = counts_.set_aside_files == kMaxLoggedFiles;
  log(LogLevel::warning, "store.set_aside",
      fmt::format("{}/{} is left alone: {}{}", options_.directory, name, reason,
                  more ? "; further files are not named" : ""),
      {{"directory", options_.directory}, {"file", name}, {"reason", reason}});
}

void DiskStore::rebuild_index() {
  const std::optional<Checkpoint> checkpoint =
      checkpoint_there_ ? read_checkpoint(files_, options_.directory, options_.layout_id,
                                          max_checkpoint_bytes(std::ssize(segments_), total_bytes()))
                        : std::nullopt;
  const auto count_sequence = [this](std::uint64_t next) {
    if (next <= kMaxSequence) next_sequence_ = std::max(next_sequence_, next);
  };
  if (checkpoint) {
    count_sequence(checkpoint->next_sequence);
    std::int64_t records = 0;
    for (const auto& [id, covered] : checkpoint->segments)
      records += std::ssize(covered.records) / kCheckpointRecordBytes;
    index_.reserve(records);
  }
  int written_again = 0;
  for (auto& [id, segment] : segments_) {
    if (!segment->file) continue;
    segment->named = checkpoint_there_;  // also where the checkpoint cannot be read now: the next time it may
    SegmentFile& file = *segment->file;
    const CheckpointSegment* known = nullptr;
    if (checkpoint) {
      const auto covered = checkpoint->segments.find(id);
      if (covered != checkpoint->segments.end() && covered->second.covers(file.header())) known = &covered->second;
    }
    const std::int64_t from = known != nullptr ? known->end : kSegmentDataOffset;
    file.set_end(from);
    SegmentContents contents;
    if (known == nullptr || !known->sealed) contents = file.scan(read_buffer_, from);
    if (!contents.unopened.ok()) {
      segment->unopened = contents.unopened;
      continue;
    }
    if (known != nullptr) {
      for (std::size_t i = 0; i < known->records.size(); i += kCheckpointRecordBytes)
        add_found(*segment, decode_checkpoint_record(known->records.subspan(i)));
      segment->damaged = known->damaged;
      active_ = nullptr;
      if (known->sealed) continue;
    }
    segment->damaged = segment->damaged || !contents.gaps.empty();
    segment->unread = !contents.whole;
    for (const FoundRecord& found : contents.records) {
      const RecordHeader& header = found.header;
      count_sequence(header.sequence + 1);
      if (header.kind == RecordKind::dead || header.layout_id != options_.layout_id) continue;
      add_found(*segment, {header.id, header.kind, header.version, found.offset, header.length, header.sequence});
    }
    appended_bytes_ += contents.end - from;
    // Records behind the checkpoint may be in the page cache only, where a sync may miss them (File::fdatasync()).
    if (file.file().cached()) {
      const IoStatus again = file.write_again(contents.records, read_buffer_);
      if (!contents.whole || !again.ok()) leave(*segment, again);
      if (!contents.records.empty() && ++written_again > kMaxUnsyncedSegments && !segment->retiring)
        sync_segment(*segment);
      if (segment->retiring) continue;
    }
    // Appends go to the last readable segment, if its file has the size in its header and this store would allow it.
    const SegmentHeader& header = file.header();
    const bool takes_more =
        header.version == kSegmentVersion && segment->bytes == header.bytes && header.bytes <= options_.segment_bytes;
    active_ = takes_more ? segment.get() : nullptr;
  }
  for (auto& [id, entries] : older_) choose_sound(id, std::move(entries));
  older_.clear();
  for (auto at = segments_.begin(); at != segments_.end();)
    if (Segment& segment = *at++->second; !segment.unopened.ok() && !segment.retiring) (void)drop_segment(segment);
}

void DiskStore::add_found(Segment& segment, const CheckpointRecord& record) {
  const Entry entry{{&segment, record.offset, record.length},
                    record.sequence,
                    record.kind,
                    record.version,
                    !options_.guard->believes(record.kind)};
  if (const std::optional<Entry> before = index_.put(record.id, entry)) older_[record.id].push_back(*before);
  if (entry.set_aside)
    note_unauthenticated(record.kind == RecordKind::value ? RecordRefusal::unauthenticated : RecordRefusal::wrong_key);
  segment.ids.push_back(record.id);
  segment.live_bytes += stored_bytes(record.length);
}

/// An unauthenticated record is not damage: it stays until its segment goes or a newer record takes its place.
void DiskStore::note_unauthenticated(RecordRefusal refusal) {
  if (unauthenticated_records_++ > 0) return;
  speak([&] {
    log(LogLevel::warning, "tier.unauthenticated",
        fmt::format("the store {} has records that are not believed: {}", options_.directory, to_string(refusal)),
        {{"tier", "disk"}, {"directory", options_.directory}, {"reason", to_string(refusal)}});
  });
}

// A crash may have left the newest record with a header and without its payload: then the newest sound record counts.
// Where a record cannot be read, it counts and the older ones stay.
void DiskStore::choose_sound(const RecordId& id, std::vector<Entry> older) {
  older.push_back(index_.find(id).value());
  auto sound = older.rbegin();
  ReadRecord record;
  std::vector<std::byte> scratch;
  for (; sound != older.rend(); ++sound) {
    record = read_entry(id, *sound, read_buffer_);
    if (record.status.ok() && record.refusal == RecordRefusal::none)
      record.refusal = options_.guard->check(record.header, record.payload, scratch);
    if (!record.status.ok() || record.refusal == RecordRefusal::none) break;
  }
  if (sound == older.rend()) sound = older.rbegin();
  const Entry chosen = *sound;
  index_.put(id, chosen);
  for (const Entry& entry : older) {
    if (entry.place == chosen.place) continue;
    entry.place.segment->live_bytes -= stored_bytes(entry.place.length);
    if (record.status.ok()) superseded_.push_back(entry.place);
  }
}

void DiskStore::put(std::span<PutRequest> requests) {
  if (!usable()) {
    for (PutRequest& request : requests) request.status = PutStatus::failed;
    return;
  }
  while (!requests.empty()) {
    const std::size_t count = put_some(requests);
    put_again(requests.first(count));
    tell_full(requests.first(count));
    requests = requests.subspan(count);
  }
}

std::size_t DiskStore::put_some(std::span<PutRequest> requests) {
  const auto length_of = [&](const PutRequest& request) { return std::ssize(request.payload); };
  const auto bytes_of = [&](const PutRequest& request) { return stored_bytes(length_of(request)); };
  const std::int64_t most = options_.segment_bytes - kSegmentDataOffset;
  PutRequest& first = requests.front();
  first.status = PutStatus::failed;
  if (!lock_ || directory_failed_) return 1;
  if (length_of(first) > kMaxPayloadBytes || bytes_of(first) > most) {
    first.status = PutStatus::too_large;
    return 1;
  }
  if (const IoStatus status = make_active(bytes_of(first), true); !status.ok()) {
    first.status = status.code == IoCode::no_space ? PutStatus::no_space : PutStatus::failed;
    return 1;
  }

  std::int64_t bytes = 0;
  const std::int64_t room = active_->file->room();
  std::vector<NewRecord> records;
  for (const PutRequest& request : requests) {
    if (!records.empty() && (length_of(request) > kMaxPayloadBytes || bytes + bytes_of(request) > room)) break;
    bytes += bytes_of(request);
    RecordHeader header;
    header.kind = options_.guard->kind();
    header.layout_id = options_.layout_id;
    header.id = request.id;
    header.set_label(request.label);
    header.length = length_of(request);
    header.sequence = next_sequence_++;
    records.push_back({header, request.payload, options_.guard.get(), {}, {}});
  }
  index_.make_room(std::ssize(records));
  make_room(superseded_, records.size());
  append(records);

  for (std::size_t i = 0; i < records.size(); ++i) {
    const NewRecord& record = records[i];
    if (!record.status.ok()) {
      requests[i].status = record.status.code == IoCode::no_space ? PutStatus::no_space : PutStatus::failed;
      continue;
    }
    const Entry entry{record.place, record.header.sequence, record.header.kind, kRecordVersion, false};
    if (const std::optional<Entry> before = index_.put(record.header.id, entry)) {
      before->place.segment->live_bytes -= stored_bytes(before->place.length);
      superseded_.push_back(before->place);
    }
    requests[i].status = PutStatus::stored;
  }
  return records.size();
}

void DiskStore::get(std::span<GetRequest> requests) {
  if (!usable()) {
    for (GetRequest& request : requests) {
      request.status = GetStatus::missing;
      request.bytes = 0;
    }
    return;
  }
  const auto give_back = [this](Reader* used) {
    const std::lock_guard lock(readers_mutex_);
    idle_readers_.push_back(used);
  };
  std::unique_ptr<Reader, decltype(give_back)> taken(nullptr, give_back);
  {
    const std::lock_guard lock(readers_mutex_);
    taken.reset(idle_readers_.back());
    idle_readers_.pop_back();
  }
  Reader& reader = *taken;
  reader.reads.reset();
  std::vector<Found> found(requests.size());
  std::size_t next = 0;
  const auto skip_to_next = [&] {
    while (next < requests.size() && !found[next].segment && !begin_get(requests[next], found[next])) ++next;
    return next < requests.size();
  };
  run_transfers(
      *reader.queue,
      [&]() -> IoOp* {
        if (!skip_to_next()) return nullptr;
        const RecordPlace& place = found[next].entry.place;
        // A payload sealed by version 1 may be longer than `to`: its salt and tag follow it.
        const bool fits = place.length == found[next].entry.payload_bytes();
        const std::span<std::byte> to = fits ? requests[next].to : std::span<std::byte>();
        RecordRead* read = reader.reads.take(RecordRead::buffer_bytes(to, place.length));
        if (read == nullptr) return nullptr;
        read->index = next++;
        read->start(*place.segment->file, place.offset, place.length, to);
        return read;
      },
      [&](IoOp& op) {
        RecordRead& read = static_cast<RecordRead&>(op);
        GetRequest& request = requests[read.index];
        finish_get(request, std::move(found[read.index]), read.finish(), reader.again_buffer);
        if (request.status != GetStatus::found) read.clear();
        reader.reads.give(op);
      });
}

bool DiskStore::begin_get(GetRequest& request, Found& found) const {
  request.bytes = 0;
  request.status = GetStatus::missing;
  const bool there = lock_ && index_.visit(request.id, [&](const Entry& entry) {
    found = {entry, entry.place.segment->shared_from_this()};
  });
  if (!there || found.entry.set_aside) return false;
  request.bytes = found.entry.payload_bytes();
  request.status = GetStatus::too_small;
  return std::ssize(request.to) >= request.bytes;
}

void DiskStore::finish_get(GetRequest& request, Found found, ReadRecord record, BlockBuffer& again_buffer) {
  const auto sound = [&] { return record.status.ok() && record.refusal == RecordRefusal::none; };
  compare(request.id, found.entry, record);
  bool again = record.status.ok();  // the damage may be in the transfer
  while (!sound()) {
    const RecordPlace before = found.entry.place;
    if (!begin_get(request, found)) return;  // the record is gone by now
    if (found.entry.place == before && !std::exchange(again, false)) break;
    record = read_entry(request.id, found.entry, again_buffer);
  }
  if (!record.status.ok()) {
    request.status = GetStatus::failed;
    return;
  }
  if (record.refusal == RecordRefusal::none)
    record.refusal = options_.guard->open(record.header, record.payload, request.to.first(request.bytes));
  if (record.refusal == RecordRefusal::wrong_key) {
    request.status = GetStatus::missing;
    if (index_.set_aside(request.id, found.entry.place)) note_unauthenticated(record.refusal);
    return;
  }
  if (record.refusal != RecordRefusal::none) {
    request.status = GetStatus::damaged;
    if (!index_.set_aside(request.id, found.entry.place)) return;
    ++set_aside_records_;
    if (log_wanted())
      log(LogLevel::warning, "store.damaged_record",
          fmt::format("a record in {}, segment {}, is set aside: {}", options_.directory, found.segment->id,
                      to_string(record.refusal)),
          {{"directory", options_.directory}, {"reason", to_string(record.refusal)}});
    found.segment->damaged = true;
    return;
  }
  request.coding = record.header.coding();
  request.status = GetStatus::found;
}

ReadRecord DiskStore::read_entry(const RecordId& id, const Entry& entry, BlockBuffer& buffer) const {
  ReadRecord record = entry.place.segment->file->read(entry.place.offset, entry.place.length, buffer);
  compare(id, entry, record);
  return record;
}

void DiskStore::compare(const RecordId& id, const Entry& entry, ReadRecord& record) const {
  if (record.refusal != RecordRefusal::none) return;
  if (record.header.id != id || record.header.kind != entry.kind || record.header.version != entry.version)
    record.refusal = RecordRefusal::other_record;
  if (record.header.layout_id != options_.layout_id) record.refusal = RecordRefusal::other_layout;
  if (record.header.sequence != entry.sequence) record.refusal = RecordRefusal::other_sequence;
}

void DiskStore::forget(const RecordId& id) noexcept {
  const RecordPlace place = index_.find(id).value().place;
  place.segment->live_bytes -= stored_bytes(place.length);
  index_.erase(id);
}

void DiskStore::exists(std::span<ExistsRequest> requests) const {
  if (usable()) return index_.look_up(requests);
  for (ExistsRequest& request : requests) {
    request.bytes = -1;
    request.answered = true;
  }
}

void DiskStore::remove(std::span<RemoveRequest> requests) {
  for (RemoveRequest& request : requests) request.removed = false;
  if (!usable()) return;
  make_room(removed_, requests.size());
  for (RemoveRequest& request : requests) {
    const std::optional<Entry> found = index_.find(request.id);
    request.removed = found && !found->set_aside;
    if (!found) continue;
    removed_.push_back(found->place);
    forget(request.id);
  }
}

bool DiskStore::close() {
  if (!usable()) return false;
  const bool durable = flush();
  if (durable && (appended_bytes_ > 0 || !checkpoint_there_)) write_checkpoint();
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
  if (!usable()) return result;
  const std::int64_t before = total_bytes();
  std::vector<RecordId> damaged;
  std::set<const Segment*> unread;  // segments with unknown content: they stay
  std::vector<std::pair<RecordId, Entry>> all;
  index_.for_each([&](const RecordId& id, const Entry& entry) { all.emplace_back(id, entry); });
  for (const auto& [id, entry] : all) {
    const ReadRecord record = read_entry(id, entry, read_buffer_);
    if (!record.status.ok()) unread.insert(entry.place.segment);
    if (record.status.ok() && record.refusal != RecordRefusal::none) damaged.push_back(id);
  }
  make_room(removed_, damaged.size());
  for (const RecordId& id : damaged) {
    removed_.push_back(index_.find(id).value().place);
    forget(id);
  }
  result.damaged_records = static_cast<std::int64_t>(damaged.size());
  result.durable = flush();
  std::vector<std::uint64_t> wasteful;
  for (const auto& [id, segment] : segments_) {
    const bool sparse = segment.get() != active_ && segment->live_bytes * 2 < segment->bytes;
    if ((sparse || segment->damaged) && !segment->unread && unread.count(segment.get()) == 0) wasteful.push_back(id);
  }
  for (const std::uint64_t id : wasteful) {  // one at a time: the store exceeds its size by one segment at most
    if (const auto found = segments_.find(id); found != segments_.end()) leave(*found->second);
    result.durable = flush() && result.durable;
    if (!result.durable) break;
  }
  result.freed_bytes = before - total_bytes();
  return result;
}

StoreStats DiskStore::stats() const {
  StoreStats stats = counts_;
  if (!usable()) return stats;
  stats.records = index_.sound_records();
  stats.payload_bytes = index_.payload_bytes();
  stats.set_aside_records = set_aside_records_;
  stats.unauthenticated_records = unauthenticated_records_;
  stats.segments = static_cast<std::int64_t>(segments_.size());
  stats.segment_bytes = total_bytes();
  return stats;
}

}  // namespace kv4::tier
