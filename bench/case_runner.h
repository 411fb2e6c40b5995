// Runs one case under Google Benchmark, alternating with a memcpy of the same number of bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "cases.h"
#include "checks/copy_baseline.h"

namespace kv4::bench {

struct CaseResult {
  std::string name, item, error;
  std::int64_t bytes = 0;
  double seconds = 0, memcpy_seconds = 0, plain_seconds = 0, sgemm_seconds = 0, items = 1;
  bool interrupted = false;

  std::optional<double> memcpy_ratio() const {
    return bytes > 0 && seconds > 0 ? std::optional(memcpy_seconds / seconds) : std::nullopt;
  }
  /// The plain row code's time divided by this one.
  std::optional<double> plain_ratio() const {
    return plain_seconds > 0 && seconds > 0 ? std::optional(plain_seconds / seconds) : std::nullopt;
  }
  /// Arithmetic per second, as a share of OpenBLAS' rate in matrix products of the same shapes.
  std::optional<double> sgemm_ratio() const {
    return sgemm_seconds > 0 && seconds > 0 ? std::optional(sgemm_seconds / seconds) : std::nullopt;
  }
};

/// Runs at least `min_time` seconds inside the operation. If `stop` returns true, the measurement ends early and its
/// result is `interrupted`.
CaseResult measure_case(const Case& c, checks::CopyBaseline& copy, double min_time, const std::function<bool()>& stop);

}  // namespace kv4::bench
