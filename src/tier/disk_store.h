// Records by key on a disk: append-only segments and an index in memory that is rebuilt from their headers.
//
// Promises:
//   1. get() gives exactly the bytes of the newest put() of its tenant and key. Anything else is a miss.
//   2. A record can be found once its write has ended and put() is about to return `stored`, and not before.
//   3. Puts and removes before a flush() that returned true are durable, even if the process is killed or the machine
//      loses power later.
//   4. A store takes no more than `capacity_bytes`, plus one segment while records move. The oldest segment makes room,
//      also where the disk is full before that. On a disk without room for one segment, segments are smaller.
//   5. The store leaves alone files that it did not make or cannot open. The log and stats() report them as set aside;
//      the store does not remove, overwrite or extend them, and their room does not count.
//
// Records of a segment that cannot be opened miss until the store is opened again and the segment can be. They are then
// as they were: a newer record of their key counts, and a removal in between did not reach them.
//
// How it keeps them:
//   a. The newest record of a key is the one at the highest (segment, offset). Live records only move forward. Opening
//      a store after a crash checks payloads where a key has several records.
//   b. A superseded record is tombstoned on disk after its successor is durable, a removed one after all older ones are
//      tombstoned. A segment is unlinked after its live records are durable elsewhere. So no older record comes back.
//      A checkpoint of the index is gone from the disk before a record that it names is tombstoned.
//   c. After a failed fdatasync nothing more is written to the segment. Records that can still be read and verified
//      move to another segment, and the failed one is dropped.
//
// One thread at a time calls put(), remove(), flush(), collect(), close() and stats(). Beside it `read_threads` threads
// may call get(), and any number exists(): the index is in memory, segments are only appended to, and a get() whose
// record has just moved or been replaced looks again. No other call may overlap close() or the destructor. A lock keeps
// a second process out. In a forked child every call misses or fails, and the parent keeps the store.
//
// The transfers of a batch are in flight together, `queue_depth` at a time, gets beside puts; the requests of a batch
// still take effect in their order. Payloads at addresses that are multiples of 4,096 are not copied.
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
  std::uint64_t layout_id = 0;                             // the cache's; a store holds bytes of one layout
  std::int64_t segment_bytes = std::int64_t{256} << 20;    // a multiple of 4,096; 64 KiB to 1 TiB
  std::int64_t capacity_bytes = std::int64_t{64} << 30;    // at least two segments
  std::int64_t sync_every_bytes = std::int64_t{64} << 20;  // fdatasync after so many bytes, beside later writes
  int queue_depth = 32;                                    // transfers in flight; 1 to 4,096
  int read_threads = 1;                                    // threads in get(), each with such a queue; 1 to 64
  /// Protects records and decides which are believed; others are misses. Null: as a guard without keys.
  std::shared_ptr<const RecordGuard> guard;
};

/// Segments written to before the first of them is synced: so many files have to stay open.
inline constexpr int kMaxUnsyncedSegments = 8;

struct StoreStats {
  std::int64_t records = 0, payload_bytes = 0;   // records that can be found
  std::int64_t segments = 0, segment_bytes = 0;  // files
  std::int64_t set_aside_records = 0;            // damaged; since the store was opened, as all below
  std::int64_t unauthenticated_records = 0;      // no key of the guard protects them
  std::int64_t evicted_records = 0;              // dropped to make room
  std::int64_t lost_records = 0;                 // could not be read when their segment had to be dropped
  std::int64_t dropped_segments = 0;             // after a failed sync
  std::int64_t set_aside_files = 0;              // left alone: files that cannot be opened or have unusable names
  std::int64_t unopened_segments = 0;            // of these: their records miss, and may be sound
};

/// Makes room for `more` elements: adding them then allocates nothing.
template <class T>
void make_room(std::vector<T>& list, std::size_t more) {
  if (list.capacity() - list.size() < more) list.reserve(std::max(list.size() + more, 2 * list.capacity()));
}

