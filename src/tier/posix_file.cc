// Files by system calls, opened again where they were closed to save descriptors.
#include "tier/posix_file.h"

#include <fcntl.h>
#include <sys/syscall.h>

#include <algorithm>

namespace kv4::tier {
namespace {

/// On a file system without RENAME_NOREPLACE and links, another program can take the name between the two calls; the
/// store's lock keeps other stores away.
IoStatus rename_if_free(const char* from, const char* to) {
  constexpr unsigned kNoReplace = 1;  // RENAME_NOREPLACE
  if (::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, kNoReplace) == 0) return {};
  if (errno != EINVAL && errno != ENOSYS) return status_of(errno);
  if (::link(from, to) == 0) return checked(::unlink(from));
  if (errno == EEXIST) return status_of(errno);
  struct stat info {};
  if (::lstat(to, &info) == 0) return status_of(EEXIST);
  return checked(::rename(from, to));
}

}  // namespace

IoStatus kind_of(const struct stat& info) { return S_ISREG(info.st_mode) ? IoStatus{} : IoStatus{IoCode::not_a_file}; }

RegularFile as_regular(Descriptor fd, bool direct) {
  RegularFile file;
  struct stat info {};
  file.status = fd.valid() ? checked(::fstat(fd.get(), &info)) : status_of(errno);
  if (file.status.ok()) file.status = kind_of(info);
  if (!file.status.ok()) return file;
  (void)::fcntl(fd.get(), F_SETFL, direct ? O_DIRECT : 0);  // without O_NONBLOCK: io_uring would give up early
  file.fd = std::move(fd);
  file.direct = direct;
  file.identity = {info.st_dev, info.st_ino};
  return file;
}

Descriptor OpenFiles::open(const std::string& path, int flags) {
  const std::lock_guard lock(mutex_);
  return open_locked(path, flags);
}

Descriptor OpenFiles::open_locked(const std::string& path, int flags) {
  for (;;) {
    const int fd = uninterrupted([&] { return ::open(path.c_str(), flags, 0600); });
    const int error = errno;
    const std::size_t before = open_.size();
    if (fd < 0 && status_of(error).too_many_open()) close_down_to(before / 2);
    errno = error;
    if (fd >= 0 || open_.size() == before) return Descriptor(fd);
  }
}

void OpenFiles::close_down_to(std::size_t count) {
  for (auto at = open_.begin(); at != open_.end() && open_.size() > count;) {
    PosixFile& file = **at;
    if (file.writes_ != file.synced_) {
      ++at;
      continue;
    }
    file.fd_.reset();
    at = open_.erase(at);
  }
}

void OpenFiles::add(PosixFile& file, Descriptor fd) {
  const std::lock_guard lock(mutex_);
  file.fd_ = std::make_shared<const Descriptor>(std::move(fd));
  close_down_to(limit_ - 1);
  file.place_ = open_.insert(open_.end(), &file);
}

// In a forked child, a thread that does not exist there may hold the lock.
void OpenFiles::remove(PosixFile& file) {
  if (::getpid() != owner_) return;
  const std::lock_guard lock(mutex_);
  if (file.fd_) open_.erase(file.place_);
}

std::pair<IoStatus, OpenFiles::Shared> OpenFiles::use(PosixFile& file) {
  const std::lock_guard lock(mutex_);
  if (file.fd_) {
    open_.splice(open_.end(), open_, file.place_);
    return {{}, file.fd_};
  }
  const bool direct = file.direct_;
  RegularFile opened = as_regular(open_locked(file.origin_.path, file.origin_.flags | (direct ? O_DIRECT : 0)), direct);
  if (opened.status.ok() && opened.identity != file.origin_.identity) opened.status = status_of(ESTALE);
  if (!opened.status.ok()) return {{IoCode::unopened, opened.status.error}, nullptr};
  close_down_to(limit_ - 1);
  file.fd_ = std::make_shared<const Descriptor>(std::move(opened.fd));
  file.place_ = open_.insert(open_.end(), &file);
  return {{}, file.fd_};
}

