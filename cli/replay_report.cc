#include "replay_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "checks/sizes.h"
#include "interrupts.h"
#include "kv4/names.h"
#include "page.h"
#include "palette.h"
#include "plot.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr int kCapacities = 6;
constexpr double kShares[kCapacities] = {0.01, 0.03, 0.1, 0.25, 0.5, 1.0};  // of all tokens that the trace could store
constexpr std::size_t kMostTenants = 16;                                    // shown in the chart

Series series_of(const std::string& name, const std::string& thing) {
  return {.name = name, .color = color_of(thing), .values = {}};
}

/// The trace's requests in each interval of a result.
std::int64_t requests_per_interval(const Trace& trace) {
  const auto requests = static_cast<std::int64_t>(trace.requests.size());
  return std::max<std::int64_t>(1, (requests + kReplayIntervals - 1) / kReplayIntervals);
}

/// The ends of the intervals. Skipped requests count; an interval of skipped requests only has no hit rate.
std::vector<double> interval_ends(const Report& report) {
  std::vector<double> out;
  const auto requests = static_cast<std::int64_t>(report.trace.requests.size());
  for (std::size_t i = 1; i <= report.data.cache.over_time.size(); ++i)
    out.push_back(
        static_cast<double>(std::min(requests, static_cast<std::int64_t>(i) * requests_per_interval(report.trace))));
  return out;
}

double rate_of(const ReplayCounts& counts) { return counts.ids == 0 ? NAN : counts.block_hit_rate(); }

Plot plot_over_time(const Report& report) {
  const std::int64_t interval = requests_per_interval(report.trace);
  Series each =
      series_of(interval == 1 ? "of each request" : fmt::format("of {} requests each", interval), "found lately");
  Series all = series_of("so far", "found");
  all.dashed = true;
  ReplayCounts sum;
  for (const ReplayCounts& counts : report.data.cache.over_time) {
    sum.add(counts);
    each.values.push_back(rate_of(counts));
    all.values.push_back(rate_of(sum));
  }
  return {.title = "Block hit rate over time",
          .x_label = "requests",
          .x = interval_ends(report),
          .panels = {{.label = "hit rate", .unit = Unit::share, .series = {each, all}, .high = 1}}};
}

Plot plot_evictions(const Report& report) {
  Series found = series_of("found", "found"), computed = series_of("computed", "computed"),
         evicted = series_of("evicted", "evicted");
  for (const ReplayCounts& counts : report.data.cache.over_time) {
    found.values.push_back(static_cast<double>(counts.hit_ids));
    computed.values.push_back(static_cast<double>(counts.ids - counts.hit_ids));
    evicted.values.push_back(static_cast<double>(counts.evicted_ids));
  }
  const std::int64_t interval = requests_per_interval(report.trace);
  return {.title = interval == 1 ? "Blocks by request" : fmt::format("Blocks over time, by {} requests", interval),
          .x_label = "requests",
          .x = interval_ends(report),
          .panels = {{.label = "asked for", .marks = Marks::stack, .series = {found, computed}},
                     {.label = "evicted", .marks = Marks::stack, .series = {evicted}}}};
}

Plot plot_capacity(const Report& report) {
  Plot plot{.title = "Block hit rate against capacity, by policy",
            .x_label = report.bytes_per_token > 0 ? "capacity in tokens (K = 1,024) and bytes"
                                                  : "capacity in tokens (K = 1,024)",
            .x_unit = Unit::tokens,
            .x = {},
            .panels = {{.label = "hit rate", .unit = Unit::share, .marks = Marks::groups, .series = {}, .high = 1}},
            .even = true,
            .bytes_per_token = report.bytes_per_token,
            .bytes_of = "blocks of " + report.model};
  const auto most = static_cast<double>(bound_distinct_ids(report.trace) * report.trace.id_tokens);
  for (const double share : kShares)
    plot.x.push_back(
        static_cast<double>(std::max<std::int64_t>(report.trace.id_tokens, static_cast<std::int64_t>(share * most))));
  for (const auto& [kind, name] : names_of<EvictionKind>()) {
    Series series = series_of(name, name);
    for (const double capacity : plot.x) {
      ReplayOptions each = report.options;
      each.eviction = kind;
      each.tenants = 1;
      each.capacity_tokens = static_cast<std::int64_t>(capacity);
      series.values.push_back(replay_cache(report.trace, each).total.block_hit_rate());
    }
    plot.panels[0].series.push_back(std::move(series));
  }
  return plot;
}

Bar one_bar(const std::string& name, const std::string& thing, double value) {
  return {name, {{thing, color_of(thing), value}}};
}

BarChart chart_snapshots(const Report& report) {
  constexpr std::int64_t kExactReplay = 128 * 43;
  const auto with = [&](SnapshotPolicy policy) {
    ReplayOptions each = report.options;
    each.snapshots = policy;
    return std::round(replay_cache(report.trace, each).total.recomputed_tokens_per_hit());
  };
  return {
      .title = "Tokens computed again per hit, by snapshot policy (mean)",
      .label = "tokens",
      .bars = {one_bar("full", "computed again", 0), one_bar("checkpoint (8192)", "computed again", with({})),
               one_bar("none, exact replay", "computed again", with({SnapshotPolicy::Kind::none, 0, kExactReplay}))}};
}

