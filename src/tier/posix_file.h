// Parts that the plain system calls and io_uring share: descriptors, and errno as a status.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "tier/file_system.h"

namespace kv4::tier {

static_assert(sizeof(IoPiece) == sizeof(iovec) && offsetof(IoPiece, data) == offsetof(iovec, iov_base) &&
              offsetof(IoPiece, bytes) == offsetof(iovec, iov_len));
inline const iovec* as_iovec(std::span<const IoPiece> pieces) { return reinterpret_cast<const iovec*>(pieces.data()); }

IoStatus status_of(int error);
inline IoStatus checked(long result) { return status_of(result < 0 ? errno : 0); }

template <class Call>
auto uninterrupted(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Owns a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void release() { fd_ = -1; }  // it has another owner now

 private:
  int fd_;
};

/// Identifies a file independently of its name.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

class PosixFile;

/// The descriptors of files. A bounded number stays open: the least recently used one is closed, and opened again when
/// it is needed. Any thread.
//
// Invariants:
//   1. A descriptor in use stays open: closing gives up one share in it.
//   2. A file that was written to since its last sync stays open. The kernel reports a write-back error to open
//      descriptors, and to later ones only while it remembers the file.
class OpenFiles {
 public:
  using Shared = std::shared_ptr<const Descriptor>;

  explicit OpenFiles(std::size_t limit) : limit_(limit) {}

  /// open(2); where the process has too many open files, it first closes unused ones. Not valid: see errno.
  Descriptor open(const std::string& path, int flags);
  void add(PosixFile& file, Descriptor fd);
  void remove(PosixFile& file);
  /// The file's descriptor, opened again if it was closed; empty with the reason where that fails.
  std::pair<IoStatus, Shared> use(PosixFile& file);
  /// Renames under the lock: a concurrent use() opens the file by its old name before, or by its new one after.
  IoStatus rename_new(PosixFile& file, const std::string& path);

 private:
  Descriptor open_locked(const std::string& path, int flags);
  void close_down_to(std::size_t count);

  const std::size_t limit_;
  const pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::list<PosixFile*> open_;  // least recently used first
};

class PosixFile : public File {
 public:
  struct Origin {
    std::string path;
    int flags = 0;  // to open it again
    bool direct = false;
    FileIdentity identity;
  };
  PosixFile(std::shared_ptr<OpenFiles> open_files, Origin origin, Descriptor fd);
  ~PosixFile() override;
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  std::pair<IoStatus, OpenFiles::Shared> use() { return open_files_->use(*this); }
  // A write counts at its start and at its end, so that a sync which began during the write does not cover it.
  void count_write() { ++writes_; }
  void begin_sync() { syncing_ = writes_.load(); }
  void end_sync() { synced_ = syncing_.load(); }  // also after a failure: its error has been reported

  IoBytes readv(std::int64_t offset, std::span<const IoPiece> to) override;
  IoBytes writev(std::int64_t offset, std::span<const IoPiece> from) override;
  IoStatus fdatasync() override;
  IoStatus fallocate(std::int64_t bytes) override;
  IoStatus punch(std::int64_t offset, std::int64_t bytes) override;
  std::int64_t size() override;
  std::int64_t allocated_bytes() override;
  std::int64_t next_data(std::int64_t offset) override;
  bool has_holes() override;
  IoStatus rename_new(const std::string& path) override { return open_files_->rename_new(*this, path); }
  bool cached() override { return !direct_; }

 private:
  friend class OpenFiles;
  template <class Call>
  IoBytes moved(Call&& call);
  template <class Call>
  IoStatus written(Call&& call);

  const std::shared_ptr<OpenFiles> open_files_;
  std::atomic<bool> direct_;
  std::atomic<std::uint64_t> writes_{0}, syncing_{0}, synced_{0};
  // Owned by open_files_, under its lock.
  Origin origin_;
  OpenFiles::Shared fd_;  // null: closed
  std::list<PosixFile*>::iterator place_;
};

struct RegularFile {
  IoStatus status;
  Descriptor fd;
  bool direct = false;
  FileIdentity identity;
};
/// Takes the result of open(2) with O_NONBLOCK and clears that flag. Where `fd` is not valid, errno has the reason.
RegularFile as_regular(Descriptor fd, bool direct);
IoStatus kind_of(const struct stat& info);  // ok: a regular file

class PosixLock : public FileLock {
 public:
  /// Descriptors of the lock file and of its directory; one of them may be missing.
  explicit PosixLock(std::array<Descriptor, 2> fds) : fds_(std::move(fds)) {}
  ~PosixLock() override;
  bool owned() const override { return owner_ == ::getpid(); }
  const std::array<Descriptor, 2>& fds() const { return fds_; }

 private:
  std::array<Descriptor, 2> fds_;
  const pid_t owner_ = ::getpid();
};

/// Null where the kernel gives no io_uring: too old, forbidden, or out of memory. For PosixFiles and PosixLocks.
std::unique_ptr<IoQueue> make_io_uring_queue(int depth, FileLock* lock);

}  // namespace kv4::tier
