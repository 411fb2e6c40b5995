// The blocks that running requests share through the prefix index: found for a prompt, published at a commit, released
// at the end of a request.
#pragma once

#include <cstdint>
#include <string_view>

#include "cache/blocks.h"
#include "cache/request_table.h"
#include "cache/snapshots.h"

namespace kv4 {

class PrefixChains {
 public:
  /// `prefix` null: no request has a chain.
  PrefixChains(CacheMemory& memory, PrefixCache* prefix, RequestTable& requests, Blocks& blocks, Snapshots& snapshots);

  /// {} where no prefixes are kept. Throws if there is no such tenant.
  PrefixIdentity identify(const Prompt& prompt) const;
  PrefixIdentity identity_of(std::int32_t row) const;  // {}: its blocks are not kept

  /// From now on blocks that become full get keys.
  void begin(std::int32_t row, PrefixIdentity identity, std::uint16_t weights_slot);
  /// The request begins with these prefix blocks, which are pinned for it.
  void hold(std::int32_t row, const KeptChain& kept);
  /// hold() of a match, pinned here; lengths and the replay begin at match.resume_at.
  void share(std::int32_t row, const PrefixMatch& match);
  /// Begins a fork's chain, over the blocks that it shares.
  void fork(PrefixChain parent, Sequence& child, std::int64_t shared_blocks);
  /// Keeps the first `blocks`.
  void cut(std::int32_t row, std::int64_t blocks);
  void end(std::int32_t row);

  /// Throws where a replay's token ids are not the prompt's.
  void check_replay(const StepItem& item, std::int32_t row) const;
  /// Gives keys to the blocks that are full now.
  void publish(std::int32_t row);
  void invalidate(std::string_view weights_id);

 private:
  CacheMemory& memory_;
  PrefixCache* prefix_;
  RequestTable& requests_;
  Blocks& blocks_;
  Snapshots& snapshots_;
};

}  // namespace kv4
