// Shows a running cache to other processes, without a server in the engine. The cache publishes its figures in a
// folder, for `kv4 serve-metrics`; there `kv4 inspect` asks for one of its requests.
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
  std::int64_t blocks = 0;            // held by it
  std::int64_t shared_blocks = 0;     // of these, held by other requests too
  std::int64_t kept_blocks = 0;       // of these, found by later prompts
};

/// Facts about the library that a cache runs with.
struct BuildInfo {
  std::string version;   // empty: older than 0.2.0, a version that reports neither this nor times
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

/// Call it between steps.
KV4_API CacheStatus read_status(const KVCacheManager& cache, Tiers* tiers = nullptr);

/// The interval of the status, and its sources.
struct StatusOptions {
  std::chrono::milliseconds interval{1000};  // the least time between two statuses
  Tiers* tiers = nullptr;                    // whose reports are published, too
  /// The first key seals the requests that are asked for, and `kv4 inspect --key-file` opens them. No keys: an answer,
  /// token ids included, lies there in plain until it is removed; only the folder's owner can read it.
  std::vector<CacheKey> keys = {};
};

/// Threads: the one that drives the cache. A lack of memory counts as a failed write. The folder belongs to the process
/// that made it: in a forked child publish() returns false, and nothing is removed.
class KV4_API StatusFolder {
 public:
  /// Makes the folder, for the owner alone, if it does not exist; its parent must. The cache and the tiers must outlive
  /// this. Throws Error: bad_file where it cannot be used; bad_state where another process publishes there;
  /// bad_argument for more keys than kMaxCacheKeys.
  StatusFolder(KVCacheManager& cache, std::string directory, const StatusOptions& options = {});
  /// Removes the status: the cache publishes no more.
  ~StatusFolder();
  StatusFolder(const StatusFolder&) = delete;
  StatusFolder& operator=(const StatusFolder&) = delete;

  /// Call it between steps, as often as you like, also when idle: a status older than a few intervals counts as that of
  /// a cache that has gone. Each call writes at most one request that is asked for, in its present state. The request
  /// goes on unchanged; writing it takes as long as save_session_file. False: something could not be written, which is
  /// no reason to stop; the log ("status.failed") has the reason.
  bool publish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
