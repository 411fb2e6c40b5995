// A chain of tiers: gets go down, found records are promoted up, and all tiers agree on the bytes.
#include "tier/tier_chain.h"

#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "support/fake_tier.h"
#include "support/simulated_disk.h"
#include "tier/disk_tier.h"
#include "tier/host_tier.h"
#include "tier/store_records.h"
#if KV4_TEST_REMOTE
#include "support/redis_servers.h"
#endif

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using tier::Content;
using tier::FlushStatus;
using tier::GetStatus;
using tier::TierChain;
using tier::TierQueue;

using Payload = std::vector<std::byte>;

Payload bytes_of(const tier::ReadResult& result) {
  const auto span = result.payload.span();
  return {span.begin(), span.end()};
}

struct TierChains : testing::Test {
  std::shared_ptr<ManualClock> clock = std::make_shared<ManualClock>();
  std::vector<std::shared_ptr<FakeTier>> fakes;
  tier::TierQueueOptions options;
  std::unique_ptr<TierChain> chain;

  void make(int count) {
    fakes.clear();
    for (int i = 0; i < count; ++i) fakes.push_back(std::make_shared<FakeTier>(clock));
    std::vector<std::unique_ptr<TierQueue>> queues;
    for (const auto& fake : fakes) queues.push_back(std::make_unique<TierQueue>(fake, options, clock));
    chain = std::make_unique<TierChain>(std::move(queues), clock);
  }
  void TearDown() override {
    for (const auto& fake : fakes) fake->release();
  }
  TierChain::Ticket ask(const tier::RecordId& id, Content content = Content::changing) {
    return chain->get({{id, 4096, {}}}, content, clock->in(1s));
  }
  tier::ReadResult get(const tier::RecordId& id, Content content = Content::changing) {
    TierChain::Ticket ticket = ask(id, content);
    EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
    return ticket.take().front();
  }
  int put(std::uint64_t number, std::uint64_t version) {
    return chain->put(record_id(number), random_bytes(version, 100), Content::changing);
  }
  void settle() { (void)chain->flush(clock->in(1s)), (void)chain->poll(); }
  /// Puts a record into one tier, bypassing the chain.
  void plant(int tier, std::uint64_t number, std::uint64_t version, std::int64_t bytes = 100) {
    const Payload payload = random_bytes(version, bytes);
    tier::PutRequest request{record_id(number), payload};
    fakes[static_cast<std::size_t>(tier)]->put({&request, 1}, clock->in(1s));
  }
  bool holds(int tier, std::uint64_t number) {
    tier::ExistsRequest request{record_id(number)};
    fakes[static_cast<std::size_t>(tier)]->exists({&request, 1}, clock->in(1s));
    return request.bytes >= 0;
  }
};

TEST_F(TierChains, PutsGoToAllAndRemovesToo) {
  make(3);
  EXPECT_EQ(put(1, 10), 3);
  EXPECT_EQ(chain->flush(clock->in(1s)), std::vector<FlushStatus>(3, FlushStatus::durable));
  for (int tier = 0; tier < 3; ++tier) EXPECT_TRUE(holds(tier, 1));
  const auto results = chain->poll();
  for (const auto& of_tier : results) EXPECT_EQ(of_tier.size(), 1u);
  EXPECT_EQ(chain->remove(record_id(1)), 3);
  EXPECT_EQ(get(record_id(1)).status, GetStatus::missing);
  settle();
  for (int tier = 0; tier < 3; ++tier) EXPECT_FALSE(holds(tier, 1));
}

TEST_F(TierChains, LooksDownAndPromotesUp) {
  make(3);
  plant(2, 1, 10);
  EXPECT_EQ(bytes_of(get(record_id(1))), random_bytes(10, 100));
  settle();
  for (int tier = 0; tier < 3; ++tier) EXPECT_TRUE(holds(tier, 1));
  const int below = fakes[1]->calls();
  EXPECT_EQ(bytes_of(get(record_id(1))), random_bytes(10, 100));
  EXPECT_EQ(fakes[1]->calls(), below);
  const std::vector<tier::ChainStats> stats = chain->stats();
  EXPECT_EQ(stats[0].promoted, 1);
  EXPECT_EQ(stats[1].promoted, 1);
  EXPECT_EQ(stats[2].promoted, 0);
  EXPECT_EQ(stats[0].queue.hits, 1);
  EXPECT_EQ(stats[2].queue.hits, 1);
}

