// The asynchronous interface of a tier: order, limits, deadlines, the breaker, and workers that do not return.
#include "tier/tier_queue.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kv4/log.h"
#include "support/fake_tier.h"
#include "tier/host_tier.h"
#include "tier/open_tier.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using tier::Content;
using tier::FlushStatus;
using tier::GetStatus;
using tier::PutStatus;
using tier::TierQueue;
using State = tier::CircuitBreaker::State;

struct TierQueues : testing::Test {
  std::shared_ptr<ManualClock> clock = std::make_shared<ManualClock>();
  std::shared_ptr<FakeTier> fake = std::make_shared<FakeTier>(clock);
  tier::TierQueueOptions options;
  std::unique_ptr<TierQueue> queue;

  TierQueues() {
    options.max_writes = 8;
    options.max_reads = 8;
    options.max_write_bytes = 64 << 10;
    options.max_read_bytes = 64 << 10;
  }
  void TearDown() override { fake->release(); }
  TierQueue& start() {
    queue = std::make_unique<TierQueue>(fake, options, clock);
    return *queue;
  }
  bool put(std::uint64_t number, std::uint64_t version, Content content = Content::changing) {
    return queue->put(record_id(number), random_bytes(version, 1000), content);
  }
  TierQueue::ReadTicket ask(std::uint64_t number, tier::Duration time = 1s) {
    return queue->get({{record_id(number), 4096, {}}}, clock->in(time));
  }
  tier::ReadResult get(std::uint64_t number) {
    TierQueue::ReadTicket ticket = ask(number);
    EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
    return ticket.take().front();
  }
  void expect(std::uint64_t number, std::uint64_t version) {
    const tier::ReadResult result = get(number);
    ASSERT_EQ(result.status, GetStatus::found);
    const auto bytes = result.payload.span();
    EXPECT_EQ(std::vector<std::byte>(bytes.begin(), bytes.end()), random_bytes(version, 1000));
  }
  /// Queues one get that the tier holds, then `count` gets that wait, until all are answered.
  void ask_while_held(std::uint64_t count) {
    fake->hold();
    std::vector<TierQueue::ReadTicket> tickets;
    tickets.push_back(ask(0));
    fake->wait_for_calls(1);
    for (std::uint64_t i = 0; i < count; ++i) tickets.push_back(ask(i));
    fake->release();
    for (TierQueue::ReadTicket& ticket : tickets) EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
  }
  FlushStatus flush() {
    const TierQueue::FlushTicket ticket = queue->flush(clock->in(1s));
    EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
    return ticket.status();
  }
};

TEST_F(TierQueues, PutsAreSeenAtOnceAndLater) {
  start();
  fake->hold();
  ASSERT_TRUE(put(1, 10));
  expect(1, 10);  // from the queue
  fake->release();
  EXPECT_EQ(flush(), FlushStatus::durable);
  expect(1, 10);  // from the tier
  const std::vector<tier::WriteResult> results = queue->drain();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].id, record_id(1));
  EXPECT_EQ(results[0].status, PutStatus::stored);
  EXPECT_EQ(queue->stats().tier.records, 1);
}

// The reader of the result would read as many bytes as the length says.
TEST_F(TierQueues, LengthsBeyondTheBufferAreFailures) {
  const auto own = std::make_shared<OpenTier>();
  own->plant(record_id(1), random_bytes(10, 1000));
  queue = std::make_unique<TierQueue>(own, options, clock);
  for (const bool views : {false, true}) {
    own->give_views(views);
    for (const std::int64_t bytes : {INT64_MIN, std::int64_t{-1}, std::int64_t{4097}, INT64_MAX}) {
      own->lie(bytes);
      const tier::ReadResult result = get(1);
      EXPECT_EQ(result.status, GetStatus::failed) << bytes;
      EXPECT_EQ(result.payload.size, 0u) << bytes;
    }
    own->lie({});
    expect(1, 10);
  }
}

TEST_F(TierQueues, ReadsDoNotWaitForWrites) {
  start();
  ASSERT_TRUE(put(1, 10));
  EXPECT_EQ(flush(), FlushStatus::durable);
  fake->hold(FakeTier::Held::writes);
  const int calls = fake->calls();
  ASSERT_TRUE(put(2, 20));
  fake->wait_for_calls(calls + 1);
  expect(1, 10);  // from the tier, while the put is still running
  EXPECT_EQ(get(3).status, GetStatus::missing);
  EXPECT_EQ(queue->stats().stored, 1);
  fake->release();
  EXPECT_EQ(flush(), FlushStatus::durable);
  EXPECT_EQ(queue->stats().stored, 2);
}

