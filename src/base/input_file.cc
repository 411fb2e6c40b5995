#include "base/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace kv4 {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

// O_NONBLOCK: opening a FIFO without a writer would wait for one.
InputFile::InputFile(const std::string& path, Links links)
    : path_(path),
      descriptor_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC |
                                           (links == Links::refused ? O_NOFOLLOW : 0))) {
  require(descriptor_ >= 0 || errno != ELOOP || links == Links::followed, ErrorCode::bad_file,
          "{} cannot be read: it is a symbolic link; give a regular file", path);
  require(descriptor_ >= 0, ErrorCode::bad_file, "{} cannot be read: {}", path, std::strerror(errno));
  struct stat info {};
  const bool known = ::fstat(descriptor_, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    ::close(descriptor_);
    fail(ErrorCode::bad_file, "{} cannot be read: it is {}; give a regular file", path,
         known ? kind_of(info.st_mode) : "not known");
  }
  bytes_ = info.st_size;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int InputFile::release() { return std::exchange(descriptor_, -1); }

std::int64_t InputFile::read(void* to, std::int64_t bytes) const {
  std::int64_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::read(descriptor_, static_cast<char*>(to) + done, bytes - done);
    if (got < 0 && errno == EINTR) continue;
    require(got >= 0, ErrorCode::bad_file, "{} cannot be read: {}", path_, std::strerror(errno));
    if (got == 0) break;
    done += got;
  }
  return done;
}

// A file may grow while it is read, and files of /proc report no bytes: the bound applies to the bytes read.
std::string read_input_file(const std::string& path, std::int64_t max_bytes, const char* what, Links links) {
  constexpr std::int64_t kPiece = 1 << 16;
  const InputFile file(path, links);
  const auto check = [&](std::int64_t bytes) {
    require(bytes <= max_bytes, ErrorCode::bad_file, "{} has {} bytes or more; {} has at most {}", path, bytes, what,
            max_bytes);
  };
  check(file.bytes());
  std::string out;
  for (std::int64_t got = kPiece; got == kPiece;) {
    const std::size_t before = out.size();
    out.resize(before + kPiece);
    got = file.read(out.data() + before, kPiece);
    out.resize(before + got);
    check(static_cast<std::int64_t>(out.size()));
  }
  return out;
}

void require_regular_file(const std::string& path) { const InputFile checked(path); }

}  // namespace kv4