std::string draw_percentiles(const Report& report) {
  std::vector<std::int64_t> sorted = report.data.cache.recomputed;
  if (sorted.empty()) return "";
  std::sort(sorted.begin(), sorted.end());
  BarChart chart{.title = "Tokens computed again per hit, percentiles of this replay", .label = "tokens", .bars = {}};
  for (const int percent : {50, 90, 99, 100})
    chart.bars.push_back(one_bar(percent == 100 ? "most" : fmt::format("p{}", percent), "computed again",
                                 static_cast<double>(sorted[(sorted.size() - 1) * percent / 100])));
  return draw(chart);
}

std::string draw_tenants(const ReplayResult& result) {
  if (result.tenants.size() < 2) return "";
  BarChart chart{.title = result.tenants.size() > kMostTenants
                              ? fmt::format("Block hit rate by tenant, {} of {}", kMostTenants, result.tenants.size())
                              : "Block hit rate by tenant",
                 .label = "hit rate",
                 .unit = Unit::share,
                 .bars = {},
                 .high = 1};
  for (std::size_t i = 0; i < std::min(result.tenants.size(), kMostTenants); ++i)
    chart.bars.push_back(one_bar(fmt::format("tenant {}", i), "found", result.tenants[i].block_hit_rate()));
  return draw(chart);
}

// With bytes only: the times a request waits for before its first token.
std::string draw_latencies(const DataReplayResult& data) {
  struct Times {
    const char *title, *thing;
    const std::vector<double>& seconds;
  };
  std::string out;
  for (const Times& times :
       {Times{"Admit, restores included: requests no slower than", "admit", data.admit_s},
        Times{"Prefill of what was not there: requests no slower than", "prefill", data.prefill_s}}) {
    if (times.seconds.empty()) continue;
    std::vector<double> sorted = times.seconds;
    std::sort(sorted.begin(), sorted.end());
    Plot plot{.title = times.title, .x_label = "share of the requests", .x_unit = Unit::share, .x = {}, .panels = {}};
    Series series = series_of(times.thing, times.thing);
    for (int percent = 0; percent <= 100; ++percent) {
      plot.x.push_back(percent / 100.0);
      series.values.push_back(sorted[(sorted.size() - 1) * percent / 100]);
    }
    plot.panels = {{.label = "time", .unit = Unit::seconds, .series = {series}}};
    out += draw(plot);
  }
  return out;
}

std::string draw_tiers(const DataReplayResult& data) {
  if (data.tiers.empty()) return "";
  BarChart chart{.title = "Bytes by tier", .label = "bytes", .unit = Unit::bytes, .bars = {}};
  chart.bars.push_back(one_bar("device, kept", "device", static_cast<double>(data.stored_bytes)));
  for (const TierReport& tier : data.tiers)
    for (const auto& [what, bytes] : {std::pair("kept", tier.tier.payload_bytes),
                                      std::pair("stored", tier.stored_bytes), std::pair("found", tier.hit_bytes)})
      if (bytes != tier::TierStats::kUnknown)
        chart.bars.push_back(one_bar(tier.name + ", " + what, tier.name, static_cast<double>(bytes)));
  return draw(chart);
}

std::string rate_words(double rate) { return fmt::format("{:.1f} % ({:.4f})", 100 * rate, rate); }

std::string summary(const Report& report) {
  const ReplayResult& result = report.data.cache;
  const ReplayCounts& total = result.total;
  std::string out = fmt::format("<h1>Replay of {}</h1>\n<table>\n", escape_html(report.name));
  const auto row = [&](const std::string& what, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(what), escape_html(value));
  };
  const std::int64_t capacity = result.capacity_ids * report.trace.id_tokens;
  row("policy", to_string(report.options.eviction));
  row("capacity", report.options.capacity_tokens == 0 ? "without limit" : group_digits(capacity) + " tokens");
  if (report.options.capacity_tokens > 0 && report.bytes_per_token > 0)
    row(fmt::format("capacity in bytes, in blocks of {}", report.model),
        human_bytes(static_cast<double>(capacity) * report.bytes_per_token));
  row("requests", group_digits(total.requests));
  if (report.data.skipped_requests > 0)
    row("requests skipped, longer than the cache", group_digits(report.data.skipped_requests));
  row("block hit rate", rate_words(total.block_hit_rate()));
  row("token hit rate", rate_words(total.token_hit_rate()));
  row("tokens computed again per hit", fmt::format("{:.0f}", total.recomputed_tokens_per_hit()));
  row("blocks evicted", group_digits(total.evicted_ids));
  return out + "</table>\n";
}

}  // namespace

void write_report(const std::string& path, const Report& report) {
  const std::string page = open_page("kv4 replay") + summary(report) + chart_hint() + "<div class=\"figures\">\n" +
                           draw(plot_over_time(report)) + draw(plot_capacity(report)) + draw(plot_evictions(report)) +
                           draw(chart_snapshots(report)) + draw_percentiles(report) + draw_tenants(report.data.cache) +
                           draw_tiers(report.data) + draw_latencies(report.data) + "</div>\n" + close_page();
  if (interrupted()) return;  // its replays are incomplete
  write_file(path, page);
}

}  // namespace kv4::cli
