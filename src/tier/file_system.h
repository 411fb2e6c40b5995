// The only interface between a tier and the operating system: files, directory, lock, clock, random numbers. The real
// one is make_posix_file_system(); tests replace it by a disk that crashes, tears writes, lies and runs full.
//
// Failures are values: every caller can go on with a miss. Functions here throw only std::bad_alloc.
// A FileSystem outlives its files and locks. One thread at a time changes a file; another may read it meanwhile.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kv4::tier {

enum class IoCode : std::uint8_t {
  ok,
  not_found,
  no_space,
  unsupported,  // the file system cannot do that; go on without it
  in_use,       // the lock is held elsewhere
  exists,       // something has that name already
  not_a_file,   // a directory, pipe, device, socket or symbolic link has that name
  unopened,     // a transfer or sync did nothing: the file could not be opened again
  failed        // everything else
};

struct IoStatus {
  IoCode code = IoCode::ok;
  int error = 0;  // errno, for the message

  bool ok() const { return code == IoCode::ok; }
  /// The process or the system has too many open files; a later call may succeed.
  bool too_many_open() const { return error == EMFILE || error == ENFILE; }
};

std::string to_string(const IoStatus& status);

/// Bytes moved by one call, perhaps fewer than asked for. A read of 0 bytes is at the end of the file.
struct IoBytes {
  IoStatus status;
  std::int64_t bytes = 0;
};

/// Memory that a transfer reads into or writes from. Several pieces in a row are one range of the file.
struct IoPiece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// Offsets, lengths and addresses are multiples of 4,096: files may bypass the page cache. A file system may close
/// files that are not in use and open them again: a call on one that cannot be opened again says `unopened`.
class File {
 public:
  virtual ~File() = default;
  virtual IoBytes readv(std::int64_t offset, std::span<const IoPiece> to) = 0;
  virtual IoBytes writev(std::int64_t offset, std::span<const IoPiece> from) = 0;
  /// When it returns ok, everything written before is on the disk. After a failure the writes since the last success
  /// are in an unknown state, and a second call may wrongly return ok: the kernel forgets pages it could not write.
  virtual IoStatus fdatasync() = 0;
  /// Makes the file `bytes` long and reserves room for all of them.
  virtual IoStatus fallocate(std::int64_t bytes) = 0;
  /// Gives room back; the range reads as zeros.
  virtual IoStatus punch(std::int64_t offset, std::int64_t bytes) = 0;
  virtual std::int64_t size() = 0;  // -1: unknown
  /// Bytes on the disk: fewer than size() where the file has holes, or where the file system packs it.
  virtual std::int64_t allocated_bytes() { return size(); }
  /// The first offset, from `offset` on, whose bytes may not be zero; size() or more: none.
  virtual std::int64_t next_data(std::int64_t offset) { return offset; }
  /// True: some ranges were never written.
  virtual bool has_holes() { return false; }
  /// Renames the file to `path`. `exists`: another file has that name, and keeps it.
  virtual IoStatus rename_new(const std::string& path) = 0;
  /// True: reads may come from the page cache, and do not show the bytes on the disk.
  virtual bool cached() = 0;
};

/// A transfer of one range of a file, or a sync of earlier writes. The IoOp and its memory stay where they are from
/// submit() until wait() returns it.
struct IoOp {
  enum class Kind : std::uint8_t { read, write, sync };  // sync: as fdatasync()

  File* file = nullptr;
  Kind kind = Kind::read;
  std::int64_t offset = 0;
  std::vector<IoPiece> pieces;            // at most kMaxIoPieces; while it is under way, those that are left
  IoBytes moved;                          // out: by the last submit()
  bool tried = false;                     // a read failed once: unlike a sync it may be tried again
  std::shared_ptr<const void> held = {};  // set by the queue: keeps the file open while it is under way
};

inline constexpr std::size_t kMaxIoPieces = 1024;  // limit of Linux

