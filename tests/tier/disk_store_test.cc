// The store's contract, on a simulated disk, and once on a real one.
#include "tier/disk_store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "kv4/error.h"
#include "kv4/log.h"
#include "tier/index_checkpoint.h"
#include "tier/record_guard.h"
#include "tier/simulated_store.h"
#include "tier/store_survey.h"

namespace kv4::test {
namespace {

using tier::DiskStore;
using tier::GetStatus;
using tier::PutStatus;

using TierDiskStore = SimulatedStore;

TEST_F(TierDiskStore, GivesBackWhatWasPut) {
  const std::vector<std::int64_t> lengths = {0, 1, 5, 127, 128, 129, 511, 512, 513, 3967, 3968, 3969, 8064, 20000};
  for (std::size_t i = 0; i < lengths.size(); ++i)
    ASSERT_EQ(put(*store, record_id(i), random_bytes(i, lengths[i])), PutStatus::stored);
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < lengths.size(); ++i) expect(i, random_bytes(i, lengths[i]));
    expect_missing(99);
    ASSERT_TRUE(store->flush());
    reopen();
  }
  EXPECT_EQ(store->stats().records, static_cast<std::int64_t>(lengths.size()));
}

TEST_F(TierDiskStore, NewestPutWins) {
  for (std::uint64_t version = 0; version < 5; ++version) {
    ASSERT_EQ(put(*store, record_id(1), random_bytes(version, 1000)), PutStatus::stored);
    expect(1, random_bytes(version, 1000));
    if (version % 2) {
      ASSERT_TRUE(store->flush());
    }
    reopen();
    expect(1, random_bytes(version, 1000));
  }
  EXPECT_EQ(store->stats().records, 1);
}

TEST_F(TierDiskStore, RemovedStaysRemoved) {
  put(*store, record_id(1), random_bytes(1, 1000));
  put(*store, record_id(1), random_bytes(2, 9000));
  put(*store, record_id(2), random_bytes(3, 1000));
  ASSERT_TRUE(store->flush());
  EXPECT_TRUE(remove(*store, record_id(1)));
  EXPECT_FALSE(remove(*store, record_id(1)));
  expect_missing(1);
  ASSERT_TRUE(store->flush());
  disk.crash();
  reopen();
  expect_missing(1);
  expect(2, random_bytes(3, 1000));
}

TEST_F(TierDiskStore, TenantsDoNotSeeEachOther) {
  put(*store, record_id(1, 5), random_bytes(1, 100));
  EXPECT_EQ(get(*store, record_id(1, 6)).status, GetStatus::missing);
  put(*store, record_id(1, 6), random_bytes(2, 100));
  EXPECT_EQ(get(*store, record_id(1, 5)).payload, random_bytes(1, 100));
  EXPECT_EQ(get(*store, record_id(1, 6)).payload, random_bytes(2, 100));
}

TEST_F(TierDiskStore, SmallBuffersAndLargeRecordsAreValues) {
  put(*store, record_id(1), random_bytes(1, 100));
  std::vector<std::byte> to(99);
  tier::GetRequest request{record_id(1), to};
  store->get({&request, 1});
  EXPECT_EQ(request.status, GetStatus::too_small);
  EXPECT_EQ(request.bytes, 100);
  EXPECT_EQ(put(*store, record_id(2), random_bytes(1, kSegment)), PutStatus::too_large);
  EXPECT_EQ(put(*store, record_id(2), random_bytes(1, kSegment - tier::kSegmentDataOffset - 4096)), PutStatus::stored);
}

TEST_F(TierDiskStore, OldestSegmentMakesRoom) {
  for (std::uint64_t i = 0; i < 200; ++i) {
    ASSERT_EQ(put(*store, record_id(i), random_bytes(i, 20000)), PutStatus::stored) << i;
    ASSERT_LE(store->stats().segment_bytes, options.capacity_bytes);
    expect(i, random_bytes(i, 20000));
  }
  expect_missing(0);
  const tier::StoreStats stats = store->stats();
  EXPECT_EQ(stats.records + stats.evicted_records, 200);
  EXPECT_GE(stats.records, 28);
  ASSERT_TRUE(store->flush());
  reopen();
  EXPECT_EQ(store->stats().records, stats.records);
}

