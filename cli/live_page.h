// A replay that can be watched while it runs: a page on loopback, its figures as JSON, and metrics for Prometheus.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace kv4::cli {

/// Serves / (the page), /state.json and /metrics in a thread of its own, as they were last set.
class LivePage {
 public:
  /// On 127.0.0.1; port 0: any that is free. Throws Error(bad_argument) where the port is taken.
  explicit LivePage(int port);
  ~LivePage();
  LivePage(const LivePage&) = delete;
  LivePage& operator=(const LivePage&) = delete;

  int port() const;
  void set(std::string state_json, std::string metrics);

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace kv4::cli
