// What a cache can be planned with, and not yet run with.
#pragma once

#include "kv4/schema.h"

namespace kv4 {

/// Throws Error(bad_config) for a schema that no operations exist for: one of V4.1, and of V4 with V4.1's rows or with
/// two row formats. Pools ask it, so every cache does.
void require_operations(const CacheSchema& schema);

}  // namespace kv4
