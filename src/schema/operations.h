// The schemas that a cache can be planned with, but not run with yet.
#pragma once

#include "kv4/schema.h"

namespace kv4 {

/// Throws Error(bad_config) for a schema without operations on its backend. Pools call it, so every cache does.
/// `has_shared_entries`: whether the backend has V4.1's operations, and with them every row format and two in a cache.
void require_operations(const CacheSchema& schema, bool has_shared_entries);

}  // namespace kv4
