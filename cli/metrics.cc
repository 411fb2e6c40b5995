#include "metrics.h"

#include <prometheus/text_serializer.h>

#include <cmath>

namespace kv4::cli {
namespace {

using prometheus::MetricType;
using Labels = std::vector<prometheus::ClientMetric::Label>;

struct Sample {
  Labels labels;
  std::int64_t value = 0;
};

/// Families in the order they are added; each has the samples of all caches.
class Families {
 public:
  explicit Families(const std::vector<WatchedCache>& caches) : caches_(caches) {}

  /// `samples(status)`: a cache's.
  template <class Samples>
  void add(MetricType type, const char* name, const char* help, Samples&& samples) {
    prometheus::MetricFamily& family = start(type, name, help);
    for (const WatchedCache& cache : caches_) {
      if (cache.status == nullptr) continue;
      for (const Sample& sample : samples(*cache.status)) {
        prometheus::ClientMetric& metric = measure(family, cache, sample.labels);
        (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = static_cast<double>(sample.value);
      }
    }
  }
  void add_histogram(const char* name, const char* help, TokenHistogram CacheStatistics::*values) {
    prometheus::MetricFamily& family = start(MetricType::Histogram, name, help);
    for (const WatchedCache& cache : caches_) {
      if (cache.status == nullptr) continue;
      const TokenHistogram& from = cache.status->cache.*values;
      auto& out = measure(family, cache, {}).histogram;
      for (int i = 0; i < TokenHistogram::kBuckets; ++i) {
        out.sample_count += static_cast<std::uint64_t>(from.counts[static_cast<std::size_t>(i)]);
        const bool last = i + 1 == TokenHistogram::kBuckets;
        out.bucket.push_back({out.sample_count, last ? INFINITY : static_cast<double>(TokenHistogram::bound(i))});
      }
      out.sample_sum = static_cast<double>(from.sum);
    }
  }
  /// Whether each named cache is there.
  void add_presence() {
    prometheus::MetricFamily& family = start(MetricType::Gauge, "kv4_up", "Whether the cache's process publishes.");
    for (const WatchedCache& cache : caches_)
      if (!cache.name.empty()) measure(family, cache, {}).gauge.value = cache.status != nullptr;
    if (family.metric.empty()) families_.pop_back();
  }
  std::string text() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  prometheus::MetricFamily& start(MetricType type, const char* name, const char* help) {
    families_.push_back({name, help, type, {}});
    return families_.back();
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
  gauge("kv4_tenant_blocks", "Kept blocks by tenant.",
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
  counter("kv4_replayed_tokens_total", "Usable tokens that were computed again for windows and pending rows.",
          [](const PrefixStatistics& p) {
            return Samples{{{}, p.replayed_tokens}};
          });
  counter("kv4_prefix_blocks_total", "What became of blocks of the prefix cache.", [](const PrefixStatistics& p) {
    return Samples{{{{"event", "stored"}}, p.stored_blocks},
                   {{{"event", "joined"}}, p.joined_blocks},
                   {{{"event", "inserted"}}, p.inserted_blocks},
                   {{{"event", "evicted"}}, p.evicted_blocks}};
  });
  counter("kv4_snapshots_total", "What became of snapshots.", [](const PrefixStatistics& p) {
    return Samples{{{{"event", "saved"}}, p.saved_snapshots},
                   {{{"event", "restored"}}, p.restored_snapshots},
                   {{{"event", "dropped"}}, p.dropped_snapshots}};
  });
  families.add_histogram("kv4_usable_tokens", "Tokens of a prompt that were there.", &CacheStatistics::usable_tokens);
  families.add_histogram("kv4_replayed_tokens", "Tokens that a hit computed again.", &CacheStatistics::replayed_tokens);
}

void add_tiers(Families& families) {
  using Result = std::pair<const char*, std::int64_t>;
  // `results(tier)`: values by the label `result`, or one without.
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
    return Results{{"hit", t.hits}, {"miss", t.misses}, {"failed", t.failed_gets}, {"damaged", t.damaged}};
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
  add(MetricType::Gauge, "kv4_tier_open", "Whether a tier is left alone because it failed.", [](const TierReport& t) {
    return Results{{nullptr, t.open}};
  });
  add(MetricType::Counter, "kv4_tier_opened_total", "How often a tier was left alone.", [](const TierReport& t) {
    return Results{{nullptr, t.times_opened}};
  });
  const auto by_reason = [&](MetricType type, const char* name, const char* help, auto&& value) {
    families.add(type, name, help, [&](const CacheStatus& s) {
      Samples out;
      for (const TierReport& tier : s.tiers)
        for (const auto& [reason, count] : tier.failures)
          out.push_back({Labels{{"tier", tier.name}, {"reason", reason}}, value(tier, reason, count)});
      return out;
    });
  };
  by_reason(MetricType::Counter, "kv4_tier_failures_total", "Batches that a server of a tier failed, by reason.",
            [](const TierReport&, const std::string&, std::int64_t count) { return count; });
  by_reason(
      MetricType::Gauge, "kv4_tier_failing", "Whether a server of a tier fails now, for this reason.",
      [](const TierReport& t, const std::string& reason, std::int64_t) -> std::int64_t { return t.failure == reason; });
  add(MetricType::Gauge, "kv4_tier_unauthenticated_records",
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
  add(MetricType::Gauge, "kv4_tier_records", "Records that a tier keeps; -1: only it knows.", [](const TierReport& t) {
    return Results{{nullptr, t.tier.records}};
  });
  add(MetricType::Gauge, "kv4_tier_bytes", "Bytes of records that a tier keeps; -1: only it knows.",
      [](const TierReport& t) {
        return Results{{nullptr, t.tier.payload_bytes}};
      });
}

}  // namespace

std::string metrics_text(const std::vector<WatchedCache>& caches) {
  Families families(caches);
  families.add_presence();
  add_cache(families);
  add_prefix(families);
  add_tiers(families);
  return families.text();
}

}  // namespace kv4::cli
