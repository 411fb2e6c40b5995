// What the system's calls and io_uring share: descriptors, and errno as a status.
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
  void release() { fd_ = -1; }  // somebody else owns it now

 private:
  int fd_;
};

/// Which file it is, whatever its name.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

class PosixFile;

/// Descriptors of files, of which a bounded number stays open: the least recently used one is closed, and opened again
/// when it is needed. Any thread.
//
// Invariants:
//   1. A descriptor that somebody uses stays open: closing gives up one share in it.
//   2. A file that was written to since its last sync stays open. An error of the write-back is told to descriptors
//      that are open, and to a later one only while the system remembers the file.
class OpenFiles {
 public:
  using Shared = std::shared_ptr<const Descriptor>;

  explicit OpenFiles(std::size_t limit) : limit_(limit) {}

  /// open(2), after closing files that are not in use where the process has too many. errno tells why it is not valid.
  Descriptor open(const std::string& path, int flags);
  void add(PosixFile& file, Descriptor fd);
  void remove(PosixFile& file);
  /// Opens it where it is not; an empty one with its reason otherwise.
  std::pair<IoStatus, Shared> use(PosixFile& file);
  /// Under the lock of all that is opened here: a file that is opened again has the one name or the other.
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
  // A write counts twice, so that a sync which began beside it does not cover it.
  void count_write() { ++writes_; }
  void begin_sync() { syncing_ = writes_.load(); }
  void end_sync() { synced_ = syncing_.load(); }  // failed or not: there is nothing more to be heard about it

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
  // Of open_files_, under its lock.
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
/// What open(2) with O_NONBLOCK gave, from here on without; errno counts where it gave nothing.
RegularFile as_regular(Descriptor fd, bool direct);
IoStatus kind_of(const struct stat& info);  // ok: a regular file

class PosixLock : public FileLock {
 public:
  /// Of the lock file and of its directory; one of them may be missing.
  explicit PosixLock(std::array<Descriptor, 2> fds) : fds_(std::move(fds)) {}
  ~PosixLock() override;
  bool owned() const override { return owner_ == ::getpid(); }
  const std::array<Descriptor, 2>& fds() const { return fds_; }

 private:
  std::array<Descriptor, 2> fds_;
  const pid_t owner_ = ::getpid();
};

/// Null where the kernel has no io_uring for us: too old, forbidden, or out of memory. For PosixFiles and PosixLocks.
std::unique_ptr<IoQueue> make_io_uring_queue(int depth, FileLock* lock);

}  // namespace kv4::tier
