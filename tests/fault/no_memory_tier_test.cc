// Tiers with refused memory in any thread: fewer hits and failed puts, never wrong bytes, and everything works again
// afterwards.
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "cache/small_cache.h"
#include "kv4/tiered_prefix.h"
#include "support/refused_memory.h"
#include "tier/index_checkpoint.h"
#include "tier/open_tier.h"
#include "tier/store_records.h"
#if KV4_TEST_REMOTE
#include "support/redis_servers.h"
#endif

namespace kv4::test {
namespace {

using namespace std::chrono_literals;

tier::Deadline in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

CacheOptions cache_options() {
  CacheOptions o = small::options();
  o.prefix.enabled = true;
  o.prefix.weights_id = "weights";
  o.prefix.num_snapshots = 4;
  return o;
}

struct Folder {
  std::string path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kv4_no_memory_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

constexpr std::int32_t kTokens = 70, kBlocks = 4;

/// A cache over tiers, and one prompt.
struct Stack {
  small::SmallCache small{cache_options(), small::config(), true, make_cpu_backend()};
  Tiers& tiers;
  TieredPrefix tiered;
  std::vector<std::int32_t> ids = small::token_ids(1, 0, kTokens);

  explicit Stack(Tiers& tiers_in)
      : tiers(tiers_in), tiered(small.cache, tiers, {.load_bytes = 1 << 20, .save_bytes = 1 << 20}) {}
  Prompt prompt() const { return {ids, 0, {}, {}}; }

  /// Computes the missing part of the prompt; returns its request.
  RequestId compute() {
    const Admission admitted = small.cache.admit(prompt()).value();
    while (const auto left = static_cast<std::int32_t>(kTokens - small.cache.length(admitted.request)))
      small.run({{admitted.request, 1, std::min(48, left)}});
    return admitted.request;
  }
};

bool all_kept(const std::vector<tier::FlushStatus>& statuses) {
  return std::none_of(statuses.begin(), statuses.end(),
                      [](tier::FlushStatus status) { return status == tier::FlushStatus::failed; });
}

/// The reference, which no tier has touched.
small::SmallCache& alone() {
  static small::SmallCache cache{cache_options(), small::config(), true, make_cpu_backend()};
  return cache;
}
RequestId request_alone() {
  static const RequestId request = alone().request(1, kTokens);
  return request;
}

/// Fewer steps than next_allocation(), because each try builds a stack of its own.
std::int64_t next_try(std::int64_t n) {
  static const bool all = std::getenv("KV4_TEST_LONG") != nullptr;
  return all || n < 24 ? n + 1 : n + 1 + n / 4;
}

constexpr std::int64_t kMostTries = 4000;

class NoMemoryTiers : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
#if KV4_TEST_REMOTE
    if (is("remote") && !why_no_redis().empty()) GTEST_SKIP() << why_no_redis();
#else
    if (is("remote")) GTEST_SKIP() << "built without hiredis";
#endif
  }
  static bool is(const char* kind) { return std::string(GetParam()).find(kind) != std::string::npos; }
  TiersOptions options(const std::string& directory) const {
    TiersOptions o{.close_limit = 5s};
    if (is("keys")) o.keys = {CacheKey{}};
    if (is("own")) o.more = {std::make_shared<OpenTier>()};
    if (is("host")) o.host_bytes = 4 << 20;
    if (is("disk")) {
      o.directory = directory;
      o.segment_bytes = 1 << 20;
      o.disk_bytes = 8 << 20;
    }
#if KV4_TEST_REMOTE
    if (is("remote")) {
      shared_redis();  // empty again
      for (const tier::RedisAddress& server : shared_redis().options().servers)
        o.servers.push_back(server.host + ":" + std::to_string(server.port));
    }
#endif
    return o;
  }
  static CacheSchema schema() { return build_schema(small::config(), cache_options()); }
};

TEST_P(NoMemoryTiers, Construction) {
  const CacheSchema made_for = schema();
  const Folder folder;
  const TiersOptions o = options(folder.path);
  refuse_each(
      GetParam(), [&] { Tiers(made_for, o); }, [] {}, Threads::own);
}

TEST_P(NoMemoryTiers, Saves) {
  for (const Refused refused : {Refused::one, Refused::all_later})
    for (std::int64_t n = 1; n < kMostTries; n = next_try(n)) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (refused == Refused::one ? "" : " and all later ones"));
      const Folder folder;
      std::optional<Tiers> tiers(std::in_place, schema(), options(folder.path));
      bool happened = false;
      {
        Stack first(*tiers);
        first.compute();
        happened = call_without(n, refused, Threads::all, [&] {
                     (void)first.tiered.save(64);
                     (void)first.tiers.flush(in(200ms));
                   }).happened;
        // A flush reports puts that failed before it; save_all() offers them again.
        const tier::Deadline end = in(20s);
        do ASSERT_TRUE(first.tiered.save_all(end));
        while (!all_kept(first.tiers.flush(end)));
        const TieredStatistics& told = first.tiered.statistics();
        EXPECT_EQ(told.offered_blocks, kBlocks);
        EXPECT_EQ(told.dropped, 0);
      }
      Stack second(*tiers);
      EXPECT_EQ(second.tiered.load(second.prompt(), in(20s)), kBlocks);
      small::expect_same_bytes(second.small.cache, second.compute(), alone().cache, request_alone());
      call_without(1, Refused::all_later, Threads::all, [&] { tiers.reset(); });
      if (HasFailure() || !happened) break;
    }
}

