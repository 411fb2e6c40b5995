// Saved, handed-over and preempted requests that return to a cache with a prefix cache: they use its prefix blocks, and
// later prompts find the blocks that they bring.
#include "cache/prefix_options.h"
#include "cache/session_records.h"
#include "kv4/preempted_request.h"
#include "kv4/tiered_prefix.h"
#include "tier/host_tier.h"
#include "tier/tiers_impl.h"

namespace kv4::test {
namespace {

using Kind = SnapshotPolicy::Kind;

constexpr std::uint64_t kStream = 7;

const Model& tiny() {
  static const Model model(tiny_config());
  return model;
}

CacheOptions keeping(SnapshotPolicy policy, const FormatCase& format = format_cases()[0]) {
  CacheOptions o = prefix_options(policy, format);
  o.num_blocks = 32;
  o.prefix.weights_id = identity().weights_id;
  return o;
}

CacheOptions forgetting(CacheOptions o) {
  o.prefix = {};
  return o;
}

std::vector<std::int32_t> ids_of(std::uint64_t stream, std::int64_t count) {
  std::vector<std::int32_t> out;
  for (std::int64_t p = 0; p < count; ++p) out.push_back(Driver::token_id(stream, p));
  return out;
}

Admission begin(Driver& d, std::uint64_t stream, std::int64_t tokens, std::string_view salt = identity().salt) {
  const std::vector<std::int32_t> ids = ids_of(stream, tokens);
  return d.cache.admit({ids, 0, salt, {}}).value();
}

void fill_up(Driver& d, RequestId request, std::uint64_t stream, std::int64_t tokens) {
  for (std::int64_t at = d.cache.length(request); at < tokens; at = d.cache.length(request))
    d.run({{request, stream, static_cast<std::int32_t>(std::min<std::int64_t>(37, tokens - at))}});
}

/// A request of the stream in a cache without prefixes, on the CPU.
struct Cold : Driver {
  explicit Cold(const CacheOptions& o) : Driver(tiny(), forgetting(o), make_cpu_backend()) {}
  RequestId compute(std::int64_t tokens, std::uint64_t stream = kStream) {
    const RequestId r = admit();
    fill_up(*this, r, stream, tokens);
    return r;
  }
  Bytes bytes(std::int64_t tokens, std::uint64_t stream = kStream) {
    const RequestId r = compute(tokens, stream);
    const Bytes out = bytes_of(cache, r);
    cache.release(r);
    return out;
  }
};

/// Evicts all blocks of earlier requests.
void flood(Driver& d) {
  std::vector<RequestId> all;
  for (std::uint64_t stream = 900; d.cache.allocator().num_free() > 0 || d.cache.allocator().num_evictable() > 0;
       ++stream) {
    const RequestId r = begin(d, stream, 1, "flood").request;
    all.push_back(r);
    const std::int64_t room = 16LL * (d.cache.allocator().num_free() + d.cache.allocator().num_evictable());
    fill_up(d, r, stream, std::min<std::int64_t>(160, room));
  }
  for (const RequestId r : all) d.cache.release(r);
}

class Imported : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Formats, Imported, testing::ValuesIn(format_cases()),
                         [](const auto& format) { return format.param.name(); });

TEST_P(Imported, ALaterPromptFindsIt) {
  for (const Kind kind : {Kind::full, Kind::checkpoint, Kind::none}) {
    const CacheOptions o = keeping({.kind = kind, .period_tokens = 48}, GetParam());
    Cold cold(o);
    for (const std::int64_t length : {1, 15, 16, 17, 33, 96, 111, 128}) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(kind)) + ", length " + std::to_string(length));
      const RequestId source = cold.compute(length);
      const RecordList records = save(cold.cache, source);
      cold.cache.release(source);
      Driver d(tiny(), o);
      const RequestId restored = restore(d.cache, records);
      EXPECT_EQ(d.cache.prefix_statistics().blocks, length / 16);

      // While the restored request runs and continues.
      const Admission a = begin(d, kStream, length + 5);
      EXPECT_EQ(a.usable_tokens, length / 16 * 16);
      if (length % 16 == 0 && kind != Kind::none) {
        EXPECT_EQ(a.resume_at, length) << "its state was a snapshot";
      }
      EXPECT_EQ(begin(d, kStream, length + 5, "pepper").usable_tokens, 0);
      fill_up(d, restored, kStream, length + 20);
      fill_up(d, a.request, kStream, length + 5);
      expect_same(bytes_of(d.cache, restored), cold.bytes(length + 20), "restored");
      expect_same(bytes_of(d.cache, a.request), cold.bytes(length + 5), "hit");

