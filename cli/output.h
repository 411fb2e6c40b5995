// What the tool prints is its result: it is there, or the tool fails.
#pragma once

#include <stdexcept>
#include <string>

namespace kv4::cli {

/// What was printed so far is with whoever reads it. Throws std::system_error where it is lost: a full disk, say.
void flush_output();

/// A file that was open for writing did not take all bytes.
struct LostOutput : std::runtime_error {
  /// `error`: of errno; 0: not known.
  LostOutput(const std::string& path, int error);
};

}  // namespace kv4::cli