TEST_F(TierChains, OneRequestHereOneThere) {
  make(2);
  plant(0, 1, 10);
  plant(1, 2, 20);
  TierChain::Ticket ticket =
      chain->get({{record_id(1), 4096, {}}, {record_id(3), 4096, {}}, {record_id(2), 4096, {}}, {record_id(1), 10, {}}},
                 Content::changing, clock->in(1s));
  ASSERT_TRUE(ticket.wait(tier::Deadline::max()));
  const std::vector<tier::ReadResult> results = ticket.take();
  EXPECT_EQ(bytes_of(results[0]), random_bytes(10, 100));
  EXPECT_EQ(results[1].status, GetStatus::missing);
  EXPECT_EQ(bytes_of(results[2]), random_bytes(20, 100));
  EXPECT_EQ(results[3].status, GetStatus::too_small);
  EXPECT_EQ(results[3].bytes, 100);
  const std::vector<tier::RecordId> ids = {record_id(3), record_id(2)};
  TierChain::Ticket there = chain->exists(ids, clock->in(1s));
  ASSERT_TRUE(there.wait(tier::Deadline::max()));
  const std::vector<tier::ReadResult> found = there.take();
  EXPECT_EQ(found[0].status, GetStatus::missing);
  EXPECT_EQ(found[1].status, GetStatus::found);
  EXPECT_EQ(found[1].bytes, 100);
}

// A forger who can write to an upper tier plants a record longer than any of its kind.
TEST_F(TierChains, ARecordOfAnotherLengthHidesNothing) {
  make(2);
  plant(0, 1, 10, 5000);
  plant(1, 1, 20);
  EXPECT_EQ(bytes_of(get(record_id(1), Content::of_key)), random_bytes(20, 100));
  settle();
  EXPECT_EQ(bytes_of(get(record_id(1), Content::of_key)), random_bytes(20, 100));  // the planted record is replaced
  plant(0, 2, 10, 5000);
  plant(1, 2, 20);
  EXPECT_EQ(get(record_id(2)).status, GetStatus::too_small);  // among records that change, the upper one is newer
}

TEST_F(TierChains, TenantsStayApart) {
  make(2);
  (void)chain->put(record_id(1, 5), random_bytes(1, 100), Content::of_key);
  EXPECT_EQ(get(record_id(1, 6)).status, GetStatus::missing);
  settle();
  EXPECT_EQ(get(record_id(1, 6)).status, GetStatus::missing);
  EXPECT_EQ(bytes_of(get(record_id(1, 5))), random_bytes(1, 100));
}

TEST_F(TierChains, WhatIsWrittenMeanwhileIsNotReplaced) {
  make(2);
  plant(1, 1, 10);
  fakes[1]->hold();
  const int calls = fakes[1]->calls();
  TierChain::Ticket ticket = ask(record_id(1));
  while (fakes[1]->calls() == calls) (void)chain->poll();
  ASSERT_EQ(put(1, 11), 2);
  fakes[1]->release();
  ASSERT_TRUE(ticket.wait(tier::Deadline::max()));
  const std::vector<std::byte> seen = bytes_of(ticket.take()[0]);  // it began before the put and may see either
  EXPECT_TRUE(seen == random_bytes(10, 100) || seen == random_bytes(11, 100));
  settle();
  EXPECT_EQ(bytes_of(get(record_id(1))), random_bytes(11, 100));
  EXPECT_EQ(chain->stats()[0].promoted, 0);
}

TEST_F(TierChains, ATierThatIsAwayOnlyMisses) {
  make(3);
  EXPECT_EQ(put(1, 10), 3);
  settle();
  for (const auto& fake : fakes) {
    EXPECT_EQ(bytes_of(get(record_id(1))), random_bytes(10, 100));
    settle();
    fake->fail(true);
  }
  EXPECT_NE(get(record_id(1)).status, GetStatus::found);
}

TEST_F(TierChains, DeadlinesAndCancels) {
  make(2);
  fakes[1]->hold();
  TierChain::Ticket late = ask(record_id(1));
  TierChain::Ticket cancelled = ask(record_id(1));
  cancelled.cancel();
  EXPECT_TRUE(cancelled.done());
  while (fakes[1]->calls() == 0) (void)chain->poll();
  EXPECT_FALSE(late.done());
  EXPECT_FALSE(late.wait(clock->in(0s)));
  clock->advance(1s);
  EXPECT_TRUE(late.wait(tier::Deadline::max()));
  EXPECT_EQ(late.take()[0].status, GetStatus::failed);
}

