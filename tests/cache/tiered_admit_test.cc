// TieredPrefix::admit() loads the blocks that tiers have and admits a request; the bytes equal a computed prompt's.
#include <atomic>
#include <optional>
#include <thread>

#include "cache/session_records.h"
#include "cache/tiered_driver.h"
#include "kv4/error.h"
#include "support/far_backend.h"
#include "support/hashed_blocks.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kStream = 7;
const SnapshotPolicy kNoSnapshots{.kind = SnapshotPolicy::Kind::none};

tier::Deadline later() { return std::chrono::steady_clock::now() + 60s; }

/// The request continues to `tokens` and has the bytes of a cold one.
void expect_goes_on(TieredDriver& d, const Model& model, const CacheOptions& o, RequestId request,
                    std::int64_t tokens) {
  d.fill_up(request, kStream, tokens);
  expect_same(bytes_of(d.cache, request), cold_bytes(model, o, kStream, tokens), "admitted from tiers");
}

TEST(TieredAdmit, BeginsWithWhatTiersHave) {
  const Model model(tiny_config());
  for (const SnapshotPolicy& policy : kPolicies) {
    const CacheOptions o = prefix_options(policy);
    HostAndDisk tiers(layout_of(model, o));
    TieredDriver(model, o, tiers).compute_and_save(kStream, 100);
    for (const std::int64_t tokens : {0, 15, 16, 17, 33, 96, 97, 110}) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy.kind)) + ", " + std::to_string(tokens));
      TieredDriver d(model, o, tiers), stepwise(model, o, tiers);
      const std::vector<std::int32_t> ids = ids_of(kStream, tokens);
      const Admission a = d.tiered.admit({ids, 0, "", {}}, tiers.soon()).value();
      const std::int64_t brought = stepwise.load(kStream, tokens);
      const Admission b = stepwise.begin(kStream, tokens);
      EXPECT_EQ(a.usable_tokens, brought * 16);
      EXPECT_EQ(a.usable_tokens, b.usable_tokens);
      EXPECT_EQ(a.resume_at, b.resume_at);
      EXPECT_EQ(d.tiered.statistics().loaded_snapshots, stepwise.tiered.statistics().loaded_snapshots);
      EXPECT_EQ(d.cache.prefix_statistics().prompts, 1);
      expect_goes_on(d, model, o, a.request, tokens + 5);
      if (HasFailure()) return;
    }
  }
}

TEST(TieredAdmit, APromptIsHashedOnce) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver(model, o, tiers).compute_and_save(kStream, 150);
  const std::vector<std::int32_t> ids = ids_of(kStream, 150);  // 9 full blocks
  const Prompt prompt{ids, 0, "", {}};
  TieredDriver d(model, o, tiers);
  for (const bool on_device : {false, true}) {
    const std::int64_t before = hashed_blocks(16);
    const Admission a = d.tiered.admit(prompt, tiers.soon()).value();
    EXPECT_EQ(hashed_blocks(16) - before, 9) << (on_device ? "on the device" : "in tiers");
    EXPECT_EQ(a.resume_at, 144);
    d.cache.release(a.request);
  }
  TieredDriver between(model, o, tiers);
  const std::int64_t before = hashed_blocks(16);
  PrefixLoad load = between.tiered.start_load(prompt, tiers.soon());
  while (!load.advance()) std::this_thread::yield();
  EXPECT_EQ(load.admit().value().resume_at, 144);
  EXPECT_EQ(hashed_blocks(16) - before, 9);
}

TEST(TieredAdmit, WithNothingInTiersIsLikeAdmit) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver d(model, o, tiers);
  const std::vector<std::int32_t> ids = ids_of(kStream, 100);
  const Admission cold = d.tiered.admit({ids, 0, "", {}}, tiers.soon()).value();
  EXPECT_EQ(cold.usable_tokens, 0);
  EXPECT_EQ(cold.resume_at, 0);
  d.fill_up(cold.request, kStream, 100);
  d.cache.release(cold.request);
  const Admission kept = d.tiered.admit({ids, 0, "", {}}, tiers.soon()).value(), same = d.begin(kStream, 100);
  EXPECT_EQ(kept.usable_tokens, 96);
  EXPECT_EQ(kept.resume_at, same.resume_at);
  expect_goes_on(d, model, o, kept.request, 105);
}

