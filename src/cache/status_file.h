// The files of a status folder (docs/formats.md, "Status folder"): names, and the status as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kv4/status_folder.h"

namespace kv4 {

inline constexpr const char* kStatusFileName = "status.json";
inline constexpr const char* kStatusLockName = "lock";

/// What status.json says.
struct PublishedStatus {
  std::string model;
  std::int64_t process = 0;
  std::int64_t time_ms = 0;  // since 1970
  std::int64_t interval_ms = 0;
  CacheStatus status;

  /// Several times in a row nothing came.
  bool is_stale(std::int64_t now_ms) const { return now_ms - time_ms > 5000 + 5 * interval_ms; }
};

std::string status_text(const PublishedStatus& published);
/// Throws Error(bad_file).
PublishedStatus parse_published_status(std::string_view text);

/// A request that somebody wants to look at: the asker makes the first file, with a number of its own; the cache's
/// process takes that away and leaves one of the others.
struct RequestQuestion {
  RequestId request = kNoRequest;
  std::uint64_t number = 0;

  std::string question_name() const;  // inspect-REQUEST-NUMBER.wanted
  std::string answer_name() const;    // .kv4s: a session
  std::string error_name() const;     // .error: a sentence
};
/// Nullopt: it is the name of no question.
std::optional<RequestQuestion> parse_question(std::string_view name);
/// Whether a file of this name is part of a question or an answer.
bool is_of_question(std::string_view name);

}  // namespace kv4
