// Files that somebody else wrote: only regular files are read, and never more than a named number of bytes.
#pragma once

#include <cstdint>
#include <string>

namespace kv4 {

/// Of the path's last part. Refused in folders of somebody else's: a link there names a file that only the reader may
/// read.
enum class Links : std::uint8_t { followed, refused };

/// A regular file that is open for reading. A FIFO, a device or a folder is refused: reading one may wait or never end.
class InputFile {
 public:
  /// Throws Error(bad_file) that names the path and the reason.
  explicit InputFile(const std::string& path, Links links = Links::followed);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::int64_t bytes() const { return bytes_; }
  /// For a library that closes the descriptor itself.
  int release();
  /// `to` has `bytes` bytes; returns how many the file had left.
  std::int64_t read(void* to, std::int64_t bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
};

/// The whole file. Throws Error(bad_file) where it is larger than `max_bytes`; `what` says what such a file is.
std::string read_input_file(const std::string& path, std::int64_t max_bytes, const char* what,
                            Links links = Links::followed);

/// Throws Error(bad_file) unless the path names a regular file, for readers that open it themselves.
void require_regular_file(const std::string& path);

}  // namespace kv4
