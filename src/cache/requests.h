// The beginning, rewinding, forking and end of requests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/blocks.h"
#include "cache/prefix_chains.h"
#include "cache/request_table.h"
#include "cache/snapshots.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {

// KVCacheManager documents these calls.
class Requests {
 public:
  Requests(CacheMemory& memory, PrefixCache* prefix, RequestTable& table, Blocks& blocks, Snapshots& snapshots,
           PrefixChains& chains);

  Expected<RequestId> admit();
  Expected<Admission> admit(const Prompt& prompt);
  /// The same without hashing again: `known` are keys of the prompt's first blocks from `root`. If the present root
  /// differs, they are ignored.
  Expected<Admission> admit(const Prompt& prompt, const BlockKey& root, std::span<const BlockKey> known);
  /// Throws if the prompt can never be admitted.
  void check(const Prompt& prompt) const;
  Expected<RequestId> fork(RequestId request);
  void release(RequestId request);
  void rewind(RequestId request, std::int64_t length, int group);
  std::int64_t rewind_floor(RequestId request, int group) const;

  std::vector<BlockId> blocks(RequestId request) const;
  std::vector<std::int32_t> token_ids(RequestId request) const;
  std::vector<std::int32_t> last_token_ids(RequestId request, int count) const;

 private:
  Expected<Admission> begin(const Prompt& prompt, PrefixIdentity identity, std::span<const BlockKey> known);

  CacheMemory& memory_;
  PrefixCache* prefix_;
  RequestTable& table_;
  Blocks& blocks_;
  Snapshots& snapshots_;
  PrefixChains& chains_;
};

}  // namespace kv4