TEST_F(TierDiskStore, UnopenedSegmentIsLeftAloneAndCountsLater) {
  for (std::uint64_t i = 0; i < 12; ++i) put(*store, record_id(i), random_bytes(i, 20000));
  ASSERT_TRUE(store->close());
  const std::string last = options.directory + "/" + tier::segment_name(6);
  ASSERT_TRUE(disk.has(last));
  std::vector<std::string> heard;
  set_log_sink([&](const LogRecord& record) {
    if (record.level != LogLevel::info) heard.emplace_back(record.event);
  });
  disk.refuse_open(last, EACCES);
  disk.refuse_open(first_segment(), EMFILE);
  const std::vector<std::byte> bytes = disk.contents(last), first_bytes = disk.contents(first_segment());
  reopen();
  set_log_sink({});
  EXPECT_EQ(heard, (std::vector<std::string>{"store.set_aside", "store.set_aside"}));
  EXPECT_EQ(store->stats().unopened_segments, 2);
  EXPECT_EQ(store->stats().set_aside_files, 2);
  expect_missing(11);
  for (std::uint64_t i = 11; i < 60; ++i) put(*store, record_id(i), random_bytes(i + 1000, 20000));  // evicts, too
  EXPECT_TRUE(store->collect().durable);
  ASSERT_TRUE(store->close());
  EXPECT_EQ(tier::survey_store(disk, "store", false).unreadable_segments(), 2);
  EXPECT_EQ(disk.contents(last), bytes);
  EXPECT_EQ(disk.contents(first_segment()), first_bytes);

  disk.refuse_open(last, 0);
  disk.refuse_open(first_segment(), 0);
  reopen();
  EXPECT_EQ(store->stats().set_aside_files, 0);
  expect(59, random_bytes(1059, 20000));
  expect(10, random_bytes(10, 20000));  // of the last segment
}

// collect() removes or rewrites only records that it has read.
TEST_F(TierDiskStore, CollectKeepsWhatItCannotRead) {
  for (std::uint64_t i = 0; i < 6; ++i) put(*store, record_id(i), random_bytes(i, 10000));
  for (std::uint64_t i = 1; i < 6; ++i) remove(*store, record_id(i));  // most of the first segment is dead
  for (std::uint64_t i = 10; i < 20; ++i) put(*store, record_id(i), random_bytes(i, 10000));
  ASSERT_TRUE(store->flush());
  disk.refuse_read(first_segment(), EIO);
  (void)store->collect();
  EXPECT_TRUE(disk.has(first_segment()));
  disk.refuse_read(first_segment(), 0);
  expect(0, random_bytes(0, 10000));
  EXPECT_TRUE(store->collect().durable);
  EXPECT_FALSE(disk.has(first_segment()));
  expect(0, random_bytes(0, 10000));
}

// While a store runs, one of its files cannot be reopened.
TEST_F(TierDiskStore, SegmentThatCannotBeOpenedAgainIsSetAside) {
  for (std::uint64_t i = 0; i < 12; ++i) put(*store, record_id(i), random_bytes(i, 20000));
  ASSERT_TRUE(store->close());
  reopen();
  disk.refuse_open_again(first_segment(), EMFILE);  // a temporary error
  EXPECT_FALSE(store->flush());
  EXPECT_EQ(store->stats().set_aside_files, 0);
  EXPECT_EQ(get(*store, record_id(0)).status, GetStatus::failed);
  disk.refuse_open_again(first_segment(), 0);
  EXPECT_TRUE(store->flush());
  expect(0, random_bytes(0, 20000));

  reopen();
  disk.refuse_open_again(first_segment(), EACCES);
  EXPECT_FALSE(store->flush());
  EXPECT_TRUE(store->flush());
  expect_missing(0);
  EXPECT_EQ(store->stats().unopened_segments, 1);
  ASSERT_TRUE(store->close());
  disk.refuse_open_again(first_segment(), 0);
  reopen();
  expect(0, random_bytes(0, 20000));
}

TEST_F(TierDiskStore, DamagedRecordIsAMissAndSetAside) {
  put(*store, record_id(1), random_bytes(1, 1000));
  put(*store, record_id(2), random_bytes(2, 1000));
  disk.damage(first_segment(), tier::kSegmentDataOffset + 4096 + 500, std::byte{1});
  std::vector<std::string> heard;
  set_log_sink([&](const LogRecord& record) { heard.emplace_back(record.event); });
  EXPECT_EQ(get(*store, record_id(1)).status, GetStatus::damaged);
  EXPECT_EQ(get(*store, record_id(1)).status, GetStatus::missing);
  set_log_sink({});
  EXPECT_EQ(heard, std::vector<std::string>{"store.damaged_record"});
  EXPECT_EQ(store->stats().set_aside_records, 1);
  expect(2, random_bytes(2, 1000));
  put(*store, record_id(1), random_bytes(3, 1000));
  expect(1, random_bytes(3, 1000));
}

