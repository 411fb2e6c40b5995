// A hit gives the same bytes as computing the prompt: images, entries, index keys, and everything after them.
#include <cstdlib>
#include <map>

#include "cache/prefix_options.h"
#include "cache/session_records.h"
#include "kv4/error.h"
#include "kv4/names.h"
#include "kv4/preempted_request.h"
#include "kv4/tiered_prefix.h"
#include "tier/host_tier.h"
#include "tier/tiers_impl.h"

namespace kv4::test {
namespace {

using Kind = SnapshotPolicy::Kind;

const SnapshotPolicy kFull{.kind = Kind::full};
const SnapshotPolicy kCheckpoint{.kind = Kind::checkpoint, .period_tokens = 48};
const SnapshotPolicy kNone{.kind = Kind::none};

std::vector<std::int32_t> ids_of(std::uint64_t stream, std::int64_t count) {
  std::vector<std::int32_t> out;
  for (std::int64_t p = 0; p < count; ++p) out.push_back(Driver::token_id(stream, p));
  return out;
}

/// A cache that admits prompts of streams.
class PrefixDriver : public Driver {
 public:
  using Driver::admit;
  using Driver::Driver;

  Expected<Admission> admit(std::uint64_t stream, std::int64_t tokens, std::string_view salt = "", TenantId tenant = 0,
                            std::span<const std::string_view> extra = {}) {
    const std::vector<std::int32_t> ids = ids_of(stream, tokens);
    return cache.admit({ids, tenant, salt, extra});
  }
  /// Computes the rest of a prompt, in chunks of at most `chunk`.
  void fill_up(RequestId request, std::uint64_t stream, std::int64_t tokens, std::int64_t chunk) {
    for (std::int64_t at = cache.length(request); at < tokens; at = cache.length(request))
      run({{request, stream, static_cast<std::int32_t>(std::min(chunk, tokens - at))}});
  }
  RequestId request(std::uint64_t stream, std::int64_t tokens, std::int64_t chunk = 256) {
    const RequestId r = admit(stream, tokens).value().request;
    fill_up(r, stream, tokens, chunk);
    return r;
  }
};

/// The same tokens in a cache without prefixes, on the CPU.
Bytes cold_bytes(const Model& model, CacheOptions options, std::uint64_t stream, std::int64_t tokens) {
  options.prefix = {};
  options.max_requests = options.spare_slots = 1;
  Driver d(model, options, make_cpu_backend());
  const RequestId r = d.admit();
  if (tokens > 0) d.run({{r, stream, static_cast<std::int32_t>(tokens)}});
  return bytes_of(d.cache, r);
}

/// Blocks are free, held by requests, or evictable and in the index; one may be reserved as the dummy block of replays.
void expect_balance(const PrefixDriver& d) {
  const BlockAllocator& a = d.cache.allocator();
  std::int64_t published = 0;
  for (BlockId b = 0; b < a.num_blocks(); ++b) published += a.is_published(b);
  EXPECT_EQ(published, d.cache.prefix_statistics().blocks);
  if (d.cache.num_requests() == 0) {
    EXPECT_EQ(a.num_held(), d.backend->on_host() ? 0 : 1);
    EXPECT_EQ(a.num_evictable(), d.cache.prefix_statistics().blocks);
  }
}

TEST(Prefix, AHitIsAsIfComputed) {
  for (const SnapshotPolicy& policy : {kFull, kCheckpoint, kNone})
    for (const FormatCase& format : all_format_cases()) {
      if (format.shared && test_backend()->shared_entries() == nullptr) continue;
      const Model model(tiny_config(format));
      const CacheOptions o = prefix_options(policy, format);
      const std::int64_t reach = std::int64_t{model.config.window} * model.config.num_layers;
      for (const std::int64_t tokens : {1, 15, 16, 17, 31, 32, 33, 48, 49, 80, 81, 111}) {
        SCOPED_TRACE(format.name() + ", policy " + std::to_string(static_cast<int>(policy.kind)) + ", " +
                     std::to_string(tokens) + " tokens");
        PrefixDriver d(model, o);
        const Bytes cold = cold_bytes(model, o, 7, tokens + 5);
        for (const std::int64_t chunk : {256, 7, 1}) {
          const Admission a = d.admit(7, tokens).value();
          const std::int64_t most = (tokens - 1) / 16 * 16;
          EXPECT_EQ(a.usable_tokens, chunk == 256 ? 0 : most);
          EXPECT_EQ(d.cache.length(a.request), a.resume_at);
          EXPECT_EQ(d.cache.rewind_floor(a.request), a.resume_at);
          // The prompt's own last boundary has a snapshot; without one, a window per layer is replayed.
          EXPECT_EQ(a.resume_at,
                    policy.kind == Kind::none ? std::max<std::int64_t>(0, a.usable_tokens - reach) / 16 * 16
                                              : a.usable_tokens);
          d.fill_up(a.request, 7, tokens + 5, chunk);
          expect_same(bytes_of(d.cache, a.request), cold, "chunks of " + std::to_string(chunk));
          d.cache.release(a.request);
          expect_balance(d);
        }
        if (HasFailure()) return;
      }
    }
}

// A bounded replay of V4.1: one window, whose entries stay as they were; windows begin with it. Nothing that follows is
// kept: no blocks, no snapshots, no sessions, also after a preemption.
TEST(Prefix, ABoundedReplayOfV41IsNotKept) {
  if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  const Model model(shared_tiny_config());
  CacheOptions o = prefix_options({.kind = Kind::none, .replay_tokens = 8}, shared_format_cases()[0]);
  o.prefix.num_snapshots = 0;
  PrefixDriver d(model, o);
  const RequestId first = d.request(7, 60);
  const std::int64_t kept = d.cache.prefix_statistics().blocks;
  EXPECT_EQ(kept, 3);
  const Admission a = d.admit(7, 60).value();
  EXPECT_EQ(a.usable_tokens, 48);
  EXPECT_EQ(a.resume_at, 32);  // a block boundary
  d.fill_up(a.request, 7, 100, 9);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, kept);
  // The inputs of this test do not depend on windows, so the bytes are those of a cold run.
  expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, 7, 100), "replayed");
  const RequestId child = d.cache.fork(a.request).value();
  const auto expect_no_session = [&](RequestId request) {
    try {
      save(d.cache, request);
      ADD_FAILURE() << "a session was made";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("resumed by a bounded replay"), std::string::npos) << e.what();
    }
  };
  expect_no_session(child);
  d.fill_up(child, 7, 130, 30);
  PreemptedRequest away(HostMemory(d.backend, preempted_bytes(d.cache, child)));
  preempt(d.cache, child, away);
  const RequestId back = resume(d.cache, away).value();
  expect_no_session(back);
  d.fill_up(back, 7, 150, 30);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, kept);
  expect_same(bytes_of(d.cache, back), cold_bytes(model, o, 7, 150), "resumed");
  for (const RequestId r : {first, a.request, back}) d.cache.release(r);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, kept);
  EXPECT_EQ(d.admit(7, 150).value().usable_tokens, 48);

  // An exact replay, and a prompt that begins at its first token, are as ever.
  o.prefix.snapshots.replay_tokens = 0;
  PrefixDriver exact(model, o);
  exact.cache.release(exact.request(7, 150));
  const Admission b = exact.admit(7, 150).value();
  EXPECT_EQ(b.resume_at, 64);  // 9 layers of 8
  exact.fill_up(b.request, 7, 160, 50);
  EXPECT_EQ(exact.cache.prefix_statistics().blocks, 10);
}

