// Cache keys as bytes objects.
#pragma once

#include <vector>

#include "bindings.h"
#include "kv4/cache_keys.h"

namespace kv4::python {

/// Throws Error(bad_argument) that names `what` if the bytes are not 32.
CacheKey key_of(const nb::bytes& bytes, const char* what);
std::vector<CacheKey> keys_of(const std::vector<nb::bytes>& list);
std::vector<nb::bytes> bytes_of(const std::vector<CacheKey>& keys);

}  // namespace kv4::python
