// kv4_cache_options and CacheOptions.
#pragma once

#include "kv4.h"
#include "kv4/options.h"

namespace kv4::c_api {

kv4_cache_options cache_options_defaults();
/// NULL gives the defaults.
CacheOptions cache_options(const kv4_cache_options* given);

}  // namespace kv4::c_api
