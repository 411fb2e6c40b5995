// The allocator by hand, and against a slow model over a long random run.
#include "kv4/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kv4/error.h"

namespace {

using kv4::BlockAllocator;
using kv4::BlockId;

template <class F>
std::string refusal(F&& call) {
  try {
    call();
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_argument) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

TEST(BlockAllocator, FirstBlocksInOrderThenLastFreedFirst) {
  BlockAllocator a(4);
  EXPECT_EQ(a.num_free(), 4);
  for (BlockId b = 0; b < 4; ++b) EXPECT_EQ(a.allocate(), b);
  EXPECT_EQ(a.allocate(), std::nullopt);
  EXPECT_EQ(a.num_held(), 4);
  a.release(1);
  a.release(3);
  a.release(0);
  EXPECT_EQ(a.num_free(), 3);
  EXPECT_EQ(a.allocate(), 0);
  EXPECT_EQ(a.allocate(), 3);
  EXPECT_EQ(a.allocate(), 1);
  EXPECT_EQ(a.allocate(), std::nullopt);
}

TEST(BlockAllocator, ReferenceCounts) {
  BlockAllocator a(2);
  const BlockId b = a.allocate().value();
  EXPECT_EQ(a.reference_count(b), 1);
  EXPECT_FALSE(a.is_immutable(b));
  a.retain(b);
  a.retain(b);
  EXPECT_EQ(a.reference_count(b), 3);
  EXPECT_TRUE(a.is_immutable(b)) << "shared";
  a.release(b);
  a.release(b);
  EXPECT_FALSE(a.is_immutable(b));
  EXPECT_EQ(a.num_free(), 1);
  a.release(b);
  EXPECT_EQ(a.num_free(), 2);
  EXPECT_EQ(a.reference_count(b), 0);
}

TEST(BlockAllocator, PublishedBlocksStayUntilNeededOldestFirst) {
  BlockAllocator a(3);
  for (int i = 0; i < 3; ++i) a.publish(a.allocate().value());
  EXPECT_TRUE(a.is_immutable(0)) << "published";
  a.release(1);
  a.release(0);
  a.release(2);
  EXPECT_EQ(a.num_free(), 0);
  EXPECT_EQ(a.num_evictable(), 3);
  EXPECT_EQ(a.num_available(), 3);
  EXPECT_EQ(a.num_held(), 0);
  EXPECT_EQ(a.allocate(), 1) << "released first";
  EXPECT_FALSE(a.is_published(1)) << "its content is gone";
  EXPECT_FALSE(a.is_immutable(1));
  a.retain(0);
  EXPECT_EQ(a.reference_count(0), 1) << "revived";
  EXPECT_TRUE(a.is_published(0));
  EXPECT_EQ(a.allocate(), 2);
  EXPECT_EQ(a.allocate(), std::nullopt);
  a.release(0);
  EXPECT_EQ(a.num_evictable(), 1) << "evictable again";
}

TEST(BlockAllocator, FreeBlocksGoBeforeEvictable) {
  BlockAllocator a(3);
  a.publish(a.allocate().value());
  a.allocate();
  a.release(0);
  a.release(1);
  EXPECT_EQ(a.num_free(), 2);
  EXPECT_EQ(a.allocate(), 1);
  EXPECT_EQ(a.allocate(), 2);
  EXPECT_EQ(a.allocate(), 0);
}

TEST(BlockAllocator, Unpublish) {
  BlockAllocator a(3);
  for (int i = 0; i < 3; ++i) a.publish(a.allocate().value());
  a.unpublish(0);
  EXPECT_FALSE(a.is_published(0));
  EXPECT_EQ(a.reference_count(0), 1);
  a.unpublish(0);
  a.release(0);
  EXPECT_EQ(a.num_free(), 1);
  a.release(1);
  a.release(2);
  a.unpublish(2);
  EXPECT_EQ(a.num_evictable(), 1);
  EXPECT_EQ(a.num_free(), 2);
  EXPECT_EQ(a.allocate(), 2);
  EXPECT_EQ(a.allocate(), 0);
  EXPECT_EQ(a.allocate(), 1);
}

TEST(BlockAllocator, RefusesAndStaysAsItWas) {
  BlockAllocator a(3);
  a.allocate();
  a.publish(a.allocate().value());
  a.release(1);
  const auto unchanged = [&] {
    EXPECT_EQ(a.num_free(), 1);
    EXPECT_EQ(a.num_evictable(), 1);
    EXPECT_EQ(a.reference_count(0), 1);
    EXPECT_EQ(a.reference_count(1), 0);
    EXPECT_TRUE(a.is_published(1));
  };
  for (BlockId bad : {-1, 3, std::numeric_limits<BlockId>::min(), std::numeric_limits<BlockId>::max()}) {
    const std::string id = std::to_string(bad);
    EXPECT_NE(refusal([&] { a.retain(bad); }).find(id), std::string::npos);
    EXPECT_NE(refusal([&] { a.release(bad); }).find(id), std::string::npos);
    EXPECT_NE(refusal([&] { a.publish(bad); }).find(id), std::string::npos);
    EXPECT_NE(refusal([&] { a.unpublish(bad); }).find(id), std::string::npos);
    EXPECT_NE(refusal([&] { a.reference_count(bad); }).find(id), std::string::npos);
    EXPECT_NE(refusal([&] { a.is_published(bad); }).find(id), std::string::npos);
    unchanged();
  }
  refusal([&] { a.release(2); });  // never taken
  refusal([&] { a.retain(2); });
  refusal([&] { a.publish(2); });
  refusal([&] { a.release(1); });  // evictable: released already
  refusal([&] { a.publish(1); });
  unchanged();
  a.release(0);
  refusal([&] { a.release(0); });  // twice
  EXPECT_EQ(a.num_free(), 2);
}

TEST(BlockAllocator, SizesOfNothing) {
  for (std::int32_t bad : {0, -1, std::numeric_limits<std::int32_t>::min()})
    EXPECT_THROW(BlockAllocator a(bad), kv4::Error) << bad;
  EXPECT_EQ(BlockAllocator(1).num_blocks(), 1);
  EXPECT_EQ(BlockAllocator(1000).memory_bytes(), BlockAllocator::memory_bytes(1000));
  EXPECT_EQ(BlockAllocator::memory_bytes(1000), 1000 * BlockAllocator::memory_bytes(1));
}

// --- against a model

// The same contract with linear searches.
struct SlowAllocator {
  std::vector<int> count;
  std::vector<bool> published;
  std::vector<BlockId> free;      // last freed at the back
  std::deque<BlockId> evictable;  // oldest at the front

  explicit SlowAllocator(int n) : count(static_cast<std::size_t>(n)), published(static_cast<std::size_t>(n)) {
    for (BlockId b = n - 1; b >= 0; --b) free.push_back(b);
  }
  std::optional<BlockId> allocate() {
    BlockId b;
    if (!free.empty()) {
      b = free.back();
      free.pop_back();
    } else if (!evictable.empty()) {
      b = evictable.front();
      evictable.pop_front();
    } else {
      return std::nullopt;
    }
    count[static_cast<std::size_t>(b)] = 1;
    published[static_cast<std::size_t>(b)] = false;
    return b;
  }
  bool retain(BlockId b) {
    const std::size_t i = static_cast<std::size_t>(b);
    if (count[i] == 0 && !published[i]) return false;
    if (count[i]++ == 0) evictable.erase(std::find(evictable.begin(), evictable.end(), b));
    return true;
  }
  bool release(BlockId b) {
    const std::size_t i = static_cast<std::size_t>(b);
    if (count[i] == 0) return false;
    if (--count[i] > 0) return true;
    if (published[i]) {
      evictable.push_back(b);
    } else {
      free.push_back(b);
    }
    return true;
  }
  bool publish(BlockId b) {
    if (count[static_cast<std::size_t>(b)] == 0) return false;
    published[static_cast<std::size_t>(b)] = true;
    return true;
  }
  bool unpublish(BlockId b) {
    const std::size_t i = static_cast<std::size_t>(b);
    if (!published[i]) return true;
    published[i] = false;
    if (count[i] > 0) return true;
    evictable.erase(std::find(evictable.begin(), evictable.end(), b));
    free.push_back(b);
    return true;
  }
};

template <class F>
bool accepted(F&& call) {
  try {
    call();
    return true;
  } catch (const kv4::Error&) {
    return false;
  }
}

TEST(BlockAllocator, RandomRunsMatchTheSlowModel) {
  constexpr std::uint32_t kSeed = 99;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  for (int n : {1, 2, 7, 64}) {
    BlockAllocator a(n);
    SlowAllocator slow(n);
    for (int step = 0; step < 30'000; ++step) {
      const BlockId b = static_cast<BlockId>(random() % static_cast<std::uint32_t>(n));
      const std::uint32_t phase = (random() + (step / 500) % 2 * 2) % 8;  // some stretches fill up, some drain
      SCOPED_TRACE(testing::Message() << n << " blocks, step " << step);
      if (phase <= 2) {
        ASSERT_EQ(a.allocate(), slow.allocate());
      } else if (phase == 3) {
        ASSERT_EQ(accepted([&] { a.retain(b); }), slow.retain(b));
      } else if (phase <= 5) {
        ASSERT_EQ(accepted([&] { a.release(b); }), slow.release(b));
      } else if (phase == 6) {
        ASSERT_EQ(accepted([&] { a.publish(b); }), slow.publish(b));
      } else {
        ASSERT_EQ(accepted([&] { a.unpublish(b); }), slow.unpublish(b));
      }
      ASSERT_EQ(a.num_free(), static_cast<int>(slow.free.size()));
      ASSERT_EQ(a.num_evictable(), static_cast<int>(slow.evictable.size()));
      for (BlockId i = 0; i < n; ++i) {
        ASSERT_EQ(a.reference_count(i), slow.count[static_cast<std::size_t>(i)]);
        ASSERT_EQ(a.is_published(i), slow.published[static_cast<std::size_t>(i)]);
      }
    }
  }
}

}  // namespace
