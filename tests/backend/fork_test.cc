// A forked child has none of its parent's threads: its caches go on with new ones.
#include <sys/wait.h>
#include <unistd.h>

#include "cache/small_cache.h"
#include "support/sanitized.h"

namespace kv4 {
namespace {

#if KV4_TSAN
constexpr bool kMayStartThreads = false;  // TSan ends a child that starts threads
#else
constexpr bool kMayStartThreads = true;
#endif

constexpr unsigned kMostSeconds = 60;  // a child that hangs is ended

/// Runs `body` in a child; its exit status.
template <class Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kMostSeconds);
    ::_exit(body() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST(Fork, AChildGoesOnWithThreadsOfItsOwn) {
  if (!kMayStartThreads) GTEST_SKIP() << "TSan ends a child that starts threads";
  small::SmallCache parent(small::options(), small::config(), true, make_cpu_backend(4)),
      twin(small::options(), small::config(), true, make_cpu_backend(1));
  const RequestId request = parent.request(1, 40), same = twin.request(1, 60);
  const auto goes_on = [&] {
    parent.run({{request, 1, 20}});
    return parent.cache.export_blocks(request) == twin.cache.export_blocks(same) &&
           parent.cache.export_image(request) == twin.cache.export_image(same);
  };
  EXPECT_EQ(in_child([&] { return goes_on(); }), 0);
  EXPECT_EQ(in_child([&] { return in_child([&] { return goes_on(); }) == 0 && goes_on(); }), 0);
  EXPECT_TRUE(goes_on());  // the parent has its own, as before
}

TEST(Fork, AChildThatComputesNothingCanEndItsCache) {
  auto parent = std::make_unique<small::SmallCache>(small::options(), small::config(), true, make_cpu_backend(4));
  (void)parent->request(1, 40);
  EXPECT_EQ(in_child([&] {
              parent.reset();
              return true;
            }),
            0);
}

}  // namespace
}  // namespace kv4