struct CollectResult {
  std::int64_t damaged_records = 0;
  std::int64_t freed_bytes = 0;
  bool durable = false;  // the result of its flush()
};

/// Reader threads use only `file` and `damaged`.
struct StoreSegment : std::enable_shared_from_this<StoreSegment> {
  std::uint64_t id = 0;
  std::int64_t bytes = 0;             // size of the file
  std::unique_ptr<SegmentFile> file;  // null: its header cannot be read
  std::vector<RecordId> ids;          // of all records ever put there; some have moved since
  std::int64_t live_bytes = 0;        // of records in the index
  std::int64_t unsynced_bytes = 0;
  bool dirty = false;                // some of it may not be durable
  bool sync_due = false;             // to be synced beside the next writes, or by flush()
  std::atomic<bool> damaged{false};  // it has bytes that are no records
  bool named = false;                // a checkpoint on the disk may name its records
  bool unread = false;               // blocks could not be read when it was opened: collect() leaves it as it is
  bool retiring = false;             // takes no writes; unlinked by flush() when its records have moved
  IoStatus unopened;                 // not ok: it could not be opened again, and is not unlinked but set aside
};

class DiskStore {
 public:
  /// Makes the directory if it is not there. Throws Error: bad_argument for options that cannot work, bad_state where
  /// another process has the store, bad_file where the directory cannot be used or holds another layout or version.
  /// Damaged segments and records do not make it fail. `files` outlives the store.
  static std::unique_ptr<DiskStore> open(FileSystem& files, const StoreOptions& options);
  /// Does not flush: see close().
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  void put(std::span<PutRequest> requests);
  /// A request's memory is valid only where its status is `found`.
  void get(std::span<GetRequest> requests);
  /// Any thread, at any time; does not touch the disk.
  void exists(std::span<ExistsRequest> requests) const;
  void remove(std::span<RemoveRequest> requests);
  /// True: everything before is durable. False: unknown; records of a failed segment may be gone (`lost_records`). A
  /// later flush may succeed, except after a failed sync of the directory: then open the store again.
  bool flush();
  /// Calls flush(); every later call misses or fails.
  bool close();
  /// Reads every record, drops damaged ones, and rewrites segments that are less than half alive or damaged. Flushes.
  CollectResult collect();

  StoreStats stats() const;

 private:
  using Segment = StoreSegment;
  using Entry = RecordEntry;
  /// A record that get() reads. Its segment stays open meanwhile, even if the store drops it.
  struct Found {
    Entry entry;
    std::shared_ptr<Segment> segment;
  };

  /// The working memory of one thread in get().
  struct Reader {
    std::unique_ptr<IoQueue> queue;
    TransferPool<RecordRead> reads;
    BlockBuffer again_buffer;
  };

  /// A record on its way into the active segment.
  struct NewRecord {
    RecordHeader header;  // without protection, digest and place; append() sets them
    std::span<const std::byte> payload;
    const RecordGuard* guard = nullptr;  // protects it while it is written; null: it is written as it is
    RecordPlace place;                   // out
    IoStatus status;                     // out
  };

  struct SegmentSync : IoOp {
    Segment* segment = nullptr;
    std::int64_t bytes = 0;  // bytes that it makes durable
  };

  DiskStore(FileSystem& files, const StoreOptions& options);
  void report_opened();
  void lock();
  bool usable() const { return lock_ && lock_->owned(); }
  void open_segments();
  /// True: the file is a segment, or may be a segment that cannot be opened.
  bool open_segment(std::uint64_t id);
  void set_aside(const std::string& name, const std::string& reason);
  void rebuild_index();
  void add_found(Segment& segment, const CheckpointRecord& record);
  void choose_sound(const RecordId& id, std::vector<Entry> older);  // oldest first

