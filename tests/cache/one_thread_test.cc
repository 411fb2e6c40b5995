// One thread at a time drives a cache: overlapping calls are refused, later ones are not.
#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <thread>

#include "cache/session_records.h"
#include "cache/small_cache.h"
#include "kv4/preempted_request.h"
#include "kv4/status_folder.h"
#include "kv4/tiered_prefix.h"

namespace kv4::test {
namespace {

using small::expect_error;
using small::SmallCache;

CacheOptions prefix_cache() {
  CacheOptions o = small::options();
  o.prefix.enabled = true;
  o.prefix.weights_id = "weights";
  return o;
}

/// A sink that blocks its thread until the test releases it.
struct Waiting : RecordSink {
  std::latch inside{1}, go_on{1};
  bool first = true;
  void write(std::span<const std::byte>) override {
    if (!std::exchange(first, false)) return;
    inside.count_down();
    go_on.wait();
  }
};

TEST(OneThread, OverlappingCallsAreRefused) {
  SmallCache world(prefix_cache());
  KVCacheManager& cache = world.cache;
  const RequestId request = world.request(1, 40);
  Tiers tiers(cache.schema(), {.host_bytes = 1 << 20});
  TieredPrefix tiered(cache, tiers);
  SessionReceiver receiver(cache, identity());
  std::optional<PrefixLoad> load, ended;
  const std::vector<std::int32_t> ids = small::token_ids(1, 0, 40);
  const Prompt prompt{ids, 0, {}, {}};
  const std::vector<std::int32_t> unknown = small::token_ids(2, 0, 40);
  load.emplace(tiered.start_load({unknown, 0, {}, {}}, std::chrono::steady_clock::now() + std::chrono::hours(1)));
  ended.emplace(tiered.start_load({unknown, 0, {}, {}}, std::chrono::steady_clock::now() + std::chrono::hours(1)));
  ASSERT_EQ(ended->wanted_blocks(), 2);
  (void)ended->advance();  // it holds load memory
  const small::CacheState before = small::state_of(cache, {request});

  Waiting sink;
  std::thread other([&] { EXPECT_TRUE(save_session(cache, request, identity(), sink)); });
  sink.inside.wait();
  const auto refused = [](auto&& call) {
    expect_error(ErrorCode::bad_state, {"another thread", "one thread at a time", "lock"}, call);
  };
  refused([&] { (void)cache.admit(); });
  refused([&] { (void)cache.admit(prompt); });
  refused([&] { cache.release(request); });
  refused([&] { cache.rewind(request, 39); });
  refused([&] { (void)cache.fork(request); });
  refused([&] { (void)world.try_prepare({{request, 1, 1}}); });
  refused([&] { (void)cache.acquire(0); });
  refused([&] { cache.commit({}); });
  refused([&] { cache.abort({}); });
  refused([&] { (void)cache.length(request); });
  refused([&] { (void)cache.token_ids(request); });
  refused([&] { (void)cache.export_image(request); });
  refused([&] { (void)cache.export_blocks(request); });
  refused([&] { (void)cache.statistics(); });
  refused([&] { (void)cache.requests(); });
  refused([&] { (void)cache.find_block({}); });
  refused([&] { cache.invalidate("weights"); });
  refused([&] { cache.set_weights_id("others"); });
  refused([&] { (void)read_status(cache); });
  refused([&] { (void)preempted_bytes(cache, request); });
  refused([&] { (void)tiered.save(1); });
  refused([&] { (void)tiered.load(prompt, std::chrono::steady_clock::now()); });
  refused([&] { (void)tiered.admit(prompt, std::chrono::steady_clock::now()); });
  refused([&] { (void)tiered.statistics(); });
  refused([&] { (void)load->advance(); });
  refused([&] { (void)load->admit(); });
  refused([&] { (void)load->brought_blocks(); });
  refused([&] { (void)load->wanted_blocks(); });
  ended.reset();  // throws nothing: the next call ends it
  refused([&] { (void)receiver.wanted(); });
  refused([&] { (void)receiver.has_offer(); });
  refused([&] { (void)receiver.prompt(); });
  refused([&] { (void)receiver.done_bytes(); });
  refused([&] { (void)receiver.total_bytes(); });
  refused([&] {
    RecordList records;
    save_session(cache, request, identity(), records);
  });
  sink.go_on.count_down();
  other.join();

  EXPECT_EQ(small::state_of(cache, {request}), before);
  while (!load->advance()) std::this_thread::yield();
  EXPECT_EQ(load->brought_blocks(), 0);
  cache.release(request);
}

// A load destroyed during another call leaves that call's data alone; its memory is free after the next call.
TEST(OneThread, ALoadMayEndBesideACall) {
  SmallCache world(prefix_cache());
  const RequestId request = world.request(1, 40);
  Tiers tiers(world.cache.schema(), {.host_bytes = 1 << 20});
  TieredPrefix tiered(world.cache, tiers, {.load_bytes = 1});  // room for two blocks, so one load takes it all
  const std::vector<std::int32_t> ids = small::token_ids(2, 0, 40);
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int i = 0; i < 20; ++i) {
    std::optional<PrefixLoad> load(tiered.start_load({ids, 0, {}, {}}, end));
    Waiting sink;
    std::thread other([&] { EXPECT_TRUE(save_session(world.cache, request, identity(), sink)); });
    sink.inside.wait();
    load.reset();
    sink.go_on.count_down();
    other.join();
    EXPECT_EQ(tiered.load({ids, 0, {}, {}}, end), 0);
  }
  std::atomic<bool> over{false};
  std::atomic<PrefixLoad*> given{nullptr};
  std::thread other([&] {
    while (!over) delete given.exchange(nullptr);
  });
  for (int i = 0; i < 1000; ++i) {
    try {
      auto load = std::make_unique<PrefixLoad>(tiered.start_load({ids, 0, {}, {}}, end));
      (void)load->advance();
      delete given.exchange(load.release());
      (void)tiered.statistics();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_state) << e.what();
    }
  }
  over = true;
  other.join();
  delete given.load();
  EXPECT_EQ(tiered.load({ids, 0, {}, {}}, end), 0);
}

