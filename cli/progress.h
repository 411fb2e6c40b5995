// A progress bar on standard error: only on a terminal, and only for work of more than two seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "checks/work_monitor.h"

namespace kv4::cli {

class Progress : public checks::WorkMonitor {
 public:
  Progress(std::string title, std::int64_t total);
  ~Progress() override;

  void before_step() override;  // throws Interrupted after Ctrl-C (interrupts.h)
  void advance(std::int64_t amount) override;

 private:
  using Clock = std::chrono::steady_clock;
  void draw(Clock::time_point now);

  std::string title_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool terminal_;
  bool shown_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = start_;
};

}  // namespace kv4::cli
