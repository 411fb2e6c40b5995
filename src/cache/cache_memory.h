// The memory of a cache, all allocated here at the start, except the prefix cache's and the rope tables'.
#pragma once

#include <memory>
#include <utility>

#include "backend/device_memory.h"
#include "cache/step_tables.h"
#include "kv4/paged_kv_pool.h"
#include "kv4/schema.h"
#include "kv4/state_cache_pool.h"
#include "schema/table_layout.h"

namespace kv4 {

struct CacheMemory {
  CacheMemory(const ModelConfig& config, const CacheOptions& options, std::shared_ptr<Backend> backend_in)
      : schema(build_schema(config, options)),
        backend(std::move(backend_in)),
        kv_pool(schema, backend),
        state_pool(schema, backend),
        tables(schema, backend),
        index_workspace(backend, index_workspace_bytes(schema)),
        attend_workspace(backend, attend_workspace_bytes(schema)),
        candidates(backend, candidate_layout(schema).bytes) {}

  std::int64_t bytes() const {
    return kv_pool.memory_bytes() + state_pool.memory_bytes() + tables.memory_bytes() + index_workspace.bytes() +
           attend_workspace.bytes() + candidates.bytes();
  }

  CacheSchema schema;  // the pools refer to it
  std::shared_ptr<Backend> backend;
  PagedKVPool kv_pool;
  StateCachePool state_pool;
  StepTables tables;
  DeviceMemory index_workspace, attend_workspace, candidates;
};

}  // namespace kv4
