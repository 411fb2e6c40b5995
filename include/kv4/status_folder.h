// A running cache seen from other processes, without a server in the engine: a folder in which the cache publishes its
// figures, for `kv4 serve-metrics`, and in which `kv4 inspect` asks for one of its requests.
//
//   kv4::StatusFolder status(cache, "/run/kv4/gpu0", {.tiers = &tiers});
//   for (;;) { ... a step, or nothing to do ...  status.publish(); }
//
// docs/formats.md, "Status folder", lists its files. A memory file system (/run) suits it best.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kv4/cache_keys.h"
#include "kv4/export.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/statistics.h"
#include "kv4/tiers.h"

namespace kv4 {

/// A running request, in numbers.
struct RequestStatus {
  RequestId request = kNoRequest;
  std::vector<std::int64_t> lengths;  // backbone, draft stages
  std::int64_t rewind_floor = 0;      // of the backbone
  std::int64_t blocks = 0;            // that it holds
  std::int64_t shared_blocks = 0;     // of them: other requests hold them, too
  std::int64_t kept_blocks = 0;       // of them: later prompts find them
};

/// Facts about the library that a cache runs with.
struct BuildInfo {
  std::string version;   // empty: older than 0.2.0, which tells neither this nor times
  bool cuda = false;     // it can make a CUDA backend
  std::string compiler;  // "gcc 12.2.0"
};
/// Facts about the library that is linked.
KV4_API BuildInfo build_info();

/// The state of a cache, as plain values.
struct CacheStatus {
  BuildInfo build;
  CacheStatistics cache;
  std::vector<RequestStatus> requests;
  std::string block_states;  // [blocks] h: held by requests or set aside, k: kept for later ones, f: free
  std::vector<TierReport> tiers;
};

/// Between steps.
KV4_API CacheStatus read_status(const KVCacheManager& cache, Tiers* tiers = nullptr);

/// The interval of the status, and its sources.
struct StatusOptions {
  std::chrono::milliseconds interval{1000};  // publish() does nothing more often than that
  Tiers* tiers = nullptr;                    // whose reports are published, too
  /// The first seals the requests that are asked for, and `kv4 inspect --key-file` opens them. None: they lie there in
  /// plain until they are taken away, token ids included, for the folder's owner alone.
  std::vector<CacheKey> keys = {};
};

/// Threads: the one that drives the cache. Want of memory is something that could not be written, too. The folder is
/// that of the process which made it: in a forked child publish() is false, and nothing is taken away.
class KV4_API StatusFolder {
 public:
  /// Makes the folder, for the owner alone, where it is not there; its parent is. Cache and tiers outlive this. Throws
  /// Error: bad_file where it cannot be used; bad_state where another process publishes there; bad_argument for more
  /// keys than kMaxCacheKeys.
  StatusFolder(KVCacheManager& cache, std::string directory, const StatusOptions& options = {});
  /// Takes the status away: the cache publishes no more.
  ~StatusFolder();
  StatusFolder(const StatusFolder&) = delete;
  StatusFolder& operator=(const StatusFolder&) = delete;

  /// Between steps, as often as you like, also while there is nothing to do: a status older than a few intervals counts
  /// as that of a cache that has gone. At most one request that is asked for is written each time, as it is now, and
  /// goes on unchanged; that takes as long as save_session_file. False: something could not be written, which is no
  /// reason to stop; the log ("status.failed") says what.
  bool publish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
