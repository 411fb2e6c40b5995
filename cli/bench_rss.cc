// Resident memory of a cache whose pools have been touched, against the plan.
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "bench_cases.h"
#include "sizes.h"
#include "table.h"

namespace kv4::cli {
namespace {

constexpr std::int64_t kPoolBytes = std::int64_t{1} << 30;
constexpr double kAllowed = 0.02;

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

int run_rss_check(const BenchSettings& settings, bool json) {
  const std::int64_t before = resident_bytes();
  KVCacheManager manager(settings.config, gigabyte_options(settings.config), make_cpu_backend(settings.threads));
  std::memset(manager.kv_pool().base(), 1, static_cast<std::size_t>(manager.kv_pool().memory_bytes()));
  const CacheSchema& schema = manager.schema();
  std::memset(manager.state_pool().base(), 1,
              static_cast<std::size_t>(manager.state_pool().num_slots() * schema.slot_bytes));
  const std::int64_t grown = resident_bytes() - before, planned = plan_memory(schema).total_bytes;
  const double difference = static_cast<double>(grown - planned) / static_cast<double>(planned);
  const bool ok = std::abs(difference) <= kAllowed;
  if (json) {
    const nlohmann::ordered_json out = {
        {"ok", ok}, {"planned_bytes", planned}, {"resident_bytes", grown}, {"difference", difference}};
    fmt::print("{}\n", out.dump(2));
  } else {
    Table table("lr", {"resident memory", "bytes"});
    table.row({"planned", group_digits(planned)});
    table.row({"grown by", group_digits(grown)});
    table.row({"difference", fmt::format("{:+.2f} %", difference * 100)});
    fmt::print("{}", table.str());
  }
  if (!ok)
    fmt::print(stderr, "failed: resident memory differs from the plan by {:+.2f} %, allowed are 2 %\n",
               difference * 100);
  return ok ? 0 : 1;
}

}  // namespace kv4::cli
