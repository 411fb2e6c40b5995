// The store's contract, on a simulated disk, and once on a real one.
#include "tier/disk_store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "kv4/error.h"
#include "support/simulated_disk.h"
#include "tier/store_records.h"
#include "tier/store_survey.h"

namespace kv4::test {
namespace {

using tier::DiskStore;
using tier::GetStatus;
using tier::PutStatus;

constexpr std::int64_t kSegment = 64 << 10;

tier::StoreOptions small_options() {
  tier::StoreOptions options;
  options.directory = "store";
  options.layout_id = 11;
  options.segment_bytes = kSegment;
  options.capacity_bytes = 1 << 20;
  options.sync_every_bytes = 32 << 10;
  return options;
}

struct TierDiskStore : testing::Test {
  SimulatedDisk disk{1};
  tier::StoreOptions options = small_options();
  std::unique_ptr<DiskStore> store = DiskStore::open(disk, options);

  void reopen() {
    store.reset();
    store = DiskStore::open(disk, options);
  }
  void expect(std::uint64_t number, std::span<const std::byte> payload) {
    const Got got = get(*store, record_id(number));
    ASSERT_EQ(got.status, GetStatus::found) << "record " << number;
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), got.payload.begin(), got.payload.end()));
  }
  void expect_missing(std::uint64_t number) {
    EXPECT_EQ(get(*store, record_id(number)).status, GetStatus::missing) << "record " << number;
  }
  std::string first_segment() const { return options.directory + "/" + tier::segment_name(1); }

  template <class Call>
  void refused(ErrorCode code, const std::string& part, Call&& call) {
    try {
      call();
      FAIL() << "not refused: " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }
};

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
  EXPECT_EQ(put(*store, record_id(2), random_bytes(1, kSegment - tier::kSegmentDataOffset - 128)), PutStatus::stored);
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

TEST_F(TierDiskStore, FullDiskIsAValueAndPasses) {
  disk.set_capacity(3 * kSegment);
  std::uint64_t stored = 0;
  while (put(*store, record_id(stored), random_bytes(stored, 10000)) == PutStatus::stored) ++stored;
  EXPECT_EQ(put(*store, record_id(stored), random_bytes(stored, 10000)), PutStatus::no_space);
  EXPECT_GT(stored, 5u);
  ASSERT_TRUE(store->flush());
  disk.set_capacity(1 << 30);
  ASSERT_EQ(put(*store, record_id(stored), random_bytes(stored, 10000)), PutStatus::stored);
  for (std::uint64_t i = 0; i <= stored; ++i) expect(i, random_bytes(i, 10000));
}

TEST_F(TierDiskStore, DamagedRecordIsAMissAndSetAside) {
  put(*store, record_id(1), random_bytes(1, 1000));
  put(*store, record_id(2), random_bytes(2, 1000));
  disk.damage(first_segment(), tier::kSegmentDataOffset + 500, std::byte{1});
  EXPECT_EQ(get(*store, record_id(1)).status, GetStatus::damaged);
  EXPECT_EQ(get(*store, record_id(1)).status, GetStatus::missing);
  EXPECT_EQ(store->stats().set_aside_records, 1);
  expect(2, random_bytes(2, 1000));
  put(*store, record_id(1), random_bytes(3, 1000));
  expect(1, random_bytes(3, 1000));
}

TEST_F(TierDiskStore, OneDamagedHeaderLosesOneRecord) {
  for (std::uint64_t i = 0; i < 5; ++i) put(*store, record_id(i), random_bytes(i, 5000));
  ASSERT_TRUE(store->close());
  disk.damage(first_segment(), tier::kSegmentDataOffset + 8192 + 40, std::byte{1});
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

// A payload that holds a whole segment, records and all, with the header in front of it damaged.
TEST_F(TierDiskStore, PayloadsAreNeverTakenForRecords) {
  put(*store, record_id(7), random_bytes(7, 100));
  ASSERT_TRUE(store->flush());
  std::vector<std::byte> image = disk.contents(first_segment());
  image.resize(20000);
  image.erase(image.begin(), image.begin() + 128);  // its blocks lie at multiples of 4,096 in the file
  remove(*store, record_id(7));
  put(*store, record_id(8), image);
  ASSERT_TRUE(store->close());
  disk.damage(first_segment(), tier::kSegmentDataOffset + 4096 + 3, std::byte{1});
  reopen();
  expect_missing(7);
  expect_missing(8);
}

TEST_F(TierDiskStore, FailedSyncDropsTheSegmentNotTheRecords) {
  for (std::uint64_t i = 0; i < 3; ++i) put(*store, record_id(i), random_bytes(i, 3000));
  ASSERT_TRUE(store->flush());
  for (int round = 0; round < 40; ++round) {  // every call of a flush fails once
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
  refused(ErrorCode::bad_file, "format version 2, this build reads 1", [&] { DiskStore::open(disk, options); });
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
  with([](auto& o) { o.capacity_bytes = o.segment_bytes * 2 - 1; });
  with([](auto& o) { o.sync_every_bytes = 0; });
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

TEST(TierPosixFiles, AreForTheOwnerAndNeverFollowLinks) {
  for (const bool direct : {false, true}) {
    const std::filesystem::path base =
        std::filesystem::temp_directory_path() / ("kv4_store_" + std::to_string(::getpid()) + (direct ? "d" : "b"));
    std::filesystem::remove_all(base);
    const auto files = tier::make_posix_file_system(direct);
    tier::StoreOptions options = small_options();
    options.directory = base.string();
    options.capacity_bytes = 8 << 20;
    {
      const auto store = DiskStore::open(*files, options);
      for (std::uint64_t i = 0; i < 60; ++i)
        ASSERT_EQ(put(*store, record_id(i), random_bytes(i, 1000 * static_cast<std::int64_t>(i % 30))),
                  PutStatus::stored);
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
    {
      const auto store = DiskStore::open(*files, options);
      for (std::uint64_t i = 0; i < 60; ++i)
        EXPECT_EQ(get(*store, record_id(i)).payload, random_bytes(i, 1000 * static_cast<std::int64_t>(i % 30)));
    }
    std::filesystem::rename(base / tier::segment_name(1), base / "elsewhere");
    std::filesystem::create_symlink(base / "elsewhere", base / tier::segment_name(1));
    EXPECT_EQ(tier::survey_store(*files, options.directory, true).damaged_segments(), 1);
    std::filesystem::remove_all(base);
  }
}

}  // namespace
}  // namespace kv4::test