TEST(OneThread, HandlesOfAStepAreRefusedToo) {
  SmallCache world;
  const RequestId saved = world.request(1, 20), request = world.admit();
  const Step step = world.prepare({{request, 2, 3}});
  LayerCacheHandle handle = world.cache.acquire(0);
  Waiting sink;
  std::thread other([&] { EXPECT_TRUE(save_session(world.cache, saved, identity(), sink)); });
  sink.inside.wait();
  std::vector<float> rows(3 * 80);
  expect_error(ErrorCode::bad_state, {"another thread"}, [&] { handle.write_swa({rows.data(), {3, 80}}); });
  expect_error(ErrorCode::bad_state, {"another thread"}, [&] { (void)handle.read_swa_view(); });
  sink.go_on.count_down();
  other.join();
  world.append(step);
  world.cache.commit(step);
}

TEST(OneThread, ACallbackMayCallItsCache) {
  SmallCache world;
  const RequestId request = world.request(1, 40);
  RecordList records;
  int calls = 0;
  const auto progress = [&](std::int64_t, std::int64_t) {
    calls += world.cache.length(request) == 40;
    return true;
  };
  EXPECT_TRUE(save_session(world.cache, request, identity(), records, progress));
  EXPECT_GT(calls, 1);
  world.cache.release(request);
}

TEST(OneThread, ACacheGoesFromThreadToThread) {
  SmallCache world, twin;
  const RequestId request = world.admit(), same = twin.admit();
  for (int i = 0; i < 8; ++i) {
    std::thread([&] { world.run({{request, 1, 9}}); }).join();
    twin.run({{same, 1, 9}});
  }
  small::expect_same_bytes(world.cache, request, twin.cache, same);
}

// After an error, the next call of any thread is accepted.
TEST(OneThread, AnErrorEndsTheCall) {
  SmallCache world;
  expect_error(ErrorCode::bad_argument, {"does not run"}, [&] { world.cache.release(7); });
  std::thread([&] { (void)world.admit(); }).join();
  EXPECT_EQ(world.cache.num_requests(), 1);
}

// Overlapping calls of all kinds: each is made or refused, a refused call can be repeated, and the cache stays intact.
TEST(OneThread, AStorm) {
  SmallCache world;
  const RequestId running = world.request(1, 20);
  const small::CacheState before = small::state_of(world.cache, {running});
  std::atomic<int> made{0};
  const auto work = [&] {
    const auto until_made = [&](auto&& call) {
      for (;; std::this_thread::yield()) {
        try {
          call();
          ++made;
          return;
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), ErrorCode::bad_state) << e.what();
        }
      }
    };
    for (int i = 0; i < 1000; ++i) {
      RequestId request = kNoRequest;
      until_made([&] {
        const Expected<RequestId> admitted = world.cache.admit();
        ASSERT_TRUE(admitted);
        request = *admitted;
      });
      until_made([&] { (void)world.cache.length(running); });
      until_made([&] { world.cache.release(request); });
    }
  };
  std::thread a(work), b(work);
  a.join();
  b.join();
  EXPECT_EQ(made, 2 * 1000 * 3);
  EXPECT_EQ(small::state_of(world.cache, {running}), before);
}

}  // namespace
}  // namespace kv4::test
