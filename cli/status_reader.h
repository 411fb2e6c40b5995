// The other side of a status folder: what a running cache says of itself, and asking it for a request.
#pragma once

#include <string>

#include "cache/status_file.h"

namespace kv4::cli {

/// Throws Error(bad_file) where nobody has published there, or not for a while.
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
