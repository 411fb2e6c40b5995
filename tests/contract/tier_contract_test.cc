// The promises of every tier (include/kv4/tier.h).
#include <gtest/gtest.h>

#include <map>

#include "contract/tier_places.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::GetStatus;
using tier::PutStatus;

tier::Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }
tier::Deadline just_now() { return std::chrono::steady_clock::now() - std::chrono::milliseconds(1); }

template <class Place>
struct TierContract : testing::Test {
  std::unique_ptr<Place> place;

  void SetUp() override {
    if (const std::string why = Place::why_not(); !why.empty()) GTEST_SKIP() << why;
    place = std::make_unique<Place>();
  }
  tier::Tier& tier() { return place->tier(); }

  PutStatus put(const tier::RecordId& id, std::span<const std::byte> payload) {
    tier::PutRequest request{id, payload};
    tier().put({&request, 1}, soon());
    return request.status;
  }
  Got get(const tier::RecordId& id, std::int64_t room = 32 << 10) {
    std::vector<std::byte> to(static_cast<std::size_t>(room), std::byte{0xee});
    tier::GetRequest request{id, to};
    tier().get({&request, 1}, soon());
    if (request.status == GetStatus::found) to.resize(static_cast<std::size_t>(request.bytes));
    return {request.status, std::move(to)};
  }
  bool remove(const tier::RecordId& id) {
    tier::RemoveRequest request{id};
    tier().remove({&request, 1}, soon());
    EXPECT_TRUE(request.answered);
    return request.removed;
  }
  std::int64_t length(const tier::RecordId& id) {
    tier::ExistsRequest request{id};
    tier().exists({&request, 1}, soon());
    EXPECT_TRUE(request.answered);
    return request.bytes;
  }
  void expect(const tier::RecordId& id, std::span<const std::byte> payload) {
    const Got got = get(id);
    ASSERT_EQ(got.status, GetStatus::found);
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), got.payload.begin(), got.payload.end()));
  }
};

struct PlaceNames {
  template <class Place>
  static std::string GetName(int) {
    return Place::kName;
  }
};
TYPED_TEST_SUITE(TierContract, AllPlaces, PlaceNames);

TYPED_TEST(TierContract, GivesBackWhatWasPut) {
  const std::vector<std::int64_t> lengths = {0, 1, 5, 127, 128, 129, 895, 896, 897, 3968, 8064, 20000};
  std::vector<std::vector<std::byte>> payloads;
  std::vector<tier::PutRequest> puts;
  for (std::size_t i = 0; i < lengths.size(); ++i) payloads.push_back(random_bytes(i, lengths[i]));
  for (std::size_t i = 0; i < lengths.size(); ++i) puts.push_back({record_id(i), payloads[i]});
  this->tier().put(puts, soon());
  for (const tier::PutRequest& request : puts) EXPECT_EQ(request.status, PutStatus::stored);

  std::vector<std::vector<std::byte>> buffers(lengths.size() + 1, std::vector<std::byte>(20000));
  std::vector<tier::GetRequest> gets;
  for (std::size_t i = 0; i <= lengths.size(); ++i) gets.push_back({record_id(i), buffers[i]});
  this->tier().get(gets, soon());
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    ASSERT_EQ(gets[i].status, GetStatus::found) << i;
    ASSERT_EQ(gets[i].bytes, lengths[i]);
    EXPECT_TRUE(std::equal(payloads[i].begin(), payloads[i].end(), buffers[i].begin()));
    EXPECT_EQ(this->length(record_id(i)), lengths[i]);
  }
  EXPECT_EQ(gets.back().status, GetStatus::missing);
  EXPECT_EQ(this->length(record_id(lengths.size())), -1);
}

TYPED_TEST(TierContract, SameSaltHitsOtherMisses) {
  ASSERT_EQ(this->put(record_id(1, 5), random_bytes(1, 100)), PutStatus::stored);
  this->expect(record_id(1, 5), random_bytes(1, 100));
  EXPECT_EQ(this->get(record_id(1, 6)).status, GetStatus::missing);
  EXPECT_EQ(this->length(record_id(1, 6)), -1);
  EXPECT_FALSE(this->remove(record_id(1, 6)));
  ASSERT_EQ(this->put(record_id(1, 6), random_bytes(2, 100)), PutStatus::stored);
  this->expect(record_id(1, 5), random_bytes(1, 100));
  this->expect(record_id(1, 6), random_bytes(2, 100));
}

// In this test no place returns to an older put (kv4/tier.h, 1a).
TYPED_TEST(TierContract, NewestPutWins) {
  for (const std::int64_t length : {1000, 1000, 5, 9000, 0, 300}) {
    const std::vector<std::byte> payload = random_bytes(static_cast<std::uint64_t>(length) + 7, length);
    ASSERT_EQ(this->put(record_id(1), payload), PutStatus::stored);
    this->expect(record_id(1), payload);
    EXPECT_EQ(this->length(record_id(1)), length);
  }
}

