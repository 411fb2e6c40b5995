// A forked child has none of its parent's threads: its caches continue with new ones.
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "cache/small_cache.h"
#include "kv4/tiered_prefix.h"
#include "support/sanitized.h"

namespace kv4 {
namespace {

#if KV4_TSAN
constexpr bool kMayStartThreads = false;  // TSan ends a child that starts threads
#else
constexpr bool kMayStartThreads = true;
#endif

constexpr unsigned kMostSeconds = 60;  // limit for a hanging child

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
  EXPECT_TRUE(goes_on());  // the parent's threads still work
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

// No thread answers in the child, and no deadline is near.
TEST(Fork, AChildFindsNothingInTiersAndEndsThem) {
  const auto folder = std::filesystem::temp_directory_path() / ("kv4_fork_" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  CacheOptions options = small::options();
  options.prefix.enabled = true;
  options.prefix.weights_id = "weights";
  options.prefix.num_snapshots = 4;
  {
    small::SmallCache parent(options, small::config(), true, make_cpu_backend(1));
    const TiersOptions below{.host_bytes = 1 << 20,
                             .directory = folder.string(),
                             .disk_bytes = 4 << 20,
                             .segment_bytes = 1 << 20,
                             .close_limit = std::chrono::hours(1)};
    auto tiers = std::make_unique<Tiers>(parent.cache.schema(), below);
    auto tiered = std::make_unique<TieredPrefix>(parent.cache, *tiers);
    const std::vector<std::int32_t> ids = small::token_ids(1, 0, 70);
    const Prompt prompt{ids, 0, {}, {}};
    const tier::Deadline late = std::chrono::steady_clock::now() + std::chrono::hours(1);
    const RequestId request = parent.cache.admit(prompt).value().request;
    while (const auto left = static_cast<std::int32_t>(70 - parent.cache.length(request)))
      parent.run({{request, 1, std::min(48, left)}});
    ASSERT_TRUE(tiered->save_all(late));
    parent.cache.release(request);
    parent.cache.invalidate("weights");
    EXPECT_EQ(in_child([&] {
                const std::int64_t found = tiered->load(prompt, late);
                const auto flushed = tiers->flush(late);
                tiered.reset();
                tiers.reset();
                return found == 0 && flushed == std::vector(2, tier::FlushStatus::failed);
              }),
              0);
    EXPECT_EQ(tiered->load(prompt, late), 4);
    EXPECT_EQ(tiers->flush(late), (std::vector{tier::FlushStatus::kept, tier::FlushStatus::durable}));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kv4
