// The tiers that TiersOptions ask for, each behind its queue: below a cache (kv4/tiers.h) and in a store of chunks
// (kv4/chunk_store.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kv4/tiers.h"
#include "tier/tier_chain.h"

namespace kv4::tier {

/// What the records of a stack are.
struct StackShape {
  std::uint64_t layout_id = 0;
  std::int64_t host_page_bytes = 16 << 10;
  std::int64_t max_requests = 4096;      // reads and writes of each tier that wait or are under way
  bool own_as_records = false;           // tiers of the caller's own get headers, too, where there are no keys
  std::function<void()> on_answer = {};  // TierQueueOptions
};

struct TierStack {
  std::vector<std::unique_ptr<TierQueue>> queues;  // the fastest first
  std::vector<Protection> protections;             // of written records, by tier
};

/// Throws Error as the constructors of Tiers and ChunkStore.
TierStack make_stack(const TiersOptions& options, const StackShape& shape, const std::shared_ptr<Clock>& clock);

TierReport report_of(const ChainStats& stats, Protection protection);

}  // namespace kv4::tier
