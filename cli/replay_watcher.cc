#include "replay_watcher.h"

#include <fmt/format.h>

#include <cstdio>
#include <thread>

#include "checks/sizes.h"
#include "interrupts.h"
#include "metrics.h"
#include "output.h"
#include "page.h"

namespace kv4::cli {

using namespace checks;

namespace {

// Time of two requests of a page, and some for the answer.
constexpr std::chrono::milliseconds kLinger{2 * kPagePeriodMs + 500};

/// Skipped requests count as done, so that the count ends at all requests.
std::string headline_of(const ReplayMoment& moment, std::int64_t requests, RunState state) {
  const double rate = moment.counts.block_hit_rate();
  std::string out =
      fmt::format("{} of {} requests, block hit rate {:.4f} ({:.1f} %)",
                  group_digits(moment.counts.requests + moment.skipped), group_digits(requests), rate, 100 * rate);
  if (moment.skipped > 0) out += fmt::format("; {} skipped, longer than the cache", group_digits(moment.skipped));
  if (state == RunState::finished) out += "; the replay is finished";
  if (state == RunState::interrupted) out += "; the replay was interrupted";
  return out;
}

}  // namespace

ReplayWatcher::ReplayWatcher(std::string metrics_path, const std::optional<std::string>& port, std::int64_t requests)
    : metrics_path_(std::move(metrics_path)), requests_(requests) {
  if (!port) return;
  server_.emplace(*port, "--serve");
  serve_page(*server_, "/", nullptr, {.headline = "waiting for the first request", .rate_title = {}, .rates = {}});
  serve_metrics(*server_, metrics_text({}));  // an early scraper finds a page without figures
  fmt::print(stderr, "live page: {}\n", server_->address());
  std::fflush(stderr);
}

// Publishes the cache once a second, and at the end.
void ReplayWatcher::see(const ReplayMoment& moment) {
  if (!moment.last) head_.rates.push_back(moment.counts.block_hit_rate());
  const auto now = std::chrono::steady_clock::now();
  if (!moment.last && now - seen_ < std::chrono::seconds(1)) return;
  seen_ = now;
  const CacheStatus status = read_status(moment.cache, moment.tiers);
  const MetricsText text = metrics_text({{.name = {}, .status = &status}});
  if (!metrics_path_.empty()) replace_file(metrics_path_, text.prometheus);
  if (!server_) return;
  if (moment.last) head_.state = interrupted() ? RunState::interrupted : RunState::finished;
  head_.headline = headline_of(moment, requests_, head_.state);
  serve_page(*server_, "/", &status, head_);
  serve_metrics(*server_, text);
}

void ReplayWatcher::stay() const {
  if (!server_) return;
  flush_output();  // from now on a reader of the result may end the process
  while (!interrupted()) sleep_ms(1000);
}

void ReplayWatcher::linger() const {
  if (!server_ || server_->last_asked() + kLinger < seen_) return;
  std::this_thread::sleep_until(seen_ + kLinger);
}

}  // namespace kv4::cli
