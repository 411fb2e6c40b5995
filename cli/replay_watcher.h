// Who looks on while a replay runs: a file of metrics, a live page.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "live_page.h"
#include "replay_data.h"

namespace kv4::cli {

class ReplayWatcher {
 public:
  /// An empty path: no file. A port: a page there (0: any that is free), whose address goes to stderr.
  ReplayWatcher(std::string metrics_path, std::optional<int> port, std::int64_t requests);

  void see(const ReplayMoment& moment);
  /// The replay has ended; a page is served until the process is interrupted.
  void stay() const;

 private:
  std::string metrics_path_;
  std::optional<LivePage> page_;
  std::int64_t requests_;
  std::vector<double> rates_;  // of the requests so far
  std::chrono::steady_clock::time_point written_{};
};

}  // namespace kv4::cli
