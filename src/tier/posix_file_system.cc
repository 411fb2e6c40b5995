#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include "tier/file_system.h"

namespace kv4::tier {
namespace {

IoStatus status_of(int error) {
  switch (error) {
    case 0: return {};
    case ENOENT: return {IoCode::not_found, error};
    case ENOSPC:
    case EDQUOT: return {IoCode::no_space, error};
    case EOPNOTSUPP:
    case ENOSYS: return {IoCode::unsupported, error};
    case EWOULDBLOCK: return {IoCode::in_use, error};
    default: return {IoCode::failed, error};
  }
}

template <class Call>
auto uninterrupted(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

IoStatus checked(long result) { return status_of(result < 0 ? errno : 0); }

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

  IoBytes pread(std::int64_t offset, std::span<std::byte> to) override {
    return moved([&] { return ::pread(fd_.get(), to.data(), to.size(), offset); });
  }
  IoBytes pwrite(std::int64_t offset, std::span<const std::byte> from) override {
    return moved([&] { return ::pwrite(fd_.get(), from.data(), from.size(), offset); });
  }
  IoStatus fdatasync() override { return checked(::fdatasync(fd_.get())); }
  IoStatus fallocate(std::int64_t bytes) override {
    const IoStatus status = checked(uninterrupted([&] { return ::fallocate(fd_.get(), 0, 0, bytes); }));
    return status.code != IoCode::unsupported ? status
                                              : checked(uninterrupted([&] { return ::ftruncate(fd_.get(), bytes); }));
  }
  IoStatus punch(std::int64_t offset, std::int64_t bytes) override {
    return checked(uninterrupted(
        [&] { return ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes); }));
  }
  std::int64_t size() override {
    struct stat info {};
    return ::fstat(fd_.get(), &info) == 0 ? info.st_size : -1;
  }

 private:
  // Some file systems take O_DIRECT when a file is opened and refuse the first transfer.
  template <class Call>
  IoBytes moved(Call&& call) {
    ssize_t bytes = uninterrupted(call);
    if (bytes < 0 && errno == EINVAL) {
      const int flags = ::fcntl(fd_.get(), F_GETFL);
      if (flags >= 0 && (flags & O_DIRECT) != 0 && ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) == 0)
        bytes = uninterrupted(call);
      else
        errno = EINVAL;
    }
    return {checked(bytes), std::max<std::int64_t>(bytes, 0)};
  }

  Descriptor fd_;
};

class PosixLock : public FileLock {
 public:
  explicit PosixLock(Descriptor fd) : fd_(std::move(fd)) {}

 private:
  Descriptor fd_;
};

class PosixFileSystem : public FileSystem {
 public:
  explicit PosixFileSystem(bool direct) : direct_(direct) {}

  IoStatus make_directory(const std::string& path) override {
    const IoStatus status = checked(::mkdir(path.c_str(), 0700));
    return status.error == EEXIST ? IoStatus{} : status;
  }

  Listing list(const std::string& directory) override {
    Listing listing;
    DIR* stream = ::opendir(directory.c_str());
    if (stream == nullptr) return {status_of(errno), {}};
    errno = 0;
    while (const dirent* entry = ::readdir(stream)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") listing.names.push_back(name);
    }
    listing.status = status_of(errno);
    ::closedir(stream);
    std::sort(listing.names.begin(), listing.names.end());
    return listing;
  }

  IoStatus sync_directory(const std::string& directory) override {
    const Descriptor fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return checked(fd.valid() ? ::fsync(fd.get()) : -1);
  }

  Opened<File> open(const std::string& path, OpenMode mode) override {
    const int flags = O_NOFOLLOW | O_CLOEXEC | (mode == OpenMode::read ? O_RDONLY : O_RDWR) |
                      (mode == OpenMode::create ? O_CREAT | O_EXCL : 0);
    int fd = uninterrupted([&] { return ::open(path.c_str(), flags | (direct_ ? O_DIRECT : 0), 0600); });
    // Without O_DIRECT; a file that the refused call has made is there already.
    if (fd < 0 && errno == EINVAL && direct_)
      fd = uninterrupted([&] { return ::open(path.c_str(), flags & ~O_EXCL, 0600); });
    if (fd < 0) return {status_of(errno), nullptr};
    return {{}, std::make_unique<PosixFile>(Descriptor(fd))};
  }

  IoStatus rename(const std::string& from, const std::string& to) override {
    return checked(::rename(from.c_str(), to.c_str()));
  }

  IoStatus unlink(const std::string& path) override { return checked(::unlink(path.c_str())); }

  Opened<FileLock> lock(const std::string& path) override {
    Descriptor fd(uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600); }));
    if (!fd.valid() || uninterrupted([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0)
      return {status_of(errno), nullptr};
    return {{}, std::make_unique<PosixLock>(std::move(fd))};
  }

  std::int64_t now_ns() override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  std::uint64_t random64() override {
    std::uint64_t value = 0;
    if (::getrandom(&value, sizeof(value), 0) == sizeof(value)) return value;
    std::random_device device;
    return (std::uint64_t{device()} << 32) | device();
  }

 private:
  bool direct_;
};

}  // namespace

std::string to_string(const IoStatus& status) {
  return status.error != 0 ? std::strerror(status.error) : status.ok() ? "ok" : "input/output error";
}

std::unique_ptr<FileSystem> make_posix_file_system(bool direct) { return std::make_unique<PosixFileSystem>(direct); }

IoStatus read_all(File& file, std::int64_t offset, std::span<std::byte> to) {
  bool tried = false;
  while (!to.empty()) {
    const IoBytes read = file.pread(offset, to);
    if (!read.status.ok()) {
      if (std::exchange(tried, true)) return read.status;
      continue;
    }
    if (read.bytes == 0) return {IoCode::failed, 0};
    offset += read.bytes;
    to = to.subspan(static_cast<std::size_t>(read.bytes));
  }
  return {};
}

IoStatus write_all(File& file, std::int64_t offset, std::span<const std::byte> from) {
  while (!from.empty()) {
    const IoBytes written = file.pwrite(offset, from);
    if (!written.status.ok()) return written.status;
    if (written.bytes == 0) return {IoCode::failed, 0};
    offset += written.bytes;
    from = from.subspan(static_cast<std::size_t>(written.bytes));
  }
  return {};
}

}  // namespace kv4::tier
