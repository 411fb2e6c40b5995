// What the tool prints is its result: it is there, or the tool fails.
#pragma once

namespace kv4::cli {

/// What was printed so far is with whoever reads it. Throws std::system_error where it is lost: a full disk, say.
void flush_output();

}  // namespace kv4::cli