TEST_F(TierQueues, CallsOfTheTierAreTimed) {
  start();
  fake->hold();
  ASSERT_TRUE(put(1, 10));
  fake->wait_for_calls(1);
  clock->advance(3ms);
  fake->release();
  EXPECT_EQ(flush(), FlushStatus::durable);
  expect(1, 10);
  EXPECT_EQ(get(2).status, GetStatus::missing);
  const tier::QueueStats stats = queue->stats();
  EXPECT_EQ(stats.put_times.count(), 1);
  EXPECT_EQ(stats.put_times.counts[11], 1) << "at most 5 ms";
  EXPECT_EQ(stats.put_times.sum_ns, 3'000'000);
  EXPECT_EQ(stats.get_times.count(), 2);
  EXPECT_EQ(stats.get_times.counts[0], 2) << "no time passed";
}

TEST_F(TierQueues, ReadersShareWhatWaits) {
  fake = std::make_shared<FakeTier>(clock, 3);
  options.max_reads = 64;
  start();
  ASSERT_TRUE(put(1, 10));
  EXPECT_EQ(flush(), FlushStatus::durable);
  const std::size_t before = fake->batches().size();
  fake->hold();
  std::vector<tier::ReadRequest> many;
  for (std::uint64_t i = 0; i < 16; ++i) many.push_back({record_id(i), 1000, {}});
  TierQueue::ReadTicket ticket = queue->get(many, clock->in(1s));
  fake->wait_for_calls(static_cast<int>(before) + 2);  // neither of them has come back
  EXPECT_FALSE(ticket.done());
  fake->release();
  EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
  const std::vector<tier::ReadResult> results = ticket.take();
  for (std::size_t i = 0; i < results.size(); ++i)
    EXPECT_EQ(results[i].status, i == 1 ? GetStatus::found : GetStatus::missing) << i;
  const std::vector<std::size_t> batches = fake->batches();
  EXPECT_EQ((std::vector<std::size_t>{batches.begin() + static_cast<std::ptrdiff_t>(before), batches.end()}),
            (std::vector<std::size_t>{8, 8}));
}

// Lookups that a tier answers from memory need no worker: here both are busy.
TEST(TierQueue, LookupsAreAnsweredAtOnce) {
  const auto clock = std::make_shared<ManualClock>();
  const auto host = std::make_shared<tier::HostTier>(tier::HostTierOptions{1, 1 << 20, 1 << 10}, clock);
  tier::PutRequest there{record_id(1), {}};
  const std::vector<std::byte> payload = random_bytes(1, 1000);
  there.payload = payload;
  host->put({&there, 1}, tier::Deadline::max());
  TierQueue queue(host, {}, clock);
  const std::vector<tier::RecordId> ids = {record_id(1), record_id(2)};
  TierQueue::ReadTicket known = queue.exists(ids, tier::Deadline::max());
  TierQueue::ReadTicket missing = queue.get({{record_id(2), 1000, {}}}, tier::Deadline::max());
  EXPECT_TRUE(known.done() && missing.done());
  const std::vector<tier::ReadResult> results = known.take();
  EXPECT_EQ(results[0].status, GetStatus::found);
  EXPECT_EQ(results[0].bytes, 1000);
  EXPECT_EQ(results[1].status, GetStatus::missing);
  EXPECT_EQ(missing.take()[0].status, GetStatus::missing);
  EXPECT_EQ(queue.stats().misses, 1);
}

TEST_F(TierQueues, WritesOfAnIdKeepTheirOrder) {
  start();
  fake->hold();
  for (std::uint64_t version = 0; version < 4; ++version) ASSERT_TRUE(put(1, version));
  ASSERT_TRUE(queue->remove(record_id(1)));
  EXPECT_EQ(get(1).status, GetStatus::missing);
  ASSERT_TRUE(put(1, 9));
  expect(1, 9);
  fake->release();
  EXPECT_EQ(flush(), FlushStatus::durable);
  expect(1, 9);
}

