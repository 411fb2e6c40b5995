// Metrics of caches and their tiers for Prometheus; docs/operations.md, "Metrics", lists them.
#pragma once

#include <string>
#include <vector>

#include "kv4/status_folder.h"

namespace kv4::cli {

struct WatchedCache {
  std::string name;                     // of its label; empty: none, for a single cache
  const CacheStatus* status = nullptr;  // null: no status now
};

/// The same figures in the two formats that scrapers accept.
struct MetricsText {
  std::string prometheus;   // its text format, version 0.0.4
  std::string openmetrics;  // version 1.0.0
};
MetricsText metrics_text(const std::vector<WatchedCache>& caches);

}  // namespace kv4::cli
