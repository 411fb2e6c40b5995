// Tiers below a cache, and the status folder of both.
#include "kv4/tiers.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "c_api/handles.h"

using namespace kv4::c_api;

namespace {

kv4_tiers_options options_defaults() {
  const kv4::TiersOptions known;
  const auto ms = [](kv4::tier::Duration time) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  };
  auto value = sized<kv4_tiers_options>();
  value.host_bytes = known.host_bytes;
  value.directory = value.user = value.password = "";
  value.tls_ca_file = value.tls_certificate_file = value.tls_key_file = "";
  value.disk_bytes = known.disk_bytes;
  value.segment_bytes = known.segment_bytes;
  value.host_threads = known.host_threads;
  value.disk_threads = known.disk_threads;
  value.remote_ttl_ms = ms(known.remote_ttl);
  value.protection = kv4::to_string(known.protection);
  value.max_write_bytes = known.max_write_bytes;
  value.max_read_bytes = known.max_read_bytes;
  value.close_limit_ms = ms(known.close_limit);
  return value;
}

std::vector<std::string> texts(const char* const* given, std::int64_t count, const char* what) {
  std::vector<std::string> out;
  for (const char* one : list(given, count, what)) out.emplace_back(c_text(one, what));
  return out;
}

kv4::tier::Duration duration(std::int64_t ms, const char* what) {
  kv4::require(ms >= 0 && ms <= kMaxDurationMs, kv4::ErrorCode::bad_argument, "{} is {}; 0 to {}", what, ms,
               kMaxDurationMs);
  return std::chrono::milliseconds(ms);
}

}  // namespace

kv4::TiersOptions kv4::c_api::tiers_options_of(const kv4_tiers_options* given) {
  const kv4_tiers_options in = read_struct(given, options_defaults(), "options");
  kv4::TiersOptions out;
  out.host_bytes = in.host_bytes;
  out.host_threads = in.host_threads;
  out.directory = c_text(in.directory, "options.directory");
  out.disk_bytes = in.disk_bytes;
  out.segment_bytes = in.segment_bytes;
  out.disk_threads = in.disk_threads;
  if (in.disk_key != nullptr) out.disk_key = keys_of(in.disk_key, 1, "options.disk_key").front();
  out.servers = texts(in.servers, in.num_servers, "options.servers");
  out.user = c_text(in.user, "options.user");
  out.password = c_text(in.password, "options.password");
  out.allowed_servers = texts(in.allowed_servers, in.num_allowed_servers, "options.allowed_servers");
  out.tls_ca_file = c_text(in.tls_ca_file, "options.tls_ca_file");
  out.tls_certificate_file = c_text(in.tls_certificate_file, "options.tls_certificate_file");
  out.tls_key_file = c_text(in.tls_key_file, "options.tls_key_file");
  out.remote_ttl = duration(in.remote_ttl_ms, "options.remote_ttl_ms");
  out.keys = keys_of(in.keys, in.num_keys, "options.keys");
  out.protection = kv4::parse_protection(c_text(in.protection, "options.protection"));
  out.accept_unauthenticated = in.accept_unauthenticated != 0;
  out.max_write_bytes = in.max_write_bytes;
  out.max_read_bytes = in.max_read_bytes;
  out.close_limit = duration(in.close_limit_ms, "options.close_limit_ms");
  return out;
}

kv4_flush_status kv4::c_api::worst(const std::vector<kv4::tier::FlushStatus>& all) {
  const kv4::tier::FlushStatus least = *std::min_element(all.begin(), all.end());  // there is a tier
  return least == kv4::tier::FlushStatus::failed ? KV4_FLUSH_STATUS_FAILED
         : least == kv4::tier::FlushStatus::kept ? KV4_FLUSH_STATUS_KEPT
                                                 : KV4_FLUSH_STATUS_DURABLE;
}

kv4_tier_report kv4::c_api::report_of(const kv4::TierReport& from, const std::vector<kv4_failure_count>& failures) {
  auto value = sized<kv4_tier_report>();
  value.name = from.name.c_str();
  value.protection = kv4::to_string(from.protection);
  value.hits = from.hits;
  value.misses = from.misses;
  value.failed_gets = from.failed_gets;
  value.damaged = from.damaged;
  value.hit_bytes = from.hit_bytes;
  value.stored = from.stored;
  value.failed_puts = from.failed_puts;
  value.refused_puts = from.refused_puts;
  value.stored_bytes = from.stored_bytes;
  value.promoted = from.promoted;
  value.waiting_bytes = from.waiting_bytes;
  value.open = from.open;
  value.times_opened = from.times_opened;
  value.records = from.tier.records;
  value.payload_bytes = from.tier.payload_bytes;
  value.capacity_bytes = from.tier.capacity_bytes;
  value.evicted_records = from.tier.evicted_records;
  value.set_aside_records = from.tier.set_aside_records;
  value.unauthenticated_records = from.tier.unauthenticated_records;
  value.failure = from.failure.c_str();
  value.failure_detail = from.failure_detail.c_str();
  value.failures = failures.data();
  value.num_failures = std::ssize(failures);
  value.get_times = histogram(from.get_times);
  value.put_times = histogram(from.put_times);
  return value;
}