TEST(Prefix, RealSizesAroundBoundaries) {
  const Model model(real_config());
  for (const SnapshotPolicy& policy : {kFull, SnapshotPolicy{.kind = Kind::checkpoint, .period_tokens = 256}, kNone}) {
    CacheOptions o = prefix_options(policy);
    o.block_tokens = 0;
    o.max_context = 768;
    o.max_step_tokens = 768;
    PrefixDriver d(model, o);
    d.cache.release(d.request(3, 700, 389));  // boundaries inside the steps
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513}) {
      SCOPED_TRACE(tokens);
      const Admission a = d.admit(3, tokens).value();
      EXPECT_EQ(a.usable_tokens, (tokens - 1) / 128 * 128);
      const std::int64_t reach = policy.kind == Kind::full ? 0 : policy.kind == Kind::none ? 3 * 128 : 128;
      EXPECT_GE(a.resume_at, a.usable_tokens - reach);
      d.fill_up(a.request, 3, tokens, 300);
      expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, 3, tokens), "hit");
      d.cache.release(a.request);
    }
    expect_balance(d);
  }
}

TEST(Prefix, RunningRequestsShare) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  PrefixDriver d(model, o);
  const RequestId first = d.request(1, 70, 9);
  const Admission a = d.admit(1, 100).value();
  EXPECT_EQ(a.usable_tokens, 64);
  EXPECT_EQ(a.resume_at, 64);  // the latest boundary of a running request
  const std::vector<BlockId> blocks = d.cache.blocks(first);
  EXPECT_TRUE(std::equal(blocks.begin(), blocks.begin() + 4, d.cache.blocks(a.request).begin()));
  d.fill_up(a.request, 1, 100, 30);
  d.fill_up(first, 1, 100, 30);  // the same block again: one of the two is given back
  EXPECT_EQ(d.cache.blocks(first)[5], d.cache.blocks(a.request)[5]);
  EXPECT_NE(d.cache.blocks(first)[6], d.cache.blocks(a.request)[6]);
  EXPECT_EQ(d.cache.prefix_statistics().joined_blocks, 2);
  const Bytes cold = cold_bytes(model, o, 1, 100);
  expect_same(bytes_of(d.cache, first), cold, "first");
  expect_same(bytes_of(d.cache, a.request), cold, "second");
}

