// Python's Tiers, and durations as Python gives them: in seconds.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "kv4/error.h"
#include "kv4/tiers.h"
#include "turns.h"

namespace kv4::python {

constexpr double kDefaultTimeout = 30.0, kLongestTimeout = 1e8;

inline tier::Duration duration_of(double seconds, const char* name) {
  if (!(seconds >= 0 && seconds <= kLongestTimeout))
    throw Error(ErrorCode::bad_argument,
                std::string(name) + " must be from 0 to 1e8 seconds; got " + std::to_string(seconds));
  return std::chrono::duration_cast<tier::Duration>(std::chrono::duration<double>(seconds));
}

inline tier::Deadline deadline_of(double timeout) {
  return std::chrono::steady_clock::now() + duration_of(timeout, "timeout");
}

/// The library's Tiers. Caches on several backends may share them, so they have turns of their own; a call takes its
/// cache's turn first.
struct SharedTiers {
  Turns turns;
  std::optional<Tiers> tiers;

  SharedTiers(const CacheSchema& schema, TiersOptions options, std::shared_ptr<Device> backend) {
    if (backend) options.backend = backend->backend();
    turns.work([&] { tiers.emplace(schema, options); });
  }
  ~SharedTiers() {
    turns.at_end([&] { tiers.reset(); });
  }

  std::vector<tier::FlushStatus> flush(double timeout) {
    return turns.work([&] { return tiers->flush(deadline_of(timeout)); });
  }
  std::vector<tier::FlushStatus> close(double timeout) {
    return turns.work([&] { return tiers->close(deadline_of(timeout)); });
  }
};

}  // namespace kv4::python
