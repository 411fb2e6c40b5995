// What a cache and its tiers have and have done, in the text format that Prometheus reads.
#pragma once

#include <span>
#include <string>

#include "kv4/statistics.h"
#include "tier/tier_chain.h"

namespace kv4::cli {

std::string metrics_text(const CacheStatistics& cache, std::span<const tier::ChainStats> tiers);

/// The file appears complete, or stays as it was. Throws Error(bad_file).
void write_metrics(const std::string& path, const std::string& text);

}  // namespace kv4::cli
