// The failures of each server, as the connections for reads and for writes see them. A failure is logged once, until
// the server works again or fails for another reason.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "kv4/tier.h"

namespace kv4::tier {

struct RedisFailure {
  FailureReason reason = FailureReason::none;
  std::string detail;
};

/// The failure that an error reply stands for. Its text is cut, made printable, and left out where it has a part of the
/// password: servers repeat arguments in errors.
RedisFailure failure_of_error(std::string_view error, const std::string& password);

/// A server's text, made fit for a log.
std::string printable(std::string_view text);

/// For any thread.
class RedisFailures {
 public:
  enum class Side : std::uint8_t { reads, writes };
  static constexpr std::size_t kSides = 2;

  /// `server`: one of a bounded number.
  void failed(Side side, const std::string& server, const RedisFailure& failure);
  void worked(Side side, const std::string& server);
  TierFailure now() const;

 private:
  struct Entry {
    RedisFailure failure;
    std::uint64_t since = 0;  // a sequence number
  };
  using Entries = std::array<Entry, kSides>;

  mutable std::mutex mutex_;
  std::map<std::string, Entries> failing_;
  std::array<std::int64_t, kFailureReasons> counts_{};
  std::uint64_t next_ = 1;
};

}  // namespace kv4::tier