TEST(Prefix, WhatTheBytesDependOnIsInTheKey) {
  const Model model(tiny_config());
  PrefixDriver d(model, prefix_options(kFull));
  const std::string_view image[] = {"", "image"}, other[] = {"", "other"}, early[] = {"image"};
  const auto usable = [&](std::uint64_t stream, std::string_view salt, std::span<const std::string_view> extra) {
    const Admission a = d.admit(stream, 60, salt, 0, extra).value();
    d.fill_up(a.request, stream, 60, 64);
    d.cache.release(a.request);
    return a.usable_tokens;
  };
  EXPECT_EQ(usable(1, "a", image), 0);
  EXPECT_EQ(usable(1, "a", image), 48);
  EXPECT_EQ(usable(2, "a", image), 0);
  EXPECT_EQ(usable(1, "b", image), 0);
  EXPECT_EQ(usable(1, "", image), 0);
  EXPECT_EQ(usable(1, "a", other), 16);
  EXPECT_EQ(usable(1, "a", {}), 16);
  EXPECT_EQ(usable(1, "a", early), 0);
  EXPECT_EQ(usable(1, "a", image), 48);
}

TEST(Prefix, OffUnlessAskedFor) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kFull);
  o.prefix.enabled = false;
  PrefixDriver d(model, o);
  EXPECT_THROW((void)d.admit(1, 20), Error);
  const RequestId r = d.admit();
  d.run({{r, 1, 64}});
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 0);
  d.cache.release(r);
  EXPECT_EQ(d.cache.allocator().num_free(), 64);
}

TEST(Prefix, BadPrompts) {
  const Model model(tiny_config());
  PrefixDriver d(model, prefix_options(kFull));
  const std::string_view extra[] = {"a", "b", "c"};
  EXPECT_THROW((void)d.admit(1, 161), Error);
  EXPECT_THROW((void)d.admit(1, 20, "", 1), Error);
  EXPECT_THROW((void)d.admit(1, 20, "", 0, extra), Error);
  EXPECT_EQ(d.cache.num_requests(), 0);
  EXPECT_EQ(d.admit(1, 0).value().usable_tokens, 0);
}

TEST(Prefix, AReplayTakesThePromptsTokens) {
  const Model model(tiny_config());
  PrefixDriver d(model, prefix_options(kNone));
  d.cache.release(d.request(5, 100));
  const Admission a = d.admit(5, 100).value();
  ASSERT_EQ(a.usable_tokens, 96);
  ASSERT_EQ(a.resume_at, 64);
  EXPECT_THROW((void)d.prepare({{a.request, 6, 4}}), Error);
  EXPECT_EQ(d.cache.length(a.request), 64);
  // During the replay: a fork, a rewind, an aborted step. Entries do not change.
  const std::vector<BlockId> shared = d.cache.blocks(a.request);
  d.run({{a.request, 5, 20}});
  const RequestId fork = d.cache.fork(a.request).value();
  d.cache.rewind(a.request, 82);
  const Step step = d.prepare({{a.request, 5, 18}}).value();
  d.append(step);
  d.cache.abort(step);
  d.fill_up(a.request, 5, 100, 17);
  d.fill_up(fork, 5, 100, 64);
  const Bytes cold = cold_bytes(model, prefix_options(kNone), 5, 100);
  expect_same(bytes_of(d.cache, a.request), cold, "replayed");
  expect_same(bytes_of(d.cache, fork), cold, "fork of a replay");
  EXPECT_TRUE(std::equal(shared.begin(), shared.end(), d.cache.blocks(a.request).begin()));
  d.cache.release(a.request);
  d.cache.release(fork);
  expect_balance(d);
}

