#include "metrics.h"

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <vector>

#include "base/check.h"

namespace kv4::cli {
namespace {

struct Sample {
  std::string labels;  // `state="free"`, or nothing
  std::int64_t value = 0;
};

class Text {
 public:
  void counter(const char* name, const char* help, const std::vector<Sample>& samples) {
    family(name, "counter", help, samples);
  }
  void gauge(const char* name, const char* help, const std::vector<Sample>& samples) {
    family(name, "gauge", help, samples);
  }
  void histogram(const char* name, const char* help, const TokenHistogram& values) {
    head(name, "histogram", help);
    std::int64_t below = 0;
    for (int i = 0; i < TokenHistogram::kBuckets; ++i) {
      below += values.counts[static_cast<std::size_t>(i)];
      const std::string bound =
          i + 1 < TokenHistogram::kBuckets ? std::to_string(TokenHistogram::bound(i)) : std::string("+Inf");
      out_ += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name, bound, below);
    }
    out_ += fmt::format("{}_sum {}\n{}_count {}\n", name, values.sum, name, below);
  }
  std::string take() { return std::move(out_); }

 private:
  void head(const char* name, const char* type, const char* help) {
    out_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  void family(const char* name, const char* type, const char* help, const std::vector<Sample>& samples) {
    if (samples.empty()) return;
    head(name, type, help);
    for (const Sample& s : samples)
      out_ += s.labels.empty() ? fmt::format("{} {}\n", name, s.value)
                               : fmt::format("{}{{{}}} {}\n", name, s.labels, s.value);
  }
  std::string out_;
};

void add_tiers(Text& text, std::span<const tier::ChainStats> tiers) {
  std::vector<Sample> reads, read_bytes, writes, write_bytes, records, bytes, open;
  for (const tier::ChainStats& each : tiers) {
    const tier::QueueStats& q = each.queue;
    const auto labels = [&](const char* result) { return fmt::format("tier=\"{}\",result=\"{}\"", each.name, result); };
    const std::string tier = fmt::format("tier=\"{}\"", each.name);
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
  text.counter("kv4_tier_reads_total", "Records that were asked for.", reads);
  text.counter("kv4_tier_read_bytes_total", "Bytes of records that were found.", read_bytes);
  text.counter("kv4_tier_writes_total", "Records that were offered.", writes);
  text.counter("kv4_tier_write_bytes_total", "Bytes of records that were stored.", write_bytes);
  text.counter("kv4_tier_breaker_opened_total", "How often a tier was left alone because it failed.", open);
  text.gauge("kv4_tier_records", "Records that a tier keeps.", records);
  text.gauge("kv4_tier_bytes", "Bytes of records that a tier keeps.", bytes);
}

}  // namespace

std::string metrics_text(const CacheStatistics& cache, std::span<const tier::ChainStats> tiers) {
  Text text;
  const PrefixStatistics& p = cache.prefix;
  text.gauge("kv4_requests", "Running requests.", {{"", cache.requests}});
  text.gauge("kv4_requests_max", "Requests that can run at once.", {{"", cache.max_requests}});
  text.gauge("kv4_blocks", "Blocks of the paged pool.",
             {{"state=\"free\"", cache.free_blocks},
              {"state=\"held\"", cache.held_blocks},
              {"state=\"evictable\"", cache.evictable_blocks}});
  text.gauge("kv4_slots", "State slots.",
             {{"state=\"free\"", cache.free_slots}, {"state=\"held\"", cache.slots - cache.free_slots}});
  text.gauge("kv4_memory_bytes", "Memory of the cache.", {{"", cache.memory_bytes}});
  text.counter("kv4_prompts_total", "Prompts that were admitted.",
               {{"result=\"hit\"", p.hits}, {"result=\"miss\"", p.prompts - p.hits}});
  text.counter("kv4_prompt_tokens_total", "Tokens of prompts.",
               {{"result=\"usable\"", p.usable_tokens}, {"result=\"new\"", p.prompt_tokens - p.usable_tokens}});
  text.counter("kv4_replayed_tokens_total", "Usable tokens that were computed again for windows and pending rows.",
               {{"", p.replayed_tokens}});
  text.counter("kv4_prefix_blocks_total", "What became of blocks of the prefix cache.",
               {{"event=\"stored\"", p.stored_blocks},
                {"event=\"joined\"", p.joined_blocks},
                {"event=\"inserted\"", p.inserted_blocks},
                {"event=\"evicted\"", p.evicted_blocks}});
  text.counter("kv4_snapshots_total", "What became of snapshots.",
               {{"event=\"saved\"", p.saved_snapshots},
                {"event=\"restored\"", p.restored_snapshots},
                {"event=\"dropped\"", p.dropped_snapshots}});
  text.gauge("kv4_prefix_blocks", "Blocks that the prefix cache keeps.", {{"", p.blocks}});
  text.gauge("kv4_snapshots", "Snapshots that the prefix cache keeps.", {{"", p.snapshots}});
  std::vector<Sample> use, shares;
  for (std::size_t i = 0; i < cache.tenants.size(); ++i) {
    use.push_back({fmt::format("tenant=\"{}\"", i), cache.tenants[i].blocks});
    shares.push_back({fmt::format("tenant=\"{}\"", i), cache.tenants[i].share_blocks});
  }
  text.gauge("kv4_tenant_blocks", "Kept blocks by tenant.", use);
  text.gauge("kv4_tenant_share_blocks", "Blocks that others cannot evict.", shares);
  text.histogram("kv4_usable_tokens", "Tokens of a prompt that were there.", cache.usable_tokens);
  text.histogram("kv4_replayed_tokens", "Tokens that a hit computed again.", cache.replayed_tokens);
  add_tiers(text, tiers);
  return text.take();
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