TEST_F(TierQueues, AFullQueueRefusesAndNeverBlocks) {
  start();
  fake->hold();
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(put(i, i));
  EXPECT_FALSE(put(8, 8));
  EXPECT_EQ(queue->stats().refused_puts, 1);
  std::vector<TierQueue::ReadTicket> tickets;
  for (std::uint64_t i = 0; i < 9; ++i) tickets.push_back(ask(100 + i));
  EXPECT_TRUE(tickets[8].done());
  EXPECT_EQ(tickets[8].take()[0].status, GetStatus::failed);
  fake->release();
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(tickets[static_cast<std::size_t>(i)].wait(tier::Deadline::max()));
    EXPECT_EQ(tickets[static_cast<std::size_t>(i)].take()[0].status, GetStatus::missing);
  }
  EXPECT_EQ(flush(), FlushStatus::durable);
  EXPECT_FALSE(put(8, 8)) << "results that nobody drains count";
  EXPECT_EQ(queue->drain().size(), 8u);
  EXPECT_TRUE(put(8, 8));
}

TEST_F(TierQueues, BytesAreBounded) {
  start();
  fake->hold();
  EXPECT_TRUE(queue->put(record_id(1), random_bytes(1, 60 << 10), Content::changing));
  EXPECT_FALSE(queue->put(record_id(2), random_bytes(1, 8 << 10), Content::changing));
  EXPECT_FALSE(queue->put(record_id(3), random_bytes(1, 65 << 10), Content::changing));
  TierQueue::ReadTicket large = queue->get({{record_id(9), 60 << 10, {}}}, clock->in(1s));
  TierQueue::ReadTicket next = queue->get({{record_id(9), 8 << 10, {}}}, clock->in(1s));
  EXPECT_FALSE(large.done());
  EXPECT_TRUE(next.done());
}

TEST_F(TierQueues, SharedPayloadsAreNotCopied) {
  start();
  fake->hold();
  const auto pool = tier::BytesPool::make(1 << 20);
  const tier::SharedBytes bytes = pool->take(100);
  std::fill(bytes.span().begin(), bytes.span().end(), std::byte{7});
  ASSERT_TRUE(queue->put(record_id(1), bytes, Content::of_key));
  EXPECT_EQ(get(1).payload.data, bytes.data);
  fake->release();
  EXPECT_EQ(flush(), FlushStatus::durable);
  EXPECT_EQ(bytes.data.use_count(), 1);
  // Into the caller's memory.
  const tier::SharedBytes to = pool->take(200);
  TierQueue::ReadTicket ticket = queue->get({{record_id(1), 0, to}}, clock->in(1s));
  ASSERT_TRUE(ticket.wait(tier::Deadline::max()));
  const tier::ReadResult result = ticket.take()[0];
  ASSERT_EQ(result.status, GetStatus::found);
  EXPECT_EQ(result.payload.data, to.data);
  EXPECT_EQ(result.payload.size, 100u);
  EXPECT_EQ(to.span()[99], std::byte{7});
}

TEST_F(TierQueues, WhatWasReplacedIsNeverSeenAgain) {
  start();
  ASSERT_TRUE(put(1, 10));
  ASSERT_TRUE(put(2, 20, Content::of_key));
  EXPECT_EQ(flush(), FlushStatus::durable);
  (void)queue->drain();
  // Failed on the way.
  fake->fail(true);
  ASSERT_TRUE(put(1, 11));
  ASSERT_TRUE(put(2, 20, Content::of_key));
  while (queue->stats().waiting_writes > 0) std::this_thread::yield();
  fake->fail(false);
  EXPECT_EQ(get(1).status, GetStatus::missing);
  expect(2, 20);
  EXPECT_EQ(queue->stats().stale_ids, 1);
  EXPECT_EQ(flush(), FlushStatus::failed) << "a put was accepted and failed";
  EXPECT_EQ(flush(), FlushStatus::durable);
  ASSERT_TRUE(put(1, 12));
  EXPECT_EQ(flush(), FlushStatus::durable);
  expect(1, 12);
  EXPECT_EQ(queue->stats().stale_ids, 0);
  // A put is refused while an older one is running.
  (void)queue->drain();
  fake->hold();
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_TRUE(put(i, 30 + i));
  ASSERT_FALSE(put(1, 40));
  EXPECT_EQ(get(1).status, GetStatus::missing);
  ASSERT_FALSE(queue->remove(record_id(3)));
  EXPECT_EQ(get(3).status, GetStatus::missing);
  fake->release();
  EXPECT_EQ(flush(), FlushStatus::durable);
  EXPECT_EQ(get(1).status, GetStatus::missing);
  EXPECT_EQ(get(3).status, GetStatus::missing);
  expect(4, 34);
}

