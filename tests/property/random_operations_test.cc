// All calls of an engine in random order, against each request's own history computed alone.
#include <cstdlib>
#include <map>

#include "backend/cpu/cpu_backend.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

// The stream of each position of a request.
using History = std::vector<std::uint64_t>;

Bytes computed_alone(const Model& model, CacheOptions options, const History& history) {
  options.max_requests = 1;
  options.spare_slots = 1;
  options.num_blocks = 0;
  options.max_rewind_tokens = 0;
  Driver d(model, options, cpu::make_cpu_backend_on(1, cpu::plain_row_kernels()));
  const RequestId r = d.admit();
  for (std::size_t at = 0; at < history.size();) {
    std::size_t end = at;
    while (end < history.size() && history[end] == history[at]) ++end;
    d.run({{r, history[at], static_cast<std::int32_t>(end - at)}});
    at = end;
  }
  return bytes_of(d.cache, r);
}

class Chaos {
 public:
  Chaos(const Model& model, const CacheOptions& options, std::uint64_t seed)
      : model_(model),
        options_(options),
        random_(seed),
        driver_(model, options, test_backend(static_cast<int>(1 + seed % 3))) {}

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      switch (random_.below(12)) {
        case 0: admit(); break;
        case 1: fork(); break;
        case 2: release(); break;
        case 3: move(); break;
        case 4:
        case 5: rewind(); break;
        case 6: step(true); break;
        default: step(false); break;
      }
      if (i % 25 == 24) check_one();
    }
    while (!live_.empty()) {
      check_one();
      release();
    }
    EXPECT_EQ(driver_.cache.allocator().num_held(), 0);
    EXPECT_EQ(driver_.cache.state_pool().num_free(), driver_.cache.state_pool().num_slots());
    EXPECT_EQ(driver_.cache.num_requests(), 0);
  }

 private:
  using Entry = std::map<RequestId, History>::iterator;

  Entry any() {
    Entry it = live_.begin();
    std::advance(it, random_.below(static_cast<std::int64_t>(live_.size())));
    return it;
  }

  void admit() {
    const Expected<RequestId> r = driver_.cache.admit();
    if (r) live_[*r] = {};
  }

  void fork() {
    if (live_.empty()) return;
    const Entry parent = any();
    const Expected<RequestId> r = driver_.cache.fork(parent->first);
    if (r) live_[*r] = parent->second;
  }

  void release() {
    if (live_.empty()) return;
    const Entry e = any();
    driver_.cache.release(e->first);
    live_.erase(e);
  }

  // Exports a request as bytes and imports them as another request.
  void move() {
    if (live_.empty()) return;
    const Entry e = any();
    const Bytes saved = bytes_of(driver_.cache, e->first);
    const History history = e->second;
    driver_.cache.release(e->first);
    live_.erase(e);
    const Expected<RequestId> r = driver_.cache.import_image(saved.image, saved.token_ids, saved.blocks);
    if (r) live_[*r] = history;  // else blocks shared with a fork no longer fit as copies
  }

  void rewind() {
    if (live_.empty()) return;
    const Entry e = any();
    const std::int64_t floor = driver_.cache.rewind_floor(e->first);
    const std::int64_t to = random_.below(2) ? floor : random_.between(floor, driver_.cache.length(e->first));
    driver_.cache.rewind(e->first, to);
    e->second.resize(static_cast<std::size_t>(to));
  }

  void step(bool aborted) {
    std::vector<Work> work;
    for (const auto& [request, history] : live_) {
      if (random_.below(2)) continue;
      const std::int64_t most = std::min<std::int64_t>(
          random_.below(4) ? 4 : 40, options_.max_context - static_cast<std::int64_t>(history.size()));
      if (most < 1) continue;
      work.push_back({request, random_.next() % 1000, static_cast<std::int32_t>(random_.between(1, most))});
      if (random_.below(5) == 0) work.push_back({kNoRequest, 0, 2});
    }
    if (work.empty()) return;
    const std::int32_t held = driver_.cache.allocator().num_held(), slots = driver_.cache.state_pool().num_free();
    const Expected<Step> prepared = driver_.prepare(work);
    if (!prepared) {  // no room: nothing has changed
      EXPECT_EQ(driver_.cache.allocator().num_held(), held);
      EXPECT_EQ(driver_.cache.state_pool().num_free(), slots);
      return;
    }
    std::vector<const LayerCacheSchema*> layers;
    for (const LayerCacheSchema& layer : driver_.cache.schema().layers)
      if (!aborted || random_.below(2)) layers.push_back(&layer);
    driver_.append_layers(*prepared, layers);
    if (aborted) {
      driver_.cache.abort(*prepared);
      EXPECT_EQ(driver_.cache.allocator().num_held(), held);
      EXPECT_EQ(driver_.cache.state_pool().num_free(), slots);
      return;
    }
    driver_.cache.commit(*prepared);
    for (const Work& w : work)
      if (w.request != kNoRequest)
        live_[w.request].insert(live_[w.request].end(), static_cast<std::size_t>(w.count), w.stream);
  }

  void check_one() {
    if (live_.empty()) return;
    const Entry e = any();
    ASSERT_EQ(driver_.cache.length(e->first), static_cast<std::int64_t>(e->second.size()));
    expect_same(bytes_of(driver_.cache, e->first), computed_alone(model_, options_, e->second),
                "request " + std::to_string(e->first));
  }

  const Model& model_;
  CacheOptions options_;
  Random random_;
  Driver driver_;
  std::map<RequestId, History> live_;
};

