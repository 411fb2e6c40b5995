// Publishes a running replay: a file of metrics, a live page.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "live_page.h"
#include "replay_data.h"

namespace kv4::cli {

class ReplayWatcher {
 public:
  /// An empty path: no file. A port: a page there on loopback (0: any free port), whose address goes to stderr.
  ReplayWatcher(std::string metrics_path, const std::optional<std::string>& port, std::int64_t requests);

  void see(const ReplayMoment& moment);
  /// After the replay: serves the page until the process is interrupted.
  void stay() const;
  /// Before the process ends: if a page is open, waits until every open page has the last state.
  void linger() const;

 private:
  std::string metrics_path_;
  std::optional<HttpServer> server_;
  std::int64_t requests_;
  PageHead head_{.headline = {}, .rate_title = "Block hit rate so far", .rates = {}, .rate_label = "requests"};
  std::chrono::steady_clock::time_point seen_{};
};

}  // namespace kv4::cli
