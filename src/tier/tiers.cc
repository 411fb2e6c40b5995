#include "kv4/tiers.h"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "tier/disk_tier.h"
#include "tier/host_tier.h"
#include "tier/record_cipher.h"
#include "tier/remote_tier.h"
#include "tier/tier_chain.h"

namespace kv4 {
namespace {

constexpr std::int64_t kPageAlignment = 4096, kLeastPageBytes = 16 << 10;

/// A block fits a page, so that it can be given out where it lies.
std::int64_t host_page_bytes(const CacheSchema& schema) {
  const std::int64_t record_bytes = tier::kRecordHeaderBytes + schema.block_image_bytes;
  return std::max(kLeastPageBytes, ceil_div(record_bytes, kPageAlignment) * kPageAlignment);
}

tier::RedisAddress parse_address(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  tier::RedisAddress address;
  const char* const end = text.data() + text.size();
  const bool good = colon != std::string::npos && colon > 0 &&
                    std::from_chars(text.data() + colon + 1, end, address.port).ptr == end && colon + 1 < text.size();
  require(good, ErrorCode::bad_argument, "'{}' is no server; write host:port", text);
  address.host = text.substr(0, colon);
  return address;
}

tier::StoreOptions store_options(const CacheSchema& schema, const TiersOptions& options) {
  tier::StoreOptions store;
  store.directory = options.directory;
  store.layout_id = schema.layout_id;
  store.segment_bytes = options.segment_bytes;
  store.capacity_bytes = options.disk_bytes;
  store.read_threads = options.disk_threads;
  if (options.disk_key) store.cipher = std::make_shared<tier::RecordCipher>(*options.disk_key);
  return store;
}

tier::RemoteOptions remote_options(const CacheSchema& schema, const TiersOptions& options) {
  tier::RemoteOptions remote;
  for (const std::string& server : options.servers) remote.servers.push_back(parse_address(server));
  remote.user = options.user;
  remote.password = options.password;
  remote.layout_id = schema.layout_id;
  return remote;
}

}  // namespace

Tiers::Tiers(const CacheSchema& schema, const TiersOptions& options) try : backend_(options.backend) {
  const auto clock = std::make_shared<tier::SteadyClock>();
  std::vector<std::shared_ptr<tier::Tier>> all;
  if (options.host_bytes > 0) {
    const std::int64_t page_bytes = host_page_bytes(schema), pages = ceil_div(options.host_bytes, page_bytes);
    all.push_back(std::make_shared<tier::HostTier>(
        tier::HostTierOptions{schema.layout_id, pages * page_bytes, page_bytes, options.host_threads, options.backend},
        clock));
  }
  if (!options.directory.empty())
    all.push_back(
        std::make_shared<tier::DiskTier>(tier::make_posix_file_system(), store_options(schema, options), clock));
  if (!options.servers.empty()) all.push_back(tier::make_remote_tier(remote_options(schema, options)));
  all.insert(all.end(), options.more.begin(), options.more.end());
  require(!all.empty(), ErrorCode::bad_argument, "no tier is asked for; set host_bytes, directory, servers or more");

  tier::TierQueueOptions queue;
  queue.max_write_bytes = options.max_write_bytes;
  queue.max_read_bytes = options.max_read_bytes;
  queue.close_limit = options.close_limit;
  std::vector<std::unique_ptr<tier::TierQueue>> queues;
  for (std::shared_ptr<tier::Tier>& each : all)
    queues.push_back(std::make_unique<tier::TierQueue>(std::move(each), queue, clock));
  chain_ = std::make_unique<tier::TierChain>(std::move(queues), clock);
} catch (const std::bad_alloc&) {
  fail_for_memory();
} catch (const std::system_error& e) {  // of a thread
  fail(ErrorCode::out_of_memory, "the system refused a thread of a tier: {}", e.what());
}

Tiers::~Tiers() = default;
Tiers::Tiers(Tiers&&) noexcept = default;

std::vector<tier::FlushStatus> Tiers::flush(tier::Deadline deadline) try {
  const OneThread::Call call(chain_->driver());
  return chain_->flush(deadline);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<tier::FlushStatus> Tiers::close(tier::Deadline deadline) try {
  const OneThread::Call call(chain_->driver());
  return chain_->close(deadline);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<TierReport> Tiers::report() try {
  const OneThread::Call call(chain_->driver());
  std::vector<TierReport> reports;
  for (const tier::ChainStats& each : chain_->stats()) {
    const tier::QueueStats& q = each.queue;
    TierReport report;
    report.name = each.name;
    report.hits = q.hits;
    report.misses = q.misses;
    report.failed_gets = q.failed_gets;
    report.damaged = q.damaged;
    report.hit_bytes = q.hit_bytes;
    report.stored = q.stored;
    report.failed_puts = q.failed_puts;
    report.refused_puts = q.refused_puts;
    report.stored_bytes = q.stored_bytes;
    report.promoted = each.promoted;
    report.waiting_bytes = q.waiting_write_bytes;
    report.open = q.breaker != tier::CircuitBreaker::State::closed;
    report.times_opened = q.times_opened;
    report.tier = q.tier;
    reports.push_back(std::move(report));
  }
  return reports;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
