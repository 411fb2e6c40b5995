// A store of chunks: the promises of kv4/chunk_store.h, over host memory, a simulated disk, and tiers that fail, hang
// and lie.
#include "kv4/chunk_store.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <map>
#include <string>
#include <string_view>
#include <thread>

#include "kv4/error.h"
#include "support/fake_tier.h"
#include "support/simulated_disk.h"
#include "tier/chunk_store_impl.h"
#include "tier/chunk_values.h"
#include "tier/disk_tier.h"
#include "tier/guarded_tier.h"
#include "tier/host_tier.h"
#include "tier/open_tier.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kLayout = 26;

/// A store over tiers of the test's.
struct Store {
  std::shared_ptr<tier::Clock> clock;
  std::shared_ptr<tier::Wakeup> wakeup = std::make_shared<tier::Wakeup>(clock);
  tier::TierQueueOptions queue;
  std::unique_ptr<ChunkStore> store;

  explicit Store(std::vector<std::shared_ptr<tier::Tier>> tiers,
                 std::shared_ptr<tier::Clock> clock_in = std::make_shared<tier::SteadyClock>(),
                 const ChunkStoreOptions& options = {}, const tier::TierQueueOptions& queue_in = {})
      : clock(std::move(clock_in)), queue(queue_in) {
    queue.on_answer = [wake = wakeup] { wake->notify(); };
    queue.close_limit = 5s;
    tier::TierStack stack;
    for (auto& each : tiers) {
      stack.queues.push_back(std::make_unique<tier::TierQueue>(std::move(each), queue, clock));
      stack.protections.push_back(Protection::none);
    }
    store = ChunkStore::Impl::over(options, std::move(stack), clock, wakeup);
  }
  ChunkStore* operator->() { return store.get(); }

  ChunkStatus put(const std::string& name, const Bytes& value, std::uint64_t tenant = 0) {
    const auto batch = store->put({{.key = key(name), .value = value}}, {.tenant = tenant});
    return store->take(batch, soon()).value().statuses.front();
  }
  /// The value, or the reason why there is none.
  std::pair<ChunkStatus, Bytes> get(const std::string& name, std::uint64_t tenant = 0, std::size_t room = 1 << 17) {
    Bytes to(room, std::byte{0xee});
    const auto batch = store->get({{.key = key(name), .to = to}}, {.tenant = tenant});
    const ChunkResults results = store->take(batch, soon()).value();
    if (results.statuses.front() == ChunkStatus::ok) to.resize(static_cast<std::size_t>(results.bytes.front()));
    return {results.statuses.front(), to};
  }
  void expect(const std::string& name, const Bytes& value, std::uint64_t tenant = 0) {
    const auto [status, got] = get(name, tenant);
    ASSERT_EQ(status, ChunkStatus::ok);
    EXPECT_EQ(got, value);
  }
  ChunkPresence look_up(const std::string& name, std::uint64_t tenant = 0) {
    const ChunkKey one = key(name);
    return store->look_up({&one, 1}, tenant).front();
  }
  ChunkStatus exists(const std::string& name) {
    const ChunkKey one = key(name);
    return store->take(store->exists({&one, 1}), soon()).value().statuses.front();
  }
  ChunkStatus remove(const std::string& name) {
    const ChunkKey one = key(name);
    return store->take(store->remove({&one, 1}), soon()).value().statuses.front();
  }
  std::vector<tier::FlushStatus> flush() { return store->take(store->flush(), soon()).value().flushed; }
};

std::shared_ptr<tier::HostTier> host_tier(std::int64_t bytes = 8 << 20,
                                          std::shared_ptr<tier::Clock> clock = std::make_shared<tier::SteadyClock>()) {
  return std::make_shared<tier::HostTier>(tier::HostTierOptions{kLayout, bytes, 4 << 10}, std::move(clock));
}

tier::StoreOptions disk_options() {
  tier::StoreOptions options;
  options.directory = "store";
  options.layout_id = kLayout;
  options.segment_bytes = 1 << 20;
  options.capacity_bytes = 16 << 20;
  return options;
}

std::shared_ptr<tier::Tier> disk_tier(const std::shared_ptr<SimulatedDisk>& disk) {
  return std::make_shared<tier::DiskTier>(disk, disk_options(), std::make_shared<tier::SteadyClock>());
}

std::shared_ptr<tier::Tier> own_tier(std::shared_ptr<tier::Tier> inner) {
  return std::make_shared<tier::GuardedTier>(std::move(inner), std::make_shared<tier::RecordGuard>(), kLayout);
}

