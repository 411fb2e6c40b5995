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

/// Bytes the cache holds against the plan.
Check check_memory(Scenario& scenario);

/// Inside the last step: every gather against a plain decoding of the stored bytes, and a sample of rows against what a
/// plain computation in double precision says they should be.
std::vector<Check> check_gathers(Scenario& scenario);

/// Every live request once more, alone, in a second cache with another layout and in other chunks: the same image and
/// blocks.
std::vector<Check> check_replays(Scenario& scenario, const RunSettings& settings, WorkMonitor& monitor);

/// Releases everybody; nothing may stay behind.
Check check_release(Scenario& scenario);

}  // namespace kv4::checks