TEST_F(TierDiskStore, OneDamagedHeaderLosesOneRecord) {
  for (std::uint64_t i = 0; i < 5; ++i) put(*store, record_id(i), random_bytes(i, 5000));
  ASSERT_TRUE(store->close());
  ASSERT_TRUE(disk.unlink(checkpoint()).ok());
  disk.damage(first_segment(), tier::kSegmentDataOffset + tier::stored_bytes(5000) + 40, std::byte{1});
  disk.damage(first_segment(), 20, std::byte{1});  // and one copy of the segment's header
  reopen();
  for (std::uint64_t i = 0; i < 5; ++i) i == 1 ? expect_missing(i) : expect(i, random_bytes(i, 5000));
  const tier::CollectResult result = store->collect();
  EXPECT_TRUE(result.durable);
  ASSERT_TRUE(store->close());
  EXPECT_TRUE(tier::survey_store(disk, options.directory, true).sound());
}

TEST_F(TierDiskStore, LostSegmentHeaderLosesThatSegmentOnly) {
  for (std::uint64_t i = 0; i < 6; ++i) put(*store, record_id(i), random_bytes(i, 20000));
  ASSERT_TRUE(store->close());
  disk.damage(first_segment(), 20, std::byte{1});
  disk.damage(first_segment(), 4096 + 20, std::byte{1});
  reopen();
  expect_missing(0);
  expect(5, random_bytes(5, 20000));
  EXPECT_GT(store->collect().freed_bytes, 0);
  EXPECT_FALSE(disk.has(first_segment()));
}

// A payload that contains a whole segment with records, behind a damaged header.
TEST_F(TierDiskStore, PayloadsAreNeverTakenForRecords) {
  put(*store, record_id(7), random_bytes(7, 100));
  ASSERT_TRUE(store->flush());
  std::vector<std::byte> image = disk.contents(first_segment());
  image.resize(20000);
  remove(*store, record_id(7));
  put(*store, record_id(8), image);
  ASSERT_TRUE(store->close());
  ASSERT_TRUE(disk.unlink(checkpoint()).ok());
  disk.damage(first_segment(), tier::kSegmentDataOffset + tier::stored_bytes(100) + 3, std::byte{1});
  reopen();
  expect_missing(7);
  expect_missing(8);
}

TEST_F(TierDiskStore, FailedSyncDropsTheSegmentNotTheRecords) {
  for (std::uint64_t i = 0; i < 3; ++i) put(*store, record_id(i), random_bytes(i, 3000));
  ASSERT_TRUE(store->flush());
  for (int round = 0; round < 40; ++round) {  // each call of a flush fails once
    put(*store, record_id(10), random_bytes(static_cast<std::uint64_t>(round) + 100, 3000));
    disk.fail_call_in(round % 8);
    (void)store->flush();
    disk.crash();
    reopen();
    for (std::uint64_t i = 0; i < 3; ++i) expect(i, random_bytes(i, 3000));
  }
}

TEST_F(TierDiskStore, NoPutAfterAFailedDirectorySync) {
  disk.fail_all(true);
  EXPECT_NE(put(*store, record_id(1), random_bytes(1, 10)), PutStatus::stored);
  EXPECT_EQ(get(*store, record_id(1)).status, GetStatus::missing);
  disk.fail_all(false);
  ASSERT_EQ(put(*store, record_id(1), random_bytes(1, 10)), PutStatus::stored);
  ASSERT_TRUE(store->flush());
}

TEST_F(TierDiskStore, OneUserAtATime) {
  put(*store, record_id(1), {});
  refused(ErrorCode::bad_state, "in use by another process", [&] { DiskStore::open(disk, options); });
  refused(ErrorCode::bad_state, "in use by another process", [&] { tier::survey_store(disk, "store", false); });
  EXPECT_TRUE(store->close());
  EXPECT_FALSE(store->close());
  EXPECT_EQ(put(*store, record_id(1), {}), PutStatus::failed);
  DiskStore::open(disk, options);
}

TEST_F(TierDiskStore, OtherLayoutAndVersionAreRefused) {
  put(*store, record_id(1), random_bytes(1, 10));
  ASSERT_TRUE(store->close());
  options.layout_id = 12;
  refused(ErrorCode::bad_file, "layout 000000000000000b", [&] { DiskStore::open(disk, options); });
  options.layout_id = 11;
  for (const std::int64_t copy : {0, 4096}) disk.damage(first_segment(), copy + 8, std::byte{3});
  refused(ErrorCode::bad_file, "format version 0, this build reads 2 and 3", [&] { DiskStore::open(disk, options); });
}

