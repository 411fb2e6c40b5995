// Blocks from tiers have the same bytes as the computed prompt.
#include <stdlib.h>

#include <filesystem>
#include <optional>
#include <thread>

#include "cache/tiered_driver.h"
#include "kv4/error.h"
#include "support/far_backend.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;

TEST(PrefixInTiers, AnotherCacheGoesOnWhereOneStopped) {
  for (const SnapshotPolicy& policy : kPolicies)
    for (const FormatCase& format : all_format_cases()) {
      if (format.shared && test_backend()->shared_entries() == nullptr) continue;
      const Model model(tiny_config(format));
      const CacheOptions o = prefix_options(policy, format);
      HostAndDisk tiers(layout_of(model, o));
      TieredDriver(model, o, tiers).compute_and_save(7, 100);
      for (const std::int64_t tokens : {15, 16, 17, 33, 96, 97, 110}) {
        SCOPED_TRACE(format.name() + ", policy " + std::to_string(static_cast<int>(policy.kind)) + ", " +
                     std::to_string(tokens) + " tokens");
        TieredDriver d(model, o, tiers);
        const std::int64_t most = std::min<std::int64_t>((tokens - 1) / 16, 6);
        EXPECT_EQ(d.load(7, tokens), most);
        const Admission a = d.begin(7, tokens);
        EXPECT_EQ(a.usable_tokens, most * 16);
        d.fill_up(a.request, 7, tokens + 5);
        expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, 7, tokens + 5), "from the tier");
        if (HasFailure()) return;
      }
      TieredDriver whole(model, o, tiers);
      whole.load(7, 97);
      const std::int64_t reach = std::int64_t{model.config.window} * model.config.num_layers;
      EXPECT_EQ(whole.begin(7, 97).resume_at,
                policy.kind == SnapshotPolicy::Kind::none ? (96 - reach) / 16 * 16 : 96);
    }
}

TEST(PrefixInTiers, ADiskKeepsContextsAcrossRestarts) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  std::string directory = (std::filesystem::temp_directory_path() / "kv4_tiered_XXXXXX").string();
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const std::string store = directory + "/store";
  {
    HostAndDisk tiers(layout_of(model, o), store);
    TieredDriver(model, o, tiers).compute_and_save(3, 120);
    tiers.chain->close(tiers.soon());
  }
  HostAndDisk tiers(layout_of(model, o), store);
  TieredDriver d(model, o, tiers);
  EXPECT_EQ(d.load(3, 120), 7);
  const Admission a = d.begin(3, 120);
  EXPECT_EQ(a.resume_at, 112);
  d.fill_up(a.request, 3, 130);
  expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, 3, 130), "after a restart");
  EXPECT_EQ(d.tiered.statistics().loaded_blocks, 7);
  EXPECT_EQ(d.tiered.statistics().loaded_snapshots, 1);
  EXPECT_EQ(d.tiered.statistics().offered_blocks, 0);
  d.save_all();
  EXPECT_EQ(d.tiered.statistics().offered_blocks, 1) << "what came from the tiers is there already";
  EXPECT_GE(tiers.chain->stats()[0].promoted, 7) << "into host memory";
  std::filesystem::remove_all(directory);
}

TEST(PrefixInTiers, OtherSaltsAndWeightsFindNothing) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver(model, o, tiers).compute_and_save(7, 100, "ours");
  TieredDriver d(model, o, tiers);
  EXPECT_EQ(d.load(7, 100, "theirs"), 0);
  EXPECT_EQ(d.load(7, 100), 0);
  EXPECT_EQ(d.load(8, 100, "ours"), 0);
  EXPECT_EQ(d.load(7, 100, "ours"), 6);
  o.prefix.weights_id = "others";
  EXPECT_EQ(TieredDriver(model, o, tiers).load(7, 100, "ours"), 0);
}

TEST(PrefixInTiers, AMissingBlockEndsWhatIsBrought) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver first(model, o, tiers);
  first.compute_and_save(7, 100);
  const std::vector<std::int32_t> ids = ids_of(7, 100);
  const BlockKey gone = first.cache.block_keys({ids, 0, "", {}})[4];
  tier::RecordId record;
  std::memcpy(record.key.data(), gone.data(), gone.size());
  tiers.chain->remove(record);
  TieredDriver d(model, o, tiers);
  EXPECT_EQ(d.load(7, 100), 4);
  const Admission a = d.begin(7, 100);
  EXPECT_EQ(a.usable_tokens, 64);
  EXPECT_EQ(a.resume_at, 48);  // the last checkpoint before it
  d.fill_up(a.request, 7, 105);
  expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, 7, 105), "with a gap");
}

