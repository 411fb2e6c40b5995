#include "kv4/tiers.h"

#include <algorithm>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "tier/disk_tier.h"
#include "tier/guarded_tier.h"
#include "tier/host_tier.h"
#include "tier/record_guard.h"
#include "tier/redis_url.h"
#include "tier/remote_tier.h"
#include "tier/tiers_impl.h"

namespace kv4 {
namespace {

constexpr std::int64_t kPageAlignment = 4096, kLeastPageBytes = 16 << 10;

/// A page holds a block's record, so that the block can be given out without a copy.
std::int64_t host_page_bytes(const CacheSchema& schema) {
  const std::int64_t record_bytes = tier::kRecordHeaderBytes + schema.block_image_bytes;
  return std::max(kLeastPageBytes, ceil_div(record_bytes, kPageAlignment) * kPageAlignment);
}

/// The guard of one tier; its records are bound to the tier's name.
std::shared_ptr<const tier::RecordGuard> guard_of(const std::string& tier, const TiersOptions& options) {
  tier::GuardOptions guard{tier, options.keys, options.protection, options.accept_unauthenticated};
  if (tier == "disk" && options.disk_key) guard.keys.push_back(*options.disk_key);
  return std::make_shared<tier::RecordGuard>(guard);
}

tier::StoreOptions store_options(const CacheSchema& schema, const TiersOptions& options) {
  tier::StoreOptions store;
  store.directory = options.directory;
  store.layout_id = schema.layout_id;
  store.segment_bytes = options.segment_bytes;
  store.capacity_bytes = options.disk_bytes;
  store.read_threads = options.disk_threads;
  store.guard = guard_of("disk", options);
  return store;
}

tier::RemoteOptions remote_options(const CacheSchema& schema, const TiersOptions& options) {
  tier::RemoteOptions remote;
  tier::set_servers(remote, options.servers, options.user, options.password);
  remote.allowed = options.allowed_servers;
  remote.tls_files = {options.tls_ca_file, options.tls_certificate_file, options.tls_key_file};
  remote.ttl = options.remote_ttl;
  remote.layout_id = schema.layout_id;
  remote.guard = guard_of("remote", options);
  return remote;
}

}  // namespace

const char* tier::to_string(FailureReason reason) {
  switch (reason) {
    case FailureReason::none: break;
    case FailureReason::connection_refused: return "connection_refused";
    case FailureReason::unreachable: return "unreachable";
    case FailureReason::silent: return "silent";
    case FailureReason::disconnected: return "disconnected";
    case FailureReason::password_needed: return "password_needed";
    case FailureReason::wrong_password: return "wrong_password";
    case FailureReason::not_permitted: return "not_permitted";
    case FailureReason::tls_refused: return "tls_refused";
    case FailureReason::certificate_refused: return "certificate_refused";
    case FailureReason::not_redis: return "not_redis";
    case FailureReason::reply_too_large: return "reply_too_large";
    case FailureReason::server_full: return "server_full";
    case FailureReason::server_error: return "server_error";
    case FailureReason::not_admitted: return "not_admitted";
  }
  return "none";
}

Tiers::Tiers(const CacheSchema& schema, const TiersOptions& options) try {
  const auto clock = std::make_shared<tier::SteadyClock>();
  std::vector<std::shared_ptr<tier::Tier>> all;
  if (options.host_bytes > 0) {
    const std::int64_t page_bytes = host_page_bytes(schema), pages = ceil_div(options.host_bytes, page_bytes);
    all.push_back(std::make_shared<tier::HostTier>(
        tier::HostTierOptions{schema.layout_id, pages * page_bytes, page_bytes, options.host_threads, options.backend},
        clock));
  }
  std::vector<Protection> protections(all.size(), Protection::none);
  const auto add = [&](std::shared_ptr<tier::Tier> each, const tier::RecordGuard& guard) {
    all.push_back(std::move(each));
    protections.push_back(guard.protection());
    if (guard.has_keys()) return;
    speak([&] {
      const char* name = all.back()->name();
      log(LogLevel::warning, "tier.no_key",
          fmt::format("the tier '{}' has no cache key: its records are checked for damage, not for who wrote them; "
                      "set TiersOptions::keys (docs/security.md)",
                      name),
          {{"tier", name}});
    });
  };
  if (!options.directory.empty()) {
    const tier::StoreOptions store = store_options(schema, options);
    add(std::make_shared<tier::DiskTier>(tier::make_posix_file_system(), store, clock), *store.guard);
  }
  if (!options.servers.empty()) {
    const tier::RemoteOptions remote = remote_options(schema, options);
    add(tier::make_remote_tier(remote), *remote.guard);
  }
  for (const std::shared_ptr<tier::Tier>& own : options.more) {
    const auto guard = guard_of(fmt::format("own {}", own->name()), options);
    const bool plain = guard->protection() == Protection::none;
    add(plain ? own : std::make_shared<tier::GuardedTier>(own, guard, schema.layout_id), *guard);
  }
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      require(std::string_view(all[i]->name()) != all[j]->name(), ErrorCode::bad_argument,
              "two tiers are called '{}'; reports and metrics tell them apart by their names", all[i]->name());
  require(!all.empty(), ErrorCode::bad_argument, "no tier is asked for; set host_bytes, directory, servers or more");

  tier::TierQueueOptions queue;
  queue.max_write_bytes = options.max_write_bytes;
  queue.max_read_bytes = options.max_read_bytes;
  queue.close_limit = options.close_limit;
  std::vector<std::unique_ptr<tier::TierQueue>> queues;
  for (std::shared_ptr<tier::Tier>& each : all)
    queues.push_back(std::make_unique<tier::TierQueue>(std::move(each), queue, clock));
  impl_ = std::make_unique<Impl>(std::move(queues), clock);
  impl_->backend = options.backend;
  impl_->protections = std::move(protections);
} catch (const std::bad_alloc&) {
  fail_for_memory();
} catch (const std::system_error& e) {  // of a thread
  fail(ErrorCode::out_of_memory, "the system refused a thread of a tier: {}", e.what());
}

Tiers::Tiers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tiers::~Tiers() = default;
Tiers::Tiers(Tiers&&) noexcept = default;

std::vector<tier::FlushStatus> Tiers::flush(tier::Deadline deadline) try {
  const OneThread::Call call(impl_->chain.driver());
  return impl_->chain.flush(deadline);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<tier::FlushStatus> Tiers::close(tier::Deadline deadline) try {
  const OneThread::Call call(impl_->chain.driver());
  return impl_->chain.close(deadline);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<TierReport> Tiers::report() try {
  const OneThread::Call call(impl_->chain.driver());
  std::vector<TierReport> reports;
  for (const tier::ChainStats& each : impl_->chain.stats()) {
    const tier::QueueStats& q = each.queue;
    TierReport report;
    report.name = each.name;
    report.protection = impl_->protections[reports.size()];
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
    report.get_times = q.get_times;
    report.put_times = q.put_times;
    report.tier = q.tier;
    report.failure_detail = q.failure.detail;
    if (q.failure.reason != tier::FailureReason::none) report.failure = tier::to_string(q.failure.reason);
    for (std::size_t i = 0; i < tier::kFailureReasons; ++i)
      if (q.failure.counts[i] > 0)
        report.failures[tier::to_string(static_cast<tier::FailureReason>(i))] = q.failure.counts[i];
    reports.push_back(std::move(report));
  }
  return reports;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