TEST_P(NoMemoryTiers, Loads) {
  const Folder folder;
  Tiers tiers(schema(), options(folder.path));
  {
    Stack first(tiers);
    first.compute();
    ASSERT_TRUE(first.tiered.save_all(in(20s)));
    ASSERT_TRUE(all_kept(tiers.flush(in(20s))));
  }
  for (const Refused refused : {Refused::one, Refused::all_later})
    for (std::int64_t n = 1; n < kMostTries; n = next_try(n)) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (refused == Refused::one ? "" : " and all later ones"));
      Stack stack(tiers);
      const Refusal refusal = call_without(n, refused, Threads::all, [&] {
        (void)stack.tiered.load(stack.prompt(), in(2s));
        (void)tiers.report();
      });
      // A tier that failed for memory is skipped for a while, then asked again.
      std::int64_t kept = 0;
      for (const tier::Deadline end = in(20s); kept < kBlocks && std::chrono::steady_clock::now() < end;) {
        (void)stack.tiered.load(stack.prompt(), in(20s));
        kept = 0;
        for (const BlockKey& key : stack.small.cache.block_keys(stack.prompt()))
          kept += stack.small.cache.find_block(key).has_value();
      }
      EXPECT_EQ(kept, kBlocks);
      small::expect_same_bytes(stack.small.cache, stack.compute(), alone().cache, request_alone());
      if (HasFailure() || !refusal.happened) break;
    }
}

// Either the request is admitted as without refusals, or it is not and the call can be repeated.
TEST_P(NoMemoryTiers, Admits) {
  const Folder folder;
  Tiers tiers(schema(), options(folder.path));
  {
    Stack first(tiers);
    first.compute();
    ASSERT_TRUE(first.tiered.save_all(in(20s)));
    ASSERT_TRUE(all_kept(tiers.flush(in(20s))));
  }
  for (std::int64_t n = 1; n < kMostTries; n = next_try(n)) {
    SCOPED_TRACE(testing::Message() << "allocation " << n);
    Stack stack(tiers);
    std::optional<Admission> admitted;
    const Refusal refusal = call_without(n, Refused::one, Threads::own,
                                         [&] { admitted = stack.tiered.admit(stack.prompt(), in(20s)).value(); });
    EXPECT_EQ(stack.small.cache.num_requests(), admitted ? 1 : 0);
    if (admitted) stack.small.cache.release(admitted->request);
    const Admission again = stack.tiered.admit(stack.prompt(), in(20s)).value();
    stack.small.cache.release(again.request);
    small::expect_same_bytes(stack.small.cache, stack.compute(), alone().cache, request_alone());
    if (HasFailure() || !refusal.happened) break;
  }
}

/// Repeats the call, refusing its n-th allocation, until no allocation is refused; the call may succeed with a refusal.
void refuse_in_turn(const char* name, const std::function<void()>& call) {
  SCOPED_TRACE(name);
  for (const Refused refused : {Refused::all_later, Refused::one})
    for (std::int64_t n = 1; n < kMostTries; n = next_try(n))
      if (!call_without(n, refused, Threads::own, call).happened) break;
}

// Each call alone, in the thread that drives the cache.
TEST_P(NoMemoryTiers, EveryCall) {
  const Folder folder;
  Tiers tiers(schema(), options(folder.path));
  small::SmallCache small{cache_options(), small::config(), true, make_cpu_backend()};
  refuse_in_turn("TieredPrefix", [&] { TieredPrefix(small.cache, tiers); });
  {
    Stack first(tiers);
    first.compute();
    refuse_in_turn("save", [&] { (void)first.tiered.save(1); });
    refuse_in_turn("save_all", [&] { (void)first.tiered.save_all(in(200ms)); });
    refuse_in_turn("statistics", [&] { EXPECT_EQ(first.tiered.statistics().dropped, 0); });
    ASSERT_TRUE(first.tiered.save_all(in(20s)));
  }
  refuse_in_turn("flush", [&] { (void)tiers.flush(in(20s)); });
  ASSERT_TRUE(all_kept(tiers.flush(in(20s))));
  refuse_in_turn("report", [&] { EXPECT_FALSE(tiers.report().empty()); });

  Stack second(tiers);
  std::optional<PrefixLoad> load;
  refuse_in_turn("start_load", [&] { load.emplace(second.tiered.start_load(second.prompt(), in(20s))); });
  load.reset();  // the refused load has given up some of its records
  load.emplace(second.tiered.start_load(second.prompt(), in(20s)));
  for (bool done = false; !done;) refuse_in_turn("advance", [&] { done = done || load->advance(); });
  refuse_in_turn("of a load", [&] { EXPECT_LE(load->brought_blocks(), load->wanted_blocks()); });
  std::optional<Admission> admitted;
  refuse_in_turn("admit", [&] {
    if (!admitted) admitted = load->admit().value();
  });
  load.reset();
  EXPECT_EQ(second.small.cache.num_requests(), 1);
  second.small.cache.release(admitted.value().request);
  refuse_in_turn("load", [&] { (void)second.tiered.load(second.prompt(), in(20s)); });
  small::expect_same_bytes(second.small.cache, second.compute(), alone().cache, request_alone());
  refuse_in_turn("close", [&] { (void)tiers.close(in(20s)); });
}

