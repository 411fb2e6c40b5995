#include "replay_watcher.h"

#include <fmt/format.h>

#include <cstdio>

#include "interrupts.h"
#include "metrics.h"
#include "output.h"
#include "page.h"
#include "sizes.h"

namespace kv4::cli {

ReplayWatcher::ReplayWatcher(std::string metrics_path, const std::optional<std::string>& port, std::int64_t requests)
    : metrics_path_(std::move(metrics_path)), requests_(requests) {
  if (!port) return;
  server_.emplace(*port, "--serve");
  serve_page(*server_, "/", nullptr, {.headline = "waiting for the first request", .rate_title = {}, .rates = {}});
  serve_metrics(*server_, metrics_text({}));  // a scraper that is early finds a page without figures
  fmt::print(stderr, "live page: {}\n", server_->address());
  std::fflush(stderr);
}

// The cache is looked at once a second, and at the end.
void ReplayWatcher::see(const ReplayMoment& moment) {
  head_.rates.push_back(moment.counts.block_hit_rate());
  const auto now = std::chrono::steady_clock::now();
  if (!moment.last && now - seen_ < std::chrono::seconds(1)) return;
  seen_ = now;
  const CacheStatus status = read_status(moment.cache, moment.tiers);
  const MetricsText text = metrics_text({{.name = {}, .status = &status}});
  if (!metrics_path_.empty()) replace_file(metrics_path_, text.prometheus);
  if (!server_) return;
  head_.headline = fmt::format("{} of {} requests, block hit rate {:.4f}", group_digits(moment.counts.requests),
                               group_digits(requests_), moment.counts.block_hit_rate());
  serve_page(*server_, "/", &status, head_);
  serve_metrics(*server_, text);
}

void ReplayWatcher::stay() const {
  if (!server_) return;
  flush_output();  // whoever reads the result may end the process from now on
  while (!interrupted()) sleep_ms(1000);
}

}  // namespace kv4::cli
