// One running request, as the manager sees it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv4/kv_cache_manager.h"
#include "prefix/prefix_index.h"

namespace kv4 {

/// Progress of one layer group: the backbone, or one draft stage.
struct GroupProgress {
  std::int64_t length = 0;        // committed tokens
  std::int64_t highest = 0;       // one past the highest position ever written, rejected ones included
  std::int64_t floor = 0;         // length at import or at a hit: nothing before it can be rebuilt
  std::int64_t window_begin = 0;  // window rows before it do not exist
};

/// A request's blocks in the prefix index.
struct PrefixChain {
  bool publishes = false;    // its full blocks get keys
  bool approximate = false;  // a bounded replay: its later bytes are not those of a cold run
  bool narrowed = false;     // its decoder's windows depend on how the prompt was cut: no snapshots
  TenantId tenant = 0;
  std::uint16_t weights_slot = 0;  // of its weights
  BlockKey root{};
  std::int64_t blocks = 0;         // its blocks in the index: the first of its table row
  NodeId tail = kNoNode;             // the last of these, pinned
  std::int64_t replay_end = 0;     // tokens below it have their entries already; 0: no replay
  std::int64_t prompt_end = 0;     // the last boundary that another request with this prompt can use
  NodeId latest = kNoNode;           // its snapshot goes once this request has a newer one
  std::vector<std::string> extra;  // by block of the prompt
};

/// A row of the request table. Free rows have id -1.
struct Sequence {
  RequestId id = kNoRequest;
  std::int32_t slot = -1;
  std::int64_t step_id = 0;           // of the open step it is in; 0: in none
  std::vector<GroupProgress> groups;  // [num_groups]
  PrefixChain chain;

  std::int64_t length() const { return groups[0].length; }
};

}  // namespace kv4