TEST(PrefixInTiers, LongContextsComeInBatches) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver first(model, o, tiers);
  first.compute_and_save(7, 150);
  const std::vector<std::int32_t> ids = ids_of(7, 150);
  const Prompt prompt{ids, 0, "", {}};
  for (const std::int64_t blocks : {1, 2, 4, 9}) {
    Driver d(model, o);
    TieredPrefix tiered(d.cache, *tiers.tiers, {.load_bytes = 8 * blocks * d.cache.schema().block_image_bytes});
    EXPECT_EQ(tiered.load(prompt, tiers.soon()), 9) << blocks;
    EXPECT_EQ(d.cache.admit(prompt).value().resume_at, 144) << blocks;
  }
  tier::RecordId record;
  std::memcpy(record.key.data(), first.cache.block_keys(prompt)[4].data(), record.key.size());
  tiers.chain->remove(record);
  for (const std::int64_t blocks : {1, 2, 4}) {
    Driver d(model, o);
    TieredPrefix tiered(d.cache, *tiers.tiers, {.load_bytes = 8 * blocks * d.cache.schema().block_image_bytes});
    EXPECT_EQ(tiered.load(prompt, tiers.soon()), 4) << blocks;
  }
}

TEST(PrefixInTiers, ASnapshotFarBeforeTheEndIsFound) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kCheckpoint);
  o.max_context = 90 * 16;
  o.num_blocks = 120;
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver(model, o, tiers).compute_and_save(7, 49);  // with a snapshot behind three blocks
  CacheOptions without = o;
  without.prefix.snapshots = {.kind = SnapshotPolicy::Kind::none};
  TieredDriver(model, without, tiers).compute_and_save(7, 80 * 16 + 1);
  TieredDriver d(model, o, tiers);
  EXPECT_EQ(d.load(7, 80 * 16 + 1), 80);
  EXPECT_EQ(d.tiered.statistics().loaded_snapshots, 1);
  const std::vector<std::int32_t> ids = ids_of(7, 48);
  EXPECT_TRUE(d.cache.find_block(d.cache.block_keys({ids, 0, "", {}})[2])->has_snapshot);
}

TEST(PrefixInTiers, WhatTheDeviceEvictsComesBack) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kCheckpoint);
  o.num_blocks = 10;
  o.prefix.num_snapshots = 2;
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver d(model, o, tiers);
  for (std::uint64_t round = 0; round < 12; ++round) {
    const std::uint64_t stream = round % 4;
    SCOPED_TRACE(round);
    EXPECT_EQ(d.load(stream, 90), round < 4 ? 0 : 5);
    const Admission a = d.begin(stream, 90);
    EXPECT_EQ(a.resume_at, round < 4 ? 0 : 80);
    d.fill_up(a.request, stream, 90);
    expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, stream, 90), "round");
    d.cache.release(a.request);
    d.save_all();
  }
  EXPECT_EQ(d.tiered.statistics().dropped, 4) << "snapshots whose places were needed before they were saved";
  EXPECT_EQ(d.tiered.statistics().offered_blocks, 4 * 5);
}

TEST(PrefixInTiers, WhatAFullQueueHasNoRoomForIsOfferedLater) {
  const Model model(tiny_config());
  FakeBelow below(3);
  Driver d(model, prefix_options({.kind = SnapshotPolicy::Kind::none}));
  TieredPrefix tiered(d.cache, *below.tiers);
  compute(d, 7, 150);  // 9 blocks
  below.fake->hold();
  EXPECT_EQ(tiered.save(100), d.backend->on_host() ? 6 : 9);  // the first three are queued or being written
  while (tiered.save(100) > 6) continue;
  EXPECT_EQ(tiered.save(100), 6);
  EXPECT_EQ(tiered.statistics().offered_blocks, 3);
  below.fake->release();
  EXPECT_TRUE(tiered.save_all(std::chrono::steady_clock::now() + 60s));
  while (below.stored() < 9) std::this_thread::yield();
  EXPECT_EQ(tiered.statistics().offered_blocks, 9);
  EXPECT_EQ(tiered.statistics().dropped, 0);
}

