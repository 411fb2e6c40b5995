#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include "tier/posix_file.h"

namespace kv4::tier {

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

namespace {

IoStatus checked(long result) { return status_of(result < 0 ? errno : 0); }

constexpr std::chrono::milliseconds kLockStep{5};

class PosixFileSystem : public FileSystem {
 public:
  explicit PosixFileSystem(const PosixOptions& options) : options_(options) {}

  IoStatus make_directory(const std::string& path) override {
    const IoStatus status = checked(::mkdir(path.c_str(), 0700));
    return status.error == EEXIST ? IoStatus{} : status;
  }

  Listing list(const std::string& directory) override {
    Listing listing;
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(directory.c_str()), ::closedir);
    if (stream == nullptr) return {status_of(errno), {}};
    errno = 0;
    while (const dirent* entry = ::readdir(stream.get())) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") listing.names.push_back(name);
    }
    listing.status = status_of(errno);
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
    int fd = uninterrupted([&] { return ::open(path.c_str(), flags | (options_.direct ? O_DIRECT : 0), 0600); });
    // Without O_DIRECT; a file that the refused call has made is there already.
    if (fd < 0 && errno == EINVAL && options_.direct)
      fd = uninterrupted([&] { return ::open(path.c_str(), flags & ~O_EXCL, 0600); });
    if (fd < 0) return {status_of(errno), nullptr};
    return {{}, std::make_unique<PosixFile>(Descriptor(fd))};
  }

  std::unique_ptr<IoQueue> make_queue(int depth, FileLock* lock) override {
    std::unique_ptr<IoQueue> queue = options_.io_uring ? make_io_uring_queue(depth, lock) : nullptr;
    return queue ? std::move(queue) : make_plain_queue(depth);
  }

  IoStatus rename(const std::string& from, const std::string& to) override {
    return checked(::rename(from.c_str(), to.c_str()));
  }

  IoStatus unlink(const std::string& path) override { return checked(::unlink(path.c_str())); }

  Opened<FileLock> lock(const std::string& path) override {
    Descriptor fd(uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600); }));
    if (!fd.valid()) return {status_of(errno), nullptr};
    const auto deadline = std::chrono::steady_clock::now() + options_.lock_wait;
    while (uninterrupted([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
      if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= deadline) return {status_of(errno), nullptr};
      std::this_thread::sleep_for(kLockStep);
    }
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
  PosixOptions options_;
};

}  // namespace

// Before the descriptor is closed: a queue has a share in the file.
PosixLock::~PosixLock() {
  if (fd_.valid()) (void)::flock(fd(), LOCK_UN);
}

IoBytes PosixFile::readv(std::int64_t offset, std::span<const IoPiece> to) {
  return moved([&] { return ::preadv(fd(), as_iovec(to), static_cast<int>(to.size()), offset); });
}

IoBytes PosixFile::writev(std::int64_t offset, std::span<const IoPiece> from) {
  return moved([&] { return ::pwritev(fd(), as_iovec(from), static_cast<int>(from.size()), offset); });
}

IoStatus PosixFile::fdatasync() { return checked(::fdatasync(fd())); }

IoStatus PosixFile::fallocate(std::int64_t bytes) {
  const IoStatus status = checked(uninterrupted([&] { return ::fallocate(fd(), 0, 0, bytes); }));
  return status.code != IoCode::unsupported ? status : checked(uninterrupted([&] { return ::ftruncate(fd(), bytes); }));
}

IoStatus PosixFile::punch(std::int64_t offset, std::int64_t bytes) {
  return checked(
      uninterrupted([&] { return ::fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes); }));
}

std::int64_t PosixFile::size() {
  struct stat info {};
  return ::fstat(fd(), &info) == 0 ? info.st_size : -1;
}

bool PosixFile::cached() { return (::fcntl(fd(), F_GETFL) & O_DIRECT) == 0; }

// Some file systems take O_DIRECT when a file is opened and refuse the first transfer.
template <class Call>
IoBytes PosixFile::moved(Call&& call) {
  ssize_t bytes = uninterrupted(call);
  if (bytes < 0 && errno == EINVAL) {
    const int flags = ::fcntl(fd(), F_GETFL);
    if (flags >= 0 && (flags & O_DIRECT) != 0 && ::fcntl(fd(), F_SETFL, flags & ~O_DIRECT) == 0)
      bytes = uninterrupted(call);
    else
      errno = EINVAL;
  }
  return {checked(bytes), std::max<std::int64_t>(bytes, 0)};
}

std::unique_ptr<FileSystem> make_posix_file_system(const PosixOptions& options) {
  return std::make_unique<PosixFileSystem>(options);
}

}  // namespace kv4::tier