TEST(ChunkStore, GivesBackWhatWasPut) {
  Store store({host_tier(), disk_tier(std::make_shared<SimulatedDisk>(1)), own_tier(std::make_shared<OpenTier>())});
  for (std::int64_t i = 0; i < 40; ++i) ASSERT_EQ(store.put(key_of(i), value_of(i)), ChunkStatus::ok) << i;
  for (std::int64_t i = 0; i < 40; ++i) {
    store.expect(key_of(i), value_of(i));
    EXPECT_EQ(store.look_up(key_of(i)), ChunkPresence::there);
    EXPECT_EQ(store.exists(key_of(i)), ChunkStatus::ok);
  }
  EXPECT_EQ(store.get("another").first, ChunkStatus::missing);
  EXPECT_EQ(store.exists("another"), ChunkStatus::missing);
  EXPECT_EQ(store.get(key_of(5), 1).first, ChunkStatus::missing);  // of another tenant
  EXPECT_EQ(store.remove(key_of(5)), ChunkStatus::ok);
  EXPECT_EQ(store.get(key_of(5)).first, ChunkStatus::missing);
  ASSERT_EQ(store.put(key_of(6), value_of(1006)), ChunkStatus::ok);
  store.expect(key_of(6), value_of(1006));
  store.expect(key_of(7), value_of(7));
}

// A get sees everything that was begun before it, and perhaps what was begun later.
TEST(ChunkStore, OrderIsKeptWithoutWaiting) {
  Store store({host_tier(), disk_tier(std::make_shared<SimulatedDisk>(2))});
  const std::string name = "the key";
  const ChunkKey one = key(name);
  const auto result = [&](std::uint64_t batch, Bytes& to) {
    const ChunkResults got = store->take(batch, soon()).value();
    to.resize(static_cast<std::size_t>(got.bytes.front()));
    return got.statuses.front();
  };
  for (std::uint64_t round = 0; round < 100; ++round) {
    const Bytes first = value_of(round), second = value_of(round + 1000);
    Bytes before(1 << 17), after(1 << 17);
    (void)store->put({{.key = one, .value = first}});
    EXPECT_EQ(store.look_up(name), ChunkPresence::there);
    const auto get_first = store->get({{.key = one, .to = before}});
    (void)store->put({{.key = one, .value = second}});
    const auto get_second = store->get({{.key = one, .to = after}});
    ASSERT_EQ(result(get_first, before), ChunkStatus::ok);
    EXPECT_TRUE(before == first || before == second);
    ASSERT_EQ(result(get_second, after), ChunkStatus::ok);
    EXPECT_EQ(after, second);
    (void)store->remove({&one, 1});
    EXPECT_EQ(store.look_up(name), ChunkPresence::absent);
    EXPECT_EQ(store.exists(name), ChunkStatus::missing);
    (void)store->drain();
  }
}

