// The host tier beyond the contract: its budget and its evictions.
#include "tier/host_tier.h"

#include <gtest/gtest.h>

#include "kv4/error.h"
#include "support/manual_clock.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::GetStatus;
using tier::HostTier;
using tier::PutStatus;

constexpr std::int64_t kHeader = tier::kRecordHeaderBytes;

struct TierHost : testing::Test {
  ManualClock* clock = new ManualClock;
  std::shared_ptr<tier::Clock> shared_clock{clock};
  HostTier tier{{11, 64 << 10, 1 << 10}, shared_clock};

  PutStatus put(std::uint64_t number, std::int64_t length) {
    const std::vector<std::byte> payload = random_bytes(number, length);
    tier::PutRequest request{record_id(number), payload};
    tier.put({&request, 1}, clock->in(tier::Duration(1)));
    return request.status;
  }
  GetStatus get(std::uint64_t number) {
    std::vector<std::byte> to(64 << 10);
    tier::GetRequest request{record_id(number), to};
    tier.get({&request, 1}, clock->in(tier::Duration(1)));
    if (request.status == GetStatus::found) {
      to.resize(static_cast<std::size_t>(request.bytes));
      EXPECT_EQ(to, random_bytes(number, request.bytes));
    }
    return request.status;
  }
};

TEST_F(TierHost, TheBudgetIsExact) {
  // 1,024 - 512 bytes fit one page, one more takes two.
  ASSERT_EQ(put(0, 1024 - kHeader), PutStatus::stored);
  EXPECT_EQ(tier.used_bytes(), 1 << 10);
  ASSERT_EQ(put(0, 1025 - kHeader), PutStatus::stored);
  EXPECT_EQ(tier.used_bytes(), 2 << 10);
  ASSERT_EQ(put(1, (62 << 10) - kHeader), PutStatus::stored);
  EXPECT_EQ(tier.used_bytes(), 64 << 10);
  EXPECT_EQ(tier.stats().evicted_records, 0);
  ASSERT_EQ(put(2, (64 << 10) - kHeader), PutStatus::stored);
  EXPECT_EQ(tier.stats().evicted_records, 2);
  EXPECT_EQ(tier.stats().records, 1);
  EXPECT_EQ(get(2), GetStatus::found);
  EXPECT_EQ(put(3, (64 << 10) - kHeader + 1), PutStatus::too_large);
  EXPECT_EQ(get(2), GetStatus::found);
}

TEST_F(TierHost, WhatWasUsedLongestAgoLeaves) {
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_EQ(put(i, (8 << 10) - kHeader), PutStatus::stored);
  EXPECT_EQ(get(0), GetStatus::found);
  ASSERT_EQ(put(8, (16 << 10) - kHeader), PutStatus::stored);
  for (std::uint64_t i = 0; i < 9; ++i) EXPECT_EQ(get(i), i == 1 || i == 2 ? GetStatus::missing : GetStatus::found);
}

TEST_F(TierHost, EveryBitOfARecordCounts) {
  for (std::size_t at = 0; at < static_cast<std::size_t>(kHeader) + 50; ++at) {
    ASSERT_EQ(put(1, 50), PutStatus::stored);
    tier.pages_of(record_id(1)).front()[at] ^= std::byte{0x10};
    ASSERT_EQ(get(1), GetStatus::damaged) << "byte " << at;
    ASSERT_EQ(get(1), GetStatus::missing);
  }
  EXPECT_EQ(tier.used_bytes(), 0);
}

TEST_F(TierHost, MixedLengthsFillItAndComeBack) {
  Random random(5);
  for (std::uint64_t i = 0; i < 2000; ++i) {
    ASSERT_EQ(put(i % 97, random.below(9000)), PutStatus::stored);
    ASSERT_EQ(get(i % 97), GetStatus::found);
    (void)get(static_cast<std::uint64_t>(random.below(97)));
    ASSERT_LE(tier.used_bytes(), 64 << 10);
  }
}

// A view does not change, whatever happens to its record and to the tier.
TEST_F(TierHost, ViewsStayWhileTheyAreHeld) {
  auto shared = std::make_shared<HostTier>(tier::HostTierOptions{11, 4 << 10, 1 << 10}, shared_clock);
  const auto put = [&](std::uint64_t number, std::uint64_t version, std::int64_t length) {
    const std::vector<std::byte> payload = random_bytes(version, length);
    tier::PutRequest request{record_id(number), payload};
    shared->put({&request, 1}, clock->in(tier::Duration(1)));
    return request.status;
  };
  std::vector<std::byte> to(4 << 10);
  const auto view = [&](std::uint64_t number) {
    tier::GetRequest request{.id = record_id(number), .to = to, .view_allowed = true};
    shared->get({&request, 1}, clock->in(tier::Duration(1)));
    return request;
  };
  ASSERT_EQ(put(1, 1, 512), PutStatus::stored);
  tier::GetRequest one = view(1), again = view(1);
  ASSERT_EQ(one.status, GetStatus::found);
  ASSERT_TRUE(one.view);
  EXPECT_EQ(one.view.get(), again.view.get());
  EXPECT_EQ(one.view.get(), shared->pages_of(record_id(1)).front().data() + kHeader) << "it is the tier's own memory";
  ASSERT_EQ(put(1, 2, 512), PutStatus::stored);  // another version, and then more than fits
  for (std::uint64_t i = 2; i < 9; ++i) ASSERT_EQ(put(i, i, 500), PutStatus::stored);
  EXPECT_EQ(put(9, 9, 4000 - kHeader), PutStatus::no_space) << "a page is held";
  EXPECT_EQ(view(1).status, GetStatus::missing);
  const auto bytes = [](const tier::GetRequest& r) {
    return std::vector<std::byte>(r.view.get(), r.view.get() + r.bytes);
  };
  EXPECT_EQ(bytes(one), random_bytes(1, 512));
  one.view.reset();
  EXPECT_EQ(bytes(again), random_bytes(1, 512));
  again.view.reset();
  EXPECT_EQ(put(9, 9, 4000 - kHeader), PutStatus::stored);

  const tier::GetRequest chain = view(9);  // not in one page, so a copy
  ASSERT_EQ(chain.status, GetStatus::found);
  EXPECT_FALSE(chain.view);
  to.resize(static_cast<std::size_t>(chain.bytes));
  EXPECT_EQ(to, random_bytes(9, 4000 - kHeader));

  ASSERT_EQ(put(1, 3, 400), PutStatus::stored);
  shared->pages_of(record_id(1)).front()[300] ^= std::byte{1};
  to.resize(4 << 10);
  EXPECT_EQ(view(1).status, GetStatus::damaged);
  EXPECT_EQ(view(1).status, GetStatus::missing);
  ASSERT_EQ(put(1, 4, 400), PutStatus::stored);
  const tier::GetRequest last = view(1);
  shared.reset();
  EXPECT_EQ(bytes(last), random_bytes(4, 400));
}

TEST_F(TierHost, BadOptionsAreRefused) {
  EXPECT_THROW(HostTier({0, 1 << 20, 100}, shared_clock), Error);
  EXPECT_THROW(HostTier({0, 1000, 1 << 10}, shared_clock), Error);
  EXPECT_THROW(HostTier({0, (1 << 20) + 1, 1 << 10}, shared_clock), Error);
  EXPECT_THROW(HostTier({0, 1 << 20, 1 << 10, 0}, shared_clock), Error);
}

}  // namespace
}  // namespace kv4::test
