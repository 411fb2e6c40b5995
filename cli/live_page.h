// A cache that can be watched while it runs: a page, its figures as JSON, and metrics for Prometheus.
#pragma once

#include <string>
#include <vector>

#include "http_server.h"
#include "kv4/status_folder.h"
#include "metrics.h"

namespace kv4::cli {

/// An open page asks for its state every so many ms, until a run is over.
constexpr int kPagePeriodMs = 1000;

enum class RunState { running, finished, interrupted };

/// The head of the page, above the cache's own figures.
struct PageHead {
  std::string headline, rate_title;
  std::vector<double> rates;  // so far
  std::string rate_label = "seconds";
  RunState state = RunState::running;  // where it is over, an open page shows this state for good
};

/// The page at `path`, which ends with a slash, and PATHstate.json. Null: there is no status now.
void serve_page(HttpServer& server, const std::string& path, const CacheStatus* status, const PageHead& head);
/// At /metrics.
void serve_metrics(HttpServer& server, const MetricsText& text);

}  // namespace kv4::cli
