// The text format of OpenMetrics 1.0, which prometheus-cpp does not write.
#pragma once

#include <prometheus/metric_family.h>

#include <string>
#include <vector>

namespace kv4::cli {

/// A counter's name ends with _total, as in Prometheus' own format; its family's name does not.
std::string openmetrics_text(const std::vector<prometheus::MetricFamily>& families);

}  // namespace kv4::cli
