// The accepted replies, byte by byte and in one piece; announced sizes count against the limits.
#include "tier/redis_reply_gate.h"

#include <gtest/gtest.h>

namespace kv4::test {
namespace {

using tier::FailureReason;
using tier::ReplyGate;
using Verdict = tier::ReplyGate::Verdict;

constexpr tier::ReplyLimits kLimits = {.depth = 2, .elements = 10, .bulk_bytes = 20, .total_bytes = 100};

/// The verdict on the first reply in `text`, given in pieces of `size` bytes; `end`: where it ends.
Verdict look(ReplyGate& gate, std::string_view text, std::size_t size, std::size_t& end) {
  end = 0;
  while (end < text.size()) {
    const std::string_view piece = text.substr(end, size);
    std::size_t taken = 0;
    const Verdict verdict = gate.look({piece.data(), piece.size()}, kLimits, taken);
    end += taken;
    if (verdict != Verdict::more) return verdict;
    EXPECT_EQ(taken, piece.size());
  }
  return Verdict::more;
}

TEST(TierReplyGate, LetsRepliesPass) {
  const std::vector<std::string> replies = {"+OK\r\n",
                                            "-ERR a\nb\rc\r\n",
                                            ":-12\r\n",
                                            "$-1\r\n",
                                            "*-1\r\n",
                                            "$0\r\n\r\n",
                                            "$4\r\na\r\nb\r\n",
                                            "$20\r\n01234567890123456789\r\n",
                                            "*0\r\n",
                                            "*2\r\n:1\r\n*2\r\n$1\r\na\r\n*-1\r\n",
                                            "*2\r\n*0\r\n*0\r\n",
                                            "*10\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n"};
  for (std::size_t size : {1, 2, 3, 7, 1000}) {
    ReplyGate gate;
    std::string all;
    for (const std::string& reply : replies) all += reply;
    std::string_view rest = all;
    for (const std::string& reply : replies) {
      std::size_t end = 0;
      ASSERT_EQ(look(gate, rest, size, end), Verdict::complete) << reply << gate.failure().detail;
      ASSERT_EQ(rest.substr(0, end), reply);
      rest.remove_prefix(end);
    }
  }
}

TEST(TierReplyGate, RefusesWhatIsTooLargeOrNoReply) {
  struct Case {
    std::string text;
    FailureReason reason;
  };
  const FailureReason large = FailureReason::reply_too_large, nonsense = FailureReason::not_redis;
  for (const Case& each : {Case{"*50000000\r\n", large},
                           {"*11\r\n", large},
                           {"*9223372036854775807\r\n", large},
                           {"*99999999999999999999\r\n", nonsense},
                           {"*2\r\n*5\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n*4\r\n", large},
                           {"*1\r\n*1\r\n*1\r\n", large},
                           {"$21\r\n", large},
                           {"$9223372036854775807\r\n", large},
                           {"*5\r\n$20\r\n01234567890123456789\r\n$20\r\n01234567890123456789\r\n$20\r\n"
                            "01234567890123456789\r\n$20\r\n",
                            large},
                           {std::string(20000, '+'), large},
                           {"-" + std::string(120, 'x') + "\r\n", large},
                           {"$-2\r\n", nonsense},
                           {"*-2\r\n", nonsense},
                           {"$\r\n", nonsense},
                           {"$1x\r\n", nonsense},
                           {": 1\r\n", nonsense},
                           {"$1\r\nabc", nonsense},
                           {"$1\r\na\rb", nonsense},
                           {"nonsense", nonsense},
                           {"HTTP/1.1 400 Bad Request\r\n", nonsense},
                           {std::string("\0\0", 2), nonsense},
                           {"\r\n", nonsense},
                           {"%1\r\n", nonsense},   // RESP3: map, set, attribute, push, big number, double, boolean,
                           {"~1\r\n", nonsense},   // null, verbatim string, streamed string
                           {"|1\r\n", nonsense},
                           {">1\r\n", nonsense},
                           {"(1\r\n", nonsense},
                           {",1\r\n", nonsense},
                           {"#t\r\n", nonsense},
                           {"_\r\n", nonsense},
                           {"=5\r\ntxt:a\r\n", nonsense},
                           {"$?\r\n", nonsense}}) {
    for (std::size_t size : {1, 5, 100000}) {
      ReplyGate gate;
      std::size_t end = 0;
      EXPECT_EQ(look(gate, each.text, size, end), Verdict::refused) << each.text;
      EXPECT_EQ(gate.failure().reason, each.reason) << each.text << ": " << gate.failure().detail;
    }
  }
}

TEST(TierReplyGate, CountsEachReplyByItself) {
  ReplyGate gate;
  for (int i = 0; i < 100; ++i) {
    std::size_t end = 0;
    ASSERT_EQ(look(gate, "*4\r\n$20\r\n01234567890123456789\r\n:1\r\n:1\r\n:1\r\n", 1000, end), Verdict::complete);
  }
}

}  // namespace
}  // namespace kv4::test