TEST(Prefix, MemoryIsAsPlanned) {
  const Model model(tiny_config());
  for (const SnapshotPolicy& policy : {kFull, kCheckpoint, kNone}) {
    const CacheOptions o = prefix_options(policy);
    const PrefixDriver d(model, o);
    EXPECT_EQ(d.cache.memory_bytes(), plan_memory(build_schema(model.config, o)).total_bytes);
  }
  CacheOptions more = prefix_options(kFull);
  const std::int64_t before = plan_memory(build_schema(model.config, more)).total_bytes;
  ++more.prefix.num_snapshots;
  EXPECT_GT(plan_memory(build_schema(model.config, more)).total_bytes, before);
}

TEST(Prefix, RoomComesFromTheDeepestAndColdest) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kFull);
  o.num_blocks = 9 + (test_backend()->on_host() ? 0 : 1);
  PrefixDriver d(model, o);
  d.cache.release(d.request(1, 64));
  d.cache.release(d.request(2, 64));
  d.cache.release(d.request(3, 32));  // one block is free, one of the first chain goes
  EXPECT_EQ(d.cache.prefix_statistics().evicted_blocks, 1);
  const auto usable = [&](std::uint64_t stream) {
    const Admission a = d.admit(stream, 65).value();
    d.cache.release(a.request);
    return a.usable_tokens;
  };
  EXPECT_EQ(usable(1), 48);
  EXPECT_EQ(usable(2), 64);
  EXPECT_EQ(usable(3), 32);
  // A request that needs all there is, and one block too many.
  const RequestId r = d.admit(4, 144).value().request;
  EXPECT_EQ(d.prepare({{r, 4, 145}}).error(), Shortage::blocks);
  EXPECT_EQ(usable(2), 64);
  d.run({{r, 4, 144}});
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 9);
  EXPECT_EQ(d.cache.prefix_statistics().evicted_blocks, 10);
}

TEST(Prefix, AFloodLeavesAnotherTenantItsShare) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kFull);
  o.num_blocks = 12 + (test_backend()->on_host() ? 0 : 1);
  o.prefix.tenant_shares = {4, 4};
  PrefixDriver d(model, o);
  const auto feed = [&](std::uint64_t stream, TenantId tenant, std::int64_t tokens) {
    const Admission a = d.admit(stream, tokens, tenant == 0 ? "zero" : "one", tenant).value();
    d.fill_up(a.request, stream, tokens, 64);
    d.cache.release(a.request);
  };
  feed(1, 0, 64);
  feed(2, 0, 32);
  for (std::uint64_t stream = 10; stream < 20; ++stream) feed(stream, 1, 80);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 12);
  const Admission first = d.admit(1, 65, "zero", 0).value(), second = d.admit(2, 33, "zero", 0).value();
  EXPECT_EQ(first.usable_tokens + second.usable_tokens, 64);  // four blocks of the six
  d.cache.release(first.request);
  d.cache.release(second.request);
  const RequestId r = d.admit(30, 160, "one", 1).value().request;
  EXPECT_EQ(d.prepare({{r, 30, 129}}).error(), Shortage::blocks);  // eight can be had, not nine
  d.run({{r, 30, 128}});
}

