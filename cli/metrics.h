// What caches and their tiers have and have done, in the text format that Prometheus reads.
#pragma once

#include <string>
#include <vector>

#include "kv4/status_folder.h"

namespace kv4::cli {

struct WatchedCache {
  std::string name;                     // of its label; empty: none, there is one cache only
  const CacheStatus* status = nullptr;  // null: there is none now
};

std::string metrics_text(const std::vector<WatchedCache>& caches);

}  // namespace kv4::cli
