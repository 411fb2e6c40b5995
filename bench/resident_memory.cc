// Resident memory of a cache after touching its pools, against the plan.
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <stdexcept>

#include "cases.h"

namespace kv4::bench {
namespace {

constexpr std::int64_t kPoolBytes = std::int64_t{1} << 30;

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  if (!(statm >> total >> resident)) throw std::runtime_error("cannot read /proc/self/statm; the check needs Linux");
  return resident * sysconf(_SC_PAGESIZE);
}

CacheOptions gigabyte_options(const ModelConfig& config) {
  CacheOptions options;
  const MemoryPlan plan = plan_memory(build_schema(config, options));
  options.num_blocks = kPoolBytes / plan.block_bytes + 1;
  options.max_requests = static_cast<int>(kPoolBytes / 4 / plan.state_bytes_per_request) + 1;
  return options;
}

}  // namespace

ResidentMemory measure_resident_memory(const BenchSettings& settings) {
  const std::int64_t before = resident_bytes();
  KVCacheManager manager(settings.config, gigabyte_options(settings.config), make_cpu_backend(settings.threads));
  std::memset(manager.kv_pool().base(), 1, manager.kv_pool().memory_bytes());
  const CacheSchema& schema = manager.schema();
  std::memset(manager.state_pool().base(), 1, manager.state_pool().num_slots() * schema.slot_bytes);
  const MemoryPlan plan = plan_memory(schema);
  std::int64_t planned = plan.total_bytes;
  for (const MemoryPart& part : plan.parts)
    if (part.name == "index workspace" || part.name == "attend workspace") planned -= part.bytes;  // nothing has run
  return {planned, resident_bytes() - before};
}

}  // namespace kv4::bench