TEST_F(TierDiskStore, BadOptionsAreRefused) {
  const auto with = [&](auto&& change) {
    tier::StoreOptions bad = small_options();
    change(bad);
    refused(ErrorCode::bad_argument, "", [&] { DiskStore::open(disk, bad); });
  };
  with([](auto& o) { o.directory = ""; });
  with([](auto& o) { o.segment_bytes = 4096; });
  with([](auto& o) { o.segment_bytes = (1 << 20) + 1; });
  with([](auto& o) {
    o.segment_bytes = tier::kMaxSegmentBytes + tier::kBlockBytes;
    o.capacity_bytes = INT64_MAX;
  });
  with([](auto& o) { o.capacity_bytes = o.segment_bytes * 2 - 1; });
  with([](auto& o) { o.sync_every_bytes = 0; });
  with([](auto& o) { o.queue_depth = 0; });
}

TEST_F(TierDiskStore, CollectGivesRoomBack) {
  for (std::uint64_t i = 0; i < 40; ++i) put(*store, record_id(i), random_bytes(i, 10000));
  for (std::uint64_t i = 0; i < 40; ++i)
    if (i % 8) remove(*store, record_id(i));
  const tier::CollectResult result = store->collect();
  EXPECT_TRUE(result.durable);
  EXPECT_GE(result.freed_bytes, 5 * kSegment);
  for (int round = 0; round < 2; ++round) {
    for (std::uint64_t i = 0; i < 40; ++i) i % 8 ? expect_missing(i) : expect(i, random_bytes(i, 10000));
    disk.crash();
    reopen();
  }
}

TEST_F(TierDiskStore, CheckpointSavesReadingHeaders) {
  options.directory = "large";
  options.segment_bytes = 1 << 20;
  options.capacity_bytes = 1 << 24;
  reopen();
  for (std::uint64_t i = 0; i < 60; ++i) put(*store, record_id(i), random_bytes(i, 30000));
  ASSERT_TRUE(store->close());
  const std::int64_t before = disk.calls();
  reopen();
  const std::int64_t with = disk.calls() - before;
  for (std::uint64_t i = 0; i < 60; ++i) expect(i, random_bytes(i, 30000));
  put(*store, record_id(60), random_bytes(60, 30000));  // after it
  store.reset();
  reopen();
  for (std::uint64_t i = 0; i <= 60; ++i) expect(i, random_bytes(i, 30000));
  ASSERT_TRUE(disk.unlink(checkpoint()).ok());
  store.reset();
  const std::int64_t scanning = disk.calls();
  reopen();
  EXPECT_LT(2 * with, disk.calls() - scanning);
  for (std::uint64_t i = 0; i <= 60; ++i) expect(i, random_bytes(i, 30000));
}

// A checkpoint from before a removal that somebody restores: a miss, and no older bytes.
TEST_F(TierDiskStore, StaleCheckpointGivesNothingWrong) {
  for (std::uint64_t i = 0; i < 20; ++i) put(*store, record_id(i), random_bytes(i, 5000));
  ASSERT_TRUE(store->close());
  const std::vector<std::byte> stale = disk.contents(checkpoint());
  reopen();
  remove(*store, record_id(1));
  put(*store, record_id(2), random_bytes(102, 5000));
  ASSERT_TRUE(store->flush());
  EXPECT_FALSE(disk.has(checkpoint()));  // removed before any record that it names became a tombstone
  ASSERT_TRUE(store->close());
  disk.replace(checkpoint(), stale);
  reopen();
  EXPECT_NE(get(*store, record_id(1)).status, GetStatus::found);
  expect(2, random_bytes(102, 5000));
  for (std::uint64_t i = 3; i < 20; ++i) expect(i, random_bytes(i, 5000));
}

TEST_F(TierDiskStore, DamagedOrForeignCheckpointIsAsNone) {
  for (std::uint64_t i = 0; i < 20; ++i) put(*store, record_id(i), random_bytes(i, 5000));
  ASSERT_TRUE(store->close());
  const std::vector<std::byte> sound = disk.contents(checkpoint());
  const auto all_there_with = [&](std::vector<std::byte> bytes) {
    disk.replace(checkpoint(), std::move(bytes));
    reopen();
    for (std::uint64_t i = 0; i < 20; ++i) expect(i, random_bytes(i, 5000));
    store.reset();
  };
  for (std::size_t bit = 0; bit < 8 * (64 + 48 + 128); bit += 3) {  // header, a segment, two records
    std::vector<std::byte> bytes = sound;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    all_there_with(std::move(bytes));
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{100}, std::size_t{4096}, sound.size() - 4096})
    all_there_with({sound.begin(), sound.begin() + static_cast<std::ptrdiff_t>(std::min(size, sound.size()))});
  // A checkpoint of another store, with segments of the same names.
  options.directory = "other";
  store = DiskStore::open(disk, options);
  for (std::uint64_t i = 0; i < 20; ++i) put(*store, record_id(i + 100), random_bytes(i, 5000));
  ASSERT_TRUE(store->close());
  const std::vector<std::byte> foreign = disk.contents(checkpoint());
  options.directory = "store";
  all_there_with(foreign);
}