  /// Puts the requests at the front that fit the active segment together, at least one. Returns their number.
  std::size_t put_some(std::span<PutRequest> requests);
  /// Repeats the puts for which the disk had no room, after it evicted the oldest segments.
  void put_again(std::span<PutRequest> requests);
  /// Logs that the disk has no room even so: once, until a put is stored.
  void tell_full(std::span<const PutRequest> requests);
  /// True: there is a record to read. False: the request is answered.
  bool begin_get(GetRequest& request, Found& found) const;
  void finish_get(GetRequest& request, Found found, ReadRecord record, BlockBuffer& again_buffer);
  /// Reads the record and compares it with the index.
  ReadRecord read_entry(const RecordId& id, const Entry& entry, BlockBuffer& buffer) const;
  void compare(const RecordId& id, const Entry& entry, ReadRecord& record) const;
  void note_unauthenticated(RecordRefusal refusal);
  void forget(const RecordId& id) noexcept;  // out of the index; the bytes stay

  /// Writes all records and makes the syncs that are due, in flight together; the active segment has room for them. The
  /// place of a record that failed becomes dead, or the segment retires. The segment retires, too, where memory is
  /// refused half-way: it may then hold records that are in no index. The caller has reserved memory for its own
  /// bookkeeping, because that must not throw once the records are written.
  void append(std::span<NewRecord> records);
  IoStatus make_active(std::int64_t record_bytes, bool may_evict);
  /// Adds a segment with room for a record of so many bytes.
  IoStatus add_segment(std::int64_t record_bytes);
  IoStatus make_segment(std::int64_t bytes);
  std::uint64_t take_segment_id();
  bool evict_oldest();
  bool settle();  // the work of flush(); false, too, while lost records have not been reported to the caller

  void sync_segment(Segment& segment);
  void finish_sync(Segment& segment, const IoStatus& status, std::int64_t bytes) noexcept;  // it retires on failure
  bool sync_segments();
  bool sync_directory();
  bool move_records(Segment& segment);
  bool tombstone(std::vector<RecordPlace>& places);
  bool drop_segment(Segment& segment);
  bool unlink_retiring();
  void write_checkpoint();
  bool drop_checkpoint();
  void leave(Segment& segment, const IoStatus& why = {}) noexcept;  // retires it; `why` unopened: not unlinked
  std::int64_t total_bytes() const;

  FileSystem& files_;
  StoreOptions options_;
  std::unique_ptr<FileLock> lock_;  // null: closed
  std::unique_ptr<IoQueue> write_queue_;
  std::map<std::uint64_t, std::shared_ptr<Segment>> segments_;
  Segment* active_ = nullptr;  // the segment that takes appends
  const SeededIdHash hash_;    // of this store's maps
  RecordIndex index_;
  std::unordered_map<RecordId, std::vector<Entry>, SeededIdHash> older_;  // of the same key, while opening
  std::vector<RecordPlace> superseded_, removed_;  // to be tombstoned by flush(), in this order
  std::set<std::uint64_t> taken_ids_;              // ids in the names of set-aside files
  std::uint64_t next_segment_ = 1, next_sequence_ = 1;
  std::int64_t appended_bytes_ = 0;    // since the last checkpoint
  bool checkpoint_there_ = false;      // a checkpoint is on the disk, sound or not
  bool checkpoint_set_aside_ = false;  // something else has its name: none is read or written
  bool directory_dirty_ = false;
  bool directory_failed_ = false;  // its sync failed: names may be lost, so no promise holds any more
  bool records_lost_ = false;      // since the last flush() of the caller
  bool full_told_ = false;         // tell_full() has logged since the last stored put
  bool small_segments_ = false;    // an empty store had no room for a whole one: new ones have a quarter of its bytes
  StoreStats counts_;              // only its last five are used
  BlockBuffer read_buffer_, write_buffer_;
  TransferPool<RecordWrite> writes_;
  // Counted by the reader threads.
  std::atomic<std::int64_t> set_aside_records_{0}, unauthenticated_records_{0};
  std::mutex readers_mutex_;
  std::vector<Reader> readers_;
  std::vector<Reader*> idle_readers_;  // under readers_mutex_
};

}  // namespace kv4::tier
