// All policies by hand; S3-FIFO also against a slow model of itself.
#include "prefix/eviction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kv4/error.h"

namespace {

using kv4::EvictionKind;
using kv4::EvictionNode;
using kv4::kNoNode;
using kv4::NodeId;

/// A policy over some nodes; the fingerprint of node s is 1000 + s.
struct Policy {
  Policy(EvictionKind kind, std::int64_t capacity, std::size_t slots)
      : nodes(slots), policy(make_eviction(kind, nodes, capacity)) {}
  void insert(NodeId id) { policy->insert(id, print(id)); }
  NodeId evict() {
    const NodeId id = policy->victim();
    if (id != kNoNode) policy->evict(id, print(id));
    return id;
  }
  static std::uint64_t print(NodeId id) { return 1000u + static_cast<std::uint64_t>(id); }

  std::vector<EvictionNode> nodes;
  std::unique_ptr<kv4::EvictionPolicy> policy;
};

TEST(Eviction, Names) {
  EXPECT_EQ(kv4::parse_eviction("lru"), EvictionKind::lru);
  EXPECT_EQ(kv4::parse_eviction("s3fifo"), EvictionKind::s3fifo);
  EXPECT_EQ(kv4::parse_eviction("density"), EvictionKind::density);
  EXPECT_THROW(kv4::parse_eviction("lfu"), kv4::Error);
}

TEST(Eviction, LruTakesTheLeastRecentlyUsed) {
  Policy lru(EvictionKind::lru, 4, 4);
  EXPECT_EQ(lru.evict(), kNoNode);
  for (const NodeId id : {0, 1, 2, 3}) lru.insert(id);
  lru.policy->touch(0);
  lru.policy->hold(2);
  EXPECT_EQ(lru.policy->victim(), 1);
  EXPECT_EQ(lru.policy->victim(), 1) << "asking changes nothing";
  EXPECT_EQ(lru.evict(), 1);
  lru.policy->release(2);
  EXPECT_EQ(lru.evict(), 3);
  EXPECT_EQ(lru.evict(), 0);
  EXPECT_EQ(lru.evict(), 2);
  EXPECT_EQ(lru.evict(), kNoNode);
}

TEST(Eviction, S3FifoKeepsWhatWasHitAndRemembersWhatWent) {
  Policy s3(EvictionKind::s3fifo, 10, 12);  // a small queue of 1
  for (NodeId id = 0; id < 10; ++id) s3.insert(id);
  s3.policy->touch(1);
  EXPECT_EQ(s3.evict(), 0);
  EXPECT_EQ(s3.evict(), 2) << "1 was hit and moved to the main queue";
  s3.insert(0);  // a ghost: straight to the main queue
  s3.insert(10);
  for (const NodeId expected : {3, 4, 5, 6, 7, 8, 9}) EXPECT_EQ(s3.evict(), expected);
  EXPECT_EQ(s3.evict(), 1) << "the small queue is down to its share; the main one gives its oldest";
  s3.policy->touch(0);
  s3.insert(11);
  EXPECT_EQ(s3.evict(), 10);
  EXPECT_EQ(s3.evict(), 0) << "its hit is used up by one more round";
  EXPECT_EQ(s3.evict(), 11);
  EXPECT_EQ(s3.evict(), kNoNode);
}

TEST(Eviction, S3FifoPassesOverWhatIsHeld) {
  Policy s3(EvictionKind::s3fifo, 4, 4);
  for (const NodeId id : {0, 1, 2, 3}) s3.insert(id);
  s3.policy->hold(0);
  s3.policy->hold(2);
  EXPECT_EQ(s3.evict(), 1);
  EXPECT_EQ(s3.evict(), 3);
  EXPECT_EQ(s3.evict(), kNoNode) << "all that is left is held";
  s3.policy->release(2);
  s3.policy->release(0);
  EXPECT_EQ(s3.evict(), 2);
  EXPECT_EQ(s3.evict(), 0);
  EXPECT_EQ(s3.evict(), kNoNode);
}

/// S3-FIFO as in the paper, with deques and linear searches.
struct SlowS3 {
  std::size_t capacity;
  std::deque<NodeId> small, main, ghosts;
  std::map<NodeId, int> frequency;  // of those in the cache