TYPED_TEST(TierContract, RemovedIsGone) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(this->put(record_id(1), random_bytes(1, 700)), PutStatus::stored);
    ASSERT_EQ(this->put(record_id(2), random_bytes(2, 700)), PutStatus::stored);
    EXPECT_TRUE(this->remove(record_id(1)));
    EXPECT_FALSE(this->remove(record_id(1)));
    EXPECT_EQ(this->get(record_id(1)).status, GetStatus::missing);
    this->expect(record_id(2), random_bytes(2, 700));
  }
}

TYPED_TEST(TierContract, SmallBuffersAndLargeRecordsAreValues) {
  ASSERT_EQ(this->put(record_id(1), random_bytes(1, 100)), PutStatus::stored);
  std::vector<std::byte> to(99, std::byte{0xee});
  tier::GetRequest request{record_id(1), to};
  this->tier().get({&request, 1}, soon());
  EXPECT_EQ(request.status, GetStatus::too_small);
  EXPECT_EQ(request.bytes, 100);
  EXPECT_EQ(to, std::vector<std::byte>(99, std::byte{0xee}));
  this->expect(record_id(1), random_bytes(1, 100));
  EXPECT_EQ(this->put(record_id(2), std::vector<std::byte>(TypeParam::kTooLarge)), PutStatus::too_large);
  EXPECT_EQ(this->get(record_id(2)).status, GetStatus::missing);
}

TYPED_TEST(TierContract, NothingHappensAfterTheDeadline) {
  ASSERT_EQ(this->put(record_id(1), random_bytes(1, 100)), PutStatus::stored);
  const std::vector<std::byte> other = random_bytes(2, 100);
  tier::PutRequest put{record_id(1), other, PutStatus::stored};
  this->tier().put({&put, 1}, just_now());
  EXPECT_EQ(put.status, PutStatus::failed);
  std::vector<std::byte> to(100);
  tier::GetRequest get{record_id(1), to, GetStatus::found, 100};
  this->tier().get({&get, 1}, just_now());
  EXPECT_EQ(get.status, GetStatus::failed);
  EXPECT_EQ(to, std::vector<std::byte>(100));
  tier::ExistsRequest exists{record_id(1), 100, true};
  this->tier().exists({&exists, 1}, just_now());
  EXPECT_FALSE(exists.answered);
  EXPECT_EQ(exists.bytes, -1);
  tier::RemoveRequest remove{record_id(1), true, true};
  this->tier().remove({&remove, 1}, just_now());
  EXPECT_FALSE(remove.answered);
  EXPECT_FALSE(remove.removed);
  this->expect(record_id(1), random_bytes(1, 100));
}

TYPED_TEST(TierContract, DamagedIsAMissAndSetAside) {
  ASSERT_EQ(this->put(record_id(1), random_bytes(1, 100)), PutStatus::stored);
  ASSERT_EQ(this->put(record_id(2), random_bytes(2, 100)), PutStatus::stored);
  this->place->damage(record_id(1));
  EXPECT_EQ(this->get(record_id(1)).status, GetStatus::damaged);
  EXPECT_EQ(this->get(record_id(1)).status, GetStatus::missing);
  EXPECT_EQ(this->tier().stats().set_aside_records, 1);
  this->expect(record_id(2), random_bytes(2, 100));
  ASSERT_EQ(this->put(record_id(1), random_bytes(3, 100)), PutStatus::stored);
  this->expect(record_id(1), random_bytes(3, 100));
}

TYPED_TEST(TierContract, CountsWhatItHolds) {
  ASSERT_EQ(this->put(record_id(1), random_bytes(1, 1000)), PutStatus::stored);
  ASSERT_EQ(this->put(record_id(2), random_bytes(2, 500)), PutStatus::stored);
  ASSERT_EQ(this->put(record_id(2), random_bytes(2, 400)), PutStatus::stored);
  EXPECT_NE(this->tier().flush(soon()), tier::FlushStatus::failed);
  const tier::TierStats stats = this->tier().stats();
  if (stats.records == tier::TierStats::kUnknown) return;
  EXPECT_EQ(stats.records, 2);
  EXPECT_EQ(stats.payload_bytes, 1400);
  EXPECT_GT(stats.capacity_bytes, 0);
}

TYPED_TEST(TierContract, RandomOperationsAgreeWithAMap) {
  std::map<std::uint64_t, std::vector<std::byte>> expected;  // all of it fits
  Random random(3);
  for (int step = 0; step < 300; ++step) {
    const auto number = static_cast<std::uint64_t>(random.below(12));
    const tier::RecordId id = record_id(number / 3, number % 3);
    switch (random.below(4)) {
      case 0:
        expected[number] = random_bytes(random.next(), random.below(10000));
        ASSERT_EQ(this->put(id, expected[number]), PutStatus::stored);
        break;
      case 1: EXPECT_EQ(this->remove(id), expected.erase(number) == 1) << "step " << step; break;
      default:
        const Got got = this->get(id);
        ASSERT_EQ(got.status, expected.contains(number) ? GetStatus::found : GetStatus::missing) << "step " << step;
        if (got.status == GetStatus::found) {
          ASSERT_EQ(got.payload, expected[number]) << "step " << step;
        }
    }
  }
}

}  // namespace
}  // namespace kv4::test
