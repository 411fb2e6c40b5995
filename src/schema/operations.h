// The schemas that a cache can be planned with, but not run with yet.
#pragma once

#include "kv4/schema.h"

namespace kv4 {

/// Throws Error(bad_config) for a schema without operations: one of V4.1, or of V4 with V4.1's rows or with two row
/// formats. Pools call it, so every cache does.
void require_operations(const CacheSchema& schema);

}  // namespace kv4
