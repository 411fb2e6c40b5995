// A cache that can be watched while it runs: a page, its figures as JSON, and metrics for Prometheus.
#pragma once

#include <string>
#include <vector>

#include "http_server.h"
#include "kv4/status_folder.h"
#include "metrics.h"

namespace kv4::cli {

/// An open page asks for its state at this interval in ms, until the run ends.
constexpr int kPagePeriodMs = 1000;

enum class RunState { running, finished, interrupted };

/// The head of the page, above the cache's own figures.
struct PageHead {
  std::string headline, rate_title;
  std::vector<double> rates;  // so far
  std::string rate_label = "seconds";
  RunState state = RunState::running;  // once the run is over, an open page keeps this state
};

/// Sets the page at `path`, which ends with a slash, and PATHstate.json. Null: there is no status now.
void serve_page(HttpServer& server, const std::string& path, const CacheStatus* status, const PageHead& head);
/// Sets them at /metrics.
void serve_metrics(HttpServer& server, const MetricsText& text);

}  // namespace kv4::cli
