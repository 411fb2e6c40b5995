// Python's pools: with a schema of their own, or a cache's.
#pragma once

#include <memory>

#include "device.h"
#include "kv4/paged_kv_pool.h"
#include "kv4/state_cache_pool.h"

namespace kv4::python {

template <class T>
struct PoolOf {
  std::shared_ptr<Device> device;
  std::unique_ptr<CacheSchema> own_schema;
  std::unique_ptr<T> own;
  const CacheSchema* schema = nullptr;
  T* pool = nullptr;

  PoolOf(const CacheSchema& schema_in, std::shared_ptr<Device> device_in)
      : device(std::move(device_in)), own_schema(std::make_unique<CacheSchema>(schema_in)), schema(own_schema.get()) {
    own = device->work([&] { return std::make_unique<T>(*schema, device->backend()); });
    pool = own.get();
  }
  /// A cache's pool; the cache must live longer.
  PoolOf(std::shared_ptr<Device> device_in, const CacheSchema& schema_in, T& pool_in)
      : device(std::move(device_in)), schema(&schema_in), pool(&pool_in) {}
  PoolOf(PoolOf&&) noexcept = default;
  ~PoolOf() {
    if (own) device->at_end([&] { own.reset(); });
  }

  template <class Call>
  auto work(Call&& call) const {
    return device->work([&] { return call(*pool); });
  }
};

using KVPool = PoolOf<PagedKVPool>;
using StatePool = PoolOf<StateCachePool>;

}  // namespace kv4::python
