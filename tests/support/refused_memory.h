// Allocations that fail on request: every form of operator new in the whole program, and aligned_alloc, which the
// library calls itself. Sanitizers keep their own aligned_alloc.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "kv4/error.h"

namespace kv4::test {

/// Number of live allocations by operator new in the whole program.
std::int64_t live_allocations();

enum class Refused : std::uint8_t { one, all_later };  // all_later: nothing is left from then on
enum class Threads : std::uint8_t { own, all };

/// While the object lives, the n-th allocation from now on fails (n = 1: the next). Only one object at a time.
class RefusedMemory {
 public:
  RefusedMemory(std::int64_t n, Refused refused, Threads threads);
  ~RefusedMemory();
  RefusedMemory(const RefusedMemory&) = delete;
  RefusedMemory& operator=(const RefusedMemory&) = delete;

  bool happened() const;
};

/// While the object lives, allocations of the calling thread are neither refused nor counted.
class FreeMemory {
 public:
  FreeMemory();
  ~FreeMemory();
};

/// 1, 2, 3 ... up to a limit, then with growing steps; with KV4_TEST_LONG=1 all.
inline std::int64_t next_allocation(std::int64_t n) {
  static const bool all = std::getenv("KV4_TEST_LONG") != nullptr;
  return all || n < 64 ? n + 1 : n + 1 + n / 8;
}

/// The outcome of a call with refused memory; it may succeed all the same.
struct Refusal {
  bool happened = false;
  bool threw = false;
};

/// Makes the call. It may throw only Error(out_of_memory), with a text that names memory.
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
      error = thrown;  // copying takes no memory
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

/// Refuses each allocation of a call in turn, alone and with all later ones, until the call succeeds; runs `unchanged`
/// after every refusal. Returns the number of refusals.
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
