// A prefix cache that goes on below the device: a cache offers its prefix blocks to tiers, and a prompt looks there for
// the blocks that it does not find on the device.
//
//   kv4::Tiers tiers(cache.schema(), {.host_bytes = 8LL << 30, .backend = backend, .directory = "/var/cache/kv4"});
//   kv4::TieredPrefix tiered(cache, tiers);
//   kv4::Admission a = tiered.admit(prompt, deadline).value();  ... steps, and between them tiered.save(16) ...
//
// A record is a block's image or a snapshot, under the block's key; tiers check its bytes, and the key names its
// tokens. The model computes again the blocks that a tier loses or is late with. Tenants that are to share contexts
// have one id: records are kept by tenant.
//
// Nothing here waits for the device, but admit(), load() and save_all(): blocks move through pinned memory, one
// transfer each, beside the steps.
//
// Threads: the one that drives the cache, which is inside the cache as long as a call lasts. Tiers work in threads of
// their own. A call that throws Error(out_of_memory) has lost nothing, and can be made again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "kv4/export.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/tiers.h"

namespace kv4 {

/// Memory and time limits of a TieredPrefix.
struct TieredOptions {
  /// Host memory for blocks on their way in, pinned for a GPU, and as much of the device's.
  std::int64_t load_bytes = std::int64_t{64} << 20;
  /// Host memory for blocks until all tiers have written them; an eighth as much of the device's.
  std::int64_t save_bytes = std::int64_t{128} << 20;
  std::int64_t max_waiting = 65536;  // records that wait to be offered
  int max_attempts = 4;              // to put a record into a tier that fails
};

/// Counted since the TieredPrefix was made.
struct TieredStatistics {
  std::int64_t offered_blocks = 0, offered_snapshots = 0;  // and taken by one tier at least
  std::int64_t offered_again = 0;                          // to a tier that had refused one or failed
  std::int64_t dropped = 0;  // not in all tiers, and given up: evicted before, too many waiting, or failed too often
  std::int64_t loaded_blocks = 0, loaded_snapshots = 0;
  std::int64_t lost_events = 0;  // blocks that were stored faster than they were saved
  std::int64_t waiting = 0;      // now: to be offered, again or for the first time
};

/// `done` of `total` blocks. False cancels: what has arrived by then stays.
using TieredProgress = std::function<bool(std::int64_t done, std::int64_t total)>;

/// A prompt's blocks on their way to the device. Between steps call advance() until it says true; then admit(). Gone:
/// cancelled; where another thread is in a call then, by the next call. The TieredPrefix outlives it.
class KV4_API PrefixLoad {
 public:
  ~PrefixLoad();
  PrefixLoad(PrefixLoad&&) noexcept;

  /// Takes what has come and asks for more; waits for nothing. True: nothing is left to be done. Not during a step.
  bool advance();
  /// KVCacheManager::admit() of the prompt, which is not hashed again. Ends the load with what has come by now. After a
  /// shortage it may be called again.
  Expected<Admission> admit();
  std::int64_t brought_blocks() const;  // on the device by now
  std::int64_t wanted_blocks() const;   // asked for in all

 private:
  friend class TieredPrefix;
  struct Impl;
  explicit PrefixLoad(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Joins a cache with its tiers.
class KV4_API TieredPrefix {
 public:
  /// Both outlive it; nobody else reads the cache's block events. Throws Error(bad_argument) for sizes below 0, and for
  /// max_waiting or max_attempts below 1.
  TieredPrefix(KVCacheManager& cache, Tiers& tiers, const TieredOptions& options = {});
  ~TieredPrefix();
  TieredPrefix(const TieredPrefix&) = delete;
  TieredPrefix& operator=(const TieredPrefix&) = delete;

  /// Offers the records that the cache has stored since, oldest first; begins at most `max_records`. A record that
  /// finds no room in the tiers' queues stays on the device, and a later call offers it; the same holds for a record
  /// that a tier failed to store, while the device keeps it. Returns how many records are left to be offered or on
  /// their way off the device.
  std::int64_t save(std::int64_t max_records);
  /// save() until nothing is left. False: the deadline came, or progress said so.
  bool save_all(tier::Deadline deadline, const TieredProgress& progress = {});

  /// A request that begins with the blocks that the device and the tiers have of the prompt. Waits for tiers until the
  /// deadline at most, and begins with the blocks that have come by then; where tiers have nothing it is
  /// KVCacheManager::admit(). Where there is no room for a request it returns the shortage at once and asks no tier.
  /// After any other shortage or error, the blocks that have come stay for the next call. Not during a step:
  /// Error(bad_state).
  Expected<Admission> admit(const Prompt& prompt, tier::Deadline deadline, const TieredProgress& progress = {});
  /// The first part of admit() without waiting: brings blocks behind those kept, and the deepest snapshot of them. Ends
  /// at the deadline, with the blocks that have come by then.
  PrefixLoad start_load(const Prompt& prompt, tier::Deadline deadline);
  /// The first part of admit() alone, for requests that begin otherwise: SessionReceiver::prompt(). Returns the blocks
  /// brought.
  std::int64_t load(const Prompt& prompt, tier::Deadline deadline, const TieredProgress& progress = {});

  /// The counters now.
  TieredStatistics statistics() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
