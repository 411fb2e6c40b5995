// Wakes one thread that waits for many things. notify() may be called under any lock: it takes no other.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "tier/clock.h"

namespace kv4::tier {

class Wakeup {
 public:
  explicit Wakeup(std::shared_ptr<Clock> clock) : clock_(std::move(clock)) {}

  void notify() {
    const std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_one();
  }
  /// Returns at once if it was notified since the last wait.
  void wait_until(Deadline until) {
    std::unique_lock lock(mutex_);
    while (!set_ && clock_->now() < until) clock_->wait_until(changed_, lock, until);
    set_ = false;
  }

 private:
  const std::shared_ptr<Clock> clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

}  // namespace kv4::tier