// Three tiers that fail at random: a get returns the last put or nothing.
TEST_F(TierChains, RandomFailuresNeverBringBackOldBytes) {
  options.max_writes = 6;
  options.max_stale_ids = 8;
  options.breaker.failures_to_open = 2;
  int hits = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    make(3);
    Random random(seed);
    std::map<std::uint64_t, std::uint64_t> newest;
    for (int step = 0; step < 400; ++step) {
      const auto number = static_cast<std::uint64_t>(random.below(10));
      switch (random.below(8)) {
        case 0: fakes[static_cast<std::size_t>(random.below(3))]->fail(random.below(3) == 0); break;
        case 1: clock->advance(std::chrono::milliseconds(random.below(600))); break;
        case 2: (void)chain->poll(); break;
        case 3:
          newest.erase(number);
          (void)chain->remove(record_id(number));
          break;
        case 4:
        case 5: (void)put(number, newest[number] = random.next()); break;
        default: {
          const tier::ReadResult result = get(record_id(number));
          if (result.status != GetStatus::found) break;
          ++hits;
          ASSERT_TRUE(newest.contains(number)) << "seed " << seed << ", step " << step;
          ASSERT_EQ(bytes_of(result), random_bytes(newest[number], 100)) << "seed " << seed << ", step " << step;
        }
      }
    }
  }
  EXPECT_GT(hits, 100);
}

// Real tiers: a small host tier, a disk, and a cluster where there is one.
TEST(TierChainOfAll, GivesBackWhatTheHostHasNoRoomFor) {
  const auto clock = std::make_shared<tier::SteadyClock>();
  const auto later = [&] { return clock->now() + 20s; };
  std::vector<std::shared_ptr<tier::Tier>> tiers;
  tiers.push_back(std::make_shared<tier::HostTier>(tier::HostTierOptions{11, 64 << 10, 4 << 10}, clock));
  tier::StoreOptions store;
  store.directory = "store";
  store.layout_id = 11;
  store.segment_bytes = 64 << 10;
  store.capacity_bytes = 256 << 10;
  tiers.push_back(std::make_shared<tier::DiskTier>(std::make_shared<SimulatedDisk>(1), store, clock));
#if KV4_TEST_REMOTE
  if (why_no_redis().empty()) tiers.push_back(tier::make_remote_tier(shared_redis().options()));
#endif
  std::vector<std::unique_ptr<TierQueue>> queues;
  for (const auto& tier : tiers) queues.push_back(std::make_unique<TierQueue>(tier, tier::TierQueueOptions{}, clock));
  TierChain chain(std::move(queues), clock);
  constexpr std::uint64_t kCount = 40;  // of 20,000 bytes: the host holds 3, the disk 9 or so
  for (std::uint64_t i = 0; i < kCount; ++i)
    ASSERT_EQ(chain.put(record_id(i), random_bytes(i, 20000), Content::of_key), static_cast<int>(tiers.size()));
  const std::vector<FlushStatus> flushed = chain.flush(later());
  EXPECT_EQ(flushed[0], FlushStatus::kept);
  EXPECT_EQ(flushed[1], FlushStatus::durable);
  std::uint64_t found = 0;
  for (std::uint64_t i = kCount; i-- > 0;) {
    TierChain::Ticket ticket = chain.get({{record_id(i), 20000, {}}}, Content::of_key, later());
    ASSERT_TRUE(ticket.wait(later()));
    const tier::ReadResult result = ticket.take().front();
    if (result.status != GetStatus::found) continue;
    ++found;
    EXPECT_EQ(bytes_of(result), random_bytes(i, 20000));
  }
  EXPECT_GE(found, tiers.size() == 3 ? kCount : 6u);
  const std::vector<tier::ChainStats> stats = chain.stats();
  for (std::size_t i = 0; i < tiers.size(); ++i) EXPECT_GT(stats[i].queue.hits, 0) << stats[i].name;
  tiers.clear();
  EXPECT_EQ(chain.close(later())[1], FlushStatus::durable);
}

}  // namespace
}  // namespace kv4::test