TEST(Prefix, InvalidatedWeightsAreNotFound) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kCheckpoint);
  PrefixDriver d(model, o);
  const auto usable = [&](std::uint64_t stream) {
    const Admission a = d.admit(stream, 65).value();
    d.cache.release(a.request);
    return a.usable_tokens;
  };
  d.cache.release(d.request(1, 64));
  const RequestId running = d.request(2, 60);
  d.cache.set_weights_id("others");
  EXPECT_EQ(usable(1), 0);
  d.cache.release(d.request(1, 33));
  EXPECT_EQ(usable(1), 32);

  d.cache.invalidate("never used");
  d.cache.invalidate("weights");
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 2 + 3);  // of the others, and of the running request
  EXPECT_EQ(usable(1), 32);
  d.cache.set_weights_id("weights");
  EXPECT_EQ(usable(1), 0);
  EXPECT_EQ(usable(2), 0);
  d.cache.release(d.request(2, 50));  // found again, while the forgotten ones are still held
  EXPECT_EQ(usable(2), 48);
  const RequestId fork = d.cache.fork(running).value();
  d.fill_up(running, 2, 90, 7);
  d.fill_up(fork, 2, 90, 40);
  const Bytes cold = cold_bytes(model, o, 2, 90);
  expect_same(bytes_of(d.cache, running), cold, "running");
  expect_same(bytes_of(d.cache, fork), cold, "fork");
  d.cache.release(running);
  d.cache.release(fork);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 2 + 3);
  expect_balance(d);
  d.cache.invalidate("weights");
  d.cache.invalidate("others");
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 0);
  EXPECT_EQ(d.cache.prefix_statistics().snapshots, 0);
  expect_balance(d);
}

TEST(Prefix, EventsTellWhatIsThere) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kFull);
  o.num_blocks = 10;
  PrefixDriver d(model, o);
  for (std::uint64_t stream = 0; stream < 8; ++stream) d.cache.release(d.request(stream % 5, 64));
  d.cache.invalidate("weights");
  d.cache.release(d.request(7, 40));
  std::map<BlockKey, int> there;
  std::int64_t snapshots = 0;
  BlockEvent events[7];
  for (std::size_t count; (count = d.cache.read_block_events(events)) > 0;)
    for (std::size_t i = 0; i < count; ++i) {
      int& n = there[events[i].key];
      EXPECT_FALSE(events[i].inserted);
      if (events[i].kind == BlockEvent::Kind::snapshot) {
        EXPECT_EQ(n, 1) << "of a block that is there";
        ++snapshots;
        continue;
      }
      n += events[i].kind == BlockEvent::Kind::stored ? 1 : -1;
      EXPECT_TRUE(n == 0 || n == 1);
    }
  std::int64_t stored = 0;
  for (const auto& [key, n] : there) stored += n;
  EXPECT_EQ(stored, 2);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 2);
  EXPECT_EQ(snapshots, d.cache.prefix_statistics().saved_snapshots);
}

TEST(Prefix, WindowsOfAReplayBeginWhereItDoes) {
  const Model model(tiny_config());
  PrefixDriver d(model, prefix_options({.kind = Kind::none, .replay_tokens = 8}));
  d.cache.release(d.request(1, 64));
  const Admission a = d.admit(1, 60).value();
  ASSERT_EQ(a.usable_tokens, 48);
  ASSERT_EQ(a.resume_at, 32);  // a window, from the start of a block
  d.run({{a.request, 1, 3}});
  const Step step = d.prepare({{a.request, 1, 2}}).value();
  d.append(step);
  std::vector<float> rows(16 * 80);
  std::int32_t lens = 0, first = 0;
  Twins twins(d.backend);
  const TensorView out = twins.put_output({rows.data(), {1, 16, 80}}), lens_out = twins.put_output({&lens, {1}}),
                   first_out = twins.put_output({&first, {1}});
  twins.send();
  d.cache.acquire(0).gather_swa_kv(out, lens_out, first_out);
  twins.fetch();
  EXPECT_EQ(first, 32);
  EXPECT_EQ(lens, 5);
  d.cache.abort(step);
}

TEST(Prefix, DraftStagesBeginWhereTheHitDoes) {
  const Model model(tiny_config());
  CacheOptions o = prefix_options(kFull);
  o.draft_layers = 1;
  PrefixDriver d(model, o);
  const RequestId first = d.request(1, 40);
  d.run({{first, 1, 40}}, 1);
  d.cache.release(first);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 2);  // a draft leaves nothing
  const Admission a = d.admit(1, 40).value();
  ASSERT_EQ(a.resume_at, 32);
  EXPECT_EQ(d.cache.length(a.request, 1), 32);
  d.fill_up(a.request, 1, 40, 3);
  d.run({{a.request, 1, 8}}, 1);  // from here on a whole window
  d.run({{a.request, 1, 2}}, 1);
  d.cache.rewind(a.request, 40, 1);
  Driver cold(model, o, make_cpu_backend());
  const RequestId r = cold.admit();
  cold.run({{r, 1, 40}});
  cold.run({{r, 1, 40}}, 1);
  expect_same(bytes_of(d.cache, a.request), bytes_of(cold.cache, r), "with a draft stage");
}

