// Errors a caller cannot plan for: bad config, bad argument, wrong order of calls, foreign file.
// A condition that a caller can plan for (no room, no match) is a value, see `Shortage` in kv_cache_manager.h.
#pragma once

#include <stdexcept>
#include <string>

#include "kv4/export.h"

namespace kv4 {

/// The kind of an error, for programs; the message is for people.
enum class ErrorCode {
  bad_config,     // a model config or a cache option that cannot work
  bad_argument,   // a value, shape, type or id outside what the call accepts
  bad_state,      // a call that is not allowed now, for example commit without a step
  bad_file,       // a file that is truncated, foreign or damaged
  out_of_memory,  // the machine refused memory, or a thread: no call lets std::bad_alloc out
  no_device,      // no such GPU, too old a one, or a build without CUDA
  device_failure  // a GPU call or kernel failed; the cache's contents are lost
};

/// The enumerator's name: "bad_config", ...
KV4_API const char* to_string(ErrorCode code);

/// The message names the value seen, the values allowed and what to change. When a call throws, the cache is unchanged:
/// a call takes all memory that it needs before it changes anything, so it can be made again.
class KV4_API Error : public std::runtime_error {
 public:
  /// `message`: what Error::what() returns.
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }  // the kind of the error

 private:
  ErrorCode code_;
};

}  // namespace kv4
