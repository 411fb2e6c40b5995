// The output of the tool is its result: it is complete, or the tool fails.
#pragma once

#include <stdexcept>
#include <string>

namespace kv4::cli {

/// Flushes the output so far. Throws std::system_error where it is lost: a full disk, say.
void flush_output();

/// A file that was open for writing did not take all bytes.
struct LostOutput : std::runtime_error {
  /// `error`: an errno; 0: unknown.
  LostOutput(const std::string& path, int error);
};

}  // namespace kv4::cli
