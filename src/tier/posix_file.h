// What the system's calls and io_uring share: descriptors, and errno as a status.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "tier/file_system.h"

namespace kv4::tier {

static_assert(sizeof(IoPiece) == sizeof(iovec) && offsetof(IoPiece, data) == offsetof(iovec, iov_base) &&
              offsetof(IoPiece, bytes) == offsetof(iovec, iov_len));
inline const iovec* as_iovec(std::span<const IoPiece> pieces) { return reinterpret_cast<const iovec*>(pieces.data()); }

IoStatus status_of(int error);

template <class Call>
auto uninterrupted(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Owns a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

class PosixFile : public File {
 public:
  explicit PosixFile(Descriptor fd) : fd_(std::move(fd)) {}
  int fd() const { return fd_.get(); }

  IoBytes readv(std::int64_t offset, std::span<const IoPiece> to) override;
  IoBytes writev(std::int64_t offset, std::span<const IoPiece> from) override;
  IoStatus fdatasync() override;
  IoStatus fallocate(std::int64_t bytes) override;
  IoStatus punch(std::int64_t offset, std::int64_t bytes) override;
  std::int64_t size() override;
  bool cached() override;

 private:
  template <class Call>
  IoBytes moved(Call&& call);

  Descriptor fd_;
};

class PosixLock : public FileLock {
 public:
  explicit PosixLock(Descriptor fd) : fd_(std::move(fd)) {}
  ~PosixLock() override;
  int fd() const { return fd_.get(); }

 private:
  Descriptor fd_;
};

/// Null where the kernel has no io_uring for us: too old, forbidden, or out of memory. For PosixFiles and PosixLocks.
std::unique_ptr<IoQueue> make_io_uring_queue(int depth, FileLock* lock);

}  // namespace kv4::tier
