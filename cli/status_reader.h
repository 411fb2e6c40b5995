// The other side of a status folder: what a running cache says of itself, and asking it for a request.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cache/status_file.h"

namespace kv4::cli {

/// Looks at a folder again and again.
class StatusReader {
 public:
  explicit StatusReader(std::string directory) : directory_(std::move(directory)) {}
  /// Throws Error(bad_file) where nobody has published there, or not for a while. No wall clock is asked.
  PublishedStatus read();

 private:
  std::string directory_;
  std::optional<std::pair<std::string, std::int64_t>> mark_;  // differs with every status of a cache
  std::optional<std::chrono::steady_clock::time_point> changed_;
};

/// One look; where only a change tells whether somebody publishes, it waits some seconds for one.
PublishedStatus read_published_status(const std::string& directory);

/// A session's file of a request that runs on, gone with this.
class AskedRequest {
 public:
  /// Waits until it is there. Throws Error: bad_argument with the cache's words where it cannot give the request,
  /// bad_file where it does not answer.
  AskedRequest(const std::string& directory, RequestId request);
  ~AskedRequest();
  AskedRequest(const AskedRequest&) = delete;
  AskedRequest& operator=(const AskedRequest&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kv4::cli
