// The fixture of the store tests: a store on a simulated disk.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "kv4/error.h"
#include "support/simulated_disk.h"
#include "tier/disk_store.h"
#include "tier/index_checkpoint.h"
#include "tier/store_records.h"

namespace kv4::test {

inline constexpr std::int64_t kSegment = 64 << 10;

inline tier::StoreOptions small_options() {
  tier::StoreOptions options;
  options.directory = "store";
  options.layout_id = 11;
  options.segment_bytes = kSegment;
  options.capacity_bytes = 1 << 20;
  options.sync_every_bytes = 32 << 10;
  return options;
}

struct SimulatedStore : testing::Test {
  SimulatedDisk disk{1};
  tier::StoreOptions options = small_options();
  std::unique_ptr<tier::DiskStore> store = tier::DiskStore::open(disk, options);

  void reopen() {
    store.reset();
    store = tier::DiskStore::open(disk, options);
  }
  void expect(std::uint64_t number, std::span<const std::byte> payload) {
    const Got got = get(*store, record_id(number));
    ASSERT_EQ(got.status, tier::GetStatus::found) << "record " << number;
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), got.payload.begin(), got.payload.end()));
  }
  void expect_missing(std::uint64_t number) {
    EXPECT_EQ(get(*store, record_id(number)).status, tier::GetStatus::missing) << "record " << number;
  }
  std::string checkpoint() const { return options.directory + "/" + std::string(tier::kCheckpointName); }
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

}  // namespace kv4::test