TEST(Prefix, NoSnapshotWhereALayerSavedNone) {
  const Model model(tiny_config());
  const CacheOptions o = prefix_options(kFull);
  PrefixDriver d(model, o);
  const RequestId first = d.admit(1, 60).value().request;
  const Step step = d.prepare({{first, 1, 60}}).value();
  std::vector<const LayerCacheSchema*> others;
  for (const LayerCacheSchema& layer : d.cache.schema().layers)
    if (layer.spec.layer != 0) others.push_back(&layer);
  d.append_layers(step, others);
  LayerInputs in = d.inputs_of(step, d.cache.schema().layer(0));
  Twins twins(d.backend);
  const ConstTensorView raw_kv = twins.put(in.views.raw_kv);
  twins.send();
  d.cache.acquire(0).write_swa(raw_kv);
  d.cache.commit(step);
  EXPECT_EQ(d.cache.prefix_statistics().snapshots, 0);  // every boundary lies before the last rows of the rings
  const Admission a = d.admit(1, 60).value();
  EXPECT_EQ(a.usable_tokens, 48);
  EXPECT_EQ(a.resume_at, 0);
  d.fill_up(a.request, 1, 60, 64);
  expect_same(bytes_of(d.cache, a.request), cold_bytes(model, o, 1, 60), "replayed from the start");
  EXPECT_EQ(d.cache.prefix_statistics().snapshots, 3);
}

/// Engine calls in random order; every request against its own history computed alone.
class Chaos {
 public:
  Chaos(const Model& model, const CacheOptions& options, std::uint64_t seed)
      : model_(model), options_(options), random_(seed), driver_(model, options) {
    if (random_.below(2) == 0) return;
    // Small enough to evict, too.
    const tier::HostTierOptions host{.layout_id = driver_.cache.schema().layout_id, .capacity_bytes = 1 << 20};
    std::vector<std::unique_ptr<tier::TierQueue>> queues;
    queues.push_back(std::make_unique<tier::TierQueue>(std::make_shared<tier::HostTier>(host, clock_),
                                                       tier::TierQueueOptions{}, clock_));
    tiers_.emplace(Tiers::Impl::over(std::move(queues), clock_));
    tiered_.emplace(driver_.cache, *tiers_);
  }

  void run(int operations) {
    for (int i = 0; i < operations && !testing::Test::HasFailure(); ++i) {
      switch (random_.below(11)) {
        case 0:
        case 1:
        case 2: admit(); break;
        case 3: release(); break;
        case 4: fork(); break;
        case 5: rewind(); break;
        case 6: step(true); break;
        case 7: come_back(); break;
        default: step(false); break;
      }
      if (random_.below(50) == 0) driver_.cache.invalidate("weights");
      if (tiered_ && random_.below(4) == 0) tiered_->save(random_.between(1, 40));
      if (i % 20 == 19) check();
    }
    check();
    while (!live_.empty()) release();
    expect_balance(driver_);
  }
  std::int64_t hits() const { return driver_.cache.prefix_statistics().hits; }
  std::int64_t loaded() const { return tiered_ ? tiered_->statistics().loaded_blocks : 0; }
  std::int64_t came_back() const { return came_back_; }
  std::int64_t compared() const { return compared_; }

 private:
  // Streams with common beginnings: stream 8 n + k has the tokens of stream 8 n up to position 24 k.
  struct Life {
    std::vector<std::uint64_t> streams;  // of each token
    std::int64_t prompt = 0;
    TenantId tenant = 0;
    std::string salt = "";
  };
  using Entry = std::map<RequestId, Life>::iterator;

  Entry any() {
    Entry it = live_.begin();
    std::advance(it, random_.below(static_cast<std::int64_t>(live_.size())));
    return it;
  }

