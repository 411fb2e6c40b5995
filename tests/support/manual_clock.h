// A clock that stands still until a test moves it.
#pragma once

#include <atomic>

#include "tier/clock.h"

namespace kv4::test {

class ManualClock final : public tier::Clock {
 public:
  tier::Deadline now() override { return tier::Deadline(tier::Duration(now_ns_.load())); }
  tier::Deadline in(tier::Duration time) { return now() + time; }
  void advance(tier::Duration time) { now_ns_ += time.count(); }
  /// Polls at intervals, so that advance() need not know the waiting threads.
  void wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, tier::Deadline) override {
    condition.wait_for(lock, std::chrono::milliseconds(1));
  }

 private:
  std::atomic<std::int64_t> now_ns_{1'000'000'000'000};
};

}  // namespace kv4::test