namespace {

kv4_tiered_options tiered_defaults() {
  const kv4::TieredOptions known;
  auto value = sized<kv4_tiered_options>();
  value.load_bytes = known.load_bytes;
  value.save_bytes = known.save_bytes;
  value.max_waiting = known.max_waiting;
  value.max_attempts = known.max_attempts;
  return value;
}

kv4_status_options status_defaults() {
  auto value = sized<kv4_status_options>();
  value.interval_ms = kv4::StatusOptions().interval.count();
  return value;
}

}  // namespace

void kv4_tiers_options_init(kv4_tiers_options* options, size_t size) { init_struct(options, size, options_defaults()); }

void kv4_tier_report_init(kv4_tier_report* report, size_t size) { init_struct(report, size, sized<kv4_tier_report>()); }

kv4_status kv4_tiers_new(const kv4_cache* cache, const kv4_tiers_options* options, kv4_tiers** out) {
  return guarded([&] {
    const kv4_cache& of = require_set(cache, "cache");
    kv4::TiersOptions wanted = tiers_options_of(options);
    wanted.backend = of.backend.backend;
    give_new(out, [&] { return new kv4_tiers{{}, kv4::Tiers(of.manager.schema(), wanted), {}, {}}; });
  });
}

void kv4_tiers_free(kv4_tiers* tiers) { delete tiers; }

kv4_status kv4_tiers_flush(kv4_tiers* tiers, int64_t timeout_ms, kv4_flush_status* out) {
  return guarded([&] {
    kv4_tiers& all = require_set(tiers, "tiers");
    kv4_flush_status& reached = require_set(out, "out");
    reached = worst(all.tiers.flush(deadline_of(timeout_ms)));
  });
}

kv4_status kv4_tiers_close(kv4_tiers* tiers, int64_t timeout_ms, kv4_flush_status* out) {
  return guarded([&] {
    kv4_tiers& all = require_set(tiers, "tiers");
    kv4_flush_status& reached = require_set(out, "out");
    reached = worst(all.tiers.close(deadline_of(timeout_ms)));
  });
}

kv4_status kv4_tiers_get_reports(kv4_tiers* tiers, kv4_tier_report* out, int64_t capacity, int64_t* count) {
  return guarded([&] {
    kv4_tiers& all = require_set(tiers, "tiers");
    std::int64_t& number = require_set(count, "count");
    const StructArray<kv4_tier_report> room(out, capacity, "out");
    const kv4::OneThread::Call call(all.driver);
    std::vector<kv4::TierReport> reports = all.tiers.report();
    number = std::ssize(reports);
    kv4::require(capacity >= number, kv4::ErrorCode::bad_argument, "room for {} elements; there are {}", capacity,
                 number);
    std::vector<std::vector<kv4_failure_count>> failures(reports.size());
    for (std::size_t i = 0; i < reports.size(); ++i)
      for (const auto& [reason, times] : reports[i].failures) failures[i].push_back({reason.c_str(), times});
    all.reports.swap(reports);
    all.failures.swap(failures);
    for (std::size_t i = 0; i < all.reports.size(); ++i) room.write(i, report_of(all.reports[i], all.failures[i]));
  });
}

void kv4_tiered_options_init(kv4_tiered_options* options, size_t size) {
  init_struct(options, size, tiered_defaults());
}

void kv4_tiered_statistics_init(kv4_tiered_statistics* statistics, size_t size) {
  init_struct(statistics, size, sized<kv4_tiered_statistics>());
}

kv4_status kv4_tiered_prefix_new(kv4_cache* cache, kv4_tiers* tiers, const kv4_tiered_options* options,
                                 kv4_tiered_prefix** out) {
  return guarded([&] {
    kv4::KVCacheManager& above = manager(cache);
    kv4::Tiers& below = require_set(tiers, "tiers").tiers;
    const kv4_tiered_options in =
        options == nullptr ? tiered_defaults() : read_struct(options, tiered_defaults(), "options");
    const kv4::TieredOptions wanted{in.load_bytes, in.save_bytes, in.max_waiting, in.max_attempts};
    kv4::require(above.schema().options.prefix.enabled, kv4::ErrorCode::bad_argument,
                 "the cache keeps nothing that tiers could take: set prefix_enabled in its options");
    give_new(out, [&] { return new kv4_tiered_prefix{{above, below, wanted}}; });
  });
}

void kv4_tiered_prefix_free(kv4_tiered_prefix* tiered) { delete tiered; }

kv4_status kv4_tiered_prefix_admit(kv4_tiered_prefix* tiered, const kv4_prompt* prompt, int64_t timeout_ms,
                                   kv4_progress progress, void* user, kv4_admission* out) {
  return guarded([&] {
    kv4::TieredPrefix& to = require_set(tiered, "tiered").prefix;
    const GivenPrompt given(prompt);
    check_admission(out);
    return give_admission(to.admit(given.prompt, deadline_of(timeout_ms), progress_of(progress, user)), out);
  });
}