TEST_F(TierQueues, MoreStaleIdsThanTheSetHolds) {
  options.max_stale_ids = 4;
  options.max_writes = 64;
  options.max_write_bytes = 1 << 20;
  options.breaker.failures_to_open = 1000;
  start();
  for (std::uint64_t i = 0; i < 32; ++i) ASSERT_TRUE(put(i, i));
  EXPECT_EQ(flush(), FlushStatus::durable);
  (void)queue->drain();
  fake->fail(true);
  for (std::uint64_t i = 0; i < 16; ++i) ASSERT_TRUE(put(i, 100 + i));
  while (queue->stats().waiting_writes > 0) std::this_thread::yield();
  fake->fail(false);
  for (std::uint64_t i = 0; i < 16; ++i) EXPECT_EQ(get(i).status, GetStatus::missing);
  for (std::uint64_t i = 16; i < 32; ++i) expect(i, i);
}

TEST_F(TierQueues, LateAnswersGoNowhere) {
  start();
  ASSERT_TRUE(put(1, 10));
  EXPECT_EQ(flush(), FlushStatus::durable);
  fake->hold();
  const int calls = fake->calls();
  {
    TierQueue::ReadTicket running = ask(1, 10ms);
    fake->wait_for_calls(calls + 1);
    TierQueue::ReadTicket queued = ask(1, 10ms);
    EXPECT_FALSE(running.done());
    clock->advance(11ms);
    EXPECT_TRUE(running.done());
    EXPECT_TRUE(queued.wait(clock->in(1h)));
    EXPECT_EQ(running.take()[0].status, GetStatus::failed);
    EXPECT_EQ(queued.take()[0].status, GetStatus::failed);
  }
  TierQueue::ReadTicket cancelled = ask(1);
  cancelled.cancel();
  fake->release();
  expect(1, 10);
  EXPECT_EQ(queue->stats().waiting_reads, 0);
  EXPECT_EQ(fake->calls(), calls + 2) << "what nobody waits for is not asked";
}

TEST_F(TierQueues, BatchesAreMadeOfWhatWaits) {
  options.max_reads = 100;
  options.batch_requests = 10;
  start();
  ask_while_held(15);
  EXPECT_EQ(fake->batches(), (std::vector<std::size_t>{1, 10, 5}));
}

TEST_F(TierQueues, ATierIsAskedForAsFewAtATimeAsItWants) {
  fake = std::make_shared<FakeTier>(clock, 1, 2);
  start();
  ask_while_held(5);
  EXPECT_EQ(fake->batches(), (std::vector<std::size_t>{1, 2, 2, 1}));
}

TEST_F(TierQueues, BreakerOpensProbesAndRecovers) {
  options.breaker.failures_to_open = 3;
  start();
  ASSERT_TRUE(put(1, 10));
  EXPECT_EQ(flush(), FlushStatus::durable);
  fake->fail(true);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(get(1).status, GetStatus::failed);
  EXPECT_EQ(queue->stats().breaker, State::open);
  const int calls = fake->calls();
  for (int i = 0; i < 5; ++i) {
    TierQueue::ReadTicket ticket = ask(1);
    EXPECT_TRUE(ticket.done()) << "misses at once";
    EXPECT_EQ(ticket.take()[0].status, GetStatus::failed);
  }
  EXPECT_FALSE(put(5, 1));
  EXPECT_EQ(flush(), FlushStatus::failed);
  EXPECT_EQ(fake->calls(), calls);
  // Probes that fail: the pause doubles.
  for (tier::Duration pause = options.breaker.first_pause; pause < 3s; pause *= 2) {
    clock->advance(pause - 1ns);
    EXPECT_TRUE(ask(1).done());
    clock->advance(1ns);
    EXPECT_EQ(get(1).status, GetStatus::failed);
  }
  EXPECT_EQ(fake->calls(), calls + 4);
  fake->fail(false);
  clock->advance(options.breaker.longest_pause);
  expect(1, 10);
  expect(1, 10);
  EXPECT_EQ(queue->stats().breaker, State::closed);
  EXPECT_EQ(queue->stats().times_opened, 5);
  EXPECT_EQ(get(5).status, GetStatus::missing);
}