  void admit() {
    Life life;
    const std::uint64_t family = static_cast<std::uint64_t>(random_.below(3));
    const std::int64_t tokens = random_.between(1, options_.max_context - 8), fork_at = random_.below(5) * 24;
    const std::uint64_t tail = family + static_cast<std::uint64_t>(random_.below(2)) * 100;
    std::vector<std::int32_t> ids;
    for (std::int64_t p = 0; p < tokens; ++p) {
      life.streams.push_back(p < fork_at ? family : tail);
      ids.push_back(Driver::token_id(life.streams.back(), p));
    }
    life.prompt = tokens;
    // Two tenants that do not share, and a salt that both use.
    life.tenant = static_cast<TenantId>(random_.below(2));
    life.salt = random_.below(3) == 0 ? "both" : life.tenant == 0 ? "zero" : "one";
    const Prompt prompt{ids, life.tenant, life.salt, {}};
    const Expected<Admission> a =
        tiered_ ? tiered_->admit(prompt, clock_->now() + std::chrono::seconds(60)) : driver_.cache.admit(prompt);
    if (a) live_[a->request] = life;
  }

  /// Preempts or saves a request, and brings it back after another call: its bytes are unchanged.
  void come_back() {
    if (live_.empty()) return;
    const Entry e = any();
    if (replays(*e)) return;
    const Life life = e->second;
    const SessionIdentity who{.weights_id = "weights", .salt = life.salt, .share_of = life.tenant};
    PreemptedRequest aside(HostMemory(driver_.backend, preempted_bytes(driver_.cache, e->first)));
    RecordList saved;
    if (random_.below(2) == 0) {
      preempt(driver_.cache, e->first, aside);
    } else {
      saved = save(driver_.cache, e->first, who);
      driver_.cache.release(e->first);
    }
    live_.erase(e);
    if (random_.below(2) == 0) admit();
    if (random_.below(2) == 0) step(false);
    const Expected<RequestId> back =
        aside.empty() ? restore_session(driver_.cache, who, saved) : resume(driver_.cache, aside);
    if (back) live_[*back] = life;
    came_back_ += static_cast<bool>(back);
  }

  void release() {
    if (live_.empty()) return;
    const Entry e = any();
    driver_.cache.release(e->first);
    live_.erase(e);
  }

  void fork() {
    if (live_.empty()) return;
    const Entry parent = any();
    const Expected<RequestId> r = driver_.cache.fork(parent->first);
    if (r) live_[*r] = parent->second;
  }

  void rewind() {
    if (live_.empty()) return;
    const Entry e = any();
    const std::int64_t length = driver_.cache.length(e->first);
    const std::int64_t to = random_.between(driver_.cache.rewind_floor(e->first), length);
    driver_.cache.rewind(e->first, to);
    if (to >= e->second.prompt) e->second.streams.resize(static_cast<std::size_t>(to));
  }

  // Each request appends tokens of one stream: first of its prompt, then of a new stream.
  void step(bool aborted) {
    std::vector<Work> work;
    for (auto& [request, life] : live_) {
      if (random_.below(3) == 0) continue;
      const std::int64_t length = driver_.cache.length(request);
      std::int64_t most = random_.below(3) ? 4 : 60;
      if (length < static_cast<std::int64_t>(life.streams.size())) {
        const std::uint64_t stream = life.streams[static_cast<std::size_t>(length)];
        std::int64_t same = length;
        while (same < static_cast<std::int64_t>(life.streams.size()) &&
               life.streams[static_cast<std::size_t>(same)] == stream)
          ++same;
        work.push_back({request, stream, static_cast<std::int32_t>(random_.between(1, std::min(most, same - length)))});
      } else if (most = std::min(most, options_.max_context - length); most > 0) {
        work.push_back({request, 1000 + random_.next() % 2, static_cast<std::int32_t>(random_.between(1, most))});
      }
    }
    if (work.empty()) return;
    const std::int32_t held = driver_.cache.allocator().num_held(), slots = driver_.cache.state_pool().num_free();
    const PrefixStatistics before = driver_.cache.prefix_statistics();
    const Expected<Step> prepared = driver_.prepare(work);
    if (!prepared) {
      EXPECT_EQ(driver_.cache.allocator().num_held(), held);
      EXPECT_EQ(driver_.cache.state_pool().num_free(), slots);
      EXPECT_EQ(driver_.cache.prefix_statistics().blocks, before.blocks);
      return;
    }
    driver_.append(*prepared);
    if (aborted) {
      driver_.cache.abort(*prepared);
      EXPECT_EQ(driver_.cache.allocator().num_held(), held);
      EXPECT_EQ(driver_.cache.state_pool().num_free(), slots);
      EXPECT_LE(driver_.cache.prefix_statistics().snapshots, before.snapshots);
      return;
    }
    driver_.cache.commit(*prepared);
    for (const Work& w : work) {
      Life& life = live_[w.request];
      const std::size_t end = static_cast<std::size_t>(driver_.cache.length(w.request));
      if (end > life.streams.size()) life.streams.resize(end, w.stream);
    }
  }

