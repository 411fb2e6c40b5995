// Extends a prefix cache below the device: the cache offers its prefix blocks to tiers, and a prompt looks there for
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
// Only admit(), load() and save_all() wait for the device: blocks move through pinned memory, one transfer each, beside
// the steps.
//
// Threads: the thread that drives the cache; during a call it counts as a call of the cache. Tiers work in threads of
// their own. A call that throws Error(out_of_memory) has lost nothing, and can be repeated.
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
  /// Host memory for incoming blocks, pinned for a GPU, and as much device memory.
  std::int64_t load_bytes = std::int64_t{64} << 20;
  /// Host memory for blocks until all tiers have written them, and an eighth as much device memory.
  std::int64_t save_bytes = std::int64_t{128} << 20;
  std::int64_t max_waiting = 65536;  // records that wait to be offered
  int max_attempts = 4;              // at putting a record into a tier that fails
};

/// Counted since the TieredPrefix was made.
struct TieredStatistics {
  std::int64_t offered_blocks = 0, offered_snapshots = 0;  // and taken by at least one tier
  std::int64_t offered_again = 0;                          // to a tier that had refused one or failed
  std::int64_t dropped = 0;  // given up before all tiers had it: evicted, too many waiting, or failed too often
  std::int64_t loaded_blocks = 0, loaded_snapshots = 0;
  std::int64_t lost_events = 0;  // blocks that were stored faster than they were saved
  std::int64_t waiting = 0;      // now: to be offered, again or for the first time
};

/// `done` of `total` blocks. False cancels; the blocks that have arrived stay.
using TieredProgress = std::function<bool(std::int64_t done, std::int64_t total)>;

/// Loads a prompt's blocks to the device. Between steps call advance() until it returns true; then admit(). The
/// destructor cancels the load; while another thread is in a call, the next call does. The TieredPrefix outlives it.
class KV4_API PrefixLoad {
 public:
  ~PrefixLoad();
  PrefixLoad(PrefixLoad&&) noexcept;

  /// Takes the blocks that have arrived and asks for more, without waiting. True: nothing is left to do. Not during a
  /// step.
  bool advance();
  /// KVCacheManager::admit() of the prompt, without hashing it again. Ends the load with the blocks that have arrived.
  /// After a shortage it may be called again.
  Expected<Admission> admit();
  std::int64_t brought_blocks() const;  // on the device now
  std::int64_t wanted_blocks() const;   // requested in all

 private:
  friend class TieredPrefix;
  struct Impl;
  explicit PrefixLoad(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Joins a cache with its tiers.
class KV4_API TieredPrefix {
 public:
  /// Cache and tiers outlive it, and it is the only reader of the cache's block events. Throws Error(bad_argument) for
  /// sizes below 0, and for max_waiting or max_attempts below 1.
  TieredPrefix(KVCacheManager& cache, Tiers& tiers, const TieredOptions& options = {});
  ~TieredPrefix();
  TieredPrefix(const TieredPrefix&) = delete;
  TieredPrefix& operator=(const TieredPrefix&) = delete;

  /// Offers the records that the cache has stored since the last call, oldest first; begins at most `max_records`. A
  /// record that finds no room in the tiers' queues stays on the device, and a later call offers it. The same holds for
  /// a record that a tier failed to store, while the device keeps it. Returns the number of records that are still to
  /// be offered or are being copied off the device.
  std::int64_t save(std::int64_t max_records);
  /// Calls save() until no record is left. False: the deadline passed, or `progress` returned false.
  bool save_all(tier::Deadline deadline, const TieredProgress& progress = {});

  /// Begins a request with the blocks of the prompt that the device and the tiers have. Waits for tiers at most until
  /// the deadline, and begins with the blocks that have arrived; where tiers have none it is KVCacheManager::admit().
  /// Where there is no room for a request it returns the shortage at once and asks no tier. After any other shortage or
  /// error, the blocks that have arrived stay for the next call. Not during a step: Error(bad_state).
  Expected<Admission> admit(const Prompt& prompt, tier::Deadline deadline, const TieredProgress& progress = {});
  /// The first part of admit() without waiting: loads blocks behind those on the device, and their deepest snapshot.
  /// Ends at the deadline, with the blocks that have arrived.
  PrefixLoad start_load(const Prompt& prompt, tier::Deadline deadline);
  /// The first part of admit() alone, for requests that begin otherwise: SessionReceiver::prompt(). Returns the number
  /// of blocks loaded.
  std::int64_t load(const Prompt& prompt, tier::Deadline deadline, const TieredProgress& progress = {});

  /// The counters now.
  TieredStatistics statistics() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