TEST_F(TierQueues, TheBreakerIsInTheLog) {
  std::vector<std::string> heard;
  set_log_sink([&](const LogRecord& record) {
    heard.push_back(std::string(record.event) + " " + std::string(record.fields[0].value));
  });
  options.breaker.failures_to_open = 1;
  start();
  fake->fail(true);
  EXPECT_EQ(get(1).status, GetStatus::failed);
  clock->advance(options.breaker.first_pause);
  EXPECT_EQ(get(1).status, GetStatus::failed);  // a failing probe is not logged again
  fake->fail(false);
  clock->advance(options.breaker.longest_pause);
  EXPECT_EQ(get(1).status, GetStatus::missing);
  queue.reset();
  set_log_sink({});
  EXPECT_EQ(heard, (std::vector<std::string>{"tier.opened fake", "tier.closed fake"}));
}

TEST_F(TierQueues, SlowAnswersOpenTheBreakerToo) {
  options.breaker.failures_to_open = 2;
  start();
  fake->take_time(3s);
  for (int i = 0; i < 2; ++i) {
    TierQueue::ReadTicket ticket = ask(1, 10s);
    EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
    EXPECT_EQ(ticket.take()[0].status, GetStatus::missing);
  }
  EXPECT_EQ(queue->stats().breaker, State::open);
}

TEST_F(TierQueues, AStuckTierMissesAtOnceAndIsLeftBehind) {
  start();
  fake->hold();
  ASSERT_TRUE(put(1, 10));
  fake->wait_for_calls(1);
  clock->advance(options.write_limit + options.breaker.slow_after + 1ns);
  EXPECT_TRUE(ask(2).done());
  EXPECT_FALSE(put(2, 20));
  const tier::Deadline deadline = clock->in(1s);
  std::thread time([&] { clock->advance(1s); });
  EXPECT_EQ(queue->close(deadline), FlushStatus::failed);
  time.join();
  queue.reset();
  // The worker wakes after its queue has gone, and ends by itself.
  std::weak_ptr<FakeTier> left = fake;
  fake->release();
  fake.reset();
  while (!left.expired()) std::this_thread::yield();
  fake = std::make_shared<FakeTier>(clock);
}

TEST_F(TierQueues, TicketsOutliveTheQueue) {
  start();
  fake->hold();
  TierQueue::ReadTicket ticket = ask(1);
  TierQueue::ReadTicket waits = ask(2);
  fake->release();
  queue.reset();
  EXPECT_TRUE(ticket.done());
  EXPECT_EQ(waits.take().size(), 1u);
  EXPECT_EQ(ticket.take().size(), 1u);
}

TEST_F(TierQueues, CloseFinishesWhatIsQueued) {
  start();
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_TRUE(put(i, i));
  EXPECT_EQ(queue->close(clock->in(1h)), FlushStatus::durable);
  EXPECT_EQ(queue->close(clock->in(1h)), FlushStatus::failed);
  EXPECT_FALSE(put(9, 9));
  EXPECT_EQ(ask(1).take()[0].status, GetStatus::failed);
  EXPECT_EQ(queue->drain().size(), 8u);
  start();
  for (std::uint64_t i = 0; i < 8; ++i) expect(i, i);
}

TEST_F(TierQueues, ExistsGoesTheSameWay) {
  start();
  ASSERT_TRUE(put(1, 10));
  EXPECT_EQ(flush(), FlushStatus::durable);
  fake->hold();
  ASSERT_TRUE(put(2, 10));
  ASSERT_TRUE(queue->remove(record_id(3)));
  const std::vector<tier::RecordId> ids = {record_id(1), record_id(2), record_id(3), record_id(4)};
  TierQueue::ReadTicket ticket = queue->exists(ids, clock->in(1s));
  fake->release();
  EXPECT_TRUE(ticket.wait(tier::Deadline::max()));
  const std::vector<tier::ReadResult> results = ticket.take();
  EXPECT_EQ(results[0].status, GetStatus::found);
  EXPECT_EQ(results[0].bytes, 1000);
  EXPECT_EQ(results[1].status, GetStatus::found);
  EXPECT_EQ(results[2].status, GetStatus::missing);
  EXPECT_EQ(results[3].status, GetStatus::missing);
}