CacheKey key_of(unsigned char first) {
  CacheKey key{};
  key[0] = std::byte{first};
  return key;
}

std::shared_ptr<const tier::RecordGuard> guard_of(unsigned char first, Protection protection = Protection::sealed) {
  return std::make_shared<tier::RecordGuard>(tier::GuardOptions{"disk", {key_of(first)}, protection, false});
}

TEST_F(TierDiskStore, SealedRecordsNeedTheirKey) {
  put(*store, record_id(1), random_bytes(1, 5000));  // not sealed
  ASSERT_TRUE(store->close());
  options.guard = guard_of(1);
  reopen();
  expect_missing(1);
  const std::vector<std::byte> secret = random_bytes(2, 5000);
  put(*store, record_id(2, 7), secret);
  put(*store, record_id(3, 7), {});
  EXPECT_EQ(get(*store, record_id(2, 7)).payload, secret);
  EXPECT_EQ(get(*store, record_id(3, 7)).status, GetStatus::found);
  ASSERT_TRUE(store->close());
  const std::vector<std::byte> bytes = disk.contents(first_segment());
  EXPECT_EQ(std::search(bytes.begin(), bytes.end(), secret.begin(), secret.begin() + 16), bytes.end());

  for (const bool has_key : {true, false}) {
    options.guard = has_key ? guard_of(2) : nullptr;
    reopen();
    for (const bool straight : {true, false}) {  // a buffer that the disk may write to, and one that it may not
      alignas(4096) std::array<std::byte, 8192> room;
      room.fill(std::byte{9});
      tier::GetRequest request{record_id(2, 7), std::span(room).subspan(straight ? 0 : 8, 5040)};
      store->get({&request, 1});
      EXPECT_NE(request.status, GetStatus::found);
      for (const std::byte b : room) ASSERT_TRUE(b == std::byte{9} || b == std::byte{0});
    }
    EXPECT_TRUE(store->collect().durable);  // a wrong key destroys nothing
    ASSERT_TRUE(store->close());
  }
  options.guard = guard_of(1);
  reopen();
  EXPECT_EQ(get(*store, record_id(2, 7)).payload, secret);
}

TEST_F(TierDiskStore, EveryBitOfASealedRecordCounts) {
  options.guard = guard_of(1);
  reopen();
  put(*store, record_id(1), random_bytes(1, 100));
  ASSERT_TRUE(store->close());
  const std::vector<std::byte> sound = disk.contents(first_segment());
  const auto header = static_cast<std::size_t>(tier::kSegmentDataOffset), payload = header + tier::kBlockBytes;
  constexpr std::size_t kHeader = tier::kRecordHeaderBytes, kPayload = 100;
  for (std::size_t i = 0; i < 8 * (kHeader + kPayload); ++i) {
    const std::size_t at = i / 8 < kHeader ? header + i / 8 : payload + i / 8 - kHeader;
    std::vector<std::byte> bytes = sound;
    bytes[at] ^= std::byte{1} << (i % 8);
    disk.replace(first_segment(), std::move(bytes));
    reopen();
    ASSERT_NE(get(*store, record_id(1)).status, GetStatus::found) << "bit " << i;
  }
}

// Digests need no key, so anyone who can write to a store can forge them: a forged record is a miss.
TEST_F(TierDiskStore, ForgedRecordsAreMisses) {
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    options.guard = guard_of(1, protection);
    options.directory = fmt::format("store of {}", to_string(protection));
    reopen();
    put(*store, record_id(1), random_bytes(1, 100));
    ASSERT_TRUE(store->close());
    const std::vector<std::byte> sound = disk.contents(first_segment());
    const std::size_t header_at = tier::kSegmentDataOffset, payload_at = header_at + tier::kBlockBytes;
    const auto forge = [&](auto&& change) {
      std::vector<std::byte> bytes = sound;
      const auto payload = std::span(bytes).subspan(payload_at, 100);
      tier::RecordHeader header = tier::parse_header(std::span(bytes).subspan(header_at)).header;
      std::copy_n(random_bytes(2, 100).begin(), 100, payload.begin());
      change(header);
      header.payload_digest = digest128(payload);
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(header_at), 512, std::byte{0});
      tier::encode_header(header, std::span(bytes).subspan(header_at));
      disk.replace(first_segment(), std::move(bytes));
      disk.replace(checkpoint(), {});
      reopen();
      std::vector<std::byte> to(100);
      tier::GetRequest request{record_id(1), to};
      store->get({&request, 1});
      EXPECT_NE(request.status, GetStatus::found);
      EXPECT_EQ(store->stats().unauthenticated_records + store->stats().set_aside_records, 1);
    };
    forge([](tier::RecordHeader&) {});
    forge([](tier::RecordHeader& h) {
      h = {.kind = tier::RecordKind::value, .layout_id = 11, .id = h.id, .length = 100, .place = h.place};
    });
    forge([](tier::RecordHeader& h) {
      h = {.version = 1, .kind = tier::RecordKind::value, .layout_id = 11, .id = h.id, .length = 100, .place = h.place};
    });
    forge([](tier::RecordHeader& h) { h.key_id[0] ^= std::byte{1}; });
    forge([](tier::RecordHeader& h) { h.sequence += 1; });
  }
}

