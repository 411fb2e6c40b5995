// Keeps callers from waiting for a tier that fails or is slow. After some failures in a row the breaker is open and the
// tier is not called. After a pause one call may probe; a probe that fails doubles the pause.
#pragma once

#include <cstdint>

#include "tier/clock.h"

namespace kv4::tier {

struct BreakerOptions {
  int failures_to_open = 3;                       // in a row
  Duration slow_after = std::chrono::seconds(2);  // an answer that took longer counts as a failure
  Duration first_pause = std::chrono::milliseconds(250);
  Duration longest_pause = std::chrono::seconds(30);
};

/// Has no lock: its owner locks.
class CircuitBreaker {
 public:
  enum class State : std::uint8_t { closed, open, probing };

  explicit CircuitBreaker(const BreakerOptions& options) : options_(options), pause_(options.first_pause) {}

  /// Whether begin() would let a call through.
  bool allows(Deadline now) const { return state_ == State::closed || (state_ == State::open && now >= retry_at_); }
  /// True: the caller makes its call and reports how it ended.
  bool begin(Deadline now) {
    if (!allows(now)) return false;
    if (state_ == State::open) state_ = State::probing;
    return true;
  }
  void succeeded() {
    state_ = State::closed;
    failures_ = 0;
    pause_ = options_.first_pause;
  }
  void failed(Deadline now) {
    ++failures_;
    if (state_ == State::probing || failures_ >= options_.failures_to_open) open(now);
  }
  /// The call that was begun says nothing about the tier.
  void withdrawn() {
    if (state_ == State::probing) state_ = State::open;
  }
  /// Opens without further failures: a call does not return.
  void open(Deadline now) {
    if (state_ != State::open) ++times_opened_;
    if (state_ == State::probing) pause_ = pause_ * 2 < options_.longest_pause ? pause_ * 2 : options_.longest_pause;
    state_ = State::open;
    retry_at_ = now + pause_;
  }

  State state() const { return state_; }
  Deadline retry_at() const { return retry_at_; }
  std::int64_t times_opened() const { return times_opened_; }
  const BreakerOptions& options() const { return options_; }

 private:
  BreakerOptions options_;
  State state_ = State::closed;
  int failures_ = 0;
  Duration pause_;
  Deadline retry_at_{};
  std::int64_t times_opened_ = 0;
};

}  // namespace kv4::tier