      // After the restored request ends, its last computed boundary can be resumed.
      d.cache.release(restored);
      const Admission b = begin(d, kStream, length + 25);
      EXPECT_EQ(b.usable_tokens, (length + 20) / 16 * 16);
      if (kind != Kind::none) {
        EXPECT_EQ(b.resume_at, b.usable_tokens);
      }
      fill_up(d, b.request, kStream, length + 25);
      expect_same(bytes_of(d.cache, b.request), cold.bytes(length + 25), "hit of what it went on with");
      if (HasFailure()) return;
    }
  }
}

// The session of a cache with prefixes brings the snapshot of its last boundary.
TEST_P(Imported, ResumesAtTheLastBoundary) {
  for (const Kind kind : {Kind::full, Kind::checkpoint}) {
    const CacheOptions o = keeping({.kind = kind, .period_tokens = 64}, GetParam());
    Cold cold(o);
    for (const std::int64_t length : {1, 15, 16, 17, 33, 62, 111, 127}) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(kind)) + ", length " + std::to_string(length));
      Driver from(tiny(), o), to(tiny(), o);
      const RequestId source = begin(from, kStream, length).request;
      fill_up(from, source, kStream, length);
      const RequestId restored = restore(to.cache, save(from.cache, source));
      to.cache.release(restored);  // before it reaches another boundary
      const Admission a = begin(to, kStream, length + 5);
      EXPECT_EQ(a.usable_tokens, length / 16 * 16);
      EXPECT_EQ(a.resume_at, length / 16 * 16);
      fill_up(to, a.request, kStream, length + 5);
      expect_same(bytes_of(to.cache, a.request), cold.bytes(length + 5), "hit");
      EXPECT_EQ(begin(to, kStream, length + 5, "pepper").usable_tokens, 0);
      // A cache without prefixes does not use the snapshot.
      Driver plain(tiny(), forgetting(o));
      expect_same(bytes_of(plain.cache, restore(plain.cache, save(from.cache, source))), cold.bytes(length), "plain");
      if (HasFailure()) return;
    }
  }
}

TEST(ImportedPrefix, ForksAndRewindsOfIt) {
  const CacheOptions o = keeping({.kind = Kind::full});
  Cold cold(o);
  const RecordList records = save(cold.cache, cold.compute(62));
  Driver d(tiny(), o);
  const RequestId restored = restore(d.cache, records), child = d.cache.fork(restored).value();
  d.run({{restored, 99, 3}});  // one past a boundary, then not
  d.cache.rewind(restored, 62);
  fill_up(d, restored, kStream, 80);
  fill_up(d, child, kStream, 71);
  expect_same(bytes_of(d.cache, restored), cold.bytes(80), "rewound");
  expect_same(bytes_of(d.cache, child), cold.bytes(71), "forked");
  d.cache.release(restored);
  d.cache.release(child);
  const Admission a = begin(d, kStream, 90);
  EXPECT_EQ(a.usable_tokens, 80);
  fill_up(d, a.request, kStream, 90);
  expect_same(bytes_of(d.cache, a.request), cold.bytes(90), "hit");
}

TEST(ImportedPrefix, TakesWhatIsKept) {
  const CacheOptions o = keeping({.kind = Kind::checkpoint, .period_tokens = 48});
  Cold cold(o);
  const RequestId source = cold.compute(100);
  Driver d(tiny(), o);
  const RequestId there = begin(d, kStream, 60).request;
  fill_up(d, there, kStream, 60);  // three blocks
  SessionSender sender(cold.cache, source, identity());
  RecordList sent;
  sender.offer(sent);
  SessionReceiver receiver(d.cache, identity());
  EXPECT_TRUE(receiver.prompt().token_ids.empty());
  receiver.take(sent.next());
  EXPECT_EQ(receiver.wanted(), std::vector(sender.keys().begin() + 3, sender.keys().end()));
  EXPECT_EQ(receiver.total_bytes() - receiver.done_bytes(),
            3 * (tier::kRecordHeaderBytes + d.cache.schema().block_image_bytes));
  sender.send(receiver.wanted(), sent);
  for (auto record = sent.next(); !record.empty(); record = sent.next()) receiver.take(record);
  const std::int32_t held = d.cache.allocator().num_held();
  const RequestId r = receiver.finish().value();
  EXPECT_EQ(d.cache.allocator().num_held(), held + 4);
  const std::vector<BlockId> mine = d.cache.blocks(r), theirs = d.cache.blocks(there);
  EXPECT_TRUE(std::equal(mine.begin(), mine.begin() + 3, theirs.begin())) << "shared";
  expect_same(bytes_of(d.cache, r), cold.bytes(100), "handed over");
}

