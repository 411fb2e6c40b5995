// The call times that statistics() and the status folder report.
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "cache/small_cache.h"
#include "cache/status_file.h"
#include "kv4/session.h"
#include "kv4/statistics.h"
#include "kv4/tiered_prefix.h"

namespace kv4 {
namespace {

using small::SmallCache;
using std::chrono::nanoseconds;

CacheOptions keeping_prefixes() {
  CacheOptions o = small::options();
  o.prefix.enabled = true;
  o.prefix.weights_id = "weights";
  o.prefix.num_snapshots = 4;
  return o;
}

TEST(TimeHistogram, ABoundIsPartOfItsBucket) {
  TimeHistogram h;
  for (std::size_t i = 0; i < TimeHistogram::kBoundsNs.size(); ++i) {
    h.add(nanoseconds(TimeHistogram::kBoundsNs[i]));
    EXPECT_EQ(h.counts[i], i == 0 ? 1 : 2);
    h.add(nanoseconds(TimeHistogram::kBoundsNs[i] + 1));
    EXPECT_EQ(h.counts[i + 1], 1);
  }
  h.add(nanoseconds(-5));
  h.add(nanoseconds(0));
  EXPECT_EQ(h.counts[0], 3);
  EXPECT_EQ(h.count(), 2 * std::ssize(TimeHistogram::kBoundsNs) + 2);
}

TEST(TimeHistogram, TheSumIsExactAndDoesNotOverflow) {
  TimeHistogram h;
  for (int i = 0; i < 3; ++i) h.add(nanoseconds(999'999'999));
  EXPECT_EQ(h.sum_seconds, 2);
  EXPECT_EQ(h.sum_ns, 999'999'997);
  h.sum_seconds = std::int64_t{1} << 40;  // some ten thousand years
  h.add(std::chrono::hours(24 * 365 * 200));
  EXPECT_GT(h.sum_seconds, std::int64_t{1} << 40);
}

TEST(CallTimes, CallsThatComeBackCount) {
  SmallCache small;
  const RequestId request = small.admit();
  small.run({{request, 1, 20}});
  EXPECT_THROW((void)small.cache.prepare_forward({}), Error);
  const CallTimes times = small.cache.statistics().times;
  EXPECT_EQ(times.admit.count(), 1);
  EXPECT_EQ(times.prepare_forward.count(), 1) << "the call that threw does not";
  EXPECT_GT(times.prepare_forward.seconds(), 0);
}

TEST(CallTimes, ShortagesCountByReason) {
  SmallCache small;
  std::vector<RequestId> running;
  while (const Expected<RequestId> request = small.cache.admit()) running.push_back(*request);
  const CacheStatistics full = small.cache.statistics();
  EXPECT_EQ(full.admit_shortages.requests, 1);
  EXPECT_EQ(full.admit_shortages.blocks + full.admit_shortages.slots, 0);
  EXPECT_EQ(full.times.admit.count(), std::ssize(running) + 1) << "a shortage came back, too";
  const std::vector<std::int32_t> ids(32, 1);
  std::int64_t refused = 0;
  for (int round = 0; refused == 0 && round < 10'000; ++round)
    for (const RequestId request : running) {
      const StepItem item{.request = request, .count = 32, .token_ids = ids};
      const Expected<Step> step = small.cache.prepare_forward(std::span(&item, 1));
      if (step)
        small.cache.commit(*step);
      else if (step.error() == Shortage::blocks)
        ++refused;
    }
  EXPECT_GT(refused, 0);
  EXPECT_EQ(small.cache.statistics().prepare_forward_shortages.blocks, refused);
}

TEST(CallTimes, ASessionCountsOnceWhereverItGoes) {
  const std::string path = (std::filesystem::path(::testing::TempDir()) / "kv4_call_times.session").string();
  SmallCache small;
  SessionIdentity who;
  who.weights_id = "w";
  const RequestId request = small.admit();
  small.run({{request, 1, 20}});
  ASSERT_TRUE(save_session_file(small.cache, request, who, path));
  EXPECT_EQ(small.cache.statistics().times.session_save.count(), 1);
  ASSERT_TRUE(restore_session_file(small.cache, who, path));
  EXPECT_EQ(small.cache.statistics().times.session_restore.count(), 1);
  EXPECT_THROW((void)restore_session_file(small.cache, who, path + ".none"), Error);
  EXPECT_EQ(small.cache.statistics().times.session_restore.count(), 1);
  std::filesystem::remove(path);
}

TEST(CallTimes, TiersTellTheirsAndTheCacheItsLoads) {
  SmallCache small(keeping_prefixes());
  Tiers tiers(small.cache.schema(), {.host_bytes = 1 << 20});
  TieredPrefix tiered(small.cache, tiers);
  const std::vector<std::int32_t> ids = small::token_ids(1, 0, 40);
  const Prompt prompt{.token_ids = ids, .tenant = 0, .salt = {}, .extra = {}};
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  const RequestId request = small.cache.admit(prompt).value().request;
  small.run({{request, 1, 40}});
  small.cache.release(request);
  ASSERT_TRUE(tiered.save_all(soon));
  (void)tiers.flush(soon);
  TierReport report = tiers.report()[0];
  EXPECT_GT(report.put_times.count(), 0);
  EXPECT_LE(report.put_times.count(), report.stored);
  EXPECT_EQ(report.get_times.count(), 0);

  SmallCache other(keeping_prefixes());
  TieredPrefix below(other.cache, tiers);
  ASSERT_GT(below.load(prompt, soon), 0);
  EXPECT_EQ(other.cache.statistics().times.tier_load.count(), 1);
  EXPECT_GT(tiers.report()[0].get_times.count(), 0);
  EXPECT_GT(small.cache.statistics().times.tier_save.count(), 0);

  PublishedStatus published;
  published.status = read_status(other.cache, &tiers);
  const PublishedStatus found = parse_published_status(status_text(published));
  EXPECT_EQ(found.status.cache.times.tier_load.counts, other.cache.statistics().times.tier_load.counts);
  EXPECT_EQ(found.status.tiers[0].get_times.count(), published.status.tiers[0].get_times.count());
  EXPECT_EQ(found.status.tiers[0].put_times.sum_ns, published.status.tiers[0].put_times.sum_ns);
  EXPECT_EQ(found.status.build.version, build_info().version);
}

// Statuses of 0.1 have no build and no times; malformed histograms are refused.
TEST(CallTimes, OlderAndOddStatusesAreTakenOrRefused) {
  const PublishedStatus old = parse_published_status(
      R"({"format": "kv4 status 1", "status": {"cache": {"requests": 3}, "tiers": [{"name": "host", "hits": 4}]}})");
  EXPECT_EQ(old.status.cache.requests, 3);
  EXPECT_EQ(old.status.build.version, "");
  EXPECT_EQ(old.status.cache.times.admit.count() + old.status.tiers[0].get_times.count(), 0);
  const auto with = [](const std::string& cache) {
    return R"({"format": "kv4 status 1", "status": {"cache": {"times": {"admit": )" + cache + "}}}}";
  };
  for (const char* const bad : {R"({"counts": [1, 2]})", R"({"counts": 7})", "[]", R"({"counts": ["a"]})"})
    EXPECT_THROW((void)parse_published_status(with(bad)), Error) << bad;
}

// Counts above the readers' limit are written as the limit.
TEST(CallTimes, CountsBeyondWhatReadersTakeStayAtThat) {
  PublishedStatus in;
  in.status.tiers.emplace_back().hit_bytes = kMaxStatusNumber + 5;
  EXPECT_EQ(parse_published_status(status_text(in)).status.tiers[0].hit_bytes, kMaxStatusNumber);
}

}  // namespace
}  // namespace kv4
