// A trace through a real cache: every request's bytes are made and kept, and several requests run at once. A share of
// the requests is also computed cold and compared.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kv4/model_config.h"
#include "kv4/options.h"
#include "kv4/status_folder.h"
#include "kv4/tiers.h"
#include "replay_cache.h"

namespace kv4::cli {

/// The state so far; valid during the call only.
struct ReplayMoment {
  const ReplayCounts& counts;  // so far
  std::int64_t skipped;        // further requests, which are longer than the cache
  const KVCacheManager& cache;
  Tiers* tiers;  // or null
  bool last;     // the replay has ended
};

struct DataReplayOptions {
  ModelConfig config;
  CacheOptions cache;  // formats, layers and prefix policies; sizes are filled in
  std::int64_t capacity_tokens = 0;
  int tenants = 1;
  TiersOptions tiers;            // empty: no tiers
  bool remote_optional = false;  // false: servers that do not work at the start prevent the replay
  std::string status;            // folder to which the cache publishes its status; empty: none
  double verify = 0;             // share of the requests that are also computed cold
  std::uint64_t seed = 1;
  std::string device = "cpu";
  int threads = 1;
  std::function<void()> request_done;              // for progress; may be empty
  std::function<void(const ReplayMoment&)> watch;  // after every request, and at the end; may be empty
};

struct DataReplayResult {
  ReplayResult cache;
  std::int64_t skipped_requests = 0;  // longer than the cache
  std::int64_t verified_requests = 0, verified_blocks = 0;
  std::int64_t wrong_bytes = 0;
  std::int64_t computed_tokens = 0;        // in all layers, replayed and generated ones included
  std::vector<double> admit_s, prefill_s;  // [requests that were not skipped]
  std::int64_t stored_bytes = 0;           // of blocks and snapshots kept at the end
  std::int64_t loaded_blocks = 0;          // loaded from tiers
  std::vector<TierReport> tiers;
};

/// The trace's ids determine a block's token ids and inputs, so two requests agree exactly as far as their ids do.
DataReplayResult replay_data(const Trace& trace, const DataReplayOptions& options);

}  // namespace kv4::cli