// The child has no workers to answer, and the clock stands still: a wait would last for ever.
TEST_F(TierQueues, AForkedChildIsAnsweredAtOnce) {
  start();
  ASSERT_TRUE(put(1, 1));
  ASSERT_TRUE(queue->flush(clock->in(1s)).wait(tier::Deadline::max()));
  fake->hold();
  const int before = fake->calls();
  TierQueue::ReadTicket under_way = ask(1);
  fake->wait_for_calls(before + 1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    EXPECT_TRUE(under_way.wait(tier::Deadline::max()));
    EXPECT_EQ(under_way.take().front().status, GetStatus::failed);
    EXPECT_FALSE(put(2, 1));
    EXPECT_FALSE(queue->has_room(1));
    EXPECT_FALSE(queue->remove(record_id(1)));
    EXPECT_EQ(get(1).status, GetStatus::failed);
    const tier::RecordId id = record_id(1);
    EXPECT_EQ(queue->exists({&id, 1}, clock->in(1s)).take().front().status, GetStatus::failed);
    const TierQueue::FlushTicket flush = queue->flush(clock->in(1s));
    EXPECT_TRUE(flush.wait(tier::Deadline::max()));
    EXPECT_EQ(flush.status(), FlushStatus::failed);
    EXPECT_TRUE(queue->drain().empty());
    EXPECT_EQ(queue->stats().puts, 0);
    EXPECT_EQ(queue->close(clock->in(1s)), FlushStatus::failed);
    queue.reset();
    ::_exit(HasFailure() ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  fake->release();
  expect(1, 1);
  EXPECT_TRUE(put(2, 2));
}

// Several threads and a small tier that evicts; id and version determine the payload.
TEST_F(TierQueues, ManyThreadsNeverSeeAWrongByte) {
  options.max_writes = 64;
  options.max_reads = 64;
  options.max_write_bytes = options.max_read_bytes = 1 << 20;
  const auto real = std::make_shared<tier::SteadyClock>();
  TierQueue shared(std::make_shared<tier::HostTier>(tier::HostTierOptions{1, 32 << 10, 1 << 10, 3}, real), options,
                   real);
  constexpr std::uint64_t kThreads = 4, kIds = 16;
  std::atomic<int> hits = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      Random random(t);
      std::map<std::uint64_t, std::uint64_t> newest;                  // this thread's ids
      std::vector<std::pair<tier::SharedBytes, std::uint64_t>> held;  // views and buffers, with their versions
      for (int step = 0; step < 400; ++step) {
        const std::uint64_t number = static_cast<std::uint64_t>(random.below(kIds)) * kThreads + t;
        const auto later = std::chrono::steady_clock::now() + 10s;
        if (random.below(2) == 0) {
          newest[number] = random.next();
          (void)shared.put(record_id(number), random_bytes(newest[number], 700), Content::changing);
        } else if (random.below(8) == 0) {
          newest.erase(number);
          (void)shared.remove(record_id(number));
        } else {
          TierQueue::ReadTicket ticket = shared.get({{record_id(number), 4096, {}, random.below(2) == 0}}, later);
          if (random.below(4) == 0) continue;  // gives up the get
          EXPECT_TRUE(ticket.wait(later));
          const tier::ReadResult result = ticket.take().front();
          if (result.status != GetStatus::found) continue;
          ++hits;
          const auto bytes = result.payload.span();
          ASSERT_TRUE(newest.contains(number));
          ASSERT_EQ(std::vector<std::byte>(bytes.begin(), bytes.end()), random_bytes(newest[number], 700));
          held.emplace_back(result.payload, newest[number]);
        }
        if (held.size() == 4) {
          for (const auto& [payload, version] : held)
            ASSERT_EQ(std::vector<std::byte>(payload.span().begin(), payload.span().end()), random_bytes(version, 700));
          held.clear();
        }
        (void)shared.drain();
        (void)shared.stats();
        if (step % 16 == 0) (void)shared.flush(later).wait(later);  // otherwise most puts meet a full queue
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(hits, 50);
}

TEST(TierBytesPool, KeepsItsLimitAndUsesBuffersAgain) {
  const auto pool = tier::BytesPool::make(64 << 10);
  tier::SharedBytes a = pool->take(30000), b = pool->take(30000);
  EXPECT_TRUE(a && b);
  EXPECT_FALSE(pool->take(1));
  EXPECT_TRUE(pool->take(0));
  const std::byte* address = a.data.get();
  a = {};
  EXPECT_EQ(pool->take(32768).data.get(), address);
  EXPECT_TRUE(pool->take(4096)) << "a free buffer of another size makes room";
  EXPECT_LE(pool->allocated_bytes(), 64 << 10);
  EXPECT_FALSE(pool->take(64 << 10));
  b = {};
  EXPECT_TRUE(pool->take(64 << 10));
  EXPECT_EQ(pool->allocated_bytes(), 64 << 10);
}

}  // namespace
}  // namespace kv4::test
