#include "replay_watcher.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "metrics.h"

namespace kv4::cli {
namespace {

/// h: held by requests, k: kept for later ones, f: free.
std::string block_states(const BlockAllocator& blocks) {
  std::string out;
  for (BlockId block = 0; block < blocks.num_blocks(); ++block)
    out += blocks.reference_count(block) > 0 ? 'h' : blocks.is_published(block) ? 'k' : 'f';
  return out;
}

std::string state_json(const ReplayMoment& moment, std::int64_t requests, const std::vector<double>& rates) {
  using nlohmann::json;
  constexpr std::size_t kMostRates = 400;
  const CacheStatistics& c = moment.cache;
  json out = {{"done", moment.counts.requests},
              {"requests", requests},
              {"block_hit_rate", moment.counts.block_hit_rate()},
              {"blocks", block_states(moment.blocks)},
              {"tiers", json::array()},
              {"tenants", json::array()},
              {"rates", json::array()}};
  const std::pair<const char*, std::int64_t> figures[] = {{"running requests", c.requests},
                                                          {"blocks held", c.held_blocks},
                                                          {"blocks kept", c.evictable_blocks},
                                                          {"blocks free", c.free_blocks},
                                                          {"blocks evicted", c.prefix.evicted_blocks},
                                                          {"snapshots", c.prefix.snapshots},
                                                          {"state slots free", c.free_slots},
                                                          {"tokens found", c.prefix.usable_tokens},
                                                          {"tokens replayed", c.prefix.replayed_tokens},
                                                          {"memory, bytes", c.memory_bytes}};
  for (const auto& [what, value] : figures) out["cache"].push_back({what, value});
  for (const tier::ChainStats& t : moment.tiers)
    out["tiers"].push_back({{"name", t.name},
                            {"hits", t.queue.hits},
                            {"misses", t.queue.misses},
                            {"stored", t.queue.stored},
                            {"bytes", t.queue.tier.payload_bytes}});
  for (const TenantUse& t : c.tenants) out["tenants"].push_back({{"blocks", t.blocks}, {"share", t.share_blocks}});
  const std::size_t step = rates.size() / kMostRates + 1;
  for (std::size_t i = 0; i < rates.size(); i += step) out["rates"].push_back(rates[i]);
  return out.dump();
}

}  // namespace

ReplayWatcher::ReplayWatcher(std::string metrics_path, std::optional<int> port, std::int64_t requests)
    : metrics_path_(std::move(metrics_path)), requests_(requests) {
  if (!port) return;
  page_.emplace(*port);
  fmt::print(stderr, "live page: http://127.0.0.1:{}/\n", page_->port());
  std::fflush(stderr);
}

// The file is written once a second, and at the end.
void ReplayWatcher::see(const ReplayMoment& moment) {
  rates_.push_back(moment.counts.block_hit_rate());
  std::string text = metrics_text(moment.cache, moment.tiers);
  const auto now = std::chrono::steady_clock::now();
  const bool last = moment.cache.requests == 0;
  if (!metrics_path_.empty() && (last || now - written_ >= std::chrono::seconds(1))) {
    written_ = now;
    write_metrics(metrics_path_, text);
  }
  if (page_) page_->set(state_json(moment, requests_, rates_), std::move(text));
}

void ReplayWatcher::stay() const {
  if (!page_) return;
  std::fflush(stdout);
  for (;;) pause();
}

}  // namespace kv4::cli