TEST(PrefixInTiers, WhatATierFailsToStoreIsOfferedAgain) {
  const Model model(tiny_config());
  FakeBelow below(100);
  Driver d(model, prefix_options({.kind = SnapshotPolicy::Kind::none}));
  TieredPrefix tiered(d.cache, *below.tiers, {.max_attempts = 1'000'000});
  compute(d, 7, 150);  // 9 blocks
  below.fake->fail(true);
  while (below.chain->stats()[0].queue.failed_puts < 9) (void)tiered.save(100);
  below.fake->fail(false);
  while (below.stored() < 9) (void)tiered.save(100);
  EXPECT_EQ(tiered.save(100), 0);
  EXPECT_GE(tiered.statistics().offered_again, 9);
  EXPECT_EQ(tiered.statistics().dropped, 0);
  EXPECT_EQ(tiered.statistics().offered_blocks, 9);
}

TEST(PrefixInTiers, WhatATierAlwaysFailsToStoreIsGivenUp) {
  const Model model(tiny_config());
  FakeBelow below(100);
  Driver d(model, prefix_options({.kind = SnapshotPolicy::Kind::none}));
  TieredPrefix tiered(d.cache, *below.tiers, {.max_attempts = 3});
  compute(d, 8, 150);
  below.fake->fail(true);
  while (tiered.statistics().dropped < 9) (void)tiered.save(100);
  EXPECT_EQ(tiered.save(100), 0);
  EXPECT_EQ(below.chain->stats()[0].queue.failed_puts, 3 * 9);
  EXPECT_EQ(below.stored(), 0);
}

TEST(PrefixInTiers, LoadsGoOnBetweenSteps) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver(model, o, tiers).compute_and_save(7, 150);
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *tiers.tiers, {.load_bytes = 2 * d.cache.schema().block_image_bytes});
  const std::vector<std::int32_t> ids = ids_of(7, 150);
  const Prompt prompt{ids, 0, "", {}};
  const RequestId running = d.admit();
  std::int64_t length = 0;
  {
    (void)tiered.start_load(prompt, tiers.soon()).advance();  // and cancelled
    PrefixLoad load = tiered.start_load(prompt, tiers.soon());
    EXPECT_LE(load.wanted_blocks(), 9);
    while (!load.advance()) {
      if (length == 150) continue;
      d.run({{running, 3, 1}});
      ++length;
    }
    EXPECT_EQ(load.brought_blocks(), load.wanted_blocks());
  }
  EXPECT_EQ(d.cache.admit(prompt).value().resume_at, 144);
  if (length > 0) expect_same(bytes_of(d.cache, running), cold_bytes(model, o, 3, length), "beside a load");
}

TEST(PrefixInTiers, ALoadWaitsForTheMemoryOfAnother) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  FakeBelow below(100);
  Driver first(model, o);
  TieredPrefix saving(first.cache, *below.tiers);
  compute(first, 7, 150);
  EXPECT_TRUE(saving.save_all(std::chrono::steady_clock::now() + 60s));
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *below.tiers, {.load_bytes = 2 * d.cache.schema().block_image_bytes});
  const std::vector<std::int32_t> ids = ids_of(7, 150);
  const Prompt prompt{ids, 0, "", {}};
  below.fake->hold();
  std::optional<PrefixLoad> one(tiered.start_load(prompt, below.clock->in(60s)));
  EXPECT_FALSE(one->advance());  // it has queued its gets, and holds the memory until it advances or is destroyed
  below.fake->release();
  PrefixLoad other = tiered.start_load(prompt, below.clock->in(60s));
  for (int i = 0; i < 200; ++i) {
    EXPECT_FALSE(other.advance());
    std::this_thread::yield();
  }
  EXPECT_EQ(other.brought_blocks(), 0);
  one.reset();
  while (!other.advance()) std::this_thread::yield();
  EXPECT_EQ(other.brought_blocks(), 9);
}

TEST(PrefixInTiers, ProgressCancels) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  FakeBelow below(100);
  Driver first(model, o);
  TieredPrefix saving(first.cache, *below.tiers, {.save_bytes = first.cache.schema().block_image_bytes});
  compute(first, 7, 150);
  below.fake->hold();
  int calls = 0;
  EXPECT_FALSE(
      saving.save_all(std::chrono::steady_clock::now() + 60s, [&](std::int64_t, std::int64_t) { return ++calls < 3; }));
  EXPECT_EQ(calls, 3);
  below.fake->release();
  EXPECT_TRUE(saving.save_all(std::chrono::steady_clock::now() + 60s));

  Driver d(model, o);
  TieredPrefix tiered(d.cache, *below.tiers, {.load_bytes = 2 * d.cache.schema().block_image_bytes});
  const std::vector<std::int32_t> ids = ids_of(7, 150);
  below.fake->hold();
  EXPECT_EQ(tiered.load({ids, 0, "", {}}, below.clock->in(60s),
                        [](std::int64_t done, std::int64_t total) {
                          EXPECT_EQ(total, 9);
                          return done > 0;
                        }),
            0);
  below.fake->release();
  EXPECT_EQ(tiered.load({ids, 0, "", {}}, below.clock->in(60s)), 9);
}