/// Nine blocks in a tier that the test controls.
struct NineBelow {
  explicit NineBelow(const Model& model, const CacheOptions& o) {
    Driver first(model, o);
    TieredPrefix saving(first.cache, *below.tiers);
    compute(first, kStream, 150);
    EXPECT_TRUE(saving.save_all(later()));
    while (below.stored() < 9) std::this_thread::yield();  // a queue also answers from its waiting writes
  }
  FakeBelow below{100};
  std::vector<std::int32_t> ids = ids_of(kStream, 150);
  Prompt prompt{ids, 0, "", {}};
};

TEST(TieredAdmit, ADeadlineEndsTheWait) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  FakeBelow& below = nine.below;
  {  // the deadline has passed
    Driver d(model, o);
    TieredPrefix tiered(d.cache, *below.tiers);
    const Admission a = tiered.admit(nine.prompt, below.clock->in(-1s)).value();
    EXPECT_EQ(a.usable_tokens, 0);
    EXPECT_EQ(a.resume_at, 0);
  }
  {  // the deadline passes while a tier hangs
    Driver d(model, o);
    TieredPrefix tiered(d.cache, *below.tiers);
    below.fake->hold();
    const tier::Deadline deadline = below.clock->in(30s);
    std::atomic<bool> admitted{false};
    std::thread time([&] {
      for (; !admitted; std::this_thread::yield()) below.clock->advance(10ms);
    });
    const Admission a = tiered.admit(nine.prompt, deadline).value();
    admitted = true;
    time.join();
    below.fake->release();
    EXPECT_EQ(a.usable_tokens, 0);
  }
}

// The load memory has room for two blocks.
TEST(TieredAdmit, BeginsWithWhatHasArrived) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  FakeBelow& below = nine.below;
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *below.tiers, {.load_bytes = 1});
  below.fake->take_time(10s);  // for each call; a call has one block or two
  const Admission a = tiered.admit(nine.prompt, below.clock->in(35s)).value();
  EXPECT_GT(a.usable_tokens, 0);
  EXPECT_LT(a.usable_tokens, 144);
  EXPECT_EQ(a.usable_tokens, 16 * tiered.statistics().loaded_blocks);
  for (std::int64_t at = d.cache.length(a.request); at < 150; at = d.cache.length(a.request))
    d.run({{a.request, kStream, static_cast<std::int32_t>(std::min<std::int64_t>(23, 150 - at))}});
  expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, kStream, 150), "begun with a part");
}

TEST(TieredAdmit, ProgressAndAnEarlyAdmitEndTheLoad) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  FakeBelow& below = nine.below;
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *below.tiers);
  below.fake->hold();
  int calls = 0;
  const auto stop = [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(done, 0);
    EXPECT_EQ(total, 9);
    return ++calls < 1;
  };
  EXPECT_EQ(tiered.admit(nine.prompt, below.clock->in(60s), stop).value().usable_tokens, 0);
  EXPECT_EQ(calls, 1);
  PrefixLoad load = tiered.start_load(nine.prompt, below.clock->in(60s));
  EXPECT_FALSE(load.advance());
  EXPECT_EQ(load.admit().value().usable_tokens, 0);
  EXPECT_TRUE(load.advance()) << "nothing is left to be done";
  below.fake->release();
  EXPECT_EQ(d.cache.statistics().times.tier_load.count(), 2) << "an admit ends a load";
}

