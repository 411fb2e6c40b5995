// A long check reports each step to a WorkMonitor, which can end it.
#pragma once

#include <cstdint>

namespace kv4::checks {

class WorkMonitor {
 public:
  WorkMonitor() = default;
  virtual ~WorkMonitor() = default;
  WorkMonitor(const WorkMonitor&) = delete;
  WorkMonitor& operator=(const WorkMonitor&) = delete;

  /// Runs before each step. If it throws, the check ends; its results so far stay.
  virtual void before_step() {}
  /// The check has processed this many more tokens.
  virtual void advance(std::int64_t) {}
};

}  // namespace kv4::checks