  void insert(NodeId key) {
    const auto ghost = std::find(ghosts.begin(), ghosts.end(), key);
    (ghost == ghosts.end() ? small : main).push_back(key);
    if (ghost != ghosts.end()) *ghost = kNoNode;  // keeps its place
    frequency[key] = 0;
  }
  NodeId evict() {
    for (;;) {
      const bool from_small = small.size() > capacity / 10 || main.empty();
      std::deque<NodeId>& queue = from_small ? small : main;
      const NodeId key = queue.front();
      queue.pop_front();
      int& hits = frequency[key];
      if (hits > 0) {
        hits = from_small ? 0 : hits - 1;
        main.push_back(key);
        continue;
      }
      frequency.erase(key);
      if (from_small) ghosts.push_back(key);
      if (ghosts.size() > capacity) ghosts.pop_front();
      return key;
    }
  }
};

TEST(Eviction, S3FifoEqualsASlowOne) {
  for (const std::uint32_t seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(seed);
    constexpr NodeId kKeys = 200;
    const std::size_t capacity = 5 + seed * 12;
    Policy fast(EvictionKind::s3fifo, static_cast<std::int64_t>(capacity), kKeys);  // a node per key
    SlowS3 slow{.capacity = capacity, .small = {}, .main = {}, .ghosts = {}, .frequency = {}};
    std::mt19937 random(seed);
    for (int step = 0; step < 20000; ++step) {
      const auto key = static_cast<NodeId>(std::min(random() % kKeys, random() % kKeys));
      if (const auto found = slow.frequency.find(key); found != slow.frequency.end()) {
        found->second = std::min(found->second + 1, 3);
        fast.policy->touch(key);
        continue;
      }
      if (slow.frequency.size() == capacity) {
        ASSERT_EQ(fast.evict(), slow.evict()) << "step " << step;
      }
      slow.insert(key);
      fast.insert(key);
    }
  }
}

TEST(Eviction, DensityBeginsAsLru) {
  Policy density(EvictionKind::density, 4, 4);
  EXPECT_EQ(density.evict(), kNoNode);
  for (const NodeId id : {0, 1, 2, 3}) density.insert(id);
  density.policy->touch(0);
  density.policy->hold(1);
  density.policy->hold(1);
  EXPECT_EQ(density.evict(), 2);
  density.policy->expose(1);  // no touch
  EXPECT_EQ(density.evict(), 1);
  density.policy->hold(3);
  density.policy->release(3);
  EXPECT_EQ(density.evict(), 0);
  EXPECT_EQ(density.evict(), 3);
  EXPECT_EQ(density.evict(), kNoNode);
}

// Nine of ten blocks are used once; every tenth returns after more new blocks than the cache holds.
TEST(Eviction, DensityLearnsWhatComesBack) {
  constexpr std::int64_t kCapacity = 64, kReturning = 20;
  const auto hits_of = [](EvictionKind kind) {
    std::vector<EvictionNode> nodes(kCapacity);
    const auto policy = make_eviction(kind, nodes, kCapacity);
    std::map<std::uint64_t, NodeId> there;
    std::vector<std::uint64_t> keys(kCapacity);
    std::uint64_t fresh = 1000;
    int hits = 0;
    for (std::uint64_t i = 0; i < 40000; ++i) {
      const std::uint64_t key = i % 10 == 0 ? i / 10 % kReturning : fresh++;
      if (const auto found = there.find(key); found != there.end()) {
        hits += i > 20000;
        policy->touch(found->second);
        continue;
      }
      NodeId id = static_cast<NodeId>(there.size());
      if (id == kCapacity) {
        id = policy->victim();
        policy->evict(id, keys[static_cast<std::size_t>(id)]);
        there.erase(keys[static_cast<std::size_t>(id)]);
      }
      keys[static_cast<std::size_t>(id)] = key;
      there[key] = id;
      policy->insert(id, key);
    }
    return hits;
  };
  EXPECT_EQ(hits_of(EvictionKind::lru), 0);
  EXPECT_GT(hits_of(EvictionKind::density), 1800) << "of 2000";
}

}  // namespace
