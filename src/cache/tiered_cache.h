// A cache and the tiers below it, shared by a saver and a loader: the places of bytes, the sizes and the names of
// records. Constant once made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cache/block_mover.h"
#include "kv4/tiered_prefix.h"
#include "prefix/block_hash.h"
#include "tier/tier_chain.h"

namespace kv4 {

/// Limit of the records of one call, and of the slots of one kind.
inline constexpr std::int64_t kMaxStagingSlots = 1024;

/// The number of slots that fit `bytes`.
inline int staging_slots_for(std::int64_t bytes, std::int64_t slot_bytes, std::int64_t least) {
  return static_cast<int>(std::clamp(bytes / std::max<std::int64_t>(slot_bytes, 1), least, kMaxStagingSlots));
}

inline ops::CopyPiece copy_piece(const std::byte* from, std::byte* to, std::int64_t bytes) {
  return {reinterpret_cast<const std::uint8_t*>(from), reinterpret_cast<std::uint8_t*>(to), bytes};
}

/// Cache and tiers outlive it.
struct TieredCache {
  /// `pinned_for`: the backend that the tiers' own memory is pinned for, if any.
  TieredCache(KVCacheManager& cache_in, tier::TierChain& tiers_in, const Backend* pinned_for,
              const TieredOptions& options_in)
      : cache(cache_in),
        tiers(tiers_in),
        options(options_in),
        mover(cache),
        backend(*mover.backend()),
        views_allowed(backend.on_host() || pinned_for == &backend),
        block_bytes(cache.schema().block_image_bytes),
        snapshot_bytes(cache.snapshot_bytes()) {}

  static tier::RecordId block_record(TenantId tenant, const BlockKey& key) {
    tier::RecordId id{.tenant = static_cast<std::uint64_t>(tenant), .key = {}};
    std::memcpy(id.key.data(), key.data(), key.size());
    return id;
  }
  /// The record of the snapshot at the block's end.
  tier::RecordId snapshot_record(TenantId tenant, const BlockKey& key) {
    return block_record(tenant, hasher.snapshot(key));
  }

  KVCacheManager& cache;
  tier::TierChain& tiers;
  const TieredOptions options;
  BlockMover mover;
  Backend& backend;
  const bool views_allowed;  // transfers use a tier's own memory as well as a slot
  const std::int64_t block_bytes, snapshot_bytes;

 private:
  BlockHasher hasher;  // holds memory for hashing
};

}  // namespace kv4
