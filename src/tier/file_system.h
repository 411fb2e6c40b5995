// The one seam between a tier and the operating system: files, directory, lock, clock, chance. The real one is
// make_posix_file_system(); tests put a disk in its place that crashes, tears, lies and runs full.
//
// Failures are values: every caller has a plan B, which is a miss. Nothing here throws but for want of memory.
// A FileSystem outlives its files and locks. One thread at a time uses a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kv4::tier {

enum class IoCode : std::uint8_t {
  ok,
  not_found,
  no_space,
  unsupported,  // the file system cannot do that; go on without
  in_use,       // somebody else holds the lock
  failed        // everything else
};

struct IoStatus {
  IoCode code = IoCode::ok;
  int error = 0;  // errno, for the message

  bool ok() const { return code == IoCode::ok; }
};

std::string to_string(const IoStatus& status);

/// Bytes moved by one call: may be fewer than asked for; 0 of a read is the end of the file.
struct IoBytes {
  IoStatus status;
  std::int64_t bytes = 0;
};

/// Offsets, lengths and addresses are multiples of 4,096: files may bypass the page cache.
class File {
 public:
  virtual ~File() = default;
  virtual IoBytes pread(std::int64_t offset, std::span<std::byte> to) = 0;
  virtual IoBytes pwrite(std::int64_t offset, std::span<const std::byte> from) = 0;
  /// When it returns ok, everything written before is on the disk. After a failure nothing is known about the writes
  /// since the last success, and a second call would lie: the kernel forgets what it could not write.
  virtual IoStatus fdatasync() = 0;
  /// The file has `bytes`, and room for all of them.
  virtual IoStatus fallocate(std::int64_t bytes) = 0;
  /// Gives room back; the range reads as zeros.
  virtual IoStatus punch(std::int64_t offset, std::int64_t bytes) = 0;
  virtual std::int64_t size() = 0;  // -1: it cannot be told
};

/// Held until destroyed; the system releases it when the process ends, however it ends.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

enum class OpenMode : std::uint8_t { read, read_write, create };  // create: fails where the file exists

template <class T>
struct Opened {
  IoStatus status;
  std::unique_ptr<T> handle;  // null unless ok
};

struct Listing {
  IoStatus status;
  std::vector<std::string> names;  // files, sorted
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  /// Only the last part is made, for the owner alone (0700). One that exists is fine.
  virtual IoStatus make_directory(const std::string& path) = 0;
  virtual Listing list(const std::string& directory) = 0;
  /// Makes creations, renames and unlinks in it durable.
  virtual IoStatus sync_directory(const std::string& directory) = 0;
  /// For the owner alone (0600); never through a symbolic link.
  virtual Opened<File> open(const std::string& path, OpenMode mode) = 0;
  virtual IoStatus rename(const std::string& from, const std::string& to) = 0;
  virtual IoStatus unlink(const std::string& path) = 0;
  /// Against other processes and other holders in this one; does not wait.
  virtual Opened<FileLock> lock(const std::string& path) = 0;
  virtual std::int64_t now_ns() = 0;     // since 1970
  virtual std::uint64_t random64() = 0;  // not to be guessed
};

/// `direct`: bypass the page cache where the file system can.
std::unique_ptr<FileSystem> make_posix_file_system(bool direct = true);

/// All of it, over as many calls as that takes. A read that meets the end of the file has failed.
/// A read is tried twice: unlike a sync it may be.
IoStatus read_all(File& file, std::int64_t offset, std::span<std::byte> to);
IoStatus write_all(File& file, std::int64_t offset, std::span<const std::byte> from);

}  // namespace kv4::tier
