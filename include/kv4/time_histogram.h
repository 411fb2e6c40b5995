// Times of calls, as plain numbers: for metrics.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kv4 {

/// Counts calls by their time. One thread at a time uses the object, as with a cache: nothing is locked or allocated.
/// The bounds are part of the status file's format: other bounds would need fields of another name.
struct TimeHistogram {
  /// 1, 2.5 and 5 times each power of ten from 1 us to 10 s.
  static constexpr std::array<std::int64_t, 22> kBoundsNs = {
      1'000,       2'500,       5'000,         10'000,        25'000,        50'000,        100'000,    250'000,
      500'000,     1'000'000,   2'500'000,     5'000'000,     10'000'000,    25'000'000,    50'000'000, 100'000'000,
      250'000'000, 500'000'000, 1'000'000'000, 2'500'000'000, 5'000'000'000, 10'000'000'000};
  static constexpr int kBuckets = static_cast<int>(kBoundsNs.size()) + 1;

  std::array<std::int64_t, kBuckets>
      counts{};  // [i]: at most kBoundsNs[i] and more than the bound before; the last has no bound
  std::int64_t sum_seconds = 0, sum_ns = 0;  // time of all calls: the sum of both, sum_ns below 10^9

  /// Counts one call.
  void add(std::chrono::nanoseconds time) {
    constexpr std::int64_t second = 1'000'000'000;
    const std::int64_t ns = std::max<std::int64_t>(time.count(), 0);
    const auto bound = std::lower_bound(kBoundsNs.begin(), kBoundsNs.end(), ns);
    ++counts[static_cast<std::size_t>(bound - kBoundsNs.begin())];
    sum_ns += ns % second;
    sum_seconds += ns / second + sum_ns / second;
    sum_ns %= second;
  }
  /// Calls in all.
  std::int64_t count() const {
    std::int64_t out = 0;
    for (const std::int64_t each : counts) out += each;
    return out;
  }
  /// Time of all calls together.
  double seconds() const { return static_cast<double>(sum_seconds) + 1e-9 * static_cast<double>(sum_ns); }
};

}  // namespace kv4