kv4_status kv4_tiered_prefix_load(kv4_tiered_prefix* tiered, const kv4_prompt* prompt, int64_t timeout_ms,
                                  kv4_progress progress, void* user, int64_t* brought) {
  return guarded([&] {
    kv4::TieredPrefix& to = require_set(tiered, "tiered").prefix;
    const GivenPrompt given(prompt);
    std::int64_t& blocks = require_set(brought, "brought");
    blocks = to.load(given.prompt, deadline_of(timeout_ms), progress_of(progress, user));
  });
}

kv4_status kv4_tiered_prefix_start_load(kv4_tiered_prefix* tiered, const kv4_prompt* prompt, int64_t timeout_ms,
                                        kv4_prefix_load** out) {
  return guarded([&] {
    kv4::TieredPrefix& to = require_set(tiered, "tiered").prefix;
    const GivenPrompt given(prompt);
    give_new(out, [&] { return new kv4_prefix_load{to.start_load(given.prompt, deadline_of(timeout_ms))}; });
  });
}

kv4_status kv4_tiered_prefix_save(kv4_tiered_prefix* tiered, int64_t max_records, int64_t* left) {
  return guarded([&] {
    kv4::TieredPrefix& from = require_set(tiered, "tiered").prefix;
    std::int64_t& records = require_set(left, "left");
    kv4::require(max_records >= 0, kv4::ErrorCode::bad_argument, "max_records is {}; 0 or more", max_records);
    records = from.save(max_records);
  });
}

kv4_status kv4_tiered_prefix_save_all(kv4_tiered_prefix* tiered, int64_t timeout_ms, kv4_progress progress,
                                      void* user) {
  return guarded([&] {
    kv4::TieredPrefix& from = require_set(tiered, "tiered").prefix;
    return from.save_all(deadline_of(timeout_ms), progress_of(progress, user)) ? KV4_OK : KV4_STOPPED;
  });
}

kv4_status kv4_tiered_prefix_get_statistics(const kv4_tiered_prefix* tiered, kv4_tiered_statistics* out) {
  return guarded([&] {
    const kv4::TieredStatistics from = require_set(tiered, "tiered").prefix.statistics();
    auto value = sized<kv4_tiered_statistics>();
    value.offered_blocks = from.offered_blocks;
    value.offered_snapshots = from.offered_snapshots;
    value.offered_again = from.offered_again;
    value.dropped = from.dropped;
    value.loaded_blocks = from.loaded_blocks;
    value.loaded_snapshots = from.loaded_snapshots;
    value.lost_events = from.lost_events;
    value.waiting = from.waiting;
    write_struct(out, value, "out");
  });
}

kv4_status kv4_prefix_load_advance(kv4_prefix_load* load, int32_t* done) {
  return guarded([&] {
    kv4::PrefixLoad& to = require_set(load, "load").load;
    std::int32_t& is_done = require_set(done, "done");
    is_done = to.advance();
  });
}

kv4_status kv4_prefix_load_admit(kv4_prefix_load* load, kv4_admission* out) {
  return guarded([&] {
    kv4::PrefixLoad& to = require_set(load, "load").load;
    check_admission(out);
    return give_admission(to.admit(), out);
  });
}

kv4_status kv4_prefix_load_progress(const kv4_prefix_load* load, int64_t* brought, int64_t* wanted) {
  return guarded([&] {
    const kv4::PrefixLoad& of = require_set(load, "load").load;
    std::int64_t &here = require_set(brought, "brought"), &all = require_set(wanted, "wanted");
    here = of.brought_blocks();
    all = of.wanted_blocks();
  });
}

void kv4_prefix_load_free(kv4_prefix_load* load) { delete load; }

// --- a look from outside ---------------------------------------------------------------------------------------------

void kv4_status_options_init(kv4_status_options* options, size_t size) {
  init_struct(options, size, status_defaults());
}

kv4_status kv4_status_folder_new(kv4_cache* cache, const char* directory, const kv4_status_options* options,
                                 kv4_status_folder** out) {
  return guarded([&] {
    kv4::KVCacheManager& of = manager(cache);
    const std::string path(c_text(directory, "directory"));
    const kv4_status_options in =
        options == nullptr ? status_defaults() : read_struct(options, status_defaults(), "options");
    kv4::require(in.interval_ms >= 0 && in.interval_ms <= kMaxDurationMs, kv4::ErrorCode::bad_argument,
                 "options.interval_ms is {}; 0 to {}", in.interval_ms, kMaxDurationMs);
    const kv4::StatusOptions wanted{.interval = std::chrono::milliseconds(in.interval_ms),
                                    .tiers = in.tiers == nullptr ? nullptr : &in.tiers->tiers,
                                    .keys = keys_of(in.keys, in.num_keys, "options.keys")};
    give_new(out, [&] { return new kv4_status_folder{{of, path, wanted}}; });
  });
}

kv4_status kv4_status_folder_publish(kv4_status_folder* folder) {
  return guarded([&] {
    kv4::require(require_set(folder, "folder").folder.publish(), kv4::ErrorCode::bad_file,
                 "the status could not be published; the log (status.failed) says why");
  });
}

void kv4_status_folder_free(kv4_status_folder* folder) { delete folder; }