TEST_F(TierDiskStore, KeysRotateAndNothingIsLost) {
  const std::vector<std::byte> payload = random_bytes(1, 5000);
  put(*store, record_id(1), payload);
  const auto reopen_with = [&](std::vector<CacheKey> keys, bool accept = false) {
    ASSERT_TRUE(store->close());
    options.guard =
        std::make_shared<tier::RecordGuard>(tier::GuardOptions{"disk", std::move(keys), Protection::sealed, accept});
    reopen();
  };
  reopen_with({key_of(1)}, true);  // a store from before keys
  expect(1, payload);
  put(*store, record_id(2), payload);
  reopen_with({key_of(2), key_of(1)});
  expect_missing(1);
  expect(2, payload);
  put(*store, record_id(3), payload);
  EXPECT_TRUE(store->collect().durable);
  reopen_with({key_of(2)});
  expect_missing(2);
  expect(3, payload);
  EXPECT_EQ(store->stats().unauthenticated_records, 2);
  EXPECT_EQ(store->stats().set_aside_records, 0);
  reopen_with({key_of(1)});
  expect(2, payload);
}

std::vector<std::byte> file_of_0_1(const char* name) {
  std::ifstream in(source_path(std::string("tests/tier/from_0_1/") + name), std::ios::binary);
  const std::vector<char> text{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::byte> bytes(std::max<std::size_t>(text.size(), kSegment));
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

/// A store written by 0.1.
struct TierStoreOf01 : TierDiskStore {
  tier::RecordId hello{7, {}}, z{0, {}};
  TierStoreOf01() {
    store.reset();
    options.directory = "old";
    options.layout_id = 0x0123456789abcdef;
    for (std::size_t i = 0; i < hello.key.size(); ++i) hello.key[i] = z.key[i] = static_cast<std::byte>(i);
  }
  void open(const char* segment, std::vector<CacheKey> keys, bool accept = false) {
    store.reset();
    (void)disk.make_directory(options.directory);
    disk.replace(first_segment(), file_of_0_1(segment));
    options.guard =
        std::make_shared<tier::RecordGuard>(tier::GuardOptions{"disk", std::move(keys), Protection::sealed, accept});
    store = DiskStore::open(disk, options);
  }
  std::string text(const tier::RecordId& id) {
    const Got got = get(*store, id);
    if (got.status != GetStatus::found) return "missing";
    return {reinterpret_cast<const char*>(got.payload.data()), got.payload.size()};
  }
};

TEST_F(TierStoreOf01, IsRead) {
  open("two_records.segment", {});
  EXPECT_EQ(text(hello), "hello");
  EXPECT_EQ(text(z), std::string(5000, 'Z'));
  // New records go to other segments, and old ones move unchanged.
  put(*store, record_id(1), random_bytes(1, 5000));
  EXPECT_TRUE(remove(*store, hello));
  EXPECT_TRUE(store->collect().durable);
  ASSERT_TRUE(store->close());
  store = DiskStore::open(disk, options);
  EXPECT_EQ(text(hello), "missing");
  EXPECT_EQ(text(z), std::string(5000, 'Z'));
  expect(1, random_bytes(1, 5000));
}

TEST_F(TierStoreOf01, IsNotBelievedByACacheWithKeys) {
  open("two_records.segment", {key_of(1)});
  EXPECT_EQ(text(hello), "missing");
  EXPECT_EQ(store->stats().unauthenticated_records, 2);
  open("two_records.segment", {key_of(1)}, true);
  EXPECT_EQ(text(hello), "hello");
}

TEST_F(TierStoreOf01, SealedWithItsDiskKeyStaysReadable) {
  CacheKey disk_key;
  for (std::size_t i = 0; i < disk_key.size(); ++i) disk_key[i] = static_cast<std::byte>(0x40 + i);
  open("sealed_record.segment", {key_of(1), disk_key});
  EXPECT_EQ(text(hello), "hello");
  EXPECT_EQ(text(z), "missing");  // the record was not sealed
  for (int i = 0; i < 2; ++i) {   // moved, then found again by the checkpoint
    EXPECT_TRUE(store->collect().durable);
    ASSERT_TRUE(store->close());
    store = DiskStore::open(disk, options);
    EXPECT_EQ(text(hello), "hello");
  }
  open("sealed_record.segment", {key_of(1)});
  EXPECT_EQ(text(hello), "missing");
  open("sealed_record.segment", {});
  EXPECT_EQ(text(hello), "missing");
}

struct Folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("kv4_store_" + std::to_string(::getpid()));
  Folder() { std::filesystem::remove_all(path); }
  ~Folder() { std::filesystem::remove_all(path); }
};

tier::StoreOptions options_in(const Folder& folder) {
  tier::StoreOptions options = small_options();
  options.directory = folder.path.string();
  options.segment_bytes = 1 << 20;
  options.capacity_bytes = 64 << 20;
  options.queue_depth = 4;
  return options;
}

/// Memory that begins `shift` bytes after a multiple of 4,096.
struct ShiftedMemory {
  tier::BlockBuffer buffer;
  std::span<std::byte> bytes;
  ShiftedMemory(std::int64_t count, std::int64_t shift)
      : bytes(buffer.get(count + shift).subspan(static_cast<std::size_t>(shift))) {}
};

/// Puts a batch and gets it in another order, straight and through copies.
void put_and_get_batch(tier::FileSystem& files, const tier::StoreOptions& options) {
  const auto store = DiskStore::open(files, options);
  std::vector<std::unique_ptr<ShiftedMemory>> memory;
  std::vector<tier::PutRequest> puts;
  std::vector<tier::GetRequest> gets;
  constexpr std::uint64_t kCount = 100;
  const auto length_of = [](std::uint64_t i) { return static_cast<std::int64_t>(i * i * 37 % 70000); };
  for (std::uint64_t i = 0; i < kCount; ++i) {
    memory.push_back(std::make_unique<ShiftedMemory>(length_of(i), i % 3 == 0 ? 0 : 64));
    const std::vector<std::byte> payload = random_bytes(i, length_of(i));
    std::copy(payload.begin(), payload.end(), memory[i]->bytes.begin());
    puts.push_back({record_id(i), memory[i]->bytes});
  }
  store->put(puts);
  for (const tier::PutRequest& request : puts) ASSERT_EQ(request.status, PutStatus::stored);
  constexpr std::int64_t kGuard = 100;  // bytes behind a payload that must not change
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::uint64_t key = i * 7 % kCount;
    memory.push_back(std::make_unique<ShiftedMemory>(length_of(key) + kGuard, i % 2 == 0 ? 0 : 64));
    gets.push_back({record_id(key), memory.back()->bytes});
    std::fill(gets.back().to.begin(), gets.back().to.end(), std::byte{0x5a});
  }
  store->get(gets);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::uint64_t key = i * 7 % kCount;
    ASSERT_EQ(gets[i].status, GetStatus::found) << key;
    ASSERT_EQ(gets[i].bytes, length_of(key));
    const std::vector<std::byte> payload = random_bytes(key, length_of(key));
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), gets[i].to.begin())) << key;
    for (const std::byte b : gets[i].to.subspan(payload.size())) ASSERT_EQ(b, std::byte{0x5a}) << key;
  }
  ASSERT_TRUE(store->close());
}