  // Without snapshots, a replay's windows are complete only at its end.
  bool replays(const std::pair<const RequestId, Life>& each) {
    return options_.prefix.snapshots.kind == Kind::none && driver_.cache.length(each.first) < each.second.prompt;
  }

  void check() {
    expect_balance(driver_);
    for (const auto& each : live_) {
      const auto& [request, life] = each;
      const std::int64_t length = driver_.cache.length(request);
      if (replays(each)) continue;
      CacheOptions alone = options_;
      alone.prefix = {};
      alone.max_requests = alone.spare_slots = 1;
      alone.num_blocks = 0;
      Driver d(model_, alone, make_cpu_backend());
      const RequestId r = d.admit();
      for (std::int64_t at = 0, end = 0; at < length; at = end) {
        while (end < length &&
               life.streams[static_cast<std::size_t>(end)] == life.streams[static_cast<std::size_t>(at)])
          ++end;
        d.run({{r, life.streams[static_cast<std::size_t>(at)], static_cast<std::int32_t>(end - at)}});
      }
      expect_same(bytes_of(driver_.cache, request), bytes_of(d.cache, r), "request " + std::to_string(request));
      ++compared_;
    }
  }

  const Model& model_;
  CacheOptions options_;
  Random random_;
  PrefixDriver driver_;
  std::shared_ptr<tier::Clock> clock_ = std::make_shared<tier::SteadyClock>();
  std::optional<Tiers> tiers_;
  std::optional<TieredPrefix> tiered_;
  std::map<RequestId, Life> live_;
  std::int64_t came_back_ = 0, compared_ = 0;
};

TEST(Prefix, RandomOperations) {
  const Model model(tiny_config());
  std::int64_t hits = 0, loaded = 0, came_back = 0, compared = 0;
  const int seeds = rounds(std::getenv("KV4_TEST_LONG") != nullptr ? 5000 : 120);
  for (int seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(static_cast<std::uint64_t>(seed) + 500);
    const std::vector<FormatCase> cases = format_cases();
    const SnapshotPolicy policies[] = {kFull, kCheckpoint, kNone};
    CacheOptions o = prefix_options(
        policies[seed % 3], cases[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(cases.size())))]);
    o.block_tokens = 8 * static_cast<int>(random.between(1, 3));
    o.max_context = random.between(60, 160);
    o.max_requests = static_cast<int>(random.between(1, 5));
    o.spare_slots = static_cast<int>(random.between(1, 3));
    o.num_blocks = random.between(4, 60);
    o.max_rewind_tokens = static_cast<int>(random.between(0, 10));
    o.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    o.arrangement = random.below(2) ? Arrangement::block_major : Arrangement::layer_major;
    o.prefix.tenant_shares = {random.between(0, o.num_blocks / 2), random.between(0, o.num_blocks / 2)};
    o.prefix.eviction = names_of<EvictionKind>()[static_cast<std::size_t>(random.below(3))].value;
    o.prefix.num_snapshots = static_cast<int>(random.between(0, 12));
    o.prefix.snapshots.period_tokens = o.block_tokens * random.between(1, 4);
    Chaos chaos(model, o, static_cast<std::uint64_t>(seed));
    chaos.run(120);
    hits += chaos.hits();
    loaded += chaos.loaded();
    came_back += chaos.came_back();
    compared += chaos.compared();
    if (HasFailure()) return;
  }
  EXPECT_GT(hits, 0);
  EXPECT_GT(loaded, 0) << "from tiers";
  EXPECT_GT(came_back, 0);
  RecordProperty("compared", std::to_string(compared));
}

}  // namespace
}  // namespace kv4::test