IoStatus OpenFiles::rename_new(PosixFile& file, const std::string& path) {
  const std::lock_guard lock(mutex_);
  const IoStatus status = rename_if_free(file.origin_.path.c_str(), path.c_str());
  if (status.ok()) file.origin_.path = path;
  return status;
}

PosixFile::PosixFile(std::shared_ptr<OpenFiles> open_files, Origin origin, Descriptor fd)
    : open_files_(std::move(open_files)), direct_(origin.direct), origin_(std::move(origin)) {
  open_files_->add(*this, std::move(fd));
}

PosixFile::~PosixFile() { open_files_->remove(*this); }

IoBytes PosixFile::readv(std::int64_t offset, std::span<const IoPiece> to) {
  return moved([&](int fd) { return ::preadv(fd, as_iovec(to), static_cast<int>(to.size()), offset); });
}

IoBytes PosixFile::writev(std::int64_t offset, std::span<const IoPiece> from) {
  count_write();
  const IoBytes written =
      moved([&](int fd) { return ::pwritev(fd, as_iovec(from), static_cast<int>(from.size()), offset); });
  count_write();
  return written;
}

IoStatus PosixFile::fdatasync() {
  const auto [status, fd] = use();
  if (!status.ok()) return status;
  begin_sync();
  const IoStatus synced = checked(::fdatasync(fd->get()));
  end_sync();
  return synced;
}

template <class Call>
IoStatus PosixFile::written(Call&& call) {
  const std::pair<IoStatus, OpenFiles::Shared> used = use();
  if (!used.first.ok()) return used.first;
  count_write();
  return checked(uninterrupted([&] { return call(used.second->get()); }));
}

IoStatus PosixFile::fallocate(std::int64_t bytes) {
  const IoStatus status = written([&](int fd) { return ::fallocate(fd, 0, 0, bytes); });
  return status.code != IoCode::unsupported ? status : written([&](int fd) { return ::ftruncate(fd, bytes); });
}

IoStatus PosixFile::punch(std::int64_t offset, std::int64_t bytes) {
  return written([&](int fd) { return ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes); });
}

std::int64_t PosixFile::size() {
  struct stat info {};
  const auto fd = use().second;
  return fd && ::fstat(fd->get(), &info) == 0 ? info.st_size : -1;
}

std::int64_t PosixFile::allocated_bytes() {
  constexpr std::int64_t kUnit = 512;  // of st_blocks, for any block size of the file system
  struct stat info {};
  const auto fd = use().second;
  return fd && ::fstat(fd->get(), &info) == 0 ? info.st_blocks * kUnit : -1;
}

std::int64_t PosixFile::next_data(std::int64_t offset) {
  const auto fd = use().second;
  const off_t found = fd ? ::lseek(fd->get(), offset, SEEK_DATA) : offset;
  if (found >= 0) return found;
  return errno == ENXIO ? INT64_MAX : offset;
}

bool PosixFile::has_holes() {
  const auto fd = use().second;
  const off_t hole = fd ? ::lseek(fd->get(), 0, SEEK_HOLE) : -1;
  return hole >= 0 && hole < size();
}

// Some file systems take O_DIRECT when a file is opened and refuse the first transfer.
template <class Call>
IoBytes PosixFile::moved(Call&& call) {
  const auto [status, fd] = use();
  if (!status.ok()) return {status, 0};
  const int number = fd->get();
  ssize_t bytes = uninterrupted([&] { return call(number); });
  if (bytes < 0 && errno == EINVAL) {
    const int flags = ::fcntl(number, F_GETFL);
    if (flags >= 0 && (flags & O_DIRECT) != 0 && ::fcntl(number, F_SETFL, flags & ~O_DIRECT) == 0) {
      direct_ = false;
      bytes = uninterrupted([&] { return call(number); });
    } else {
      errno = EINVAL;
    }
  }
  return {checked(bytes), std::max<std::int64_t>(bytes, 0)};
}

}  // namespace kv4::tier