TEST(TieredAdmit, AShortageComesAtOnce) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *nine.below.tiers);
  std::vector<RequestId> all;
  while (const Expected<RequestId> one = d.cache.admit()) all.push_back(*one);
  const std::int64_t counted = d.cache.statistics().admit_shortages.requests;
  nine.below.fake->hold();  // a call to the tier blocks
  const Expected<Admission> none = tiered.admit(nine.prompt, nine.below.clock->in(60s));
  nine.below.fake->release();
  EXPECT_FALSE(none);
  EXPECT_EQ(none.error(), Shortage::requests);
  EXPECT_EQ(d.cache.statistics().admit_shortages.requests, counted + 1);
  EXPECT_EQ(tiered.statistics().loaded_blocks, 0);
  d.cache.release(all.back());
  EXPECT_EQ(tiered.admit(nine.prompt, later()).value().usable_tokens, 144);

  // A finished load is admitted once there is room.
  PrefixLoad load = tiered.start_load(nine.prompt, later());
  EXPECT_EQ(load.admit().error(), Shortage::requests);
  d.cache.release(all[0]);
  EXPECT_EQ(load.admit().value().usable_tokens, 144);
}

/// The allocator's evictable blocks are those that the index can evict.
void expect_no_lost_blocks(const KVCacheManager& cache) {
  const BlockAllocator& blocks = cache.allocator();
  EXPECT_EQ(blocks.num_evictable(), cache.prefix_statistics().blocks);
  EXPECT_EQ(blocks.num_free() + blocks.num_evictable(), blocks.num_blocks());
}

// Two requests with one prompt, whose loads alternate; and one whose blocks were computed in the meantime.
TEST(TieredAdmit, LoadsThatBringTheSameBlocks) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  NineBelow nine(model, o);
  for (const bool computed : {false, true}) {
    SCOPED_TRACE(computed ? "computed meanwhile" : "two loads");
    Driver d(model, o);
    TieredPrefix tiered(d.cache, *nine.below.tiers);
    const tier::Deadline deadline = nine.below.clock->in(60s);
    PrefixLoad one = tiered.start_load(nine.prompt, deadline), other = tiered.start_load(nine.prompt, deadline);
    nine.below.fake->hold();
    EXPECT_FALSE(one.advance());
    EXPECT_FALSE(other.advance());
    if (computed) compute(d, kStream, 150);
    nine.below.fake->release();
    for (bool done = false; !done; std::this_thread::yield()) {
      const bool one_done = one.advance();
      done = other.advance() && one_done;
    }
    EXPECT_EQ(one.brought_blocks(), 9);
    EXPECT_EQ(other.brought_blocks(), 9);
    EXPECT_EQ(d.cache.prefix_statistics().blocks, 9);
    EXPECT_EQ(d.cache.prefix_statistics().inserted_blocks, computed ? 0 : 9) << "a block is inserted once";
    expect_no_lost_blocks(d.cache);
    const Admission a = one.admit().value(), b = other.admit().value();
    EXPECT_EQ(a.usable_tokens, 144);
    EXPECT_EQ(b.usable_tokens, 144);
    d.cache.release(a.request);
    d.cache.release(b.request);
    expect_no_lost_blocks(d.cache);
    for (std::uint64_t stream = 20; stream < 40; ++stream) compute(d, stream, 150);  // all of it is evicted
    expect_no_lost_blocks(d.cache);
  }
}

TEST(TieredAdmit, TenantsAndSaltsStayApart) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kCheckpoint);
  o.prefix.tenant_shares = {0, 0};
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver(model, o, tiers).compute_and_save(kStream, 100, "ours");
  const std::vector<std::int32_t> ids = ids_of(kStream, 100);
  const auto usable = [&](TenantId tenant, std::string_view salt) {
    TieredDriver d(model, o, tiers);
    return d.tiered.admit({ids, tenant, salt, {}}, tiers.soon()).value().usable_tokens;
  };
  EXPECT_EQ(usable(0, "ours"), 96);
  EXPECT_EQ(usable(1, "ours"), 0) << "records are kept by tenant";
  EXPECT_EQ(usable(0, "theirs"), 0);
  EXPECT_EQ(usable(0, ""), 0);
}

