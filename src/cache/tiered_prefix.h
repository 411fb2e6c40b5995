// A prefix cache that goes on below the device: what a cache keeps is offered to tiers, and what a prompt does not find
// on the device is looked for there.
//
//   tiered.load(prompt, deadline);  cache.admit(prompt);  ... steps ...  tiered.save(16);
//
// A record is a block's image or a snapshot, under the block's key; tiers check its bytes, the key says of what they
// are. Whatever a tier loses or is late with is computed again. Tenants that are to share contexts have one id: records
// are kept by tenant.
//
// Threads: the one that drives the cache. Tiers work in threads of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "kv4/kv_cache_manager.h"
#include "prefix/block_hash.h"
#include "tier/tier_chain.h"

namespace kv4 {

struct TieredStatistics {
  std::int64_t offered_blocks = 0, offered_snapshots = 0;  // and taken by one tier at least
  std::int64_t refused = 0;                                // no tier had room in its queue
  std::int64_t loaded_blocks = 0, loaded_snapshots = 0;
  std::int64_t lost_events = 0;  // blocks that were stored faster than they were saved
};

class TieredPrefix {
 public:
  /// Both outlive it; nobody else reads the cache's block events. `batch_bytes`: of blocks that are asked for at once;
  /// at most what the tiers' queues hold for reads.
  TieredPrefix(KVCacheManager& cache, tier::TierChain& tiers, std::int64_t batch_bytes = std::int64_t{64} << 20)
      : cache_(cache), tiers_(tiers), batch_bytes_(batch_bytes) {}

  /// Offers what the cache has stored since, at most `max_records`, oldest first; write-behind. Returns how many events
  /// it has dealt with: 0 means that there is nothing left.
  std::int64_t save(std::int64_t max_records);
  /// Brings what tiers have of the prompt and the device has not: blocks behind those kept, and the deepest snapshot of
  /// them. Returns the blocks brought. Ends at the deadline, with what is there by then.
  std::int64_t load(const Prompt& prompt, tier::Deadline deadline);

  const TieredStatistics& statistics() const { return statistics_; }

 private:
  tier::RecordId snapshot_record(TenantId tenant, const BlockKey& key);
  void offer(const tier::RecordId& id, std::int64_t& count);
  /// How many of them, from the first on, are on the device now.
  std::size_t load_blocks(const Prompt& prompt, std::span<const BlockKey> keys, tier::Deadline deadline);
  void load_snapshot(const Prompt& prompt, const std::vector<BlockKey>& keys, tier::Deadline deadline);

  KVCacheManager& cache_;
  tier::TierChain& tiers_;
  std::int64_t batch_bytes_;
  BlockHasher hasher_;
  std::vector<std::byte> buffer_;
  TieredStatistics statistics_;
};

}  // namespace kv4
