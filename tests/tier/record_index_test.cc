// The index against a map.
#include "tier/record_index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::RecordEntry;
using tier::RecordIndex;

RecordEntry entry_of(std::int64_t length) { return {{nullptr, 4096, length}, 1, tier::RecordKind::value, false}; }

TEST(TierRecordIndex, IsAMap) {
  Random random(1);
  RecordIndex index;
  std::map<std::uint64_t, RecordEntry> shadow;
  // Ids of one tenant, and ids of another whose keys differ only in their last bytes.
  const auto id_of = [](std::uint64_t number) {
    if (number % 2 == 0) return record_id(number);
    tier::RecordId id{7, {}};
    id.key.back() = static_cast<std::byte>(number & 0xff);
    id.key[30] = static_cast<std::byte>(number >> 8);
    return id;
  };
  for (int step = 0; step < 60000; ++step) {
    const auto number = static_cast<std::uint64_t>(random.below(step < 30000 ? 3000 : 100));
    switch (random.below(8)) {
      case 0:
        index.erase(id_of(number));
        shadow.erase(number);
        break;
      case 1: {
        const auto found = shadow.find(number);
        const bool first = found != shadow.end() && !found->second.set_aside;
        EXPECT_EQ(index.set_aside(id_of(number), first ? found->second.place : tier::RecordPlace{}), first);
        if (first) found->second.set_aside = true;
        break;
      }
      case 2:
      case 3:
      case 4: {
        const RecordEntry entry = entry_of(random.below(1000));
        const std::optional<RecordEntry> before = index.put(id_of(number), entry);
        const auto found = shadow.find(number);
        ASSERT_EQ(before.has_value(), found != shadow.end());
        EXPECT_TRUE(!before || before->place == found->second.place);
        shadow[number] = entry;
        break;
      }
      default: {
        const std::optional<RecordEntry> entry = index.find(id_of(number));
        const auto found = shadow.find(number);
        ASSERT_EQ(entry.has_value(), found != shadow.end());
        ASSERT_TRUE(!entry || entry->place == found->second.place);
      }
    }
    ASSERT_EQ(index.size(), std::ssize(shadow));
  }
  std::vector<tier::ExistsRequest> requests;
  for (std::uint64_t number = 0; number < 3000; ++number) requests.push_back({id_of(number)});
  index.look_up(requests);
  std::int64_t records = 0, bytes = 0, visited = 0;
  for (std::uint64_t number = 0; number < 3000; ++number) {
    const auto found = shadow.find(number);
    const bool sound = found != shadow.end() && !found->second.set_aside;
    ASSERT_EQ(requests[number].bytes, sound ? found->second.place.length : -1) << number;
    records += sound ? 1 : 0;
    bytes += sound ? found->second.place.length : 0;
  }
  EXPECT_EQ(index.sound_records(), records);
  EXPECT_EQ(index.payload_bytes(), bytes);
  index.for_each([&](const tier::RecordId&, const RecordEntry&) { ++visited; });
  EXPECT_EQ(visited, std::ssize(shadow));
  index.clear();
  EXPECT_EQ(index.size(), 0);
  EXPECT_FALSE(index.find(id_of(1)));
}

// A writer of records can choose their keys: 60,000 colliding keys made opening a store take 13 s, and four times as
// many take sixteen times as long.
TEST(TierRecordIndex, KeysThatSomebodyChoseDoNotMeet) {
  constexpr std::uint64_t kIds = 4096;
  for (std::size_t word = 0; word < 4; ++word) {  // the word in which the keys differ
    std::set<std::uint32_t> places, tags, others;
    for (std::uint64_t i = 0; i < kIds; ++i) {
      tier::RecordId id{7, {}};
      tier::store_le(id.key.data() + 8 * word, i);
      const std::uint64_t hash = tier::SeededIdHash{0x0123456789abcdef}(id);
      places.insert(static_cast<std::uint32_t>(hash >> 32) % (4 * kIds));
      tags.insert(static_cast<std::uint32_t>(hash));
      others.insert(static_cast<std::uint32_t>(tier::SeededIdHash{0x0123456789abcdee}(id)));
    }
    EXPECT_GT(places.size(), kIds * 3 / 4) << word;  // by chance: 88 %
    EXPECT_GT(tags.size(), kIds - 10) << word;
    std::set<std::uint32_t> both = tags;
    both.merge(others);
    EXPECT_GT(both.size(), 2 * kIds - 20) << word;  // under another seed all keys hash differently
  }
}

}  // namespace
}  // namespace kv4::test
