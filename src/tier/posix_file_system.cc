#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
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
    case EEXIST: return {IoCode::exists, error};
    case EISDIR:
    case ELOOP:
    case ENXIO: return {IoCode::not_a_file, error};
    default: return {IoCode::failed, error};
  }
}

namespace {

constexpr std::chrono::milliseconds kLockStep{5};
constexpr int kOpenFlags = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;  // no pipe or terminal blocks

// Limits of the files that stay open; the process needs descriptors for others, too.
constexpr std::size_t kMinOpenFiles = 2, kMaxOpenFiles = 256;
constexpr rlim_t kOpenFilesShare = 4;  // at most RLIMIT_NOFILE / 4

std::size_t open_files_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMaxOpenFiles;
  return std::clamp<rlim_t>(limit.rlim_cur / kOpenFilesShare, kMinOpenFiles, kMaxOpenFiles);
}

IoStatus lock_now(int fd) {
  return checked(uninterrupted([&] { return ::flock(fd, LOCK_EX | LOCK_NB); }));
}

/// Whether the path leads to this file.
bool is_at(const Descriptor& fd, const std::string& path) {
  struct stat info {
  }, there{};
  return ::fstat(fd.get(), &info) == 0 && ::lstat(path.c_str(), &there) == 0 && info.st_dev == there.st_dev &&
         info.st_ino == there.st_ino;
}

class PosixFileSystem : public FileSystem {
 public:
  explicit PosixFileSystem(const PosixOptions& options) : options_(options) {}

  IoStatus make_directory(const std::string& path) override {
    const IoStatus status = checked(::mkdir(path.c_str(), 0700));
    return status.error == EEXIST ? IoStatus{} : status;
  }

  Listing list(const std::string& directory, const NameFilter& wanted) override {
    Listing listing;
    Descriptor fd = open_files_->open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(fd.valid() ? ::fdopendir(fd.get()) : nullptr, ::closedir);
    if (stream == nullptr) return {status_of(errno), {}};
    fd.release();
    errno = 0;
    while (const dirent* entry = ::readdir(stream.get())) {
      const std::string_view name = entry->d_name;
      if (name == "." || name == ".." || (wanted && !wanted(name))) continue;
      listing.whole = listing.names.size() < kMaxListedNames;
      if (!listing.whole) break;
      listing.names.emplace_back(name);
    }
    listing.status = status_of(errno);
    std::sort(listing.names.begin(), listing.names.end());
    return listing;
  }

  IoStatus sync_directory(const std::string& directory) override {
    const Descriptor fd = open_files_->open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return checked(fd.valid() ? ::fsync(fd.get()) : -1);
  }

  IoStatus look_at(const std::string& path) override {
    struct stat info {};
    return ::lstat(path.c_str(), &info) == 0 ? kind_of(info) : status_of(errno);
  }

  Opened<File> open(const std::string& path, OpenMode mode) override {
    const int flags = kOpenFlags | (mode == OpenMode::read ? O_RDONLY : O_RDWR);
    const int make = mode == OpenMode::create ? O_CREAT | O_EXCL : 0;
    bool direct = options_.direct;
    Descriptor fd = open_files_->open(path, flags | make | (direct ? O_DIRECT : 0));
    if (!fd.valid() && errno == EINVAL && direct) {
      direct = false;
      fd = open_files_->open(path, flags | (make & ~O_EXCL));  // the refused call may have made the file
    }
    RegularFile opened = as_regular(std::move(fd), direct);
    if (!opened.status.ok()) return {opened.status, nullptr};
    return {{},
            std::make_unique<PosixFile>(open_files_, PosixFile::Origin{path, flags, direct, opened.identity},
                                        std::move(opened.fd))};
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
    const auto deadline = std::chrono::steady_clock::now() + options_.lock_wait;
    for (;;) {
      Opened<FileLock> locked = try_lock(path);
      if (locked.status.code != IoCode::in_use || std::chrono::steady_clock::now() >= deadline) return locked;
      std::this_thread::sleep_for(kLockStep);
    }
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
  /// Locks the directory first: that lock holds even if the file is deleted. The lock on the file keeps older builds
  /// out, and all others where directories cannot be locked.
  Opened<FileLock> try_lock(const std::string& path) {
    const std::string parent = std::filesystem::path(path).parent_path().string();
    const std::string directory = parent.empty() ? "." : parent;
    Descriptor folder = open_files_->open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!folder.valid()) return {status_of(errno), nullptr};
    if (const IoStatus status = lock_now(folder.get()); status.code == IoCode::in_use)
      return {status, nullptr};
    else if (!status.ok())
      folder = Descriptor();
    RegularFile file = as_regular(open_files_->open(path, O_RDWR | O_CREAT | kOpenFlags), false);
    if (file.status.ok()) file.status = lock_now(file.fd.get());
    if (!file.status.ok() && !(file.status.code == IoCode::not_a_file && folder.valid())) return {file.status, nullptr};
    // The names must still lead to these two, or the next process would lock others.
    const bool stays =
        (!file.fd.valid() || is_at(file.fd, path)) && (!folder.valid() || is_at(folder, directory + "/."));
    if (!stays) return {status_of(EWOULDBLOCK), nullptr};
    return {{}, std::make_unique<PosixLock>(std::array{std::move(file.fd), std::move(folder)})};
  }

  PosixOptions options_;
  std::shared_ptr<OpenFiles> open_files_ = std::make_shared<OpenFiles>(open_files_limit());
};

}  // namespace

// Unlocks before it closes the descriptors, because a queue has a share in the files. A forked child has a share, too,
// and only closes its own.
PosixLock::~PosixLock() {
  if (!owned()) return;
  for (const Descriptor& fd : fds_)
    if (fd.valid()) (void)::flock(fd.get(), LOCK_UN);
}

std::unique_ptr<FileSystem> make_posix_file_system(const PosixOptions& options) {
  return std::make_unique<PosixFileSystem>(options);
}

}  // namespace kv4::tier
