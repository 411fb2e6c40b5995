// Looks at the bytes of replies before they are parsed, and lets no reply pass that is larger than its command can
// have for an answer: neither the parser's buffer nor the tree of a reply takes memory beyond that.
//
// Sizes count when they are announced: "*50000000" is refused at its line end. Nothing but RESP2 passes (+ - : $ *):
// kv4 asks for no other version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tier/redis_failures.h"

namespace kv4::tier {

inline constexpr std::int64_t kMaxLineBytes = 16 << 10;  // of a status, an error, a number, a length

/// Limits of one reply.
struct ReplyLimits {
  int depth = 0;                 // of arrays within each other; 0: no array
  std::int64_t elements = 0;     // of all its arrays together
  std::int64_t bulk_bytes = 0;   // of one string
  std::int64_t total_bytes = 0;  // as they come from the server
};

class ReplyGate {
 public:
  enum class Verdict : std::uint8_t { more, complete, refused };

  /// Bytes that continue the reply under way, or begin one; `taken`: how many of them belong to it. After `complete`
  /// the next ones begin another.
  Verdict look(std::span<const char> bytes, const ReplyLimits& limits, std::size_t& taken);
  /// Why it is refused.
  const RedisFailure& failure() const { return failure_; }

 private:
  Verdict refuse(FailureReason reason, std::string detail);
  Verdict take_line(const ReplyLimits& limits);
  Verdict take_bulk(std::int64_t bytes, const ReplyLimits& limits);
  Verdict take_array(std::int64_t elements, const ReplyLimits& limits);
  Verdict end_element();

  std::string line_;                // so far, with its end
  std::int64_t bulk_left_ = 0;      // bytes of a string that are to come, its line end included
  std::vector<std::int64_t> open_;  // arrays under way: elements that are to come
  std::int64_t elements_ = 0, total_bytes_ = 0;
  RedisFailure failure_;
};

}  // namespace kv4::tier
