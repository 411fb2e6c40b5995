// A disk that is full before the store is, or smaller than one of its segments.
#include <vector>

#include "kv4/log.h"
#include "tier/simulated_store.h"
#include "tier/store_survey.h"

namespace kv4::test {
namespace {

using tier::PutStatus;
using TierFullDisk = SimulatedStore;

// The disk is smaller than the store's capacity: the oldest segments make room, and the newest records are there.
TEST_F(TierFullDisk, EvictsTheOldest) {
  disk.set_capacity(3 * kSegment);
  int evictions = 0;
  set_log_sink([&](const LogRecord& record) { evictions += record.event == "store.disk_full" ? 1 : 0; });
  for (std::uint64_t i = 0; i < 100; ++i) {
    ASSERT_EQ(put(*store, record_id(i), random_bytes(i, 10000)), PutStatus::stored) << i;
    expect(i, random_bytes(i, 10000));
  }
  set_log_sink({});
  EXPECT_GT(evictions, 10);
  const tier::StoreStats stats = store->stats();
  EXPECT_EQ(stats.records + stats.evicted_records, 100);
  ASSERT_TRUE(store->flush());
  reopen();
  EXPECT_EQ(store->stats().records, stats.records);
  for (std::uint64_t i = 100 - static_cast<std::uint64_t>(stats.records); i < 100; ++i)
    expect(i, random_bytes(i, 10000));
}

// The disk is smaller than one segment: the store uses smaller segments, and whole ones once there is room.
TEST_F(TierFullDisk, SmallerThanASegmentIsUsed) {
  options.segment_bytes = 16 * kSegment;
  options.capacity_bytes = 64 * kSegment;
  reopen();
  disk.set_capacity(13 * kSegment);
  int told = 0;
  set_log_sink([&](const LogRecord& record) { told += record.event == "store.small_segments" ? 1 : 0; });
  const auto fill = [&](std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t i = from; i < to; ++i) {
      ASSERT_EQ(put(*store, record_id(i), random_bytes(i, 10000)), PutStatus::stored) << i;
      expect(i, random_bytes(i, 10000));
    }
  };
  fill(0, 400);
  EXPECT_EQ(told, 1);
  EXPECT_GE(store->stats().records, 20);  // of 50 that the disk could hold
  EXPECT_EQ(put(*store, record_id(1000), random_bytes(1000, 5 * kSegment)), PutStatus::stored);
  expect(1000, random_bytes(1000, 5 * kSegment));
  fill(400, 500);
  ASSERT_TRUE(store->flush());
  const std::int64_t records = store->stats().records;
  reopen();
  EXPECT_EQ(store->stats().records, records);

  disk.set_capacity(std::int64_t{1} << 30);
  fill(500, 1000);
  set_log_sink({});
  for (std::uint64_t i = 800; i < 1000; ++i) expect(i, random_bytes(i, 10000));
  ASSERT_TRUE(store->close());
  std::int64_t largest = 0;
  for (const tier::SegmentSurvey& segment : tier::survey_store(disk, options.directory, false).segments)
    largest = std::max(largest, segment.header.bytes);
  EXPECT_EQ(largest, options.segment_bytes);
}

// A store reopened with segments smaller than one of its records.
TEST_F(TierFullDisk, LargeRecordsMoveIntoSmallSegments) {
  options.segment_bytes = 4 * kSegment;
  reopen();
  const std::vector<std::byte> large = random_bytes(1, kSegment + 30000);
  ASSERT_EQ(put(*store, record_id(1), large), PutStatus::stored);
  ASSERT_TRUE(store->close());
  options.segment_bytes = kSegment;
  reopen();
  EXPECT_TRUE(store->collect().durable);  // its segment is less than half alive
  EXPECT_FALSE(disk.has(first_segment()));
  expect(1, large);
  ASSERT_TRUE(store->close());
  reopen();
  expect(1, large);
}

// On a file system that cannot reserve room, the write itself finds the disk full.
TEST_F(TierFullDisk, InTheMiddleOfABatchEvicts) {
  disk.set_reserves(false);
  disk.set_capacity(3 * kSegment);
  for (std::uint64_t round = 0; round < 20; ++round) {
    std::vector<std::vector<std::byte>> payloads;
    std::vector<tier::PutRequest> requests;
    for (std::uint64_t i = 0; i < 4; ++i) payloads.push_back(random_bytes(round * 4 + i, 9000));
    for (std::uint64_t i = 0; i < 4; ++i) requests.push_back({record_id(i % 3), payloads[i]});  // one key twice
    store->put(requests);
    for (std::uint64_t i = 1; i < 4; ++i) {
      ASSERT_EQ(requests[i].status, PutStatus::stored) << round << ", " << i;
      expect(i % 3, payloads[i]);
    }
  }
  ASSERT_TRUE(store->flush());
}

TEST_F(TierFullDisk, ThatStaysSoIsAValueAndLosesLittle) {
  for (std::uint64_t i = 0; i < 40; ++i) put(*store, record_id(i), random_bytes(i, 10000));
  ASSERT_TRUE(store->flush());
  const std::int64_t before = store->stats().segments;
  disk.set_capacity(0);
  int refused = 0, told = 0;
  set_log_sink([&](const LogRecord& record) { told += record.event == "store.no_space" ? 1 : 0; });
  for (std::uint64_t i = 100; refused == 0 && i < 110; ++i)
    refused += put(*store, record_id(i), random_bytes(i, 10000)) == PutStatus::no_space ? 1 : 0;
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(told, 1);
  EXPECT_GE(store->stats().segments, before - 2);
  EXPECT_EQ(put(*store, record_id(150), random_bytes(150, 10000)), PutStatus::no_space);
  EXPECT_EQ(told, 1);  // reported once
  set_log_sink({});
  disk.set_capacity(1 << 30);
  ASSERT_EQ(put(*store, record_id(200), random_bytes(200, 10000)), PutStatus::stored);
  ASSERT_TRUE(store->flush());
}

}  // namespace
}  // namespace kv4::test
