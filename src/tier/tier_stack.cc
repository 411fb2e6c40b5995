#include "tier/tier_stack.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "tier/disk_tier.h"
#include "tier/guarded_tier.h"
#include "tier/host_tier.h"
#include "tier/record_guard.h"
#include "tier/redis_url.h"
#include "tier/remote_tier.h"

namespace kv4::tier {
namespace {

/// The guard of one tier; its records are bound to the tier's name.
std::shared_ptr<const RecordGuard> guard_of(const std::string& tier, const TiersOptions& options) {
  GuardOptions guard{tier, options.keys, options.protection, options.accept_unauthenticated};
  if (tier == "disk" && options.disk_key) guard.keys.push_back(*options.disk_key);
  return std::make_shared<RecordGuard>(guard);
}

StoreOptions store_options(const StackShape& shape, const TiersOptions& options) {
  StoreOptions store;
  store.directory = options.directory;
  store.layout_id = shape.layout_id;
  store.segment_bytes = options.segment_bytes;
  store.capacity_bytes = options.disk_bytes;
  store.read_threads = options.disk_threads;
  store.guard = guard_of("disk", options);
  return store;
}

RemoteOptions remote_options(const StackShape& shape, const TiersOptions& options) {
  RemoteOptions remote;
  set_servers(remote, options.servers, options.user, options.password);
  remote.allowed = options.allowed_servers;
  remote.tls_files = {options.tls_ca_file, options.tls_certificate_file, options.tls_key_file};
  remote.ttl = options.remote_ttl;
  remote.layout_id = shape.layout_id;
  remote.guard = guard_of("remote", options);
  return remote;
}

}  // namespace

const char* to_string(FailureReason reason) {
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

TierStack make_stack(const TiersOptions& options, const StackShape& shape, const std::shared_ptr<Clock>& clock) {
  std::vector<std::shared_ptr<Tier>> all;
  if (options.host_bytes > 0) {
    const std::int64_t page_bytes = shape.host_page_bytes, pages = ceil_div(options.host_bytes, page_bytes);
    all.push_back(std::make_shared<HostTier>(
        HostTierOptions{shape.layout_id, pages * page_bytes, page_bytes, options.host_threads, options.backend},
        clock));
  }
  std::vector<Protection> protections(all.size(), Protection::none);
  const auto add = [&](std::shared_ptr<Tier> each, const RecordGuard& guard) {
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
    const StoreOptions store = store_options(shape, options);
    add(std::make_shared<DiskTier>(make_posix_file_system(), store, clock), *store.guard);
  }
  if (!options.servers.empty()) {
    const RemoteOptions remote = remote_options(shape, options);
    add(make_remote_tier(remote), *remote.guard);
  }
  for (const std::shared_ptr<Tier>& own : options.more) {
    const auto guard = guard_of(fmt::format("own {}", own->name()), options);
    const bool plain = guard->protection() == Protection::none && !shape.own_as_records;
    add(plain ? own : std::make_shared<GuardedTier>(own, guard, shape.layout_id), *guard);
  }
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      require(std::string_view(all[i]->name()) != all[j]->name(), ErrorCode::bad_argument,
              "two tiers are called '{}'; reports and metrics tell them apart by their names", all[i]->name());
  require(!all.empty(), ErrorCode::bad_argument, "no tier is asked for; set host_bytes, directory, servers or more");

  TierQueueOptions queue;
  queue.max_write_bytes = options.max_write_bytes;
  queue.max_read_bytes = options.max_read_bytes;
  queue.max_reads = queue.max_writes = shape.max_requests;
  queue.close_limit = options.close_limit;
  queue.on_answer = shape.on_answer;
  std::vector<std::unique_ptr<TierQueue>> queues;
  for (std::shared_ptr<Tier>& each : all) queues.push_back(std::make_unique<TierQueue>(std::move(each), queue, clock));
  return {std::move(queues), std::move(protections)};
}

TierReport report_of(const ChainStats& each, Protection protection) {
  const QueueStats& q = each.queue;
  TierReport report;
  report.name = each.name;
  report.protection = protection;
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
  report.open = q.breaker != CircuitBreaker::State::closed;
  report.times_opened = q.times_opened;
  report.get_times = q.get_times;
  report.put_times = q.put_times;
  report.tier = q.tier;
  report.failure_detail = q.failure.detail;
  if (q.failure.reason != FailureReason::none) report.failure = to_string(q.failure.reason);
  for (std::size_t i = 0; i < kFailureReasons; ++i)
    if (q.failure.counts[i] > 0) report.failures[to_string(static_cast<FailureReason>(i))] = q.failure.counts[i];
  return report;
}

}  // namespace kv4::tier
