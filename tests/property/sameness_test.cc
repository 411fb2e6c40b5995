// The bytes do not depend on the way in which tokens reach a cache: canonical images, entries, index keys and token ids
// are equal.
#include <cstdlib>

#include "backend/cpu/cpu_backend.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

bool long_run() { return std::getenv("KV4_TEST_LONG") != nullptr; }

class Sameness : public testing::TestWithParam<FormatCase> {
 protected:
  CacheOptions options() const {
    CacheOptions o = options_for(GetParam());
    o.block_tokens = 16;  // many blocks from few tokens
    return o;
  }
  void SetUp() override {
    if (GetParam().shared && test_backend()->shared_entries() == nullptr)
      GTEST_SKIP() << "this backend has no operations of V4.1";
  }
  Model model_{tiny_config(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(Formats, Sameness, testing::ValuesIn(all_format_cases()),
                         [](const auto& p) { return p.param.name(); });

// The reference: one token at a time through the plain row code, R = 0.
Bytes one_by_one(const Model& model, CacheOptions options, std::uint64_t stream, std::int32_t tokens) {
  options.max_rewind_tokens = 0;
  options.hca_mode = HcaMode::raw;
  Driver d(model, options, cpu::make_cpu_backend_on(1, cpu::plain_row_kernels()));
  const RequestId r = d.admit();
  d.feed(r, stream, std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 1));
  return bytes_of(d.cache, r);
}

TEST_P(Sameness, AnySplitIntoSteps) {
  Random random(1);
  for (int round = 0; round < rounds(long_run() ? 200 : 20); ++round) {
    const std::int32_t tokens = static_cast<std::int32_t>(random.between(1, 150));
    const Bytes want = one_by_one(model_, options(), 7, tokens);
    for (std::int64_t most : {2, 5, 30, 200}) {
      CacheOptions o = options();
      o.max_rewind_tokens = static_cast<int>(random.between(0, 20));
      o.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
      o.arrangement = random.below(2) ? Arrangement::block_major : Arrangement::layer_major;
      o.page_alignment = random.below(2) ? 64 : 576;
      Driver d(model_, o);
      const RequestId r = d.admit();
      d.feed(r, 7, random_chunks(random, tokens, most));
      expect_same(bytes_of(d.cache, r), want,
                  "round " + std::to_string(round) + " chunks up to " + std::to_string(most));
    }
  }
}

TEST_P(Sameness, AnyBatch) {
  Random random(2);
  for (int round = 0; round < rounds(long_run() ? 60 : 8); ++round) {
    CacheOptions o = options();
    o.max_rewind_tokens = static_cast<int>(random.between(0, 6));
    Driver d(model_, o, test_backend(3));
    std::vector<RequestId> requests;
    for (int i = 0; i < 5; ++i) requests.push_back(d.admit());
    for (int s = 0; s < 25; ++s) {
      std::vector<Work> work;
      for (int i = 0; i < 5; ++i) {
        if (random.below(3) == 0) continue;
        work.push_back({requests[static_cast<std::size_t>(i)], static_cast<std::uint64_t>(i),
                        static_cast<std::int32_t>(random.between(1, random.below(4) ? 3 : 25))});
        if (random.below(4) == 0) work.push_back({kNoRequest, 0, static_cast<std::int32_t>(random.between(1, 3))});
      }
      if (!work.empty()) d.run(work);
    }
    for (int i = 0; i < 5; ++i) {
      const RequestId r = requests[static_cast<std::size_t>(i)];
      expect_same(
          bytes_of(d.cache, r),
          one_by_one(model_, options(), static_cast<std::uint64_t>(i), static_cast<std::int32_t>(d.cache.length(r))),
          "round " + std::to_string(round) + " request " + std::to_string(i));
    }
  }
}

TEST_P(Sameness, RewindLeavesNoTrace) {
  Random random(3);
  for (int round = 0; round < rounds(long_run() ? 300 : 40); ++round) {
    CacheOptions o = options();
    o.max_rewind_tokens = static_cast<int>(random.between(1, 20));
    o.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    Driver d(model_, o), clean(model_, o, make_cpu_backend());
    const RequestId r = d.admit(), c = clean.admit();
    for (int s = 0; s < 12; ++s) {
      const std::int32_t keep = static_cast<std::int32_t>(random.between(1, 30));
      const std::int32_t drop = static_cast<std::int32_t>(random.between(0, o.max_rewind_tokens));
      d.feed(r, 5, random_chunks(random, keep, 40));
      clean.feed(c, 5, random_chunks(random, keep, 40));
      if (drop > 0)
        d.feed(r, 1000 + static_cast<std::uint64_t>(s), random_chunks(random, drop, 40));  // a rejected draft
      // Rewinds in several calls, as far as the highest position allows.
      const std::int64_t target = clean.cache.length(c);
      ASSERT_LE(d.cache.rewind_floor(r), target);
      if (drop > 1) d.cache.rewind(r, target + drop / 2);
      d.cache.rewind(r, target);
      expect_same(bytes_of(d.cache, r), bytes_of(clean.cache, c),
                  "round " + std::to_string(round) + " step " + std::to_string(s));
      EXPECT_EQ(d.cache.allocator().num_free(), clean.cache.allocator().num_free());
      EXPECT_EQ(d.cache.blocks(r), clean.cache.blocks(c));
    }
  }
}

std::vector<const LayerCacheSchema*> some_layers(const Driver& driver, Random& random) {
  std::vector<const LayerCacheSchema*> out;
  for (const LayerCacheSchema& layer : driver.cache.schema().layers)
    if (random.below(2)) out.push_back(&layer);
  return out;
}

TEST_P(Sameness, AbortedRepeatedAndHalfRunSteps) {
  Random random(4);
  for (int round = 0; round < rounds(long_run() ? 200 : 30); ++round) {
    CacheOptions o = options();
    o.max_rewind_tokens = static_cast<int>(random.between(0, 8));
    o.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    Driver d(model_, o), clean(model_, o, make_cpu_backend());
    const RequestId r = d.admit(), c = clean.admit();
    for (int s = 0; s < 20; ++s) {
      const std::int32_t count = static_cast<std::int32_t>(random.between(1, random.below(3) ? 6 : 40));
      const std::vector<Work> work{{r, 9, count}};
      if (random.below(2)) {  // other tokens, run in some layers only, then dropped
        const Step step =
            d.prepare({{r, 77 + static_cast<std::uint64_t>(s), static_cast<std::int32_t>(random.between(1, 30))}})
                .value();
        d.append_layers(step, some_layers(d, random));
        d.cache.abort(step);
      }
      const Step step = d.prepare(work).value();
      d.append_layers(step, some_layers(d, random));
      for (int again = static_cast<int>(random.below(3)); again > 0; --again) d.append(step);
      d.append(step);
      d.cache.commit(step);
      clean.run({{c, 9, count}});
      expect_same(bytes_of(d.cache, r), bytes_of(clean.cache, c),
                  "round " + std::to_string(round) + " step " + std::to_string(s));
      EXPECT_EQ(d.cache.allocator().num_free(), clean.cache.allocator().num_free());
      EXPECT_EQ(d.cache.blocks(r), clean.cache.blocks(c));
      EXPECT_EQ(d.cache.state_pool().num_free(), clean.cache.state_pool().num_free());
    }
  }
}

TEST_P(Sameness, ForksAreSeparateRequests) {
  Random random(5);
  for (int round = 0; round < rounds(long_run() ? 100 : 15); ++round) {
    CacheOptions o = options();
    o.max_rewind_tokens = static_cast<int>(random.between(0, 12));
    o.num_blocks = 200;
    Driver d(model_, o), clean(model_, o, make_cpu_backend());
    const RequestId a = d.admit(), ca = clean.admit(), cb = clean.admit();
    const std::int32_t common = static_cast<std::int32_t>(random.between(1, 70));
    d.feed(a, 1, random_chunks(random, common, 40));
    for (RequestId r : {ca, cb}) clean.feed(r, 1, random_chunks(random, common, 40));
    const RequestId b = d.cache.fork(a).value();
    EXPECT_EQ(d.cache.allocator().num_held(), static_cast<std::int32_t>(d.cache.blocks(a).size()) + (common % 16 != 0));
    // Rewinds one side into shared blocks; then both continue differently in one batch.
    const std::int64_t back = random.between(0, std::min<std::int64_t>(o.max_rewind_tokens, common));
    d.cache.rewind(a, std::max(common - back, d.cache.rewind_floor(a)));
    clean.cache.rewind(ca, d.cache.length(a));
    for (int s = 0; s < 6; ++s) {
      const std::int32_t x = static_cast<std::int32_t>(random.between(1, 20)),
                         y = static_cast<std::int32_t>(random.between(1, 20));
      d.run({{a, 2, x}, {b, 3, y}});
      clean.run({{ca, 2, x}});
      clean.run({{cb, 3, y}});
    }
    expect_same(bytes_of(d.cache, a), bytes_of(clean.cache, ca), "parent, round " + std::to_string(round));
    expect_same(bytes_of(d.cache, b), bytes_of(clean.cache, cb), "child, round " + std::to_string(round));
    d.cache.release(a);
    expect_same(bytes_of(d.cache, b), bytes_of(clean.cache, cb), "child alone, round " + std::to_string(round));
    d.cache.release(b);
    EXPECT_EQ(d.cache.allocator().num_held(), 0);
  }
}

TEST_P(Sameness, ExportImportContinue) {
  Random random(6);
  for (int round = 0; round < rounds(long_run() ? 150 : 20); ++round) {
    const std::int32_t before = static_cast<std::int32_t>(random.between(1, 60)),
                       after = static_cast<std::int32_t>(random.between(1, 60));
    CacheOptions here = options(), there = options();
    here.max_rewind_tokens = static_cast<int>(random.between(0, 10));
    there.max_rewind_tokens = static_cast<int>(random.between(0, 10));
    here.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    there.hca_mode = random.below(2) ? HcaMode::online : HcaMode::raw;
    there.arrangement = Arrangement::layer_major;
    Driver d(model_, here, round % 2 ? make_cpu_backend() : test_backend()), e(model_, there);
    const RequestId r = d.admit();
    d.feed(r, 4, random_chunks(random, before, 40));
    const Bytes saved = bytes_of(d.cache, r);
    const RequestId s = e.cache.import_image(saved.image, saved.token_ids, saved.blocks).value();
    expect_same(bytes_of(e.cache, s), saved, "restored, round " + std::to_string(round));
    EXPECT_EQ(e.cache.rewind_floor(s), before);
    e.feed(s, 4, random_chunks(random, after, 40));
    expect_same(bytes_of(e.cache, s), one_by_one(model_, options(), 4, before + after),
                "continued, round " + std::to_string(round));
    const std::int64_t floor = e.cache.rewind_floor(s);
    e.cache.rewind(s, floor);
    expect_same(bytes_of(e.cache, s), one_by_one(model_, options(), 4, static_cast<std::int32_t>(floor)),
                "rewound, round " + std::to_string(round));
  }
}

TEST_P(Sameness, DraftStagesHaveTheirOwnLength) {
  Random random(7);
  CacheOptions o = options();
  o.draft_layers = 2;
  o.max_rewind_tokens = 5;
  Driver d(model_, o), clean(model_, o, make_cpu_backend());
  const RequestId r = d.admit(), c = clean.admit();
  for (int s = 0; s < 40; ++s) {
    const std::int32_t count = static_cast<std::int32_t>(random.between(1, 6));
    for (int group : {0, 1, 2}) {
      const std::int32_t ahead = static_cast<std::int32_t>(random.between(0, 5));
      d.run({{r, 8, count}}, group);
      clean.run({{c, 8, count}}, group);
      if (ahead == 0) continue;
      d.run({{r, 500 + static_cast<std::uint64_t>(s), ahead}}, group);
      d.cache.rewind(r, clean.cache.length(c, group), group);
    }
  }
  expect_same(bytes_of(d.cache, r), bytes_of(clean.cache, c), "with rejected drafts");
}

void check_boundary_lengths(const Model& model, const std::vector<FormatCase>& cases) {
  const std::vector<std::int32_t> lengths = {1,   2,   3,   4,   5,   127, 128, 129, 130,
                                             255, 256, 257, 383, 384, 385, 511, 512, 513};
  for (const FormatCase& f : cases) {
    CacheOptions plain = options_for(f), other = options_for(f);
    other.max_rewind_tokens = 7;
    other.arrangement = Arrangement::layer_major;
    plain.hca_mode = HcaMode::raw;
    Driver slow(model, plain, cpu::make_cpu_backend_on(1, cpu::plain_row_kernels())),
        fast(model, other, test_backend(2));
    const RequestId walk = slow.admit(), whole_in_pieces = fast.admit();
    Random random(11);
    std::int32_t at = 0;
    for (std::int32_t n : lengths) {
      slow.feed(walk, 3, random_chunks(random, n - at, 9));
      fast.feed(whole_in_pieces, 3, random_chunks(random, n - at, 200));
      at = n;
      const Bytes want = bytes_of(slow.cache, walk);
      expect_same(bytes_of(fast.cache, whole_in_pieces), want, f.name() + " at " + std::to_string(n));
      const RequestId whole = fast.admit();
      fast.feed(whole, 3, {n});
      expect_same(bytes_of(fast.cache, whole), want, f.name() + " whole " + std::to_string(n));
      fast.cache.release(whole);
    }
  }
}

TEST(SamenessReal, BoundaryLengths) {
  std::vector<FormatCase> cases = format_cases();
  if (!long_run()) cases.resize(2);
  check_boundary_lengths(Model(real_config()), cases);
}

TEST(SamenessReal, BoundaryLengthsOfV41) {
  if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  check_boundary_lengths(Model(shared_real_config()), {shared_format_cases()[0]});
}

TEST(SamenessReal, PastFourThousand) {
  const Model model(real_config());
  CacheOptions o = options_for(format_cases()[0]);
  o.max_context = 5000;
  o.max_requests = 2;
  o.max_step_tokens = 4500;
  Driver a(model, o, make_cpu_backend()), b(model, o, test_backend(2));
  const RequestId ra = a.admit(), rb = b.admit();
  Random random(12);
  a.feed(ra, 1, {4300});
  b.feed(rb, 1, random_chunks(random, 4300, 700));
  expect_same(bytes_of(b.cache, rb), bytes_of(a.cache, ra), "4300 tokens");
}

}  // namespace
}  // namespace kv4::test
