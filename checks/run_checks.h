// The assertions of `kv4 run` after its scenario.
#pragma once

#include <string>
#include <vector>

#include "run_scenario.h"

namespace kv4::checks {

struct Check {
  std::string name;
  bool ok = false;
  std::string detail;
};

/// Bytes in the cache against the plan.
Check check_memory(Scenario& scenario);

/// In the last step, before commit: every gather against a plain decoder of the stored bytes, and a sample of rows
/// against a plain computation in double precision.
std::vector<Check> check_gathers(Scenario& scenario);

/// Replays every live request alone in a second cache with another layout and other chunks: same image and blocks.
std::vector<Check> check_replays(Scenario& scenario, const RunSettings& settings, WorkMonitor& monitor);

/// Releases all requests; the cache must then be empty.
Check check_release(Scenario& scenario);

}  // namespace kv4::checks