tier::StoreOptions store_options(const std::string& directory) {
  tier::StoreOptions o;
  o.directory = directory;
  o.layout_id = 1;
  o.segment_bytes = 8 << 20;
  o.capacity_bytes = 64 << 20;
  return o;
}

// A put that fails for want of memory may have written all the same: a later remove covers that record, too.
TEST(NoMemoryStore, WhatAPutLeftBehindIsRemovedWithItsKey) {
  const std::unique_ptr<tier::FileSystem> files = tier::make_posix_file_system();
  const tier::RecordId id = record_id(1);
  const std::vector<std::byte> before = random_bytes(1, 1000), after = random_bytes(2, 1000),
                               large = random_bytes(3, 600'000);
  for (const Refused refused : {Refused::one, Refused::all_later})
    for (std::int64_t n = 1; n < kMostTries; n = next_try(n)) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (refused == Refused::one ? "" : " and all later ones"));
      const Folder folder;
      const tier::StoreOptions options = store_options(folder.path);
      auto store = tier::DiskStore::open(*files, options);
      ASSERT_EQ(put(*store, id, before), tier::PutStatus::stored);
      ASSERT_TRUE(store->flush());
      std::vector<tier::PutRequest> batch{{id, after}};
      for (std::uint64_t other = 2; other < 8; ++other) batch.push_back({record_id(other), large});
      bool happened = false, threw = false;
      {
        const RefusedMemory memory(n, refused, Threads::own);
        try {
          store->put(batch);
        } catch (const std::bad_alloc&) {
          threw = true;
        }
        happened = memory.happened();
      }
      EXPECT_EQ(get(*store, id).payload, batch[0].status == tier::PutStatus::stored ? after : before);
      EXPECT_TRUE(remove(*store, id));
      ASSERT_TRUE(store->flush());
      EXPECT_TRUE(store->close());
      store.reset();
      std::filesystem::remove(folder.path + "/" + std::string(tier::kCheckpointName));  // forces a full read
      store = tier::DiskStore::open(*files, options);
      EXPECT_EQ(get(*store, id).status, tier::GetStatus::missing);
      for (std::size_t i = 1; i < batch.size(); ++i) {
        const bool stored = batch[i].status == tier::PutStatus::stored;
        EXPECT_TRUE(stored || threw);
        EXPECT_EQ(get(*store, batch[i].id).payload, stored ? large : std::vector<std::byte>());
      }
      if (HasFailure() || !happened) break;
    }
}

TEST(NoMemoryStore, ARemoveIsWholeOrNotMade) {
  const std::unique_ptr<tier::FileSystem> files = tier::make_posix_file_system();
  const std::vector<std::byte> bytes = random_bytes(1, 1000);
  for (std::int64_t n = 1; n < kMostTries; n = next_try(n)) {
    SCOPED_TRACE(testing::Message() << "allocation " << n);
    const Folder folder;
    const tier::StoreOptions options = store_options(folder.path);
    auto store = tier::DiskStore::open(*files, options);
    std::vector<tier::RemoveRequest> requests;
    for (std::uint64_t i = 0; i < 40; ++i) {
      ASSERT_EQ(put(*store, record_id(i), bytes), tier::PutStatus::stored);
      if (i < 20) requests.push_back({record_id(i)});
    }
    bool happened = false, threw = false;
    {
      const RefusedMemory memory(n, Refused::one, Threads::own);
      try {
        store->remove(requests);
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      happened = memory.happened();
    }
    EXPECT_EQ(threw, happened);
    EXPECT_EQ(store->stats().records, threw ? 40 : 20);
    for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(remove(*store, record_id(i)), threw);
    EXPECT_TRUE(store->close());
    store.reset();
    std::filesystem::remove(folder.path + "/" + std::string(tier::kCheckpointName));
    store = tier::DiskStore::open(*files, options);
    EXPECT_EQ(store->stats().records, 20);
    if (HasFailure() || !happened) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, NoMemoryTiers,
                         testing::Values("host", "disk", "host+disk", "remote", "disk+keys", "own+keys"),
                         [](const auto& kind) {
                           std::string name = kind.param;
                           std::erase(name, '+');
                           return name;
                         });

}  // namespace
}  // namespace kv4::test
