// The tiers below a cache, as a whole: host memory, a disk, a Redis cluster, your own; the fastest first, any of them
// left out. What is stored goes to all of them behind the caller's back; what one of them finds is put into those
// above.
//
// Any of them may be slow, full, damaged or away: then there are fewer hits, and never other bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kv4/backend.h"
#include "kv4/export.h"
#include "kv4/schema.h"
#include "kv4/tier.h"

namespace kv4 {

namespace tier {
class TierChain;  // src/tier/tier_chain.h
}

struct TiersOptions {
  std::int64_t host_bytes = 0;  // 0: no host memory
  int host_threads = 8;         // that check its records
  /// Of the caches above. Host memory is pinned for a GPU's then, and blocks go from there to the device without a copy
  /// in between.
  std::shared_ptr<Backend> backend = {};

  std::string directory = {};  // empty: no disk. One process at a time; made where it is not there
  std::int64_t disk_bytes = std::int64_t{64} << 30;
  std::int64_t segment_bytes = std::int64_t{256} << 20;  // of its files; a multiple of 4,096
  int disk_threads = 4;                                  // that read and check its records
  /// Payloads are sealed with keys that follow from it (AES-256-GCM). None: they are as they are.
  std::optional<std::array<std::byte, 32>> disk_key = {};

  std::vector<std::string> servers = {};  // "host:port", some of a Redis cluster or one server; empty: none
  std::string user = {}, password = {};

  std::vector<std::shared_ptr<tier::Tier>> more = {};  // below all these

  std::int64_t max_write_bytes = std::int64_t{256} << 20;  // of each tier: that wait to be written
  std::int64_t max_read_bytes = std::int64_t{256} << 20;
  tier::Duration close_limit = std::chrono::seconds(10);  // of the destructor: for what waits, and a flush
};

/// Of one tier, since it was made.
struct TierReport {
  std::string name;
  std::int64_t hits = 0, misses = 0, failed_gets = 0, damaged = 0, hit_bytes = 0;
  std::int64_t stored = 0, failed_puts = 0, refused_puts = 0, stored_bytes = 0;
  std::int64_t promoted = 0;       // found below and put here
  std::int64_t waiting_bytes = 0;  // now
  bool open = false;               // now: its circuit breaker; everything misses
  std::int64_t times_opened = 0;   // the breaker
  tier::TierStats tier;            // a little old
};

/// One thread at a time, that of the caches above: a call that overlaps with another thread's throws Error(bad_state).
/// Several caches of one layout may use it in turn. Where the machine refuses memory, calls throw Error(out_of_memory)
/// or find less; threads of tiers go on, with failed puts and misses.
class KV4_API Tiers {
 public:
  /// Throws Error: bad_argument; bad_state where another process has the directory, or kv4 was built without hiredis;
  /// bad_file where the directory holds another layout or cannot be used; out_of_memory. Servers that are not there are
  /// misses.
  Tiers(const CacheSchema& schema, const TiersOptions& options);
  /// Closes them.
  ~Tiers();
  Tiers(Tiers&&) noexcept;

  /// Waits until everything before is written; one answer per tier.
  std::vector<tier::FlushStatus> flush(tier::Deadline deadline);
  /// flush(), and nothing is found or taken any more.
  std::vector<tier::FlushStatus> close(tier::Deadline deadline);
  std::vector<TierReport> report();

  tier::TierChain& chain() { return *chain_; }
  /// Of the options.
  const Backend* backend() const { return backend_.get(); }

 private:
  std::shared_ptr<Backend> backend_;
  std::unique_ptr<tier::TierChain> chain_;
};

}  // namespace kv4