TEST(TieredAdmit, RequestsRewindAndFork) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  HostAndDisk tiers(layout_of(model, o));
  TieredDriver(model, o, tiers).compute_and_save(kStream, 100);
  TieredDriver d(model, o, tiers);
  const std::vector<std::int32_t> ids = ids_of(kStream, 100);
  const Admission a = d.tiered.admit({ids, 0, "", {}}, tiers.soon()).value();
  const RequestId branch = d.cache.fork(a.request).value();
  d.fill_up(a.request, kStream, 103);
  d.cache.rewind(a.request, 101);
  expect_goes_on(d, model, o, a.request, 120);
  expect_goes_on(d, model, o, branch, 111);
  d.cache.release(a.request);
  expect_goes_on(d, model, o, branch, 115);
}

// Keys of the old weights are not found under the new ones.
TEST(TieredAdmit, NewWeightsMeanwhileFindNothing) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *nine.below.tiers);
  PrefixLoad load = tiered.start_load(nine.prompt, nine.below.clock->in(60s));
  while (!load.advance()) std::this_thread::yield();
  EXPECT_EQ(load.brought_blocks(), 9);
  d.cache.set_weights_id("others");
  EXPECT_EQ(load.admit().value().usable_tokens, 0);
  d.cache.set_weights_id("weights");
  EXPECT_EQ(load.admit().value().usable_tokens, 144);
}

// Blocks that arrive after the end of their weights would outlive invalidate().
TEST(TieredAdmit, NewWeightsEndALoad) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *nine.below.tiers);
  PrefixLoad load = tiered.start_load(nine.prompt, nine.below.clock->in(60s));
  nine.below.fake->hold();
  EXPECT_FALSE(load.advance());
  d.cache.set_weights_id("others");
  d.cache.invalidate("weights");
  nine.below.fake->release();
  EXPECT_TRUE(load.advance());
  EXPECT_EQ(load.brought_blocks(), 0);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 0);
  d.cache.set_weights_id("weights");
  EXPECT_EQ(load.admit().value().usable_tokens, 0);
}

TEST(TieredAdmit, RefusesOptionsThatCannotWork) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kNoSnapshots);
  FakeBelow below(100);
  Driver d(model, o);
  const auto refused = [&](const char* what, const TieredOptions& options) {
    expect_refused(ErrorCode::bad_argument, what, [&] { TieredPrefix tiered(d.cache, *below.tiers, options); });
  };
  refused("load_bytes is -1", {.load_bytes = -1});
  refused("save_bytes is -1", {.save_bytes = -1});
  refused("max_waiting is -1", {.max_waiting = -1});
  refused("max_attempts is 0", {.max_attempts = 0});
}

TEST(TieredAdmit, RefusesWhatAdmitRefuses) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kNoSnapshots);
  NineBelow nine(model, o);
  nine.below.fake->hold();  // a call to the tier blocks
  const auto soon = nine.below.clock->in(60s);
  {
    Driver d(model, o);
    TieredPrefix tiered(d.cache, *nine.below.tiers);
    const std::vector<std::int32_t> too_many(161, 1);
    expect_refused(ErrorCode::bad_argument, "the prompt has 161 tokens; max_context is 160", [&] {
      (void)tiered.admit({too_many, 0, "", {}}, soon);
    });
    expect_refused(ErrorCode::bad_argument, "tenant", [&] { (void)tiered.admit({nine.ids, 3, "", {}}, soon); });
    const std::vector<std::string_view> extra(11);
    expect_refused(ErrorCode::bad_argument, "extra for 11 blocks", [&] {
      (void)tiered.admit({nine.ids, 0, "", extra}, soon);
    });
    const RequestId request = d.admit();
    const std::int32_t id = Driver::token_id(kStream, 0);
    const StepItem item{request, 1, {&id, 1}};
    const Step step = d.cache.prepare_forward({&item, 1}).value();
    expect_refused(ErrorCode::bad_state, "during a step", [&] { (void)tiered.admit(nine.prompt, soon); });
    d.cache.abort(step);
    EXPECT_EQ(d.cache.num_requests(), 1);
  }
  o.prefix = {};
  Driver d(model, o);
  TieredPrefix tiered(d.cache, *nine.below.tiers);
  expect_refused(ErrorCode::bad_state, "keeps no prefixes", [&] { (void)tiered.admit(nine.prompt, soon); });
}

}  // namespace
}  // namespace kv4::test
