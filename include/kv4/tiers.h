// The tiers below a cache, as a whole: host memory, a disk, a Redis cluster, your own. The fastest is first, and any
// may be left out. Stored records go to all tiers in the background. A record that one tier finds is put into those
// above.
//
// Any tier may be slow, full, damaged or away: then there are fewer hits, and never other bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kv4/backend.h"
#include "kv4/cache_keys.h"
#include "kv4/export.h"
#include "kv4/schema.h"
#include "kv4/tier.h"
#include "kv4/time_histogram.h"

namespace kv4 {

/// The tiers, their sizes and their keys.
struct TiersOptions {
  std::int64_t host_bytes = 0;  // 0: no host memory
  int host_threads = 8;         // threads that check its records
  /// The backend of the caches above. If it is a GPU's, host memory is pinned, and blocks go from there to the device
  /// without a copy in between.
  std::shared_ptr<Backend> backend = {};

  std::string directory = {};  // empty: no disk. One process at a time; made if it does not exist
  std::int64_t disk_bytes = std::int64_t{64} << 30;
  std::int64_t segment_bytes = std::int64_t{256} << 20;  // of its files; a multiple of 4,096
  int disk_threads = 4;                                  // threads that read and check its records
  /// One more key, after `keys`, for the disk only: the key of a store that 0.1 sealed. Prefer `keys`.
  std::optional<CacheKey> disk_key = {};

  /// Some servers of a Redis cluster, or one server; empty: none. "redis://user:password@host:port", "rediss://..." for
  /// TLS, or "host:port". The default port is 6379; %XX stands for a character that is no letter or digit. TLS is for
  /// all servers or none, and all have one user and password.
  std::vector<std::string> servers = {};
  std::string user = {}, password = {};  // where the URLs have none
  /// Other servers that the cluster may name: "host", "host:port", "10.0.0.0/8". With a password or TLS, nothing is
  /// sent to servers that are neither here nor configured: their records miss. Without password, TLS and list, any
  /// address that the cluster names is used.
  std::vector<std::string> allowed_servers = {};
  /// PEM files for rediss://. Empty: the system's authorities; no certificate of our own.
  std::string tls_ca_file = {}, tls_certificate_file = {}, tls_key_file = {};
  tier::Duration remote_ttl{0};  // servers forget a record after it, 1 ms to 10 years; 0: never

  std::vector<std::shared_ptr<tier::Tier>> more = {};  // below all these

  /// Keys that protect every record that leaves the process: on disk, on servers, in `more`. A record that none of them
  /// made is a miss, unless accept_unauthenticated. Empty: anybody who can write there chooses the blocks that prompts
  /// find; the log warns of it.
  std::vector<CacheKey> keys = {};
  Protection protection = Protection::sealed;  // of written records, where there are keys
  bool accept_unauthenticated = false;         // for a migration: accepts records from before there were keys

  std::int64_t max_write_bytes = std::int64_t{256} << 20;  // of each tier: waiting to be written
  std::int64_t max_read_bytes = std::int64_t{256} << 20;
  tier::Duration close_limit = std::chrono::seconds(10);  // of the destructor: for waiting writes and a flush
};

/// The report of one tier, since it was made.
struct TierReport {
  std::string name;
  Protection protection = Protection::none;  // of written records; host memory needs none
  std::int64_t hits = 0, misses = 0, failed_gets = 0, damaged = 0, hit_bytes = 0;
  std::int64_t stored = 0, failed_puts = 0, refused_puts = 0, stored_bytes = 0;
  std::int64_t promoted = 0;           // records found below and put here
  std::int64_t waiting_bytes = 0;      // now
  bool open = false;                   // now: the circuit breaker is open, and everything misses
  std::int64_t times_opened = 0;       // openings of the breaker
  TimeHistogram get_times, put_times;  // calls of the tier, a batch of records each, failed ones included
  tier::TierStats tier;                // may be a little old
  /// Now: to_string() of a tier::FailureReason, and a sentence. Empty: the tier works, as far as is known.
  std::string failure, failure_detail;
  std::map<std::string, std::int64_t> failures;  // by reason: batches in which a server failed
};

/// One thread at a time, that of the caches above: a call that overlaps another thread's throws Error(bad_state).
/// Several caches of one layout may use it in turn. Where the machine refuses memory, calls throw Error(out_of_memory)
/// or find less; the tiers' threads go on, with failed puts and misses.
class KV4_API Tiers {
 public:
  /// Throws Error: bad_argument; bad_state where another process has the directory, or kv4 was built without hiredis;
  /// bad_file where the directory holds another layout or cannot be used, or a PEM file cannot; out_of_memory. Missing
  /// servers are misses; report() and the log (remote.failed) give the reason.
  Tiers(const CacheSchema& schema, const TiersOptions& options);
  /// Closes them.
  ~Tiers();
  Tiers(Tiers&&) noexcept;

  /// Waits until all earlier writes are done; one answer per tier.
  std::vector<tier::FlushStatus> flush(tier::Deadline deadline);
  /// Calls flush(); after it the tiers find and take nothing.
  std::vector<tier::FlushStatus> close(tier::Deadline deadline);
  std::vector<TierReport> report();  // one per tier, the fastest first

  struct Impl;  // the library's own

 private:
  explicit Tiers(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
