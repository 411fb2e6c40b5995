// What is made of several calls of a cache is one call of it, too.
#pragma once

#include "cache/manager_impl.h"

namespace kv4 {

/// As OneThread::Call, of the cache.
struct CacheCall : OneThread::Call {
  explicit CacheCall(const KVCacheManager& cache) : Call(cache.impl_->driver) {}
};

}  // namespace kv4