TEST(ChunkStore, ValuesInPiecesAndRegisteredMemory) {
  Store store({host_tier(), disk_tier(std::make_shared<SimulatedDisk>(3))});
  Bytes memory = random_bytes(1, 1 << 20);
  std::fill(memory.begin() + 300'000, memory.begin() + 350'000, std::byte{0});
  const Bytes original = memory;
  auto owner = std::make_shared<int>(1);
  const std::uint64_t region = store->add_memory(memory, owner);
  const auto part = [&](std::size_t from, std::size_t bytes) { return std::span(memory).subspan(from, bytes); };
  // Registered, plain and trimmed; in pieces; at both ends of the region.
  const std::span<const std::byte> pieces[] = {part(0, 100), {}, part(5000, 1), part(200'000, 70'000)};
  const auto batch = store->put({{.key = bytes_of("a"), .value = part(0, 300'000)},
                                 {.key = bytes_of("b"), .value = part(290'000, 70'000)},
                                 {.key = bytes_of("c"), .pieces = pieces},
                                 {.key = bytes_of("d"), .value = part((1 << 20) - 10, 10)},
                                 {.key = bytes_of("e"), .value = {}}});
  EXPECT_TRUE(store->take(batch, soon()).value().all_ok());
  Bytes gathered(memory.begin(), memory.begin() + 100);
  gathered.push_back(memory[5000]);
  gathered.insert(gathered.end(), memory.begin() + 200'000, memory.begin() + 270'000);
  store.expect("c", gathered);
  store.expect("b", Bytes(memory.begin() + 290'000, memory.begin() + 360'000));
  store.expect("e", {});

  std::fill(memory.begin(), memory.end(), std::byte{0xcc});
  Bytes left(13), right(1 << 20);
  const std::span<std::byte> to[] = {left, {}, right};
  const auto gets = store->get({{.key = bytes_of("a"), .to = part(4096, 300'000)},
                                {.key = bytes_of("b"), .to = part(400'000, 70'001)},
                                {.key = bytes_of("c"), .pieces = to},
                                {.key = bytes_of("d"), .to = part(0, 9)},
                                {.key = bytes_of("e"), .to = {}}});
  const ChunkResults got = store->take(gets, soon()).value();
  EXPECT_EQ(got.statuses,
            (std::vector{ChunkStatus::ok, ChunkStatus::ok, ChunkStatus::ok, ChunkStatus::too_small, ChunkStatus::ok}));
  EXPECT_EQ(got.bytes, (std::vector<std::int64_t>{300'000, 70'000, 70'101, 10, 0}));
  EXPECT_TRUE(std::equal(memory.begin() + 4096, memory.begin() + 304'096, original.begin()));
  EXPECT_TRUE(std::equal(memory.begin() + 400'000, memory.begin() + 470'000, original.begin() + 290'000));
  EXPECT_EQ(memory[470'000], std::byte{0xcc});  // room behind the value
  left.insert(left.end(), right.begin(), right.begin() + static_cast<std::ptrdiff_t>(gathered.size() - 13));
  EXPECT_EQ(left, gathered);

  EXPECT_EQ(store->report().memory_in_use, 0);
  EXPECT_GT(store->report().trimmed_bytes, 49'000);
  EXPECT_TRUE(store->remove_memory(region));
  EXPECT_EQ(owner.use_count(), 1);
  EXPECT_FALSE(store->remove_memory(region));
  EXPECT_FALSE(store->remove_memory(77));
}

TEST(ChunkStore, EventFdTellsOfEndedBatches) {
  Store store({host_tier()});
  const auto readable = [&](int ms) {
    pollfd wait{store->event_fd(), POLLIN, 0};
    return ::poll(&wait, 1, ms) == 1;
  };
  EXPECT_FALSE(readable(0));
  EXPECT_FALSE(store->wait(std::chrono::steady_clock::now()));
  const Bytes value = random_bytes(1, 100);
  const auto first = store->put({{.key = bytes_of("a"), .value = value}});
  const auto second = store->put({{.key = bytes_of("b"), .value = value}});
  EXPECT_LT(first, second);
  EXPECT_TRUE(readable(30'000));
  EXPECT_TRUE(store->wait(soon()));
  EXPECT_TRUE(store->take(second, soon()).value().all_ok());
  EXPECT_TRUE(store->take(first, soon()).value().all_ok());
  EXPECT_FALSE(readable(0));
  EXPECT_FALSE(store->take(first, soon()));  // was taken: no wait
  const auto third = store->put({{.key = bytes_of("c"), .value = value}});
  EXPECT_TRUE(readable(30'000));
  const std::vector<ChunkResults> ended = store->drain();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended.front().batch, third);
  EXPECT_EQ(ended.front().action, ChunkAction::put);
  EXPECT_FALSE(readable(0));
}

void expect_refused(Store& store, std::string_view text, const std::function<void()>& call) {
  const auto before = store->report();
  try {
    call();
    FAIL() << "no error: " << text;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_NE(std::string_view(e.what()).find(text), std::string_view::npos) << e.what();
  }
  EXPECT_EQ(store->report().open_chunks, before.open_chunks);
}

TEST(ChunkStore, BadInputChangesNothing) {
  Store store({host_tier()});
  const Bytes value = random_bytes(1, 100);
  const std::string longest(256, 'k'), longer(257, 'k');
  Bytes to(100);
  const std::vector<std::span<const std::byte>> many(1025, std::span<const std::byte>(value).first(1));
  expect_refused(store, "a key of 0 bytes; it may have 1 to 256",
                 [&] { (void)store->put({{.key = {}, .value = value}}); });
  expect_refused(store, "chunk 1: a key of 257 bytes", [&] {
    (void)store->put({{.key = bytes_of(longest), .value = value}, {.key = bytes_of(longer), .value = value}});
  });
  expect_refused(store, "a key of 257", [&] { (void)store->get({{.key = bytes_of(longer), .to = to}}); });
  expect_refused(store, "1025 pieces; 1024", [&] { (void)store->put({{.key = bytes_of("a"), .pieces = many}}); });
  expect_refused(store, "whole and in", [&] {
    (void)store->put({{.key = bytes_of("a"), .value = value, .pieces = std::span(many).first(1)}});
  });
  // 64 MiB and one byte, without taking so much memory: pieces may repeat.
  const Bytes large((1 << 20) + 1);
  const std::vector<std::span<const std::byte>> beyond(64, large);
  expect_refused(store, "a value of 67108928 bytes; it may have 67108864",
                 [&] { (void)store->put({{.key = bytes_of("a"), .pieces = beyond}}); });
  expect_refused(store, "a timeout", [&] { (void)store->flush({.timeout = -1s}); });
  expect_refused(store, "a key of 0", [&] {
    const ChunkKey none;
    (void)store->look_up({&none, 1});
  });
  const std::vector<ChunkKey> batch(65'537, bytes_of("a"));
  expect_refused(store, "a batch of 65537 chunks; 65536", [&] { (void)store->exists(batch); });
  EXPECT_EQ(store.look_up("a"), ChunkPresence::absent);
  EXPECT_THROW(ChunkStore({.tiers = {.host_bytes = 1 << 20}, .host_page_bytes = 100}), Error);
  EXPECT_THROW(ChunkStore({.tiers = {.host_bytes = 1 << 20}, .space = std::string(257, 's')}), Error);
  EXPECT_THROW(ChunkStore({.tiers = {.host_bytes = 1 << 20}, .max_chunks = 0}), Error);
  EXPECT_THROW(ChunkStore(ChunkStoreOptions{}), Error);
  EXPECT_EQ(store.put(longest, value), ChunkStatus::ok);
  store.expect(longest, value);
}

TEST(ChunkStore, TooMuchIsRefusedAtOnce) {
  auto clock = std::make_shared<ManualClock>();
  auto fake = std::make_shared<FakeTier>(clock);
  fake->hold();
  tier::TierQueueOptions queue;
  queue.max_write_bytes = 64 << 10;
  Store store({own_tier(fake)}, clock, {.max_chunks = 20}, queue);
  const Bytes value = random_bytes(1, 20'000);
  std::vector<std::uint64_t> batches;
  for (int i = 0; i < 20; ++i) batches.push_back(store->put({{.key = key(key_of(i)), .value = value}}));
  const auto beyond = store->put({{.key = bytes_of("beyond"), .value = value}});
  EXPECT_EQ(store->take(beyond, clock->in(30s)).value().statuses.front(), ChunkStatus::refused);
  EXPECT_EQ(store.look_up("beyond"), ChunkPresence::unknown);
  fake->release();
  int ok = 0, refused = 0;
  for (const auto batch : batches) {
    const ChunkStatus status = store->take(batch, clock->in(30s)).value().statuses.front();
    ok += status == ChunkStatus::ok;
    refused += status == ChunkStatus::refused;
  }
  EXPECT_GE(ok, 2);
  EXPECT_EQ(ok + refused, 20);
  EXPECT_GT(refused, 0);  // 20,000 bytes each in 64 KiB
  EXPECT_EQ(store->report().refused, refused + 1);
}

// A tier that never answers: batches end at their deadlines, and nobody waits for it.
TEST(ChunkStore, DeadlinesAreKeptFromOutside) {
  auto clock = std::make_shared<ManualClock>();
  auto fake = std::make_shared<FakeTier>(clock);
  Store store({own_tier(fake)}, clock);
  Bytes memory(8192, std::byte{1}), plain(4096, std::byte{2});
  const auto region = store->add_memory(memory);
  fake->hold();
  const auto put = store->put({{.key = bytes_of("a"), .value = random_bytes(1, 500)}}, {.timeout = 10ms});
  fake->wait_for_calls(1);
  const auto get = store->get({{.key = bytes_of("b"), .to = plain}}, {.timeout = 10ms});
  const auto registered = store->get({{.key = bytes_of("b"), .to = memory}}, {.timeout = 10ms});
  const auto exists = store->exists(std::vector<ChunkKey>{bytes_of("b")}, {.timeout = 10ms});
  fake->wait_for_calls(2);
  clock->advance(20ms);
  for (const auto batch : {put, get, exists}) {
    const auto results = store->take(batch, clock->in(30s));
    ASSERT_TRUE(results);
    EXPECT_EQ(results->statuses.front(), ChunkStatus::failed);
  }
  EXPECT_EQ(plain, Bytes(4096, std::byte{2}));
  // Registered memory is the store's until the tier comes back, if the tier was asked with it.
  fake->release();
  const auto late = store->take(registered, clock->in(30s));
  ASSERT_TRUE(late);
  EXPECT_EQ(late->statuses.front(), ChunkStatus::failed);
  EXPECT_TRUE(store->remove_memory(region));
}

/// Writes to the memory of a get after the caller was told to stop.
class LateTier final : public tier::Tier {
 public:
  std::atomic<bool> asked{false}, go{false};
  const char* name() const override { return "late"; }
  void put(std::span<tier::PutRequest>, tier::Deadline) override {}
  void get(std::span<tier::GetRequest> requests, tier::Deadline) override {
    asked = true;
    while (!go) std::this_thread::yield();
    for (tier::GetRequest& request : requests)
      if (!request.to.empty()) request.to.front() = std::byte{0x66};
  }
  void exists(std::span<tier::ExistsRequest>, tier::Deadline) override {}
  void remove(std::span<tier::RemoveRequest>, tier::Deadline) override {}
  tier::FlushStatus flush(tier::Deadline) override { return tier::FlushStatus::kept; }
  tier::TierStats stats() override { return {}; }
};

TEST(ChunkStore, RegisteredMemoryIsTheStoresUntilTheTierComesBack) {
  auto clock = std::make_shared<ManualClock>();
  auto late = std::make_shared<LateTier>();
  Store store({late}, clock);
  Bytes memory(4096, std::byte{1}), plain(4096, std::byte{2});
  const auto region = store->add_memory(memory);
  const auto get =
      store->get({{.key = bytes_of("a"), .to = memory}, {.key = bytes_of("b"), .to = plain}}, {.timeout = 10ms});
  while (!late->asked) std::this_thread::yield();
  clock->advance(1s);
  EXPECT_FALSE(store->take(get, clock->now()));  // not ended
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(store->take(get, clock->now()));
  EXPECT_FALSE(store->remove_memory(region));
  EXPECT_GT(store->report().memory_in_use, 0);
  late->go = true;
  ASSERT_TRUE(store->take(get, clock->in(30s)));
  EXPECT_EQ(memory.front(), std::byte{0x66});  // the tier wrote, and nobody was told that the memory is free
  EXPECT_EQ(plain, Bytes(4096, std::byte{2}));
  EXPECT_TRUE(store->remove_memory(region));
}

TEST(ChunkStore, AFailingTierCostsHitsOnly) {
  auto clock = std::make_shared<ManualClock>();
  auto fake = std::make_shared<FakeTier>(clock);
  Store store({own_tier(fake), host_tier(8 << 20, clock)}, clock);
  const auto put = [&](const std::string& name, const Bytes& value) {
    return store->take(store->put({{.key = key(name), .value = value}}), clock->in(30s)).value().statuses.front();
  };
  const auto get = [&](const std::string& name) {
    Bytes to(1 << 16);
    const ChunkResults r = store->take(store->get({{.key = key(name), .to = to}}), clock->in(30s)).value();
    to.resize(static_cast<std::size_t>(r.bytes.front()));
    return std::pair(r.statuses.front(), to);
  };
  fake->fail(true);
  for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(put(key_of(i), value_of(i)), ChunkStatus::ok) << i;
  for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(get(key_of(i)), std::pair(ChunkStatus::ok, value_of(i))) << i;
  EXPECT_TRUE(store->report().tiers.front().open);
  fake->fail(false);
  clock->advance(1h);
  EXPECT_EQ(get(key_of(3)), std::pair(ChunkStatus::ok, value_of(3)));
}

// A put is `ok` where one tier has it. A flush tells of each tier whether it has everything.
TEST(ChunkStore, AFlushTellsOfPutsThatATierLacks) {
  auto clock = std::make_shared<ManualClock>();
  auto fake = std::make_shared<FakeTier>(clock);
  Store store({host_tier(8 << 20, clock), own_tier(fake)}, clock);
  const Bytes value = random_bytes(1, 100);
  const auto put = [&] {
    return store->take(store->put({{.key = bytes_of("a"), .value = value}}), clock->in(30s)).value().statuses.front();
  };
  const auto flush = [&] { return store->take(store->flush(), clock->in(30s)).value(); };
  using Flushed = std::vector<tier::FlushStatus>;
  EXPECT_EQ(put(), ChunkStatus::ok);
  EXPECT_EQ(flush().flushed, (Flushed{tier::FlushStatus::kept, tier::FlushStatus::durable}));
  fake->fail(true);
  while (!store->report().tiers.back().open) ASSERT_EQ(put(), ChunkStatus::ok);
  fake->fail(false);
  EXPECT_FALSE(flush().all_ok());
  EXPECT_EQ(put(), ChunkStatus::ok);  // the breaker is open: the tier is not even asked
  clock->advance(1h);
  EXPECT_EQ(flush().flushed, (Flushed{tier::FlushStatus::kept, tier::FlushStatus::failed}));
  EXPECT_EQ(put(), ChunkStatus::ok);
  EXPECT_EQ(flush().flushed, (Flushed{tier::FlushStatus::kept, tier::FlushStatus::durable}));
}

// Whatever a tier of the caller's answers, a value is what was put under its key or a miss.
TEST(ChunkStore, ATierThatLiesGivesMisses) {
  auto open = std::make_shared<OpenTier>();
  Store store({own_tier(open)});
  const Bytes plain = random_bytes(1, 3000);
  Bytes zeros = plain;
  std::fill(zeros.begin() + 500, zeros.end(), std::byte{0});
  ASSERT_EQ(store.put("plain", plain), ChunkStatus::ok);
  ASSERT_EQ(store.put("zeros", zeros), ChunkStatus::ok);
  const tier::RecordId plain_id{0, tier::chunk_id(bytes_of("plain"))}, zeros_id{0, tier::chunk_id(bytes_of("zeros"))};
  const Bytes sound = open->value(zeros_id), other = open->value(plain_id);
  ASSERT_LT(sound.size(), 1100u);  // trimmed, with a header of 512
  for (const bool views : {false, true}) {
    open->give_views(views);
    store.expect("zeros", zeros);
    open->plant(zeros_id, other);  // another key's record
    EXPECT_EQ(store.get("zeros").first, ChunkStatus::missing);
    Random random(5);
    for (int i = 0; i < 300; ++i) {
      Bytes damaged = sound;
      damaged[static_cast<std::size_t>(random.below(std::ssize(damaged)))] ^=
          static_cast<std::byte>(1 << random.below(8));
      open->plant(zeros_id, damaged);
      ASSERT_EQ(store.get("zeros").first, ChunkStatus::missing) << i;
    }
    // A sound header of no chunk, over the same bytes.
    Bytes unlabelled = sound;
    tier::RecordHeader header = tier::parse_header(sound).header;
    header.label.reset();
    tier::encode_header(header, unlabelled);
    open->plant(zeros_id, unlabelled);
    EXPECT_EQ(store.get("zeros").first, ChunkStatus::missing);
    // A sound record whose runs make no value: only a writer without need of a key can make it.
    Bytes forged(512 + 40, std::byte{0xff});
    header = tier::parse_header(sound).header;
    header.length = 40;
    header.payload_digest = digest128(std::span<const std::byte>(forged).subspan(512));
    tier::encode_header(header, forged);
    open->plant(zeros_id, forged);
    EXPECT_EQ(store.get("zeros").first, ChunkStatus::missing);
    for (const std::int64_t length : {-1L, 0L, 1L, 511L, 512L, 1L << 40}) {
      open->plant(zeros_id, sound);
      open->lie(length);
      EXPECT_EQ(store.get("zeros").first, ChunkStatus::missing) << length;
      open->lie({});
    }
    open->plant(zeros_id, sound);
    store.expect("zeros", zeros);
  }
  EXPECT_GE(store->report().damaged, 2);
}

TEST(ChunkStore, FlippedBitsOnTheDiskAreMisses) {
  auto disk = std::make_shared<SimulatedDisk>(4);
  Random random(8);
  for (int round = 0; round < 30; ++round) {
    Store store({disk_tier(disk)});
    for (std::int64_t i = 0; i < 12; ++i) ASSERT_EQ(store.put(key_of(i), value_of(i + 100 * round)), ChunkStatus::ok);
    disk->damage(static_cast<int>(random.between(1, 400)));
    for (std::int64_t i = 0; i < 12; ++i) {
      const auto [status, value] = store.get(key_of(i));
      if (status == ChunkStatus::ok) {
        ASSERT_EQ(value, value_of(i + 100 * round)) << i;
      } else {
        ASSERT_EQ(status, ChunkStatus::missing);
      }
    }
  }
}

TEST(ChunkStore, AFullDiskIsNoSpace) {
  auto disk = std::make_shared<SimulatedDisk>(5);
  disk->set_capacity(0);
  Store store({disk_tier(disk)});
  EXPECT_EQ(store.put("a", random_bytes(1, 1000)), ChunkStatus::no_space);
  EXPECT_EQ(store.get("a").first, ChunkStatus::missing);
  disk->set_capacity(4 << 20);
  EXPECT_EQ(store.put("a", random_bytes(2, 1000)), ChunkStatus::ok);
  store.expect("a", random_bytes(2, 1000));
  EXPECT_EQ(store.put("b", random_bytes(2, 2 << 20)), ChunkStatus::too_large);  // than a segment
}

TEST(ChunkStore, CapacityIsKeptByEviction) {
  Store store({host_tier(256 << 10), disk_tier(std::make_shared<SimulatedDisk>(6))});
  const auto name = [](std::int64_t i) { return "key " + std::to_string(i); };
  for (std::int64_t i = 0; i < 3000; ++i) ASSERT_EQ(store.put(name(i), random_bytes(i, 12'000)), ChunkStatus::ok) << i;
  (void)store.flush();
  const ChunkStoreReport report = store->report();
  ASSERT_EQ(report.tiers.size(), 2u);
  EXPECT_GT(report.tiers[0].tier.evicted_records, 2900);
  EXPECT_GT(report.tiers[1].tier.evicted_records, 1000);
  EXPECT_LE(report.tiers[1].tier.payload_bytes, 16 << 20);
  store.expect(name(2999), random_bytes(2999, 12'000));
  EXPECT_EQ(store.get(name(0)).first, ChunkStatus::missing);
}

TEST(ChunkStore, AHitBelowIsPutAbove) {
  auto disk = std::make_shared<SimulatedDisk>(7);
  {
    Store store({disk_tier(disk)});
    for (std::int64_t i = 0; i < 9; ++i) ASSERT_EQ(store.put(key_of(i), value_of(i)), ChunkStatus::ok);
  }
  Store store({host_tier(), disk_tier(disk)});
  Bytes memory(1 << 17);
  (void)store->add_memory(memory);
  for (std::int64_t i = 0; i < 9; ++i) {
    if (i % 2 == 0) {  // also into registered memory, which is the caller's again at once
      const ChunkResults got = store->take(store->get({{.key = key(key_of(i)), .to = memory}}), soon()).value();
      ASSERT_TRUE(got.all_ok());
      EXPECT_TRUE(
          std::ranges::equal(std::span(memory).first(static_cast<std::size_t>(got.bytes.front())), value_of(i)));
      std::fill(memory.begin(), memory.end(), std::byte{0xdd});
    } else {
      store.expect(key_of(i), value_of(i));
    }
  }
  (void)store.flush();
  for (std::int64_t i = 0; i < 9; ++i) store.expect(key_of(i), value_of(i));
  const ChunkStoreReport report = store->report();
  EXPECT_EQ(report.tiers[0].promoted, 9);
  EXPECT_EQ(report.tiers[0].hits, 9);
  EXPECT_EQ(report.tiers[1].hits, 9);
}

// Any sequence of operations against a map, with crashes of the disk between: what was flushed is there, and no value
// is wrong.
void run_against_a_map(std::uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  auto disk = std::make_shared<SimulatedDisk>(seed);
  std::map<std::int64_t, std::vector<std::int64_t>> may;  // by key: versions that may be there; -1: none
  constexpr std::int64_t kKeys = 12;
  for (std::int64_t k = 0; k < kKeys; ++k) may[k] = {-1};
  std::int64_t version = 0;
  Bytes memory(1 << 18);
  const auto value = [&](std::int64_t v) { return value_of(static_cast<std::uint64_t>(v) + seed * 100'000); };
  for (int life = 0; life < 3; ++life) {
    std::vector<std::shared_ptr<tier::Tier>> tiers{disk_tier(disk)};
    if (random.below(2) == 0) tiers.insert(tiers.begin(), host_tier(random.between(1, 40) << 14));
    Store store(std::move(tiers));
    (void)store->add_memory(memory);
    for (int i = 0; i < 60; ++i) {
      const std::int64_t k = random.below(kKeys);
      const std::string text = key_of(k);
      switch (random.below(8)) {
        case 0:
        case 1:
        case 2: {
          const Bytes bytes = value(++version);
          ChunkPut chunk{.key = key(text), .value = bytes};
          if (random.below(2) == 0) {
            std::copy(bytes.begin(), bytes.end(), memory.begin());
            chunk.value = std::span(memory).first(bytes.size());
          }
          ASSERT_TRUE(store->take(store->put({chunk}), soon()).value().all_ok());
          may[k] = {version};
          break;
        }
        case 3:
          ASSERT_EQ(store.remove(text), ChunkStatus::ok);
          may[k] = {-1};
          break;
        case 4: ASSERT_EQ(store.flush().back(), tier::FlushStatus::durable); break;
        default: {
          const auto [status, bytes] = store.get(text);
          const std::int64_t known = may[k].back();
          if (known >= 0) {
            ASSERT_TRUE(status == ChunkStatus::ok && bytes == value(known)) << "key " << k;
          } else {
            ASSERT_EQ(status, ChunkStatus::missing);
          }
          EXPECT_EQ(store.look_up(text), status == ChunkStatus::ok ? ChunkPresence::there : ChunkPresence::absent);
        }
      }
    }
    ASSERT_EQ(store.flush().back(), tier::FlushStatus::durable);
    std::map<std::int64_t, std::vector<std::int64_t>> after = may;
    for (int i = 0; i < 10; ++i) {  // not flushed: the old or the new value, or none
      const std::int64_t k = random.below(kKeys);
      ASSERT_EQ(store.put(key_of(k), value(++version)), ChunkStatus::ok);
      after[k].push_back(version);
    }
    disk->crash();
    disk->fail_all(true);  // the process does nothing more
    (void)store->close(soon());
    store.store.reset();
    disk->fail_all(false);
    may = after;
    Store again({disk_tier(disk)});
    for (std::int64_t k = 0; k < kKeys; ++k) {
      const auto [status, bytes] = again.get(key_of(k));
      const auto fits = [&value, is_there = status == ChunkStatus::ok, &stored = bytes](std::int64_t v) {
        return v < 0 ? !is_there : is_there && stored == value(v);
      };
      const auto found = std::find_if(may[k].begin(), may[k].end(), fits);
      ASSERT_NE(found, may[k].end()) << "key " << k << ", life " << life << ", status " << to_string(status)
                                     << ", versions " << testing::PrintToString(may[k]) << " of " << version;
      may[k] = {*found};
    }
  }
}

TEST(ChunkStore, MatchesAMapThroughCrashes) {
  const std::uint64_t seeds = std::getenv("KV4_TEST_LONG") != nullptr ? 300 : 15;
  for (std::uint64_t seed = 1; seed <= seeds && !testing::Test::HasFailure(); ++seed) run_against_a_map(seed);
}

TEST(ChunkStore, ManyThreads) {
  Store store({host_tier(64 << 20), disk_tier(std::make_shared<SimulatedDisk>(9))});
  std::vector<std::thread> threads;
  for (std::int64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::int64_t i = 0; i < 60; ++i) {
        const std::string name = key_of(t * 1000 + i);
        EXPECT_EQ(store.put(name, value_of(t * 1000 + i), t), ChunkStatus::ok);
        store.expect(name, value_of(t * 1000 + i), t);
        EXPECT_EQ(store.look_up(name, t), ChunkPresence::there);
        EXPECT_EQ(store.look_up(name, t + 10), ChunkPresence::absent);
        if (i % 20 == 0) (void)store->report();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->report().hits, 240);
  EXPECT_EQ(store->report().open_chunks, 0);
}

TEST(ChunkStore, CloseEndsEverything) {
  auto clock = std::make_shared<ManualClock>();
  auto fake = std::make_shared<FakeTier>(clock);
  Store store({own_tier(fake)}, clock);
  fake->hold();
  const Bytes value = random_bytes(1, 100);
  const auto put = store->put({{.key = bytes_of("a"), .value = value}});
  fake->wait_for_calls(1);
  std::thread later([&] {
    std::this_thread::sleep_for(20ms);
    clock->advance(1min);
  });
  EXPECT_EQ(store->close(clock->in(1s)).front(), tier::FlushStatus::failed);
  later.join();
  EXPECT_EQ(store->take(put, clock->in(1s)).value().statuses.front(), ChunkStatus::failed);
  const auto refused = store->put({{.key = bytes_of("b"), .value = value}});
  EXPECT_EQ(store->take(refused, clock->in(1s)).value().statuses.front(), ChunkStatus::refused);
  EXPECT_EQ(store->close(clock->in(1s)).front(), tier::FlushStatus::failed);
  fake->release();
}

}  // namespace
}  // namespace kv4::test
