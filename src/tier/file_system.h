// The one seam between a tier and the operating system: files, directory, lock, clock, chance. The real one is
// make_posix_file_system(); tests put a disk in its place that crashes, tears, lies and runs full.
//
// Failures are values: every caller has a plan B, which is a miss. Nothing here throws but for want of memory.
// A FileSystem outlives its files and locks. One thread at a time changes a file, another may read it meanwhile.
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
  unsupported,  // the file system cannot do that; go on without
  in_use,       // somebody else holds the lock
  exists,       // something has that name already
  not_a_file,   // a directory, pipe, device, socket or symbolic link has that name
  unopened,     // of a transfer or a sync: the file could not be opened again, and nothing was done
  failed        // everything else
};

struct IoStatus {
  IoCode code = IoCode::ok;
  int error = 0;  // errno, for the message

  bool ok() const { return code == IoCode::ok; }
  /// The process or the system has too many files open: that passes.
  bool too_many_open() const { return error == EMFILE || error == ENFILE; }
};

std::string to_string(const IoStatus& status);

/// Bytes moved by one call: may be fewer than asked for; 0 of a read is the end of the file.
struct IoBytes {
  IoStatus status;
  std::int64_t bytes = 0;
};

/// Memory that a transfer reads into or writes from; several in a row are one range of the file.
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
  /// When it returns ok, everything written before is on the disk. After a failure nothing is known about the writes
  /// since the last success, and a second call would lie: the kernel forgets what it could not write.
  virtual IoStatus fdatasync() = 0;
  /// The file has `bytes`, and room for all of them.
  virtual IoStatus fallocate(std::int64_t bytes) = 0;
  /// Gives room back; the range reads as zeros.
  virtual IoStatus punch(std::int64_t offset, std::int64_t bytes) = 0;
  virtual std::int64_t size() = 0;  // -1: it cannot be told
  /// That it takes of the disk: fewer than size() where it has holes, or where the file system packs it.
  virtual std::int64_t allocated_bytes() { return size(); }
  /// Where bytes that may not be zero begin, at `offset` or behind it; size() or more: nowhere.
  virtual std::int64_t next_data(std::int64_t offset) { return offset; }
  /// There are ranges that nothing was ever written to.
  virtual bool has_holes() { return false; }
  /// Gives it that name instead of its own. `exists` where something has it: that stays as it is.
  virtual IoStatus rename_new(const std::string& path) = 0;
  /// Reads may be answered from memory of the system's: they do not tell what the disk has.
  virtual bool cached() = 0;
};

/// One range of a file on its way, or a sync of what was written before it was submitted. It and its memory stay where
/// they are from submit() until wait() gives it back.
struct IoOp {
  enum class Kind : std::uint8_t { read, write, sync };  // sync: as fdatasync()

  File* file = nullptr;
  Kind kind = Kind::read;
  std::int64_t offset = 0;
  std::vector<IoPiece> pieces;            // at most kMaxIoPieces; what is left of them while it is under way
  IoBytes moved;                          // out: by the last submit()
  bool tried = false;                     // a read that has failed once: unlike a sync it may be tried again
  std::shared_ptr<const void> held = {};  // of the queue: what keeps the file open while it is under way
};

inline constexpr std::size_t kMaxIoPieces = 1024;  // of Linux

/// Transfers that are in flight together. They come back in any order, whole or in part.
class IoQueue {
 public:
  virtual ~IoQueue() = default;  // nothing is in flight
  virtual int depth() const = 0;
  /// At most depth() at a time.
  virtual void submit(IoOp& op) = 0;
  /// One that has ended; there is one in flight.
  virtual IoOp& wait() = 0;
};

/// Held until destroyed; the system releases it when the process ends, however it ends. A forked child has no share in
/// it: what it destroys there stays locked for its parent.
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
  std::vector<std::string> names;  // of files and whatever else is there, sorted; at most kMaxListedNames
  bool whole = true;               // false: there are more
};
inline constexpr std::size_t kMaxListedNames = std::size_t{1} << 19;
using NameFilter = std::function<bool(std::string_view)>;

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  /// Only the last part is made, for the owner alone (0700). One that exists is fine.
  virtual IoStatus make_directory(const std::string& path) = 0;
  /// Names that are `wanted`; all without a filter.
  virtual Listing list(const std::string& directory, const NameFilter& wanted) = 0;
  Listing list(const std::string& directory) { return list(directory, {}); }
  /// Is it a regular file? Says nothing else about it, and does not follow a symbolic link. `not_a_file`: something
  /// else.
  virtual IoStatus look_at(const std::string& path) = 0;
  /// Makes creations, renames and unlinks in it durable.
  virtual IoStatus sync_directory(const std::string& directory) = 0;
  /// For the owner alone (0600); never through a symbolic link. Regular files only, and it does not wait for anybody.
  virtual Opened<File> open(const std::string& path, OpenMode mode) = 0;
  /// For its files; one thread at a time uses it. `lock` stays held until everything that was submitted has ended, even
  /// where the process is killed before: what it had in flight must not meet the next holder's writes. Null: no lock.
  virtual std::unique_ptr<IoQueue> make_queue(int depth, FileLock* lock) = 0;
  virtual IoStatus rename(const std::string& from, const std::string& to) = 0;
  virtual IoStatus unlink(const std::string& path) = 0;
  /// Against other processes and other holders in this one: the file, which is made, and its directory, so that whoever
  /// deletes the file lets nobody in. Waits no longer than it takes what a killed process had in flight to end.
  virtual Opened<FileLock> lock(const std::string& path) = 0;
  virtual std::int64_t now_ns() = 0;     // since 1970
  virtual std::uint64_t random64() = 0;  // not to be guessed
};

struct PosixOptions {
  bool direct = true;    // bypass the page cache where the file system can
  bool io_uring = true;  // where the kernel lets us; else a queue's transfers are done one after the other
  std::chrono::milliseconds lock_wait{5000};  // at most: for what a killed process had in flight
};
std::unique_ptr<FileSystem> make_posix_file_system(const PosixOptions& options = {});

/// By the file's own calls, at once.
void move_plainly(IoOp& op);

/// A queue over the files' own calls: done when submitted.
std::unique_ptr<IoQueue> make_plain_queue(int depth);

/// Runs what `next` gives, as many at once as the queue takes, until it gives null with nothing in flight: null while
/// something is means "not now". `done` is called for each when all of it has moved or it has failed (op.moved.status),
/// in any order, with the queue full again: what it computes overlaps with the rest. So up to depth() + 1 are under
/// way.
void run_transfers(IoQueue& queue, const std::function<IoOp*()>& next, const std::function<void(IoOp&)>& done);

/// All of it, over as many calls as that takes. A read that meets the end of the file has failed.
/// A read is tried twice: unlike a sync it may be.
IoStatus read_all(File& file, std::int64_t offset, std::span<std::byte> to);
IoStatus write_all(File& file, std::int64_t offset, std::span<const std::byte> from);

}  // namespace kv4::tier
