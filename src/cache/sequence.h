// One running request, as the manager sees it.
#pragma once

#include <cstdint>
#include <vector>

#include "kv4/kv_cache_manager.h"

namespace kv4 {

/// Progress of one layer group: the backbone, or one draft stage.
struct GroupProgress {
  std::int64_t length = 0;   // committed tokens
  std::int64_t highest = 0;  // one past the highest position ever written, rejected ones included
  std::int64_t floor = 0;    // length at import: nothing before it can be rebuilt
};

/// A row of the request table. Free rows have id -1.
struct Sequence {
  RequestId id = kNoRequest;
  std::int32_t slot = -1;
  bool in_step = false;
  std::vector<GroupProgress> groups;  // [num_groups]

  std::int64_t length() const { return groups[0].length; }
};

}  // namespace kv4
