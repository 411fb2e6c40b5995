// Long random runs against a slow model: present, evictable and lost blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kv4/names.h"
#include "prefix/chains.h"
#include "prefix/prefix_index.h"

namespace {

using namespace kv4;

/// A chain is a string; each of its prefixes is a block.
std::string random_text(std::mt19937& random, std::size_t longest) {
  std::string text;
  for (std::size_t length = 1 + random() % longest; text.size() < length;)
    text += static_cast<char>('a' + std::min({random() % 6, random() % 6, random() % 6}));
  return text;
}

/// LRU over prefixes, by linear search.
struct SlowLru {
  std::size_t capacity;
  std::map<std::string, int> used;  // prefix -> time
  int now = 0;

  std::int64_t matched(const std::string& text) const {
    std::size_t n = 0;
    while (n < text.size() && used.contains(text.substr(0, n + 1))) ++n;
    return static_cast<std::int64_t>(n);
  }
  void insert(const std::string& text) {  // tail to head, one evicted at a time
    for (std::size_t n = text.size(); n > 0; --n) {
      const std::string prefix = text.substr(0, n);
      if (!used.contains(prefix) && used.size() == capacity)
        used.erase(std::min_element(used.begin(), used.end(),
                                    [](const auto& a, const auto& b) { return a.second < b.second; }));
      used[prefix] = ++now;
    }
  }
};

TEST(RandomChains, LruEqualsASlowOne) {
  for (const std::uint32_t seed : {11u, 12u, 13u}) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    PrefixIndexOptions options;
    options.capacity_blocks = 8 + 30 * (seed % 3);
    PrefixIndex index(options);
    SlowLru slow{.capacity = static_cast<std::size_t>(options.capacity_blocks), .used = {}};
    for (int step = 0; step < 2000; ++step) {
      const std::string text = random_text(random, 12);
      const std::vector<BlockKey> keys = test::chain(text);
      ASSERT_EQ(index.match(keys, static_cast<std::int64_t>(keys.size()) * 128).matched_blocks, slow.matched(text))
          << "step " << step << ", " << text;
      index.insert(0, keys);
      slow.insert(text);
      ASSERT_EQ(index.size(), static_cast<std::int64_t>(slow.used.size()));
    }
  }
}

TEST(RandomChains, InvariantsHoldWithPinsAndTenants) {
  for (const auto& [kind, name] : names_of<EvictionKind>())
    for (const std::uint32_t seed : {21u, 22u, 23u}) {
      SCOPED_TRACE(testing::Message() << name << ", seed " << seed);
      std::mt19937 random(seed);
      PrefixIndexOptions options;
      options.capacity_blocks = 60;
      options.eviction = kind;
      options.tenant_shares = {20, 0, 10};
      PrefixIndex index(options);
      struct Pinned {
        std::string text;
        NodeId id;
      };
      std::vector<Pinned> pins;
      for (int step = 0; step < 3000; ++step) {
        const auto tenant = static_cast<TenantId>(random() % 3);
        const std::string text = static_cast<char>('0' + tenant) + random_text(random, 10);  // its salt
        const std::vector<BlockKey> keys = test::chain(text);
        std::vector<std::int64_t> before;
        for (TenantId t = 0; t < 3; ++t) before.push_back(index.tenant_size(t));
        index.insert(tenant, keys);
        for (TenantId t = 0; t < 3; ++t)
          if (t != tenant) {
            const auto i = static_cast<std::size_t>(t);
            ASSERT_GE(index.tenant_size(t), std::min(before[i], options.tenant_shares[i]));
          }
        const PrefixMatch match = index.match(keys, static_cast<std::int64_t>(keys.size()) * 128 + 1);
        if (match.id != kNoNode && pins.size() < 5 && random() % 4 == 0) {
          index.pin(match.id);
          pins.push_back({text.substr(0, static_cast<std::size_t>(match.matched_blocks)), match.id});
        } else if (!pins.empty() && random() % 4 == 0) {
          std::swap(pins.back(), pins[random() % pins.size()]);
          index.unpin(pins.back().id);
          pins.pop_back();
        }
        for (const Pinned& pin : pins) {
          const std::vector<BlockKey> kept = test::chain(pin.text);
          for (const BlockKey& key : kept) ASSERT_NE(index.find(key), kNoNode) << "a pinned block is gone";
          ASSERT_EQ(index.find(kept.back()), pin.id);
        }
      }
      // The number of evictable blocks is known before; evicting a tenant's block costs another tenant at most one.
      std::int64_t mine = index.num_evictable(1), others = index.num_evictable(0);
      while (index.evict(static_cast<TenantId>(1))) {
        ASSERT_EQ(index.num_evictable(1), --mine);
        ASSERT_GE(index.num_evictable(0), --others);
        others = index.num_evictable(0);
      }
      EXPECT_EQ(mine, 0);
      for (const Pinned& pin : pins) {
        EXPECT_EQ(index.unpin_last(pin.id), index.parent(pin.id));
        if (index.parent(pin.id) != kNoNode) index.unpin(index.parent(pin.id));
      }
      // Every block is evicted in the end, and none before its descendants.
      while (const auto gone = index.evict(static_cast<TenantId>(1))) ASSERT_EQ(index.find(gone->key), kNoNode);
      EXPECT_EQ(index.tenant_size(0), 20);
      EXPECT_EQ(index.tenant_size(1), 0);
      EXPECT_EQ(index.tenant_size(2), 10);
    }
}

TEST(RandomChains, AMillionBlocks) {
  constexpr std::int64_t kBlocks = 1'000'000, kChain = 1000;
  PrefixIndexOptions options;
  options.capacity_blocks = kBlocks;
  PrefixIndex index(options);
  std::mt19937_64 random(5);
  std::vector<BlockKey> keys(kBlocks);
  for (BlockKey& key : keys)
    for (std::size_t i = 0; i < 32; i += 8) {
      const std::uint64_t bits = random();
      std::memcpy(key.data() + i, &bits, 8);
    }
  for (std::int64_t i = 0; i < kBlocks; i += kChain) index.insert(0, std::span(keys).subspan(i, kChain));
  EXPECT_EQ(index.size(), kBlocks);
  for (std::int64_t i = 0; i < kBlocks; i += kChain)
    ASSERT_EQ(index.match(std::span(keys).subspan(i, kChain), kChain * 128).matched_blocks, kChain);
  for (std::int64_t i = 0; i < kBlocks; ++i)  // the oldest chain first, from its tail on
    ASSERT_EQ(index.evict(0)->key, keys[static_cast<std::size_t>(i / kChain * kChain + kChain - 1 - i % kChain)]);
  EXPECT_EQ(index.size(), 0);
}

}  // namespace
