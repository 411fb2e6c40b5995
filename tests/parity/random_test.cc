// CPU against GPU: all calls of an engine in random order, step by step on both.
#include <cstdlib>
#include <set>

#include "parity/twin_caches.h"

namespace kv4::test {
namespace {

bool long_run() { return std::getenv("KV4_TEST_LONG") != nullptr; }

DType any_float(Random& random) { return random.below(2) ? DType::f32 : DType::bf16; }

class RandomTwins {
 public:
  RandomTwins(const Model& model, const CacheOptions& options, const InputStyle& style, std::uint64_t seed)
      : options_(options), random_(seed), twins_(model, options, style) {}

  void run(int operations, std::int64_t longest) {
    for (int i = 0; i < operations && !testing::Test::HasFailure(); ++i) {
      switch (random_.below(14)) {
        case 0:
        case 1: admit(); break;
        case 2: fork(); break;
        case 3:
          if (random_.below(3) == 0) release();
          break;
        case 4: exchange(); break;
        case 5: rewind(); break;
        case 6: step(longest, true, 0); break;
        case 7:
          if (options_.draft_layers > 0) step(6, false, static_cast<int>(random_.between(1, options_.draft_layers)));
          break;
        default: step(longest, false, 0); break;
      }
      if (i % 10 == 9 && !live_.empty()) twins_.check(any(), "operation " + std::to_string(i));
    }
    for (RequestId r : live_) twins_.check(r, "at the end");
    twins_.check_blocks("at the end");
  }

 private:
  RequestId any() {
    auto it = live_.begin();
    std::advance(it, random_.below(static_cast<std::int64_t>(live_.size())));
    return *it;
  }

  void admit() {
    const Expected<RequestId> a = twins_.cpu.cache.admit(), b = twins_.gpu.cache.admit();
    ASSERT_EQ(a.error(), b.error());
    if (a) live_.insert(*a);
  }
  void fork() {
    if (live_.empty()) return;
    if (const Expected<RequestId> r = twins_.fork(any())) live_.insert(*r);
  }
  void release() {
    if (live_.empty()) return;
    const RequestId r = any();
    twins_.release(r);
    live_.erase(r);
  }
  void exchange() {
    if (live_.empty()) return;
    const RequestId r = any();
    live_.erase(r);
    if (const Expected<RequestId> moved = twins_.exchange(r)) live_.insert(*moved);
  }
  void rewind() {
    if (live_.empty()) return;
    const RequestId r = any();
    const int group = static_cast<int>(random_.below(options_.draft_layers + 1));
    const std::int64_t floor = twins_.cpu.cache.rewind_floor(r, group), length = twins_.length(r, group);
    twins_.rewind(r, random_.below(2) ? floor : random_.between(floor, length), group);
  }

  // Takes some of the live requests, with chunks, decodes and padding between them.
  void step(std::int64_t longest, bool dropped, int group) {
    std::vector<Work> work;
    std::int64_t room = options_.max_step_tokens;
    const auto take = [&](RequestId r, std::int64_t limit) {
      limit = std::min({limit, room, options_.max_context - (r == kNoRequest ? 0 : twins_.length(r, group))});
      if (limit < 1) return;
      work.push_back({r, random_.next() % 1000, static_cast<std::int32_t>(random_.between(1, limit))});
      room -= work.back().count;
    };
    for (RequestId r : live_) {
      if (random_.below(3) == 0) continue;
      take(r, random_.below(3) == 0 ? longest : random_.below(2) ? 1 : options_.max_rewind_tokens + 2);
      if (random_.below(4) == 0) take(kNoRequest, 4);
    }
    if (work.empty()) return;
    const Expected<Step> prepared = twins_.prepare(work, group);
    if (!prepared) return;
    if (random_.below(10) == 0) twins_.write_and_flush(*prepared, random_);
    std::vector<const LayerCacheSchema*> layers = twins_.layers(*prepared);
    if (dropped) std::erase_if(layers, [&](const LayerCacheSchema*) { return random_.below(2) == 0; });
    twins_.append(*prepared, layers);
    if (random_.below(6) == 0) twins_.check_gathers(*prepared, random_.next(), "gathers");
    if (random_.below(8) == 0) twins_.check_views(*prepared, "views");
    dropped ? twins_.abort(*prepared) : twins_.commit(*prepared);
  }

  CacheOptions options_;
  Random random_;
  TwinCaches twins_;
  std::set<RequestId> live_;
};

void run_seeds(const ModelConfig& config, int seeds, int operations, std::int64_t longest, bool any_tile) {
  const Model model(config);
  for (int seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(static_cast<std::uint64_t>(seed) + 7000);
    const Format rows[] = {Format::fp8_row, Format::bf16, Format::fp8_tile64},
                 keys[] = {Format::nvfp4, Format::fp8, Format::bf16, Format::mxfp4};
    CacheOptions o;
    o.row_format = rows[random.below(any_tile ? 3 : 2)];
    o.index_format = keys[random.below(any_tile ? 4 : 3)];
    o.hadamard = random.below(2);
    o.pending_dtype = any_float(random);
    o.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    o.arrangement = random.below(2) ? Arrangement::block_major : Arrangement::layer_major;
    o.page_alignment = random.below(2) ? 64 : 576;
    o.index_global_scale = random.below(2) ? 1.0f : 0.0625f;
    o.block_tokens = config.hca_ratio * static_cast<int>(random.between(1, 3));
    o.max_rewind_tokens = static_cast<int>(random.below(2) ? random.between(0, 12) : 3 * random.below(2));
    o.draft_layers = static_cast<int>(random.below(3));
    o.max_requests = static_cast<int>(random.between(1, 6));
    o.spare_slots = static_cast<int>(random.between(0, 3));
    o.max_context = 10 * longest;
    o.num_blocks = random.between(8, 60);
    o.max_step_tokens = static_cast<int>(3 * longest);
    InputStyle style;
    style.raw_type = any_float(random);
    style.type = any_float(random);
    style.index_type = random.below(3) ? style.type : any_float(random);
    style.projection = random.below(2);
    style.gap = random.below(3) == 0 ? random.between(1, 9) : 0;
    style.specials = random.below(4) == 0;
    RandomTwins(model, o, style, static_cast<std::uint64_t>(seed)).run(operations, longest);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ParityRandom, TinyWidths) {
  KV4_NEEDS_DEVICE();
  run_seeds(tiny_config(), long_run() ? 1000 : 60, 120, 40, true);
}

TEST(ParityRandom, TransformersWidths) {
  KV4_NEEDS_DEVICE();
  run_seeds(transformers_tiny_config(), long_run() ? 1000 : 40, 120, 40, false);
}

TEST(ParityRandom, RealWidths) {
  KV4_NEEDS_DEVICE();
  run_seeds(real_config(), long_run() ? 200 : 16, 80, 300, true);
}

}  // namespace
}  // namespace kv4::test