TEST_F(TierDiskStore, BatchesInAnyOrder) {
  store.reset();
  options.capacity_bytes = 64 << 20;
  options.segment_bytes = 1 << 20;
  for (const int depth : {1, 3, 100}) {
    options.queue_depth = depth;
    options.directory = "store" + std::to_string(depth);
    put_and_get_batch(disk, options);
  }
}

TEST_F(TierDiskStore, OneFailedWriteOfABatchLosesNoOther) {
  for (int failing = 0; failing < 12; ++failing) {
    SCOPED_TRACE(failing);
    std::vector<std::vector<std::byte>> payloads;
    std::vector<tier::PutRequest> requests;
    for (std::uint64_t i = 0; i < 6; ++i) payloads.push_back(random_bytes(i, 30000));
    for (std::uint64_t i = 0; i < 6; ++i) requests.push_back({record_id(i), payloads[i]});
    disk.fail_call_in(failing);
    store->put(requests);
    for (std::uint64_t i = 0; i < 6; ++i)
      if (requests[i].status == PutStatus::stored) expect(i, payloads[i]);
    ASSERT_TRUE(store->flush());
    disk.crash();
    reopen();
    for (std::uint64_t i = 0; i < 6; ++i)
      if (requests[i].status == PutStatus::stored) expect(i, payloads[i]);
  }
}

