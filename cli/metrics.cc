#include "metrics.h"

#include <prometheus/text_serializer.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <vector>

#include "base/check.h"

namespace kv4::cli {
namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;

struct Sample {
  Labels labels;
  std::int64_t value = 0;
};

/// Families in the order they are added.
class Families {
 public:
  void counter(const char* name, const char* help, const std::vector<Sample>& samples) {
    prometheus::MetricFamily& family = add(name, help, prometheus::MetricType::Counter);
    for (const Sample& s : samples) measure(family, s.labels).counter.value = static_cast<double>(s.value);
  }
  void gauge(const char* name, const char* help, const std::vector<Sample>& samples) {
    prometheus::MetricFamily& family = add(name, help, prometheus::MetricType::Gauge);
    for (const Sample& s : samples) measure(family, s.labels).gauge.value = static_cast<double>(s.value);
  }
  void histogram(const char* name, const char* help, const TokenHistogram& values) {
    prometheus::MetricFamily& family = add(name, help, prometheus::MetricType::Histogram);
    auto& out = measure(family, {}).histogram;
    for (int i = 0; i < TokenHistogram::kBuckets; ++i) {
      out.sample_count += static_cast<std::uint64_t>(values.counts[static_cast<std::size_t>(i)]);
      const bool last = i + 1 == TokenHistogram::kBuckets;
      out.bucket.push_back({out.sample_count, last ? INFINITY : static_cast<double>(TokenHistogram::bound(i))});
    }
    out.sample_sum = static_cast<double>(values.sum);
  }
  std::string text() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  prometheus::MetricFamily& add(const char* name, const char* help, prometheus::MetricType type) {
    families_.push_back({name, help, type, {}});
    return families_.back();
  }
  static prometheus::ClientMetric& measure(prometheus::MetricFamily& family, const Labels& labels) {
    family.metric.emplace_back().label = labels;
    return family.metric.back();
  }
  std::vector<prometheus::MetricFamily> families_;
};

void add_tiers(Families& families, std::span<const tier::ChainStats> tiers) {
  std::vector<Sample> reads, read_bytes, writes, write_bytes, records, bytes, open;
  for (const tier::ChainStats& each : tiers) {
    const tier::QueueStats& q = each.queue;
    const auto labels = [&](const char* result) { return Labels{{"tier", each.name}, {"result", result}}; };
    const Labels tier{{"tier", each.name}};
    reads.push_back({labels("hit"), q.hits});
    reads.push_back({labels("miss"), q.misses});
    reads.push_back({labels("failed"), q.failed_gets});
    reads.push_back({labels("damaged"), q.damaged});
    read_bytes.push_back({tier, q.hit_bytes});
    writes.push_back({labels("stored"), q.stored});
    writes.push_back({labels("failed"), q.failed_puts});
    writes.push_back({labels("refused"), q.refused_puts});
    write_bytes.push_back({tier, q.stored_bytes});
    records.push_back({tier, q.tier.records});
    bytes.push_back({tier, q.tier.payload_bytes});
    open.push_back({tier, q.times_opened});
  }
  families.counter("kv4_tier_reads_total", "Records that were asked for.", reads);
  families.counter("kv4_tier_read_bytes_total", "Bytes of records that were found.", read_bytes);
  families.counter("kv4_tier_writes_total", "Records that were offered.", writes);
  families.counter("kv4_tier_write_bytes_total", "Bytes of records that were stored.", write_bytes);
  families.counter("kv4_tier_breaker_opened_total", "How often a tier was left alone because it failed.", open);
  families.gauge("kv4_tier_records", "Records that a tier keeps.", records);
  families.gauge("kv4_tier_bytes", "Bytes of records that a tier keeps.", bytes);
}

}  // namespace

std::string metrics_text(const CacheStatistics& cache, std::span<const tier::ChainStats> tiers) {
  Families families;
  const PrefixStatistics& p = cache.prefix;
  families.gauge("kv4_requests", "Running requests.", {{{}, cache.requests}});
  families.gauge("kv4_requests_max", "Requests that can run at once.", {{{}, cache.max_requests}});
  families.gauge("kv4_blocks", "Blocks of the paged pool.",
                 {{{{"state", "free"}}, cache.free_blocks},
                  {{{"state", "held"}}, cache.held_blocks},
                  {{{"state", "evictable"}}, cache.evictable_blocks}});
  families.gauge("kv4_slots", "State slots.",
                 {{{{"state", "free"}}, cache.free_slots}, {{{"state", "held"}}, cache.slots - cache.free_slots}});
  families.gauge("kv4_memory_bytes", "Memory of the cache.", {{{}, cache.memory_bytes}});
  families.counter("kv4_prompts_total", "Prompts that were admitted.",
                   {{{{"result", "hit"}}, p.hits}, {{{"result", "miss"}}, p.prompts - p.hits}});
  families.counter(
      "kv4_prompt_tokens_total", "Tokens of prompts.",
      {{{{"result", "usable"}}, p.usable_tokens}, {{{"result", "new"}}, p.prompt_tokens - p.usable_tokens}});
  families.counter("kv4_replayed_tokens_total", "Usable tokens that were computed again for windows and pending rows.",
                   {{{}, p.replayed_tokens}});
  families.counter("kv4_prefix_blocks_total", "What became of blocks of the prefix cache.",
                   {{{{"event", "stored"}}, p.stored_blocks},
                    {{{"event", "joined"}}, p.joined_blocks},
                    {{{"event", "inserted"}}, p.inserted_blocks},
                    {{{"event", "evicted"}}, p.evicted_blocks}});
  families.counter("kv4_snapshots_total", "What became of snapshots.",
                   {{{{"event", "saved"}}, p.saved_snapshots},
                    {{{"event", "restored"}}, p.restored_snapshots},
                    {{{"event", "dropped"}}, p.dropped_snapshots}});
  families.gauge("kv4_prefix_blocks", "Blocks that the prefix cache keeps.", {{{}, p.blocks}});
  families.gauge("kv4_snapshots", "Snapshots that the prefix cache keeps.", {{{}, p.snapshots}});
  std::vector<Sample> use, shares;
  for (std::size_t i = 0; i < cache.tenants.size(); ++i) {
    use.push_back({Labels{{"tenant", std::to_string(i)}}, cache.tenants[i].blocks});
    shares.push_back({Labels{{"tenant", std::to_string(i)}}, cache.tenants[i].share_blocks});
  }
  families.gauge("kv4_tenant_blocks", "Kept blocks by tenant.", use);
  families.gauge("kv4_tenant_share_blocks", "Blocks that others cannot evict.", shares);
  families.histogram("kv4_usable_tokens", "Tokens of a prompt that were there.", cache.usable_tokens);
  families.histogram("kv4_replayed_tokens", "Tokens that a hit computed again.", cache.replayed_tokens);
  add_tiers(families, tiers);
  return families.text();
}

void write_metrics(const std::string& path, const std::string& text) {
  const std::string next = path + ".new";
  std::ofstream file(next, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  require(!file.fail() && std::rename(next.c_str(), path.c_str()) == 0, ErrorCode::bad_file,
          "the metrics cannot be written to {}; is the folder there, and writable?", path);
}

}  // namespace kv4::cli
