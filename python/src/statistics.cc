// The state of a cache and its counts: CacheStatistics, and histograms of times and tokens.
#include "kv4/statistics.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "cache.h"

namespace kv4::python {

void bind_statistics(nb::module_& m) {
  nb::class_<TimeHistogram>(m, "TimeHistogram", "Calls by their time.")
      .def_ro("counts", &TimeHistogram::counts,
              "list: [i] of at most bounds()[i] seconds and more than the bound before; the last has no bound")
      .def_prop_ro("count", &TimeHistogram::count, "all of them")
      .def_prop_ro("seconds", &TimeHistogram::seconds, "of all calls together")
      .def_static(
          "bounds",
          [] {
            std::vector<double> out;
            for (const std::int64_t ns : TimeHistogram::kBoundsNs) out.push_back(static_cast<double>(ns) / 1e9);
            return out;
          },
          "Upper bounds of the buckets but the last, in seconds.");
  nb::class_<TokenHistogram>(m, "TokenHistogram", "Numbers of tokens by size.")
      .def_ro("counts", &TokenHistogram::counts,
              "list: [i] of at most 128 << i tokens and more than the bound before; the last has no bound")
      .def_ro("sum", &TokenHistogram::sum);
  nb::class_<TenantUse>(m, "TenantUse", "What the prefix cache keeps of a tenant.")
      .def_ro("share_blocks", &TenantUse::share_blocks, "that others cannot evict")
      .def_ro("blocks", &TenantUse::blocks, "kept, those of running requests included");
  nb::class_<ShortageCounts>(m, "ShortageCounts", "Calls that found no room, by what was short.")
      .def_ro("requests", &ShortageCounts::requests)
      .def_ro("blocks", &ShortageCounts::blocks)
      .def_ro("slots", &ShortageCounts::slots);
  nb::class_<CallTimes>(m, "CallTimes", "TimeHistograms of calls that came back, those with a shortage included.")
      .def_ro("admit", &CallTimes::admit)
      .def_ro("prepare_forward", &CallTimes::prepare_forward)
      .def_ro("tier_load", &CallTimes::tier_load, "TieredPrefix: from start_load() until nothing is left to be done")
      .def_ro("tier_save", &CallTimes::tier_save, "TieredPrefix.save()")
      .def_ro("session_restore", &CallTimes::session_restore)
      .def_ro("session_save", &CallTimes::session_save);
  nb::class_<CacheStatistics>(m, "CacheStatistics", "What a cache has now, and has done since it was made.")
      .def_ro("requests", &CacheStatistics::requests, "running")
      .def_ro("max_requests", &CacheStatistics::max_requests)
      .def_ro("blocks", &CacheStatistics::blocks)
      .def_ro("free_blocks", &CacheStatistics::free_blocks)
      .def_ro("held_blocks", &CacheStatistics::held_blocks)
      .def_ro("evictable_blocks", &CacheStatistics::evictable_blocks)
      .def_ro("slots", &CacheStatistics::slots)
      .def_ro("free_slots", &CacheStatistics::free_slots)
      .def_ro("memory_bytes", &CacheStatistics::memory_bytes)
      .def_ro("tenants", &CacheStatistics::tenants, "list of TenantUse; empty: the cache keeps no prefixes")
      .def_ro("prefix", &CacheStatistics::prefix, "PrefixStatistics")
      .def_ro("usable_tokens", &CacheStatistics::usable_tokens, "TokenHistogram of every prompt")
      .def_ro("replayed_tokens", &CacheStatistics::replayed_tokens, "TokenHistogram of every hit")
      .def_ro("times", &CacheStatistics::times, "CallTimes")
      .def_ro("admit_shortages", &CacheStatistics::admit_shortages, "ShortageCounts")
      .def_ro("prepare_forward_shortages", &CacheStatistics::prepare_forward_shortages, "ShortageCounts");
}

void def_statistics(nb::class_<Cache>& cache) {
  cache.def(
      "statistics", [](Cache& self) { return self.work([](KVCacheManager& manager) { return manager.statistics(); }); },
      "CacheStatistics: what the cache has and has done.");
}

}  // namespace kv4::python
