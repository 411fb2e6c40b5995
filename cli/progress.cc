#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "checks/table.h"
#include "interrupts.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr auto kQuiet = std::chrono::seconds(2);
constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr int kBarWidth = 30;

}  // namespace

Progress::Progress(std::string title, std::int64_t total)
    : title_(std::move(title)), total_(std::max<std::int64_t>(total, 1)), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::before_step() { stop_if_interrupted(); }

void Progress::advance(std::int64_t amount) {
  done_ += amount;
  if (!terminal_) return;
  const auto now = Clock::now();
  if (now - start_ >= kQuiet && now - drawn_ >= kInterval) draw(now);
}

void Progress::draw(Clock::time_point now) {
  const double share = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = share > 0 ? fmt::format("{:.0f} s left", elapsed / share - elapsed) : "";
  const std::string bar = draw_bar(share, kBarWidth);
  const auto cells = static_cast<int>(std::count_if(bar.begin(), bar.end(), [](char c) { return (c & 0xC0) != 0x80; }));
  fmt::print(stderr, "\r\x1b[K{} {}{}| {:3.0f} %  {}", title_, bar, std::string(std::max(0, kBarWidth - cells), ' '),
             share * 100, left);
  std::fflush(stderr);
  shown_ = true;
  drawn_ = now;
}

}  // namespace kv4::cli
