// Allocations that fail on request: every form of operator new of the whole program, and aligned_alloc, which the
// library calls itself. Sanitizers keep their own aligned_alloc.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "kv4/error.h"

namespace kv4::test {

/// Of the whole program, by operator new.
std::int64_t live_allocations();

enum class Refused : std::uint8_t { one, all_later };  // all_later: nothing is left from then on
enum class Threads : std::uint8_t { own, all };

/// While it lives, the n-th allocation from now on fails (n = 1: the next). One at a time.
class RefusedMemory {
 public:
  RefusedMemory(std::int64_t n, Refused refused, Threads threads);
  ~RefusedMemory();
  RefusedMemory(const RefusedMemory&) = delete;
  RefusedMemory& operator=(const RefusedMemory&) = delete;

  bool happened() const;
};

/// What the calling thread allocates meanwhile is not refused, and not counted.
class FreeMemory {
 public:
  FreeMemory();
  ~FreeMemory();
};

/// 1, 2, 3 ... up to a limit, then ever larger steps; all with KV4_TEST_LONG=1.
inline std::int64_t next_allocation(std::int64_t n) {
  static const bool all = std::getenv("KV4_TEST_LONG") != nullptr;
  return all || n < 64 ? n + 1 : n + 1 + n / 8;
}

/// What became of a call whose memory was refused: nothing where it went well all the same.
struct Refusal {
  bool happened = false;
  bool threw = false;
};

/// Makes the call; what it throws for want of memory is Error(out_of_memory) with a text that says so.
template <class Call>
Refusal call_without(std::int64_t n, Refused refused, Threads threads, Call&& call) {
  Refusal out;
  std::optional<Error> error;
  bool foreign = false;
  {
    const RefusedMemory memory(n, refused, threads);
    try {
      call();
    } catch (const Error& thrown) {
      error = thrown;  // takes no memory
    } catch (...) {
      foreign = true;
    }
    out = {memory.happened(), error || foreign};
  }
  EXPECT_FALSE(foreign) << "something else than kv4::Error came out, allocation " << n;
  if (error) {
    const std::string what = error->what();
    EXPECT_EQ(std::string(to_string(error->code())), to_string(ErrorCode::out_of_memory))
        << what << ", allocation " << n;
    EXPECT_NE(what.find("memory"), std::string::npos) << what;
  }
  return out;
}

/// Refuses each allocation of a call in turn, alone and with all later ones, until the call succeeds; after every
/// refusal `unchanged` looks. Returns how many times it was refused.
template <class Call, class Unchanged>
int refuse_each(const std::string& name, Call&& call, Unchanged&& unchanged, Threads threads = Threads::own) {
  SCOPED_TRACE(name);
  int refusals = 0;
  for (std::int64_t n = 1;; n = next_allocation(n))
    for (const Refused refused : {Refused::all_later, Refused::one}) {
      if (!call_without(n, refused, threads, call).threw) return refusals;
      ++refusals;
      unchanged();
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "allocation " << n << (refused == Refused::one ? "" : " and all later ones");
        return refusals;
      }
    }
}

}  // namespace kv4::test