// By the public headers alone.
TEST(PrefixInTiers, TiersOfAllKinds) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  std::string directory = (std::filesystem::temp_directory_path() / "kv4_tiered_XXXXXX").string();
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  TiersOptions options;
  options.host_bytes = 1 << 20;
  options.directory = directory + "/store";
  options.segment_bytes = 4 << 20;
  options.disk_key.emplace();
  const std::vector<std::int32_t> ids = ids_of(5, 100);
  for (const int round : {0, 1}) {
    Driver d(model, o);
    Tiers below(d.cache.schema(), options);
    TieredPrefix tiered(d.cache, below);
    EXPECT_EQ(tiered.load({ids, 0, "", {}}, std::chrono::steady_clock::now() + 60s), round == 0 ? 0 : 6);
    compute(d, 5, 100);
    EXPECT_TRUE(tiered.save_all(std::chrono::steady_clock::now() + 60s));
    const std::vector<tier::FlushStatus> closed = below.close(std::chrono::steady_clock::now() + 60s);
    EXPECT_EQ(closed, (std::vector<tier::FlushStatus>{tier::FlushStatus::kept, tier::FlushStatus::durable}));
    EXPECT_EQ(below.report()[1].hits, round == 0 ? 0 : 7);
    EXPECT_EQ(below.report()[0].promoted, round == 0 ? 0 : 7);
  }
  std::filesystem::remove_all(directory);
  const CacheSchema schema = build_schema(model.config, o);
  EXPECT_THROW(Tiers(schema, {}), Error);
  TiersOptions bad;
  bad.servers = {"nowhere"};
  EXPECT_THROW(Tiers(schema, bad), Error);
}

// Blocks go from the tier's own memory to a device that cannot read the host's, while other blocks replace them there.
TEST(PrefixInTiers, StraightFromHostMemory) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  const std::shared_ptr<Backend> backends[] = {test_backend(), std::make_shared<FarBackend>(make_cpu_backend())};
  const auto later = [] { return std::chrono::steady_clock::now() + 60s; };
  for (const std::shared_ptr<Backend>& backend : backends)
    for (const bool pinned : {true, false}) {
      TiersOptions options;
      options.host_bytes = 1 << 20;
      options.host_threads = 3;
      if (pinned) options.backend = backend;
      Tiers below(build_schema(model.config, o), options);
      for (const std::uint64_t stream : {5u, 6u}) {
        Driver d(model, o, backend);
        TieredPrefix tiered(d.cache, below);
        compute(d, stream, 100);
        ASSERT_TRUE(tiered.save_all(later()));
      }
      for (const std::uint64_t stream : {5u, 6u}) {
        Driver d(model, o, backend);
        TieredPrefix tiered(d.cache, below);
        const std::vector<std::int32_t> ids = ids_of(stream, 100);
        EXPECT_EQ(tiered.load({ids, 0, "", {}}, later()), 6);
        const Admission a = d.cache.admit(Prompt{ids, 0, "", {}}).value();
        EXPECT_EQ(a.usable_tokens, 96);
        d.run({{a.request, stream, 4}});
        expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, stream, 100), "from host memory");
      }
      EXPECT_EQ(below.report()[0].damaged, 0);
    }
}

TEST(PrefixInTiers, BadInputChangesNothing) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  Driver d(model, o);
  const std::vector<std::int32_t> ids = ids_of(1, 40);
  const Prompt prompt{ids, 0, "", {}};
  const std::vector<std::byte> block(static_cast<std::size_t>(d.cache.schema().block_image_bytes));
  const std::vector<std::span<const std::byte>> three{block, block, block};
  const std::vector<std::span<const std::byte>> shorter{std::span(block).first(5)};
  EXPECT_THROW(d.cache.insert_blocks(prompt, three), Error);  // two full blocks
  EXPECT_THROW(d.cache.insert_blocks(prompt, shorter), Error);
  EXPECT_THROW(d.cache.insert_snapshot(d.cache.block_keys(prompt)[0], block), Error);
  EXPECT_FALSE(d.cache.find_block(d.cache.block_keys(prompt)[0]));
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 0);
  CacheOptions off = o;
  off.prefix = {};
  Driver plain(model, off);
  EXPECT_THROW(plain.cache.block_keys(prompt), Error);
  EXPECT_THROW(plain.cache.insert_blocks(prompt, {}), Error);
}

}  // namespace
}  // namespace kv4::test
