// The one seam to the steady clock, so that tests of deadlines need not sleep.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "kv4/tier.h"

namespace kv4::tier {

/// Any thread.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Deadline now() = 0;
  /// May return early, like any wait: the caller checks again.
  virtual void wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Deadline until) = 0;
};

class SteadyClock final : public Clock {
 public:
  Deadline now() override { return std::chrono::steady_clock::now(); }
  void wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Deadline until) override {
    condition.wait_until(lock, std::min(until, now() + std::chrono::hours(1)));  // the library adds to it
  }
};

}  // namespace kv4::tier
