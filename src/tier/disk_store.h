// Records by key on a disk: append-only segments and an index in memory that is rebuilt from their headers.
//
// Promises:
//   1. A record that get() gives has exactly the bytes of the newest put() of its tenant and key. Anything else is a
//   miss.
//   2. A record can be found once its write has ended and put() is about to return `stored`, and not before.
//   3. What was put and removed before a flush() that returned true stays so, whatever is tombstoned or loses power
//   later.
//   4. A store takes no more than `capacity_bytes`, and one segment while records move: the oldest makes room,
//      where the disk is full before that, too. On a disk without room for one segment they are smaller.
//   5. What it did not make or cannot open it leaves alone: such files are set aside, which the log and stats() tell,
//      and nothing is removed, overwritten or appended there. Their room does not count.
//
// A segment that cannot be opened takes no part: its records miss until the store is opened again and it can be. They
// are then as they were: a newer record of their key counts, a removal in between was not theirs.
//
// What keeps them:
//   a. Of several records of a key the one at the highest (segment, offset) is the newest. Live records only move
//      forward; whoever opens a store after a crash looks at payloads where a key has several records.
//   b. A superseded record is tombstoned on disk after its successor is durable, a removed one after all older ones are
//      tombstoned, a segment is unlinked after its live records are durable elsewhere. So no older record comes back.
//      A checkpoint of the index is gone from the disk before a record that it names is tombstoned.
//   c. After a failed fdatasync nothing more is written to the segment: what can still be read and verified moves to
//      another one, and it is dropped.
//
// One thread at a time makes changes: put(), remove(), flush(), collect(), close(), stats(). Beside them `read_threads`
// may get(), and any number look up what exists(): the index is in memory, segments are only appended to, and a get()
// that meets a record which has just moved or been replaced looks again. While a store is closed or destroyed nobody
// else is in a call. Two processes cannot have one store (a lock). In a forked child every call misses or fails, and
// the parent keeps the store.
//
// The transfers of a batch are in flight together, `queue_depth` at a time, gets beside puts; a batch's requests count
// in their order all the same. Payloads at addresses that are multiples of 4,096 are not copied.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tier/file_system.h"
#include "tier/index_checkpoint.h"
#include "tier/record_format.h"
#include "tier/record_guard.h"
#include "tier/record_index.h"
#include "tier/record_transfer.h"
#include "tier/requests.h"
#include "tier/segment_file.h"