TEST(ImportedPrefix, WhatIsEvictedMeanwhileIsWantedAgain) {
  const CacheOptions o = keeping({.kind = Kind::full});
  Cold cold(o);
  const RequestId source = cold.compute(100);
  Driver d(tiny(), o);
  d.cache.release(restore(d.cache, save(cold.cache, cold.compute(60))));
  SessionSender sender(cold.cache, source, identity());
  RecordList sent;
  sender.offer(sent);
  SessionReceiver receiver(d.cache, identity());
  receiver.take(sent.next());
  ASSERT_EQ(receiver.wanted().size(), 3u);
  sender.send(receiver.wanted(), sent);
  for (auto record = sent.next(); !record.empty(); record = sent.next()) receiver.take(record);
  flood(d);
  expect_refused(ErrorCode::bad_file, "3 of the session's 6 full blocks are missing; the first is block 0",
                 [&] { (void)receiver.finish(); });
  ASSERT_EQ(receiver.wanted().size(), 3u);
  sender.send(receiver.wanted(), sent);
  for (auto record = sent.next(); !record.empty(); record = sent.next()) receiver.take(record);
  expect_same(bytes_of(d.cache, receiver.finish().value()), cold.bytes(100), "handed over");
}

TEST(ImportedPrefix, TiersBringItsBlocks) {
  const CacheOptions o = keeping({.kind = Kind::checkpoint, .period_tokens = 48});
  const auto clock = std::make_shared<tier::SteadyClock>();
  std::vector<std::unique_ptr<tier::TierQueue>> queues;
  queues.push_back(std::make_unique<tier::TierQueue>(
      std::make_shared<tier::HostTier>(
          tier::HostTierOptions{.layout_id = build_schema(tiny_config(), o).layout_id, .capacity_bytes = 16 << 20},
          clock),
      tier::TierQueueOptions{}, clock));
  Tiers tiers = Tiers::Impl::over(std::move(queues), clock);
  {
    Driver before(tiny(), o);
    const RequestId r = begin(before, kStream, 80).request;
    fill_up(before, r, kStream, 80);
    EXPECT_TRUE(TieredPrefix(before.cache, tiers).save_all(clock->now() + std::chrono::seconds(60)));
  }
  Cold cold(o);
  const RequestId source = cold.compute(100);
  SessionSender sender(cold.cache, source, identity());
  RecordList sent;
  sender.offer(sent);
  for (const std::string salt : {"pepper", "salt"}) {
    Driver d(tiny(), o);
    TieredPrefix tiered(d.cache, tiers);
    SessionReceiver receiver(d.cache, identity());
    receiver.take(sent.list[0]);
    Prompt prompt = receiver.prompt();
    EXPECT_EQ(prompt.salt, "salt");
    prompt.salt = salt;
    EXPECT_EQ(tiered.load(prompt, clock->now() + std::chrono::seconds(60)), salt == "salt" ? 5 : 0);
    EXPECT_EQ(receiver.wanted().size(), salt == "salt" ? 1u : 6u);
    RecordList rest;
    sender.send(receiver.wanted(), rest);
    for (auto record = rest.next(); !record.empty(); record = rest.next()) receiver.take(record);
    expect_same(bytes_of(d.cache, receiver.finish().value()), cold.bytes(100), "handed over");
  }
}

TEST(ImportedPrefix, OtherWeightsKeepNothing) {
  const CacheOptions o = keeping({.kind = Kind::full});
  Cold cold(o);
  const RecordList records = save(cold.cache, cold.compute(60));
  Driver d(tiny(), o);
  d.cache.set_weights_id("weights-2");
  const RequestId r = restore(d.cache, records);
  fill_up(d, r, kStream, 90);
  expect_same(bytes_of(d.cache, r), cold.bytes(90), "restored");
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 0);
  EXPECT_EQ(d.cache.chain_of(r).weights_generation, 0u);
  SessionIdentity who = identity();
  who.share_of = 1;
  expect_refused(ErrorCode::bad_argument, "tenant", [&] { restore(d.cache, records, who); });
}

