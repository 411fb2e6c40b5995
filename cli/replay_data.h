// A trace through a real cache: every request's bytes are made and kept, several requests run at once, and what a hit
// gives is compared with the same request computed cold.
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

/// The state so far; during the call only.
struct ReplayMoment {
  const ReplayCounts& counts;  // so far
  std::int64_t skipped;        // requests besides: longer than the cache
  const KVCacheManager& cache;
  Tiers* tiers;  // or null
  bool last;     // the replay has ended
};

struct DataReplayOptions {
  ModelConfig config;
  CacheOptions cache;  // formats, layers and prefix policies; sizes are filled in
  std::int64_t capacity_tokens = 0;
  int tenants = 1;
  TiersOptions tiers;            // none is asked for: none
  bool remote_optional = false;  // else its servers are tried first, and where they do not work there is no replay
  std::string status;            // folder where the cache says how it stands; empty: none
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
  std::int64_t computed_tokens = 0;        // through all layers, replayed and generated ones included
  std::vector<double> admit_s, prefill_s;  // [requests that were not skipped]
  std::int64_t stored_bytes = 0;           // of blocks and snapshots that are kept at the end
  std::int64_t loaded_blocks = 0;          // came from tiers
  std::vector<TierReport> tiers;
};

/// Token ids and inputs of a block follow from the trace's id, so two requests agree exactly as far as their ids do.
DataReplayResult replay_data(const Trace& trace, const DataReplayOptions& options);

}  // namespace kv4::cli
