// The parts of KVCacheManager, each after the parts that it needs.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "base/one_thread.h"
#include "cache/blocks.h"
#include "cache/cache_memory.h"
#include "cache/images.h"
#include "cache/layers.h"
#include "cache/prefix_blocks.h"
#include "cache/prefix_cache.h"
#include "cache/prefix_chains.h"
#include "cache/request_table.h"
#include "cache/requests.h"
#include "cache/snapshots.h"
#include "cache/steps.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/statistics.h"

namespace kv4 {

// Invariants between calls:
// 1. A running request holds exactly ceil(length / block_tokens) blocks, the first entries of its block table row; the
// rest is -1. In a replay it also holds those up to its end.
// 2. It holds one state slot. Free slots are at least the free request rows + spare_slots, except while a step holds
// spares.
// 3. Only blocks with one holder that are not published are written; only by the request that holds them.
// 4. Exactly the first chain.blocks of a request's blocks are published. The index's slots up to chain.tail name them,
// and the request has one reference on each.
// 5. While a step is open its requests' lengths, blocks and slots change only through commit and abort.
// A call allocates before it changes anything: where memory is refused, the cache is as it was.
struct KVCacheManager::Impl {
  Impl(const ModelConfig& config, const CacheOptions& options, std::shared_ptr<Backend> backend)
      : memory(config, options, std::move(backend)),
        prefix(options.prefix.enabled ? std::make_unique<PrefixCache>(memory.schema, memory.backend) : nullptr) {}

  bool on_host() const { return memory.backend->on_host(); }
  std::int64_t memory_bytes() const {
    return memory.bytes() + blocks.memory_bytes() + (prefix ? prefix->memory_bytes() : 0) + layers.memory_bytes();
  }

  OneThread driver;  // of every public call
  CacheMemory memory;
  const std::unique_ptr<PrefixCache> prefix;  // null: off
  Layers layers{memory};
  RequestTable table{memory.schema};
  Blocks blocks{memory, prefix.get()};
  Snapshots snapshots{memory, layers, blocks, prefix.get()};
  PrefixChains chains{memory, prefix.get(), table, blocks, snapshots};
  Requests requests{memory, prefix.get(), table, blocks, snapshots, chains};
  Steps steps{memory, table, blocks, chains, snapshots};
  Images images{memory, prefix.get(), layers, table, blocks, snapshots, chains};
  PrefixBlocks prefix_blocks{memory, prefix.get(), blocks, snapshots, steps};

  std::int64_t whole_window_step = 0;  // V4.1: the narrowed step whose last owner has window rows of all tokens
  std::int64_t candidates_step = 0;  // V4.1: the step whose candidates are there; ids start at 1

  CallTimes times;
  ShortageCounts admit_shortages, prepare_forward_shortages;
};

}  // namespace kv4
