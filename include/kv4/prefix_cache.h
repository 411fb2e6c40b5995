// The prefix cache: full blocks stay when their requests end, and a later prompt that begins with the same tokens
// reuses them (docs/design.md, "Prefix cache").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv4/export.h"

namespace kv4 {

/// The policy that chooses the block to evict.
enum class EvictionKind : std::uint8_t { lru, s3fifo, density };
/// The enumerator's name: "s3fifo", ...
KV4_API const char* to_string(EvictionKind kind);
/// The inverse of to_string(); throws Error(bad_argument) listing the names.
KV4_API EvictionKind parse_eviction(std::string_view name);

/// The boundaries whose snapshots (canonical images) are kept, and the tokens that a hit has to compute again.
struct SnapshotPolicy {
  /// The boundaries whose snapshots are kept.
  enum class Kind : std::uint8_t {
    full,        // at every block boundary
    checkpoint,  // at the last boundary of a prompt and of an output, and every `period_tokens`
    none         // nowhere: a hit replays the tokens that windows and pending rows depend on
  };
  Kind kind = Kind::checkpoint;
  std::int64_t period_tokens = 8192;  // checkpoint: a multiple of the block
  /// none: 0 is exact, window x layers; one window is bounded, an approximation. V4.1: blocks computed after a bounded
  /// replay are not kept, and such a request has no session.
  std::int64_t replay_tokens = 0;

  /// Whether the boundary at `position` tokens gets a snapshot. `ends_request`: this prompt or output has no further
  /// boundary.
  bool keeps(std::int64_t position, bool ends_request) const {
    return kind == Kind::full || (kind == Kind::checkpoint && (ends_request || position % period_tokens == 0));
  }
};

/// The enumerator's name: "checkpoint", ...
KV4_API const char* to_string(SnapshotPolicy::Kind kind);
/// The inverse of to_string(); throws Error(bad_argument) listing the names.
KV4_API SnapshotPolicy::Kind parse_snapshots(std::string_view name);

/// Index into PrefixOptions::tenant_shares.
using TenantId = std::int32_t;

/// The prefix cache of a cache.
struct PrefixOptions {
  bool enabled = false;
  std::string weights_id;  // the caller's name for the weights; new weights need a new one
  EvictionKind eviction = EvictionKind::lru;
  SnapshotPolicy snapshots;
  int num_snapshots = 64;           // places for snapshots in the backend's memory; none are allocated for Kind::none
  std::int64_t max_events = 65536;  // of the stream; older ones are lost, and counted
  /// Blocks of each tenant that others cannot evict: one element per tenant, together at most num_blocks.
  std::vector<std::int64_t> tenant_shares = {0};
};

/// SHA-256 over all inputs of a block's bytes (docs/formats.md, "Block keys").
using BlockKey = std::array<std::uint8_t, 32>;

/// The known beginning of a request. Read during the call only.
struct Prompt {
  std::span<const std::int32_t> token_ids;
  TenantId tenant = 0;    // its blocks count for this tenant's share
  std::string_view salt;  // prompts with different salts never share
  /// Other inputs of the blocks' bytes (a LoRA's name, hashes of images), one per block of the prompt from the first
  /// block on; later blocks may have none. Each is part of the keys of all later blocks, too.
  std::span<const std::string_view> extra;
};

/// Identifies the chain that a request's full blocks belong to: a request that returns from elsewhere goes on in it.
/// The manager makes these (identify_prefix, chain_of); {} identifies none.
struct PrefixIdentity {
  BlockKey root{};                       // root of the block keys
  std::uint64_t weights_generation = 0;  // of the weights in one cache, up to their invalidation; 0: nothing is kept
  TenantId tenant = 0;
  std::int64_t prompt_end = 0;     // the last block boundary that another request with this prompt can use
  std::vector<std::string> extra;  // by block, as in Prompt
  bool approximate = false;        // the request was resumed by a bounded replay (V4.1): nothing of it is kept
  bool narrowed = false;           // its prefill was narrowed (V4.1): its state is kept for no other prompt
};

/// A change of the prefix cache, for routers and tiers.
struct BlockEvent {
  /// The event.
  enum class Kind : std::uint8_t { stored, evicted, snapshot };  // snapshot: one at the block's end is kept
  Kind kind = Kind::stored;
  BlockKey key{};
  bool inserted = false;  // from elsewhere: insert_blocks, insert_snapshot
};

/// The enumerator's name: "stored", ...
KV4_API const char* to_string(BlockEvent::Kind kind);

/// A block that prompts find by its key.
struct PrefixBlock {
  TenantId tenant = 0;
  std::int64_t tokens = 0;  // from the start of its chain to its end
  bool has_snapshot = false;
};

/// Counted since the cache was made.
struct PrefixStatistics {
  std::int64_t prompts = 0;
  std::int64_t hits = 0;  // prompts with at least one block in the cache
  std::int64_t prompt_tokens = 0;
  std::int64_t usable_tokens = 0;    // of them, tokens whose entries were there
  std::int64_t replayed_tokens = 0;  // of these, tokens computed again for windows and pending rows
  std::int64_t stored_blocks = 0;
  std::int64_t joined_blocks = 0;    // computed by two requests at the same time; one copy was freed
  std::int64_t inserted_blocks = 0;  // computed elsewhere
  std::int64_t evicted_blocks = 0;
  std::int64_t saved_snapshots = 0;
  std::int64_t restored_snapshots = 0;
  std::int64_t dropped_snapshots = 0;  // to make room for others, without those evicted with their block
  std::uint64_t lost_events = 0;
  // Now.
  std::int64_t blocks = 0;  // kept, those of running requests included
  std::int64_t snapshots = 0;
};

}  // namespace kv4
