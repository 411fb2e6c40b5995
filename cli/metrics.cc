#include "metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "openmetrics.h"

namespace kv4::cli {
namespace {

using prometheus::MetricType;
using Labels = std::vector<prometheus::ClientMetric::Label>;

struct Sample {
  Labels labels;
  std::int64_t value = 0;
};

/// True where the status comes from a cache that reports times; 0.1 does not.
bool tells_times(const CacheStatus& status) { return !status.build.version.empty(); }

double bound_of(const TokenHistogram&, int bucket) { return static_cast<double>(TokenHistogram::bound(bucket)); }
double bound_of(const TimeHistogram&, int bucket) {  // a quotient gives 2.5e-06, a product 2.4999999999999998e-06
  return static_cast<double>(TimeHistogram::kBoundsNs[bucket]) / 1e9;
}
double sum_of(const TokenHistogram& histogram) { return static_cast<double>(histogram.sum); }
double sum_of(const TimeHistogram& histogram) { return histogram.seconds(); }

/// A histogram of a cache, and the labels that tell it from others of its family.
template <class Histogram>
struct Distribution {
  Labels labels;
  const Histogram* values = nullptr;
};

/// Families in the order of their addition, each with the samples of all caches. Families without samples are left out.
class Families {
 public:
  explicit Families(const std::vector<WatchedCache>& caches) : caches_(caches) {}

