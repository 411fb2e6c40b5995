#include "replay_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "interrupts.h"
#include "page.h"
#include "plot.h"
#include "sizes.h"

namespace kv4::cli {
namespace {

Plot plot_over_time(const ReplayResult& result) {
  Plot plot{"Block hit rate over time", "requests", "hit rate", {}, false, 1.0};
  Series each{"each hundredth", {}, {}}, all{"so far", {}, {}, true};
  ReplayCounts sum;
  for (const ReplayCounts& counts : result.over_time) {
    sum.add(counts);
    each.x.push_back(static_cast<double>(sum.requests));
    each.y.push_back(counts.block_hit_rate());
    all.x.push_back(static_cast<double>(sum.requests));
    all.y.push_back(sum.block_hit_rate());
  }
  plot.series = {each, all};
  return plot;
}

Plot plot_evictions(const ReplayResult& result) {
  Plot plot{"Blocks over time", "requests", "blocks per hundredth", {}};
  Series found{"found", {}, {}}, computed{"computed", {}, {}}, evicted{"evicted", {}, {}};
  double requests = 0;
  for (const ReplayCounts& counts : result.over_time) {
    requests += static_cast<double>(counts.requests);
    for (Series* s : {&found, &computed, &evicted}) s->x.push_back(requests);
    found.y.push_back(static_cast<double>(counts.hit_ids));
    computed.y.push_back(static_cast<double>(counts.ids - counts.hit_ids));
    evicted.y.push_back(static_cast<double>(counts.evicted_ids));
  }
  plot.series = {found, computed, evicted};
  return plot;
}

// From a hundredth of all tokens that could be kept up to all of them, in steps that look even on the logarithmic axis.
Plot plot_capacity(const Trace& trace, const ReplayOptions& options) {
  constexpr int kCapacities = 6;
  constexpr double kShares[kCapacities] = {0.01, 0.03, 0.1, 0.25, 0.5, 1.0};
  Plot plot{"Block hit rate against capacity", "tokens kept", "hit rate", {}, true, 1.0};
  const auto most = static_cast<double>(bound_distinct_ids(trace) * trace.id_tokens);
  for (const EvictionKind kind : kEvictionKinds) {
    Series series{to_string(kind), {}, {}};
    for (const double share : kShares) {
      ReplayOptions each = options;
      each.eviction = kind;
      each.tenants = 1;
      each.capacity_tokens = std::max<std::int64_t>(trace.id_tokens, static_cast<std::int64_t>(share * most));
      series.x.push_back(static_cast<double>(each.capacity_tokens));
      series.y.push_back(replay_cache(trace, each).total.block_hit_rate());
    }
    plot.series.push_back(std::move(series));
  }
  return plot;
}

std::string draw_recomputed(const Trace& trace, const ReplayOptions& options, const ReplayResult& result) {
  constexpr std::int64_t kExactReplay = 128 * 43;
  const auto with = [&](SnapshotPolicy policy) {
    ReplayOptions each = options;
    each.snapshots = policy;
    return replay_cache(trace, each).total.recomputed_tokens_per_hit();
  };
  const double checkpoint = with({});
  const double none = with({SnapshotPolicy::Kind::none, 0, kExactReplay});
  std::vector<Bar> bars{{"full", 0}, {"checkpoint (8192)", checkpoint}, {"none, exact replay", none}};
  std::vector<std::int64_t> sorted = result.recomputed;
  std::sort(sorted.begin(), sorted.end());
  for (const int percent : {50, 90, 99})
    if (!sorted.empty())
      bars.push_back({fmt::format("this replay, {} %", percent),
                      static_cast<double>(sorted[(sorted.size() - 1) * static_cast<std::size_t>(percent) / 100])});
  return draw_bars("Tokens computed again per hit, by snapshots kept", "tokens", bars);
}

std::string draw_tenants(const ReplayResult& result) {
  if (result.tenants.size() < 2) return "";
  std::vector<Bar> bars;
  for (std::size_t i = 0; i < std::min<std::size_t>(result.tenants.size(), 16); ++i)
    bars.push_back({fmt::format("tenant {}", i), result.tenants[i].block_hit_rate()});
  return draw_bars("Block hit rate by tenant", "", bars);
}

// With bytes only: what a request waited for before its first token.
std::string draw_latencies(const DataReplayResult& data) {
  std::string out;
  for (const auto& [title, seconds] : {std::pair("Admit, restores included", &data.admit_s),
                                       std::pair("Prefill of what was not there", &data.prefill_s)}) {
    if (seconds->empty()) continue;
    Plot plot{std::string(title) + ": requests no slower than", "share of the requests", "ms", {}};
    std::vector<double> sorted = *seconds;
    std::sort(sorted.begin(), sorted.end());
    Series series{"ms", {}, {}};
    for (int percent = 0; percent <= 100; percent += 2) {
      series.x.push_back(percent / 100.0);
      series.y.push_back(1e3 * sorted[(sorted.size() - 1) * static_cast<std::size_t>(percent) / 100]);
    }
    plot.series = {series};
    out += draw_lines(plot);
  }
  return out;
}

std::string draw_tiers(const DataReplayResult& data) {
  if (data.tiers.empty()) return "";
  std::vector<Bar> bars{{"device, kept", static_cast<double>(data.stored_bytes)}};
  for (const TierReport& tier : data.tiers) {
    bars.push_back({tier.name + ", kept", static_cast<double>(tier.tier.payload_bytes)});
    bars.push_back({tier.name + ", stored", static_cast<double>(tier.stored_bytes)});
    bars.push_back({tier.name + ", found", static_cast<double>(tier.hit_bytes)});
  }
  return draw_bars("Bytes by tier", "B", bars);
}

std::string summary(const std::string& name, const Trace& trace, const ReplayOptions& options,
                    const ReplayResult& result) {
  const ReplayCounts& total = result.total;
  std::string out = fmt::format("<h1>Replay of {}</h1>\n<table>\n", escape_html(name));
  const auto row = [&](const std::string& what, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(what), escape_html(value));
  };
  row("policy", to_string(options.eviction));
  row("capacity",
      options.capacity_tokens == 0 ? "without limit" : group_digits(result.capacity_ids * trace.id_tokens) + " tokens");
  row("requests", group_digits(total.requests));
  row("block hit rate", fmt::format("{:.4f}", total.block_hit_rate()));
  row("token hit rate", fmt::format("{:.4f}", total.token_hit_rate()));
  row("tokens computed again per hit", fmt::format("{:.0f}", total.recomputed_tokens_per_hit()));
  row("blocks evicted", group_digits(total.evicted_ids));
  return out + "</table>\n";
}

}  // namespace

void write_report(const std::string& path, const std::string& name, const Trace& trace, const ReplayOptions& options,
                  const DataReplayResult& data) {
  const ReplayResult& result = data.cache;
  const std::string page = open_page("kv4 replay") + summary(name, trace, options, result) +
                           "<div class=\"figures\">\n" + draw_lines(plot_over_time(result)) +
                           draw_lines(plot_capacity(trace, options)) + draw_recomputed(trace, options, result) +
                           draw_lines(plot_evictions(result)) + draw_tenants(result) + draw_tiers(data) +
                           draw_latencies(data) + "</div>\n" + close_page();
  if (interrupted()) return;  // its replays are not complete
  write_file(path, page);
}

}  // namespace kv4::cli