/// Transfers in flight together. They end in any order, whole or in part.
class IoQueue {
 public:
  virtual ~IoQueue() = default;  // nothing is in flight
  virtual int depth() const = 0;
  /// Starts a transfer; at most depth() at a time.
  virtual void submit(IoOp& op) = 0;
  /// Waits for a transfer to end and returns it; at least one is in flight.
  virtual IoOp& wait() = 0;
};

/// Held until destroyed; the system releases it when the process ends, however it ends. A forked child does not own it:
/// destroying the child's copy leaves it locked for the parent.
class FileLock {
 public:
  virtual ~FileLock() = default;
  /// False in a forked child of the process that took it.
  virtual bool owned() const { return true; }
};

enum class OpenMode : std::uint8_t { read, read_write, create };  // create: fails where the file exists

template <class T>
struct Opened {
  IoStatus status;
  std::unique_ptr<T> handle;  // null unless ok
};

struct Listing {
  IoStatus status;
  std::vector<std::string> names;  // of files and other entries, sorted; at most kMaxListedNames
  bool whole = true;               // false: there are more names
};
inline constexpr std::size_t kMaxListedNames = std::size_t{1} << 19;
using NameFilter = std::function<bool(std::string_view)>;

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  /// Makes only the last part, for the owner alone (0700). A directory that exists is fine.
  virtual IoStatus make_directory(const std::string& path) = 0;
  /// The names that are `wanted`, or all without a filter.
  virtual Listing list(const std::string& directory, const NameFilter& wanted) = 0;
  Listing list(const std::string& directory) { return list(directory, {}); }
  /// ok: a regular file. `not_a_file`: something else. Does not follow a symbolic link.
  virtual IoStatus look_at(const std::string& path) = 0;
  /// Makes creations, renames and unlinks in the directory durable.
  virtual IoStatus sync_directory(const std::string& directory) = 0;
  /// For the owner alone (0600); never through a symbolic link. Opens regular files only, and never blocks.
  virtual Opened<File> open(const std::string& path, OpenMode mode) = 0;
  /// A queue for this system's files, used by one thread at a time. `lock` stays held until every submitted transfer
  /// has ended, even where the process is killed before: its transfers must not meet the next holder's writes. Null: no
  /// lock.
  virtual std::unique_ptr<IoQueue> make_queue(int depth, FileLock* lock) = 0;
  virtual IoStatus rename(const std::string& from, const std::string& to) = 0;
  virtual IoStatus unlink(const std::string& path) = 0;
  /// Locks out other processes and other holders in this one. Locks the file, which is made, and its directory, so that
  /// deleting the file lets nobody in. Waits at most until the transfers of a killed process have ended.
  virtual Opened<FileLock> lock(const std::string& path) = 0;
  virtual std::int64_t now_ns() = 0;     // since 1970
  virtual std::uint64_t random64() = 0;  // unpredictable
};

struct PosixOptions {
  bool direct = true;    // bypass the page cache where the file system can
  bool io_uring = true;  // where the kernel allows it; else a queue's transfers are done one after the other
  std::chrono::milliseconds lock_wait{5000};  // at most: for the transfers of a killed process
};
std::unique_ptr<FileSystem> make_posix_file_system(const PosixOptions& options = {});

/// Makes the transfer by the file's own calls, at once.
void move_plainly(IoOp& op);

/// A queue over the files' own calls: a transfer is done when submitted.
std::unique_ptr<IoQueue> make_plain_queue(int depth);

/// Runs the transfers that `next` gives, as many at once as the queue takes. Null from `next` means "not now" while
/// transfers are in flight, else the end. `done` is called for each transfer, in any order, when it is complete or has
/// failed (op.moved.status). The queue is filled again before that call, so that its work overlaps with the other
/// transfers: up to depth() + 1 are under way.
void run_transfers(IoQueue& queue, const std::function<IoOp*()>& next, const std::function<void(IoOp&)>& done);

/// Moves all bytes, over as many calls as that takes. A read that reaches the end of the file has failed. A failed read
/// is tried once more; a sync must not be.
IoStatus read_all(File& file, std::int64_t offset, std::span<std::byte> to);
IoStatus write_all(File& file, std::int64_t offset, std::span<const std::byte> from);

}  // namespace kv4::tier