  /// `samples(status)` gives the samples of one cache. A value below 0 is unknown and gives no sample.
  template <class Samples>
  void add(MetricType type, const char* name, const char* help, Samples&& samples) {
    prometheus::MetricFamily& family = start(type, name, help);
    for (const WatchedCache& cache : caches_) {
      if (cache.status == nullptr) continue;
      for (const Sample& sample : samples(*cache.status)) {
        if (sample.value < 0) continue;
        prometheus::ClientMetric& metric = measure(family, cache, sample.labels);
        (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = static_cast<double>(sample.value);
      }
    }
    end();
  }
  /// `distributions(status)` gives the histograms of one cache.
  template <class Histogram, class Distributions>
  void add_histogram(const char* name, const char* help, Distributions&& distributions) {
    prometheus::MetricFamily& family = start(MetricType::Histogram, name, help);
    for (const WatchedCache& cache : caches_) {
      if (cache.status == nullptr) continue;
      for (const Distribution<Histogram>& each : distributions(*cache.status)) {
        const auto& counts = each.values->counts;
        if (std::any_of(counts.begin(), counts.end(), [](std::int64_t count) { return count < 0; })) continue;
        auto& out = measure(family, cache, each.labels).histogram;
        for (int i = 0; i < Histogram::kBuckets; ++i) {
          out.sample_count += static_cast<std::uint64_t>(counts[i]);
          const bool last = i + 1 == Histogram::kBuckets;
          out.bucket.push_back({out.sample_count, last ? INFINITY : bound_of(*each.values, i)});
        }
        out.sample_sum = std::max(sum_of(*each.values), 0.0);
      }
    }
    end();
  }
  /// Adds a gauge per named cache: 1 where its status is present.
  void add_presence() {
    prometheus::MetricFamily& family = start(MetricType::Gauge, "kv4_up", "Whether the cache's process publishes.");
    for (const WatchedCache& cache : caches_)
      if (!cache.name.empty()) measure(family, cache, {}).gauge.value = cache.status != nullptr;
    end();
  }
  MetricsText text() const { return {prometheus::TextSerializer().Serialize(families_), openmetrics_text(families_)}; }

 private:
  prometheus::MetricFamily& start(MetricType type, const char* name, const char* help) {
    families_.push_back({name, help, type, {}});
    return families_.back();
  }
  void end() {
    if (families_.back().metric.empty()) families_.pop_back();
  }
  static prometheus::ClientMetric& measure(prometheus::MetricFamily& family, const WatchedCache& cache,
                                           const Labels& labels) {
    prometheus::ClientMetric& metric = family.metric.emplace_back();
    if (!cache.name.empty()) metric.label.push_back({"cache", cache.name});
    metric.label.insert(metric.label.end(), labels.begin(), labels.end());
    return metric;
  }
  const std::vector<WatchedCache>& caches_;
  std::vector<prometheus::MetricFamily> families_;
};

using Samples = std::vector<Sample>;

void add_build(Families& families) {
  families.add(
      MetricType::Gauge, "kv4_build_info", "The library that the cache runs with; always 1.", [](const CacheStatus& s) {
        if (s.build.version.empty()) return Samples{};
        return Samples{
            {{{"version", s.build.version}, {"cuda", s.build.cuda ? "on" : "off"}, {"compiler", s.build.compiler}}, 1}};
      });
}

void add_cache(Families& families) {
  const auto gauge = [&](const char* name, const char* help, auto&& samples) {
    families.add(MetricType::Gauge, name, help, [&](const CacheStatus& s) -> Samples { return samples(s.cache); });
  };
  gauge("kv4_requests", "Running requests.", [](const CacheStatistics& c) { return Samples{{{}, c.requests}}; });
  gauge("kv4_requests_max", "Requests that can run at once.", [](const CacheStatistics& c) {
    return Samples{{{}, c.max_requests}};
  });
  gauge("kv4_blocks", "Blocks of the paged pool.", [](const CacheStatistics& c) {
    return Samples{{{{"state", "free"}}, c.free_blocks},
                   {{{"state", "held"}}, c.held_blocks},
                   {{{"state", "evictable"}}, c.evictable_blocks}};
  });
  gauge("kv4_slots", "State slots.", [](const CacheStatistics& c) {
    return Samples{{{{"state", "free"}}, c.free_slots}, {{{"state", "held"}}, c.slots - c.free_slots}};
  });
  gauge("kv4_memory_bytes", "Memory of the cache.", [](const CacheStatistics& c) {
    return Samples{{{}, c.memory_bytes}};
  });
  gauge("kv4_prefix_blocks", "Blocks that the prefix cache keeps.", [](const CacheStatistics& c) {
    return Samples{{{}, c.prefix.blocks}};
  });
  gauge("kv4_snapshots", "Snapshots that the prefix cache keeps.", [](const CacheStatistics& c) {
    return Samples{{{}, c.prefix.snapshots}};
  });
  const auto by_tenant = [](const CacheStatistics& c, std::int64_t TenantUse::*value) {
    Samples out;
    for (std::size_t i = 0; i < c.tenants.size(); ++i)
      out.push_back({Labels{{"tenant", std::to_string(i)}}, c.tenants[i].*value});
    return out;
  };
  gauge("kv4_tenant_blocks", "Prefix blocks by tenant.",
        [&](const CacheStatistics& c) { return by_tenant(c, &TenantUse::blocks); });
  gauge("kv4_tenant_share_blocks", "Blocks that others cannot evict.",
        [&](const CacheStatistics& c) { return by_tenant(c, &TenantUse::share_blocks); });
}

void add_prefix(Families& families) {
  const auto counter = [&](const char* name, const char* help, auto&& samples) {
    families.add(MetricType::Counter, name, help,
                 [&](const CacheStatus& s) -> Samples { return samples(s.cache.prefix); });
  };
  counter("kv4_prompts_total", "Prompts that were admitted.", [](const PrefixStatistics& p) {
    return Samples{{{{"result", "hit"}}, p.hits}, {{{"result", "miss"}}, p.prompts - p.hits}};
  });
  counter("kv4_prompt_tokens_total", "Tokens of prompts.", [](const PrefixStatistics& p) {
    return Samples{{{{"result", "usable"}}, p.usable_tokens}, {{{"result", "new"}}, p.prompt_tokens - p.usable_tokens}};
  });
  counter("kv4_prefix_block_events_total", "What became of blocks of the prefix cache.", [](const PrefixStatistics& p) {
    return Samples{{{{"event", "stored"}}, p.stored_blocks},
                   {{{"event", "joined"}}, p.joined_blocks},
                   {{{"event", "inserted"}}, p.inserted_blocks},
                   {{{"event", "evicted"}}, p.evicted_blocks}};
  });
  counter("kv4_snapshot_events_total", "What became of snapshots.", [](const PrefixStatistics& p) {
    return Samples{{{{"event", "saved"}}, p.saved_snapshots},
                   {{{"event", "restored"}}, p.restored_snapshots},
                   {{{"event", "dropped"}}, p.dropped_snapshots}};
  });
  counter("kv4_block_events_lost_total", "Events of blocks that nobody had read in time.",
          [](const PrefixStatistics& p) {
            return Samples{{{}, static_cast<std::int64_t>(p.lost_events)}};
          });
  using Tokens = std::vector<Distribution<TokenHistogram>>;
  families.add_histogram<TokenHistogram>("kv4_usable_tokens", "Tokens of a prompt that were there.",
                                         [](const CacheStatus& s) {
                                           return Tokens{{{}, &s.cache.usable_tokens}};
                                         });
  families.add_histogram<TokenHistogram>("kv4_replayed_tokens",
                                         "Usable tokens that a hit computed again for windows and pending rows.",
                                         [](const CacheStatus& s) {
                                           return Tokens{{{}, &s.cache.replayed_tokens}};
                                         });
}

void add_calls(Families& families) {
  using Times = std::vector<Distribution<TimeHistogram>>;
  const auto times = [&](const char* name, const char* help, auto&& distributions) {
    families.add_histogram<TimeHistogram>(
        name, help, [&](const CacheStatus& s) { return tells_times(s) ? distributions(s.cache.times) : Times{}; });
  };
  times("kv4_admit_seconds", "Time of calls that admit a request.", [](const CallTimes& t) {
    return Times{{{}, &t.admit}};
  });
  times("kv4_prepare_forward_seconds", "Time of calls that prepare a step.", [](const CallTimes& t) {
    return Times{{{}, &t.prepare_forward}};
  });
  times("kv4_load_seconds", "Time until a prompt came from tiers, or a session from a file or stream.",
        [](const CallTimes& t) {
          return Times{{{{"place", "tiers"}}, &t.tier_load}, {{{"place", "session"}}, &t.session_restore}};
        });
  times("kv4_save_seconds", "Time of calls that offer blocks to tiers, or save a session.", [](const CallTimes& t) {
    return Times{{{{"place", "tiers"}}, &t.tier_save}, {{{"place", "session"}}, &t.session_save}};
  });
  families.add(MetricType::Counter, "kv4_shortages_total", "Calls that found no room, by what was short.",
               [](const CacheStatus& s) {
                 Samples out;
                 const auto add = [&](const char* call, const ShortageCounts& counts) {
                   const std::pair<const char*, std::int64_t> named[] = {
                       {"requests", counts.requests}, {"blocks", counts.blocks}, {"slots", counts.slots}};
                   for (const auto& [what, count] : named) out.push_back({{{"call", call}, {"shortage", what}}, count});
                 };
                 if (!tells_times(s)) return out;
                 add("admit", s.cache.admit_shortages);
                 add("prepare_forward", s.cache.prepare_forward_shortages);
                 return out;
               });
}

/// Has a 0 for every reason that has not come up: a counter that begins at 1 hides its first rise. The process's own
/// memory and disk tiers have none of these reasons.
std::map<std::string, std::int64_t> failures_of(const TierReport& tier) {
  std::map<std::string, std::int64_t> out = tier.failures;
  if (tier.name == "host" || tier.name == "disk") return out;
  for (std::size_t i = 1; i < tier::kFailureReasons; ++i)
    out.try_emplace(tier::to_string(static_cast<tier::FailureReason>(i)), 0);
  return out;
}

void add_tiers(Families& families) {
  using Result = std::pair<const char*, std::int64_t>;
  // `results(tier)`: values by the label `result`, or one value without it.
  const auto add = [&](MetricType type, const char* name, const char* help, auto&& results) {
    families.add(type, name, help, [&](const CacheStatus& s) {
      Samples out;
      for (const TierReport& tier : s.tiers)
        for (const Result& result : results(tier)) {
          Labels labels{{"tier", tier.name}};
          if (result.first != nullptr) labels.push_back({"result", result.first});
          out.push_back({labels, result.second});
        }
      return out;
    });
  };
  using Results = std::vector<Result>;
  add(MetricType::Counter, "kv4_tier_reads_total", "Records that were asked for.", [](const TierReport& t) {
    return Results{// a report counts a damaged record as a miss; these are separate
                   {"hit", t.hits},
                   {"miss", t.misses - t.damaged},
                   {"failed", t.failed_gets},
                   {"damaged", t.damaged}};
  });
  add(MetricType::Counter, "kv4_tier_read_bytes_total", "Bytes of records that were found.", [](const TierReport& t) {
    return Results{{nullptr, t.hit_bytes}};
  });
  add(MetricType::Counter, "kv4_tier_writes_total", "Records that were offered.", [](const TierReport& t) {
    return Results{{"stored", t.stored}, {"failed", t.failed_puts}, {"refused", t.refused_puts}};
  });
  add(MetricType::Counter, "kv4_tier_write_bytes_total", "Bytes of records that were stored.", [](const TierReport& t) {
    return Results{{nullptr, t.stored_bytes}};
  });
  add(MetricType::Gauge, "kv4_tier_healthy", "1: a tier is asked; 0: it failed and is left alone for a while.",
      [](const TierReport& t) {
        return Results{{nullptr, t.open ? 0 : 1}};
      });
  add(MetricType::Counter, "kv4_tier_breaker_opened_total", "How often a tier was left alone.",
      [](const TierReport& t) {
        return Results{{nullptr, t.times_opened}};
      });
  const auto by_reason = [&](MetricType type, const char* name, const char* help, auto&& value) {
    families.add(type, name, help, [&](const CacheStatus& s) {
      Samples out;
      for (const TierReport& tier : s.tiers)
        for (const auto& [reason, count] : failures_of(tier))
          out.push_back({Labels{{"tier", tier.name}, {"reason", reason}}, value(tier, reason, count)});
      return out;
    });
  };
  by_reason(MetricType::Counter, "kv4_tier_failures_total", "Batches that a server of a tier failed, by reason.",
            [](const TierReport&, const std::string&, std::int64_t count) { return count; });
  by_reason(
      MetricType::Gauge, "kv4_tier_failing", "Whether a server of a tier fails now, for this reason.",
      [](const TierReport& t, const std::string& reason, std::int64_t) -> std::int64_t { return t.failure == reason; });
  add(MetricType::Counter, "kv4_tier_unauthenticated_records_total",
      "Records that were not believed: no key of the cache's protects them.", [](const TierReport& t) {
        return Results{{nullptr, t.tier.unauthenticated_records}};
      });
  add(MetricType::Gauge, "kv4_tier_protected", "Whether what a tier is given to keep is sealed or authenticated.",
      [](const TierReport& t) {
        return Results{{nullptr, t.protection != Protection::none ? 1 : 0}};
      });
  add(MetricType::Gauge, "kv4_tier_waiting_bytes", "Bytes that wait to be written.", [](const TierReport& t) {
    return Results{{nullptr, t.waiting_bytes}};
  });
  add(MetricType::Gauge, "kv4_tier_records", "Records that a tier keeps; not of tiers that others fill, too.",
      [](const TierReport& t) {
        return Results{{nullptr, t.tier.records}};
      });
  add(MetricType::Gauge, "kv4_tier_bytes", "Bytes of records that a tier keeps; not of tiers that others fill, too.",
      [](const TierReport& t) {
        return Results{{nullptr, t.tier.payload_bytes}};
      });
  add(MetricType::Gauge, "kv4_tier_capacity_bytes", "Bytes that a tier can keep, where it is the cache's to say.",
      [](const TierReport& t) {
        return Results{{nullptr, t.tier.capacity_bytes}};
      });
  add(MetricType::Counter, "kv4_tier_promoted_records_total", "Records that were found below and put here.",
      [](const TierReport& t) {
        return Results{{nullptr, t.promoted}};
      });
  add(MetricType::Counter, "kv4_tier_evicted_records_total", "Records that made room for others.",
      [](const TierReport& t) {
        return Results{{nullptr, t.tier.evicted_records}};
      });
  using Times = std::vector<Distribution<TimeHistogram>>;
  const auto times = [&](const char* name, const char* help, TimeHistogram TierReport::*values) {
    families.add_histogram<TimeHistogram>(name, help, [&](const CacheStatus& s) {
      Times out;
      if (!tells_times(s)) return out;
      for (const TierReport& tier : s.tiers) out.push_back({{{"tier", tier.name}}, &(tier.*values)});
      return out;
    });
  };
  times("kv4_tier_get_seconds", "Time of a tier's calls that read records, a batch each.", &TierReport::get_times);
  times("kv4_tier_put_seconds", "Time of a tier's calls that write records, a batch each.", &TierReport::put_times);
}

}  // namespace

MetricsText metrics_text(const std::vector<WatchedCache>& caches) {
  Families families(caches);
  families.add_presence();
  add_build(families);
  add_cache(families);
  add_prefix(families);
  add_calls(families);
  add_tiers(families);
  return families.text();
}

}  // namespace kv4::cli
