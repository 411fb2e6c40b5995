// The reading side of a status folder: reads a running cache's status and asks it for a request.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cache/status_file.h"

namespace kv4::cli {

/// Reads a folder repeatedly.
class StatusReader {
 public:
  explicit StatusReader(std::string directory) : directory_(std::move(directory)) {}
  /// Throws Error(bad_file) where no cache has published there, or not for a while. Uses no wall clock.
  PublishedStatus read();

 private:
  std::string directory_;
  std::optional<std::pair<std::string, std::int64_t>> mark_;  // differs with every status of a cache
  std::optional<std::chrono::steady_clock::time_point> changed_;
};

/// Reads once; if only a change tells whether a cache publishes, it waits some seconds for one.
PublishedStatus read_published_status(const std::string& directory);

/// The session file of a running request; the destructor removes it.
class AskedRequest {
 public:
  /// Waits until the file is there. Throws Error(bad_argument) with the cache's message where it cannot give the
  /// request, Error(bad_file) where it does not answer.
  AskedRequest(const std::string& directory, RequestId request);
  ~AskedRequest();
  AskedRequest(const AskedRequest&) = delete;
  AskedRequest& operator=(const AskedRequest&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kv4::cli