TEST(RandomOperations, EveryRequestIsItsOwnHistory) {
  const Model tiny(tiny_config()), transformers(transformers_tiny_config());
  const int seeds = rounds(std::getenv("KV4_TEST_LONG") != nullptr ? 5000 : 200);
  for (int seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(static_cast<std::uint64_t>(seed) + 100);
    const std::vector<FormatCase> cases = format_cases();
    const bool small = random.below(3) == 0;
    CacheOptions o =
        options_for(cases[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(cases.size())))]);
    if (small)
      o.row_format = random.below(2) ? Format::fp8_row : Format::bf16,
      o.index_format = random.below(2) ? Format::nvfp4 : Format::fp8;
    o.block_tokens = static_cast<int>(random.between(1, 3)) * 8;
    o.max_context = random.between(40, 300);
    o.max_requests = static_cast<int>(random.between(1, 6));
    o.spare_slots = static_cast<int>(random.between(1, 3));
    o.num_blocks = random.between(6, 80);
    o.max_rewind_tokens = static_cast<int>(random.between(0, 12));
    o.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    o.arrangement = random.below(2) ? Arrangement::block_major : Arrangement::layer_major;
    Chaos(small ? transformers : tiny, o, static_cast<std::uint64_t>(seed)).run(150);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RandomOperations, OfV41) {
  if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  const Model model(shared_tiny_config());
  const std::vector<FormatCase> cases = shared_format_cases();
  const int seeds = rounds(std::getenv("KV4_TEST_LONG") != nullptr ? 1500 : 60);
  for (int seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(static_cast<std::uint64_t>(seed) + 300);
    CacheOptions o = options_for(cases[static_cast<std::size_t>(seed) % cases.size()]);
    o.block_tokens = static_cast<int>(random.between(1, 8)) * 2;
    o.max_context = random.between(40, 300);
    o.max_requests = static_cast<int>(random.between(1, 6));
    o.spare_slots = static_cast<int>(random.between(1, 3));
    o.num_blocks = random.between(30, 200);
    o.max_rewind_tokens = static_cast<int>(random.between(0, 12));
    o.arrangement = random.below(2) ? Arrangement::block_major : Arrangement::layer_major;
    Chaos(model, o, static_cast<std::uint64_t>(seed)).run(150);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace kv4::test
