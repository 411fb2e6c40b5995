// Checks the bytes of replies before they are parsed, and stops a reply that is larger than its command's answer can
// be. This bounds the memory of the parser's buffer and of the reply's tree.
//
// Sizes count when they are announced: "*50000000" is refused at its line end. Only RESP2 passes (+ - : $ *): kv4 asks
// for no other version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tier/redis_failures.h"

namespace kv4::tier {

inline constexpr std::int64_t kMaxLineBytes = 16 << 10;  // a status, an error, a number or a length

/// Limits of one reply.
struct ReplyLimits {
  int depth = 0;                 // nested arrays; 0: no array
  std::int64_t elements = 0;     // in all its arrays together
  std::int64_t bulk_bytes = 0;   // in one string
  std::int64_t total_bytes = 0;  // as sent by the server
};

class ReplyGate {
 public:
  enum class Verdict : std::uint8_t { more, complete, refused };

  /// Checks bytes that continue the current reply, or begin one. `taken`: how many of them belong to it. After
  /// `complete` the next bytes begin another reply.
  Verdict look(std::span<const char> bytes, const ReplyLimits& limits, std::size_t& taken);
  /// Why the reply is refused.
  const RedisFailure& failure() const { return failure_; }

 private:
  Verdict refuse(FailureReason reason, std::string detail);
  Verdict take_line(const ReplyLimits& limits);
  Verdict take_bulk(std::int64_t bytes, const ReplyLimits& limits);
  Verdict take_array(std::int64_t elements, const ReplyLimits& limits);
  Verdict end_element();

  std::string line_;                // so far, with its end
  std::int64_t bulk_left_ = 0;      // missing bytes of a string, its line end included
  std::vector<std::int64_t> open_;  // missing elements of each open array
  std::int64_t elements_ = 0, total_bytes_ = 0;
  RedisFailure failure_;
};

}  // namespace kv4::tier