namespace kv4::tier {

struct StoreOptions {
  std::string directory;
  std::uint64_t layout_id = 0;                             // of the cache; a store holds bytes of one layout
  std::int64_t segment_bytes = std::int64_t{256} << 20;    // a multiple of 4,096; 64 KiB to 1 TiB
  std::int64_t capacity_bytes = std::int64_t{64} << 30;    // at least two segments
  std::int64_t sync_every_bytes = std::int64_t{64} << 20;  // fdatasync after as many, beside later writes
  int queue_depth = 32;                                    // transfers in flight; 1 to 4,096
  int read_threads = 1;                                    // that may get(), each with such a queue; 1 to 64
  /// Protects records, and says which ones are believed; others are misses. Null: as one without keys.
  std::shared_ptr<const RecordGuard> guard;
};

/// That are written to before the first of them is synced: as many files have to stay open.
inline constexpr int kMaxUnsyncedSegments = 8;

struct StoreStats {
  std::int64_t records = 0, payload_bytes = 0;   // that can be found
  std::int64_t segments = 0, segment_bytes = 0;  // files
  std::int64_t set_aside_records = 0;            // damaged; since the store was opened, as all below
  std::int64_t unauthenticated_records = 0;      // no key of the guard's protects them
  std::int64_t evicted_records = 0;              // made room
  std::int64_t lost_records = 0;                 // could not be read when their segment had to be dropped
  std::int64_t dropped_segments = 0;             // after a failed sync
  std::int64_t set_aside_files = 0;              // left alone: those that cannot be opened, and those of unusable names
  std::int64_t unopened_segments = 0;            // of these: their records miss, and may be sound
};

/// Room for `more`, which then take no memory.
template <class T>
void make_room(std::vector<T>& list, std::size_t more) {
  if (list.capacity() - list.size() < more) list.reserve(std::max(list.size() + more, 2 * list.capacity()));
}

struct CollectResult {
  std::int64_t damaged_records = 0;
  std::int64_t freed_bytes = 0;
  bool durable = false;  // as of flush()
};

/// Readers touch its file and `damaged` only.
struct StoreSegment : std::enable_shared_from_this<StoreSegment> {
  std::uint64_t id = 0;
  std::int64_t bytes = 0;             // of the file
  std::unique_ptr<SegmentFile> file;  // null: its header cannot be read
  std::vector<RecordId> ids;          // of all records ever put there; some have moved on
  std::int64_t live_bytes = 0;        // of records in the index
  std::int64_t unsynced_bytes = 0;
  bool dirty = false;                // there may be something that is not durable
  bool sync_due = false;             // beside the next writes, or by flush()
  std::atomic<bool> damaged{false};  // it has bytes that are no records
  bool named = false;                // there may be a checkpoint on the disk that names its records
  bool unread = false;               // blocks could not be read when it was opened: collect() leaves it as it is
  bool retiring = false;             // takes no writes; unlinked by flush() when its records have moved
  IoStatus unopened;                 // not ok: it could not be opened again, and is not unlinked but set aside
};

class DiskStore {
 public:
  /// Makes the directory if it is not there. Throws Error: bad_argument for options that cannot work, bad_state where
  /// another process has the store, bad_file where the directory cannot be used or holds another layout or version.
  /// Damaged segments and records are no reason to refuse. `files` outlives the store.
  static std::unique_ptr<DiskStore> open(FileSystem& files, const StoreOptions& options);
  /// Does not flush: see close().
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  void put(std::span<PutRequest> requests);
  /// Only where a request's status is `found` does its memory hold something of worth.
  void get(std::span<GetRequest> requests);
  /// Any thread, at any time; does not touch the disk.
  void exists(std::span<ExistsRequest> requests) const;
  void remove(std::span<RemoveRequest> requests);
  /// True: everything before is durable. False: unknown; records whose segment failed may be gone (`lost_records`). A
  /// later flush may succeed, except after a failed sync of the directory: open the store again then.
  bool flush();
  /// flush(), and every later call misses or fails.
  bool close();
  /// Reads every record, drops damaged ones, and rewrites segments that are less than half alive or damaged. Flushes.
  CollectResult collect();

  StoreStats stats() const;

 private:
  using Segment = StoreSegment;
  using Entry = RecordEntry;
  /// A record that a get reads; its segment stays open meanwhile, even where it is dropped.
  struct Found {
    Entry entry;
    std::shared_ptr<Segment> segment;
  };

  /// What a thread that gets has of its own.
  struct Reader {
    std::unique_ptr<IoQueue> queue;
    TransferPool<RecordRead> reads;
    BlockBuffer again_buffer;
  };

  /// A record on its way into the active segment.
  struct NewRecord {
    RecordHeader header;  // its protection, digest and place follow
    std::span<const std::byte> payload;
    const RecordGuard* guard = nullptr;  // protects it on its way; null: it moves as it is
    RecordPlace place;                         // out
    IoStatus status;                     // out
  };

  struct SegmentSync : IoOp {
    Segment* segment = nullptr;
    std::int64_t bytes = 0;  // that it makes durable
  };

  DiskStore(FileSystem& files, const StoreOptions& options);
  void report_opened();
  void lock();
  bool usable() const { return lock_ && lock_->owned(); }
  void open_segments();
  /// True: it is a segment, or may be one that cannot be opened.
  bool open_segment(std::uint64_t id);
  void set_aside(const std::string& name, const std::string& reason);
  void rebuild_index();
  void add_found(Segment& segment, const CheckpointRecord& record);
  void choose_sound(const RecordId& id, std::vector<Entry> older);  // oldest first