TEST(ImportedPrefix, APreemptedRequestGoesOnWithItsChain) {
  const CacheOptions o = keeping({.kind = Kind::full});
  Cold cold(o);
  Driver d(tiny(), o);
  PreemptedRequest aside(HostMemory(d.backend, 1 << 20));
  const auto set_aside = [&] {
    const RequestId r = begin(d, kStream, 60).request;
    fill_up(d, r, kStream, 70);
    preempt(d.cache, r, aside);
  };
  set_aside();
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 4);
  RequestId r = resume(d.cache, aside).value();
  EXPECT_EQ(d.cache.allocator().num_held(), d.backend->on_host() ? 5 : 6) << "four are shared with the cache";
  expect_same(bytes_of(d.cache, r), cold.bytes(70), "resumed");
  preempt(d.cache, r, aside);
  flood(d);
  r = resume(d.cache, aside).value();
  fill_up(d, r, kStream, 85);
  expect_same(bytes_of(d.cache, r), cold.bytes(85), "resumed after a flood");
  d.cache.release(r);
  const Admission a = begin(d, kStream, 90);
  EXPECT_EQ(a.usable_tokens, 80);
  EXPECT_EQ(a.resume_at, 80);
  d.cache.release(a.request);

  // After an invalidation, earlier blocks do not return, neither to this cache nor to another one.
  set_aside();
  d.cache.invalidate(identity().weights_id);
  r = resume(d.cache, aside).value();
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 0);
  preempt(d.cache, r, aside);
  Driver another(tiny(), o);
  r = resume(another.cache, aside).value();
  EXPECT_EQ(another.cache.prefix_statistics().blocks, 0);
  expect_same(bytes_of(another.cache, r), cold.bytes(70), "elsewhere");
}

TEST(ImportedPrefix, RefusalsChangeNothing) {
  CacheOptions o = keeping({.kind = Kind::none});
  o.num_blocks = 10;
  Cold cold(o);
  const RequestId source = cold.compute(100);
  const CanonicalImage image = cold.cache.export_image(source);
  const std::vector<std::byte> bytes = cold.cache.export_blocks(source);
  const std::vector<std::int32_t> ids = ids_of(kStream, 100);
  const std::size_t block = static_cast<std::size_t>(cold.cache.schema().block_image_bytes);
  std::vector<std::span<const std::byte>> blocks;
  for (std::size_t i = 0; i < 7; ++i) blocks.push_back(std::span(bytes).subspan(i * block, block));

  Driver d(tiny(), o);
  const PrefixIdentity chain = d.cache.identify_prefix({ids, 0, "salt", {}});
  const RequestId kept = begin(d, kStream, 40).request;
  fill_up(d, kept, kStream, 40);
  d.cache.release(kept);
  const auto import = [&](std::size_t left_out) {
    std::vector<std::span<const std::byte>> some = blocks;
    std::fill_n(some.begin(), left_out, std::span<const std::byte>());
    return d.cache.import_image(image, ids, some, chain);
  };
  expect_refused(ErrorCode::bad_argument, "only the first 2 are kept", [&] { (void)import(3); });
  blocks.pop_back();
  expect_refused(ErrorCode::bad_argument, "need 7 block images; got 6", [&] { (void)import(0); });
  blocks.push_back(std::span(bytes).subspan(6 * block, block));

  // The two published blocks do not make room for the others.
  const RequestId other = begin(d, 3, 64, "other").request;
  fill_up(d, other, 3, 64);
  const Occupancy before = occupancy(d.cache);
  EXPECT_EQ(import(2).error(), Shortage::blocks);
  EXPECT_EQ(occupancy(d.cache), before);
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 6);
  d.cache.release(other);
  expect_same(bytes_of(d.cache, import(2).value()), bytes_of(cold.cache, source), "imported");
}

TEST(ImportedPrefix, AReplayIsNotExportedBeforeItsEnd) {
  const CacheOptions o = keeping({.kind = Kind::none});
  Driver d(tiny(), o);
  const RequestId first = begin(d, kStream, 120).request;
  fill_up(d, first, kStream, 120);
  const Admission a = begin(d, kStream, 100);
  ASSERT_GT(a.resume_at, 0);
  d.run({{a.request, kStream, 10}});
  PreemptedRequest aside(HostMemory(d.backend, 1 << 20));
  expect_refused(ErrorCode::bad_state, "replays its prompt", [&] { preempt(d.cache, a.request, aside); });
  expect_refused(ErrorCode::bad_state, "replays its prompt", [&] { save(d.cache, a.request); });
  EXPECT_EQ(d.cache.rewind_floor(a.request), a.resume_at + 7);
  fill_up(d, a.request, kStream, a.usable_tokens + 1);
  EXPECT_EQ(d.cache.rewind_floor(a.request), a.usable_tokens) << "no window reaches further back";
  fill_up(d, a.request, kStream, 100);
  preempt(d.cache, a.request, aside);
  expect_same(bytes_of(d.cache, resume(d.cache, aside).value()), Cold(o).bytes(100), "resumed");
}

}  // namespace
}  // namespace kv4::test
