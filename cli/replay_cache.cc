#include "replay_cache.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "prefix/prefix_index.h"

namespace kv4::cli {
namespace {

constexpr std::int64_t kBlockTokens = 128;

/// Stands for a SHA-256: as uniform in the first bytes, and as unique.
BlockKey make_key(std::int64_t id) {
  std::uint64_t mixed = static_cast<std::uint64_t>(id) + 0x9E3779B97F4A7C15u;  // splitmix64
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  mixed ^= mixed >> 31;
  BlockKey key{};
  std::memcpy(key.data(), &mixed, sizeof mixed);
  std::memcpy(key.data() + sizeof mixed, &id, sizeof id);
  return key;
}

void list_keys(const TraceRequest& request, std::vector<BlockKey>& keys) {
  keys.clear();
  for (const IdRun& run : request.ids)
    for (std::int64_t i = 0; i < run.count; ++i) keys.push_back(make_key(run.first + i));
}

}  // namespace

ReplayResult replay_cache(const Trace& trace, const ReplayOptions& options) {
  const std::int64_t most = std::max<std::int64_t>(1, bound_distinct_ids(trace));
  ReplayResult result;
  result.capacity_ids = options.capacity_tokens == 0 ? most : options.capacity_tokens / trace.id_tokens;
  require(result.capacity_ids >= 1, ErrorCode::bad_argument,
          "a capacity of {} tokens holds no block; an id of this trace is {} tokens", options.capacity_tokens,
          trace.id_tokens);
  PrefixIndexOptions index_options;
  index_options.capacity_blocks = std::min(result.capacity_ids, most);
  index_options.block_tokens = trace.id_tokens;
  index_options.eviction = options.eviction;
  index_options.snapshots.kind = SnapshotPolicy::Kind::full;  // without bytes, a hit resumes where it ends
  index_options.max_events = 1;
  PrefixIndex index(index_options);
  std::vector<BlockKey> keys;
  for (const TraceRequest& request : trace.requests) {
    list_keys(request, keys);
    const std::int64_t hits =
        index.match(keys, static_cast<std::int64_t>(keys.size()) * trace.id_tokens).matched_blocks;
    result.hit_ids += hits;
    result.hit_tokens += std::min(hits * trace.id_tokens, request.input_tokens - 1) / kBlockTokens * kBlockTokens;
    try {
      result.evicted_ids += static_cast<std::int64_t>(index.insert(0, keys).evicted.size());
    } catch (const Error& e) {
      fail(ErrorCode::bad_file, "request {} in order of time: its ids are not chained: {}", result.requests + 1,
           e.what());
    }
    ++result.requests;
    result.ids += static_cast<std::int64_t>(keys.size());
    result.input_tokens += request.input_tokens;
    if (options.request_done) options.request_done();
  }
  return result;
}

}  // namespace kv4::cli