  /// Those at the front that go into the active segment together; at least one. Returns how many.
  std::size_t put_some(std::span<PutRequest> requests);
  /// Again, those of them for which the disk had no room: the oldest segments make some.
  void put_again(std::span<PutRequest> requests);
  /// Where the disk has no room for them all the same: once, until a put is stored.
  void tell_full(std::span<const PutRequest> requests);
  /// Is there something to read for it? Else it has its answer.
  bool begin_get(GetRequest& request, Found& found) const;
  void finish_get(GetRequest& request, Found found, ReadRecord record, BlockBuffer& again_buffer);
  /// And compares with the index.
  ReadRecord read_entry(const RecordId& id, const Entry& entry, BlockBuffer& buffer) const;
  void compare(const RecordId& id, const Entry& entry, ReadRecord& record) const;
  void note_unauthenticated(RecordRefusal refusal);
  void forget(const RecordId& id) noexcept;  // out of the index; the bytes stay

  /// All in flight together, and the syncs that are due; the active segment has room for them. The place of one that
  /// failed is dead, or the segment leaves; so it does where memory is refused on the way, and records may lie there
  /// that nobody knows of. The caller has made room for what it notes of them: once they are written, nothing of that
  /// may throw.
  void append(std::span<NewRecord> records);
  IoStatus make_active(std::int64_t record_bytes, bool may_evict);
  /// With room for a record of so many bytes.
  IoStatus add_segment(std::int64_t record_bytes);
  IoStatus make_segment(std::int64_t bytes);
  std::uint64_t take_segment_id();
  bool evict_oldest();
  bool settle();  // flush(); false, too, while records were lost that the caller has not heard of

  void sync_segment(Segment& segment);
  void finish_sync(Segment& segment, const IoStatus& status, std::int64_t bytes) noexcept;  // a failure makes it leave
  bool sync_segments();
  bool sync_directory();
  bool move_records(Segment& segment);
  bool tombstone(std::vector<RecordPlace>& places);
  bool drop_segment(Segment& segment);
  bool unlink_retiring();
  void write_checkpoint();
  bool drop_checkpoint();
  void leave(Segment& segment, const IoStatus& why = {}) noexcept;  // `unopened`: it is not unlinked then
  std::int64_t total_bytes() const;

  FileSystem& files_;
  StoreOptions options_;
  std::unique_ptr<FileLock> lock_;  // null: closed
  std::unique_ptr<IoQueue> write_queue_;
  std::map<std::uint64_t, std::shared_ptr<Segment>> segments_;
  Segment* active_ = nullptr;  // takes appends
  const SeededIdHash hash_;    // of this store's maps
  RecordIndex index_;
  std::unordered_map<RecordId, std::vector<Entry>, SeededIdHash> older_;  // of the same key, while the store is opened
  std::vector<RecordPlace> superseded_, removed_;  // to be tombstoned by flush(), in this order
  std::set<std::uint64_t> taken_ids_;              // of names that are not segments_: set aside
  std::uint64_t next_segment_ = 1, next_sequence_ = 1;
  std::int64_t appended_bytes_ = 0;    // since the last checkpoint
  bool checkpoint_there_ = false;      // one is on the disk, good or not
  bool checkpoint_set_aside_ = false;  // something else has its name: there is none, and none is written
  bool directory_dirty_ = false;
  bool directory_failed_ = false;  // its sync failed: names may be lost, so nothing can be promised any more
  bool records_lost_ = false;      // since the last flush() of the caller
  bool full_told_ = false;         // since the last put that was stored
  bool small_segments_ = false;    // an empty store found no room for a whole one: a quarter of what it holds
  StoreStats counts_;              // the last five
  BlockBuffer read_buffer_, write_buffer_;
  TransferPool<RecordWrite> writes_;
  // Of whoever gets.
  std::atomic<std::int64_t> set_aside_records_{0}, unauthenticated_records_{0};
  std::mutex readers_mutex_;
  std::vector<Reader> readers_;
  std::vector<Reader*> idle_readers_;  // with the lock
};

}  // namespace kv4::tier