TEST(TierPosixFiles, EveryWayGivesTheSame) {
  for (const bool direct : {false, true})
    for (const bool io_uring : {false, true}) {
      SCOPED_TRACE(fmt::format("direct {}, io_uring {}", direct, io_uring));
      const Folder folder;
      const auto files = tier::make_posix_file_system({direct, io_uring});
      tier::StoreOptions options = options_in(folder);
      options.read_threads = direct ? 3 : 1;
      put_and_get_batch(*files, options);
    }
}

// Gets beside puts, removes, flushes and evictions: always one of the allowed versions, never damage.
TEST(TierPosixFiles, ReadsBesideWrites) {
  const Folder folder;
  const auto files = tier::make_posix_file_system();
  tier::StoreOptions options = options_in(folder);
  options.segment_bytes = 128 << 10;
  options.capacity_bytes = 512 << 10;
  options.read_threads = 2;
  const auto store = DiskStore::open(*files, options);
  constexpr std::uint64_t kKeys = 8;
  const auto payload_of = [](std::uint64_t version) {
    std::vector<std::byte> bytes = random_bytes(version, 9000);
    std::memcpy(bytes.data(), &version, sizeof(version));
    return bytes;
  };
  std::array<std::atomic<std::uint64_t>, kKeys> stored{};  // each key's newest version whose put has returned
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    Random random(3);
    for (std::uint64_t version = 1; !stop; ++version) {
      const std::uint64_t key = version % kKeys;
      if (put(*store, record_id(key), payload_of(version)) == PutStatus::stored) stored[key] = version;
      if (random.below(8) == 0) remove(*store, record_id(static_cast<std::uint64_t>(random.below(kKeys))));
      if (random.below(6) == 0) store->flush();
    }
  });
  const auto read = [&](std::uint64_t seed) {
    int hits = 0;
    Random random(seed);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
    std::vector<std::byte> to(9000);
    while (hits < 200 || std::chrono::steady_clock::now() < end) {
      const auto key = static_cast<std::uint64_t>(random.below(kKeys));
      const std::uint64_t before = stored[key];
      tier::GetRequest request{record_id(key), to};
      store->get({&request, 1});
      ASSERT_TRUE(request.status == GetStatus::found || request.status == GetStatus::missing);
      if (request.status != GetStatus::found) continue;
      std::uint64_t version = 0;
      std::memcpy(&version, to.data(), sizeof(version));
      ASSERT_EQ(version % kKeys, key);
      ASSERT_GE(version, before);
      ASSERT_EQ(to, payload_of(version));
      ++hits;
    }
  };
  std::thread other([&] { read(5); });
  read(4);
  other.join();
  stop = true;
  writer.join();
  EXPECT_EQ(store->stats().set_aside_records, 0);
}

TEST(TierPosixFiles, GoOnWhereIoUringIsRefused) {
  const Folder folder;
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                             BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                             BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                             BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog filter{std::size(program), program};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
      ::_exit(3);
    const auto files = tier::make_posix_file_system();
    put_and_get_batch(*files, options_in(folder));
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 3) GTEST_SKIP() << "no seccomp here";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(TierPosixFiles, AreForTheOwnerAndNeverFollowLinks) {
  const Folder folder;
  const std::filesystem::path& base = folder.path;
  const auto files = tier::make_posix_file_system();
  const tier::StoreOptions options = options_in(folder);
  {
    const auto store = DiskStore::open(*files, options);
    ASSERT_EQ(put(*store, record_id(1), random_bytes(1, 1000)), PutStatus::stored);
    EXPECT_THROW(DiskStore::open(*files, options), Error);
    ASSERT_TRUE(store->close());
  }
  const auto mode = [](const std::filesystem::path& path) {
    struct stat info {};
    EXPECT_EQ(::stat(path.c_str(), &info), 0);
    return info.st_mode & 0777;
  };
  EXPECT_EQ(mode(base), 0700u);
  EXPECT_EQ(mode(base / "lock"), 0600u);
  EXPECT_EQ(mode(base / tier::segment_name(1)), 0600u);
  EXPECT_EQ(get(*DiskStore::open(*files, options), record_id(1)).payload, random_bytes(1, 1000));
  std::filesystem::rename(base / tier::segment_name(1), base / "elsewhere");
  std::filesystem::create_symlink(base / "elsewhere", base / tier::segment_name(1));
  EXPECT_EQ(tier::survey_store(*files, options.directory, true).damaged_segments(), 1);
}

}  // namespace
}  // namespace kv4::test
