// Files from elsewhere: only regular files are read, and never more than a given number of bytes.
#pragma once

#include <cstdint>
#include <string>

namespace kv4 {

/// Links as the path's last part. Refuse them in other users' folders: a link there may name a file that only the
/// reader may read.
enum class Links : std::uint8_t { followed, refused };

/// A regular file that is open for reading. A FIFO, a device or a folder is refused: reading one may block or never
/// end.
class InputFile {
 public:
  /// Throws Error(bad_file) that names the path and the reason.
  explicit InputFile(const std::string& path, Links links = Links::followed);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::int64_t bytes() const { return bytes_; }
  /// Gives the descriptor to a library that closes it itself.
  int release();
  /// Reads up to `bytes` bytes into `to`; returns how many the file had left.
  std::int64_t read(void* to, std::int64_t bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
};

/// Reads the whole file. Throws Error(bad_file) if it is larger than `max_bytes`; `what` names the kind of file.
std::string read_input_file(const std::string& path, std::int64_t max_bytes, const char* what,
                            Links links = Links::followed);

/// Throws Error(bad_file) unless the path names a regular file, for readers that open it themselves.
void require_regular_file(const std::string& path);

}  // namespace kv4
