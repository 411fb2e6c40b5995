// CPU against GPU: every operation, in every format and layout, leaves the same bytes.
#include <cstdlib>

#include "parity/twin_caches.h"

namespace kv4::test {
namespace {

struct Formats {
  Format rows, keys;
};

std::vector<Formats> all_formats() {
  std::vector<Formats> out;
  for (Format rows : {Format::fp8_tile64, Format::fp8_row, Format::bf16})
    for (Format keys : {Format::mxfp4, Format::nvfp4, Format::fp8, Format::bf16}) out.push_back({rows, keys});
  return out;
}

std::string formats_name(const testing::TestParamInfo<Formats>& info) {
  return std::string(to_string(info.param.rows)) + "_" + to_string(info.param.keys);
}

DType any_float(Random& random) { return random.below(2) ? DType::f32 : DType::bf16; }

/// One choice of all options except formats. Input types follow `bf16_inputs`; the rest of the style is random.
struct Choice {
  CacheOptions options;
  InputStyle style;
  std::string name;
};

std::vector<Choice> choices(const Formats& f, Random& random) {
  std::vector<Choice> out;
  for (bool hadamard : {false, true})
    for (DType pending : {DType::f32, DType::bf16})
      for (HcaMode mode : {HcaMode::online, HcaMode::raw})
        for (Arrangement arrangement : {Arrangement::block_major, Arrangement::layer_major})
          for (int rewind : {0, 3})
            for (DType input : {DType::f32, DType::bf16}) {
              Choice c;
              c.options = options_for({f.rows, f.keys, hadamard, pending});
              c.options.hca_mode = mode;
              c.options.arrangement = arrangement;
              c.options.max_rewind_tokens = rewind;
              c.options.page_alignment = random.below(2) ? 64 : 576;
              c.options.index_global_scale = random.below(2) ? 1.0f : 0.37f;
              c.style.raw_type = c.style.type = c.style.index_type = input;
              if (random.below(6) == 0) c.style.raw_type = any_float(random);
              if (random.below(6) == 0) c.style.index_type = any_float(random);
              c.style.projection = random.below(3) == 0;
              c.style.gap = random.below(4) == 0 ? 3 : random.below(4) == 0 ? 8 : 0;
              c.style.specials = random.below(4) == 0;
              c.name = std::string(hadamard ? "hadamard" : "plain") + " pending " + to_string(pending) + " " +
                       to_string(mode) + " " + to_string(arrangement) + " R " + std::to_string(rewind) + " inputs " +
                       to_string(input) + (c.style.projection ? " projected" : "") + " gap " +
                       std::to_string(c.style.gap) + (c.style.specials ? " specials" : "");
              out.push_back(c);
            }
  return out;
}

/// The step sizes of all tests below.
struct Sizes {
  std::int32_t long_chunk, chunk, short_chunk;
};

// Every operation once: chunks, decodes and padding in one batch, all gathers and views in an open step, a step run
// twice, aborted steps, a rewind, forks that write into shared blocks, images exchanged between the devices.
void every_operation(TwinCaches& t, const Sizes& sizes, std::uint64_t seed) {
  Random random(seed);
  const int r_max = t.cpu.cache.schema().options.max_rewind_tokens;
  const RequestId a = t.admit(), b = t.admit();
  t.run({{a, 1, sizes.long_chunk}, {kNoRequest, 0, 3}, {b, 2, sizes.chunk}});
  t.run({{kNoRequest, 0, 1}, {b, 2, 1}, {a, 1, 1}, {kNoRequest, 0, 2}});
  const RequestId c = t.admit();
  Step step =
      t.prepare({{a, 1, r_max + 1}, {c, 3, sizes.short_chunk}, {kNoRequest, 0, 2}, {b, 2, sizes.chunk}}).value();
  t.append(step);
  t.check_gathers(step, random.next(), "open step");
  t.check_views(step, "open step");
  t.append(step);
  t.commit(step);
  step = t.prepare({{b, 77, r_max + 1}, {c, 78, sizes.chunk}}).value();  // aborted
  t.append(step);
  for (RequestId r : {a, b, c}) t.check(r, "while a step is open");
  t.abort(step);
  for (RequestId r : {a, b, c}) t.check(r, "after an abort");
  for (int i = 0; i < r_max + 2; ++i) t.run({{a, 1, 1}, {b, 2, 1}, {kNoRequest, 0, 1}, {c, 3, 1}});
  if (r_max > 0) t.rewind(a, t.length(a) - r_max);
  const RequestId f = t.fork(a).value();
  if (r_max > 0) t.rewind(f, t.cpu.cache.rewind_floor(f));
  t.run({{f, 5, sizes.short_chunk}, {a, 1, 2}, {kNoRequest, 0, 1}});
  const RequestId moved = t.exchange(b).value();
  step = t.prepare({{moved, 2, 2}, {kNoRequest, 0, 1}, {f, 6, sizes.short_chunk}}).value();
  t.write_and_flush(step, random);
  t.check_gathers(step, random.next(), "flushed step");
  t.commit(step);
  for (RequestId r : {f, moved}) t.check(r, "after a flush");  // their compressors lack rows now: no append follows
  t.run({{c, 3, sizes.short_chunk}, {a, 1, 1}});
  step = t.prepare({{a, 1, sizes.chunk}, {c, 3, 1}}).value();
  t.append(step);
  t.check_gathers(step, random.next(), "last step");
  t.commit(step);
  for (RequestId r : {a, c, f, moved}) t.check(r, "at the end");
  t.check_blocks("at the end");
}

class Parity : public testing::TestWithParam<Formats> {
 protected:
  // Every `step`-th choice of the list; `step` is odd, so that all pairs of two-way choices occur.
  void run_choices(const ModelConfig& config, const Sizes& sizes, int block_tokens, std::size_t step) {
    const Model model(config);
    const std::size_t number =
        static_cast<std::size_t>(GetParam().rows) * 4 + static_cast<std::size_t>(GetParam().keys);
    Random random(number);
    const std::vector<Choice> all = choices(GetParam(), random);
    for (std::size_t i = number % step; i < all.size(); i += step) {
      SCOPED_TRACE("choice " + std::to_string(i) + ": " + all[i].name);
      CacheOptions o = all[i].options;
      o.block_tokens = block_tokens;
      o.max_requests = 4;
      o.spare_slots = 3;
      o.max_context = 8 * sizes.long_chunk + 64;
      o.max_step_tokens = static_cast<int>(4 * sizes.long_chunk);
      TwinCaches twins(model, o, all[i].style);
      every_operation(twins, sizes, i);
      if (HasFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Formats, Parity, testing::ValuesIn(all_formats()), formats_name);

TEST_P(Parity, TinyWidths) {
  KV4_NEEDS_DEVICE();
  run_choices(tiny_config(), {45, 23, 7}, 16, 1);
}

TEST_P(Parity, RealWidths) {
  KV4_NEEDS_DEVICE();
  run_choices(real_config(), {150, 70, 9}, 0, std::getenv("KV4_TEST_LONG") != nullptr ? 1 : 3);
}

// The widths of transformers' test models are not multiples of the tiles of fp8_tile64 and mxfp4.
class ParityTransformers : public Parity {};

INSTANTIATE_TEST_SUITE_P(Formats, ParityTransformers,
                         testing::Values(Formats{Format::fp8_row, Format::nvfp4}, Formats{Format::fp8_row, Format::fp8},
                                         Formats{Format::bf16, Format::nvfp4}, Formats{Format::bf16, Format::bf16}),
                         formats_name);

TEST_P(ParityTransformers, EveryOperation) {
  KV4_NEEDS_DEVICE();
  run_choices(transformers_tiny_config(), {33, 19, 6}, 8, 3);
}

// Steps of every number of tokens that a kernel may treat differently.
TEST(ParitySizes, StepsOfEverySize) {
  KV4_NEEDS_DEVICE();
  const Model model(real_config());
  for (const FormatCase& f : {format_cases()[0], format_cases()[5]}) {
    SCOPED_TRACE(f.name());
    CacheOptions o = options_for(f);
    o.max_context = 20'000;
    o.max_requests = 3;
    o.spare_slots = 3;
    o.max_step_tokens = 6000;
    o.max_rewind_tokens = 3;
    TwinCaches t(model, o);
    t.cpu.style.type = t.cpu.style.raw_type = t.cpu.style.index_type =
        f.pending == DType::f32 ? DType::bf16 : DType::f32;
    const RequestId a = t.admit(), b = t.admit(), c = t.admit();
    for (std::int32_t n : {3,   4,   5,   31,  32,  33,   127,  128,  129,  191,  192, 193,
                           255, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 4096, 4097}) {
      const std::int32_t x = n / 3, y = n / 5 + 1, z = n - x - y - (n > 100 ? 7 : 0);
      std::vector<Work> work = {{a, 1, x}, {b, 2, y}, {c, 3, z}};
      if (n > 100) work.insert(work.begin() + 1, {kNoRequest, 0, 7});
      const Step step = t.prepare(work).value();
      t.append(step);
      if (n % 2 == 1 && n < 1100) t.check_gathers(step, static_cast<std::uint64_t>(n), std::to_string(n) + " tokens");
      t.commit(step);
      for (RequestId r : {a, b, c})
        expect_same(t.gpu.cache.export_image(r).bytes, t.cpu.cache.export_image(r).bytes,
                    "after a step of " + std::to_string(n));
      if (testing::Test::HasFailure()) return;
    }
    for (RequestId r : {a, b, c}) t.check(r, "after all steps");
    t.check_blocks("after all steps");
  }
}

// One step of one request, long enough for the prefill kernels. The short step is for race detectors; in the long one a
// CTA writes many entries.
TEST(ParitySizes, ShortPrefill) {
  KV4_NEEDS_DEVICE();
  const Model model(real_config());
  CacheOptions o = options_for(format_cases()[0]);
  o.max_context = o.max_step_tokens = 300;
  TwinCaches t(model, o);
  const RequestId a = t.admit();
  t.run({{a, 1, 260}});
  t.check(a, "260 tokens");
}

TEST(ParitySizes, LongPrefill) {
  KV4_NEEDS_DEVICE();
  constexpr int kTokens = 18'000;
  const Model model(real_config());
  CacheOptions o = options_for(format_cases()[0]);
  o.max_context = o.max_step_tokens = kTokens;
  TwinCaches t(model, o);
  t.cpu.style.type = t.cpu.style.raw_type = t.cpu.style.index_type = DType::bf16;
  const RequestId a = t.admit();
  t.run({{a, 1, kTokens}});
  t.check(a, "one step");
  t.check_blocks("one step");
}

// Up to 20,000 tokens: chunks of up to 4,096, decodes, drafts of a few tokens that are partly rejected; a second
// request runs at the same time.
TEST(ParitySizes, TwentyThousandTokens) {
  KV4_NEEDS_DEVICE();
  const Model model(real_config());
  CacheOptions o = options_for(format_cases()[0]);
  o.max_context = 20'480;
  o.max_requests = 2;
  o.spare_slots = 2;
  o.max_step_tokens = 4200;
  o.max_rewind_tokens = 3;
  TwinCaches t(model, o);
  t.cpu.style.type = t.cpu.style.raw_type = t.cpu.style.index_type = DType::bf16;
  Random random(41);
  const RequestId a = t.admit(), b = t.admit();
  int checks = 0;
  while (t.length(a) < 20'000) {
    const std::int64_t left = 20'000 - t.length(a);
    const std::int64_t count = random.below(3) == 0 ? random.between(1, std::min<std::int64_t>(4096, left))
                                                    : random.between(1, std::min<std::int64_t>(4, left));
    std::vector<Work> work = {{a, 1, static_cast<std::int32_t>(count)}};
    if (t.length(b) < 19'000 && random.below(2))
      work.push_back({b, 2, static_cast<std::int32_t>(random.between(1, 40))});
    if (random.below(3) == 0) work.push_back({kNoRequest, 0, 5});
    const Step step = t.prepare(work).value();
    t.append(step);
    if (checks * 4000 < t.length(a) && count < 100) {
      ++checks;
      t.check_gathers(step, random.next(), "at " + std::to_string(t.length(a)));
      t.check_views(step, "at " + std::to_string(t.length(a)));
    }
    t.commit(step);
    if (count > 1 && count <= 4) t.rewind(a, t.length(a) - random.below(count));
  }
  for (RequestId r : {a, b}) t.check(r, "20,000 tokens");
  t.check_blocks("20,000 tokens");
  const RequestId moved = t.exchange(a).value();
  t.run({{moved, 1, 130}, {b, 2, 1}});
  t.check(moved, "exchanged and continued");
}

// More rows than a GPU copies at once, not a multiple of a batch; some rows do not exist.
TEST(ParitySizes, LargeGathers) {
  KV4_NEEDS_DEVICE();
  const Model model(real_config());
  for (const Formats& f : {Formats{Format::fp8_tile64, Format::mxfp4}, Formats{Format::fp8_row, Format::nvfp4},
                           Formats{Format::bf16, Format::fp8}}) {
    SCOPED_TRACE(testing::Message() << to_string(f.rows) << " " << to_string(f.keys));
    CacheOptions o = options_for({f.rows, f.keys, true, DType::f32});
    o.max_context = 2048;
    o.max_step_tokens = 2048;
    TwinCaches t(model, o, {.specials = true});
    const RequestId a = t.admit(), b = t.admit();
    t.run({{a, 1, 1501}, {b, 2, 300}});
    const Step step = t.prepare({{a, 1, 7}, {kNoRequest, 0, 3}, {b, 2, 1}}).value();
    t.append(step);
    constexpr std::int64_t kTokens = 11, kItems = 3, kChosen = 6007, kKeys = 50'021;
    Random random(7);
    std::vector<std::int32_t> indices;
    for (std::int64_t i = 0; i < kTokens * kChosen; ++i)
      indices.push_back(static_cast<std::int32_t>(random.between(-1, 390)));
    const auto gather = [&](Driver& d) {
      Outputs out{{"chosen", std::vector<std::byte>(2 * kTokens * kChosen * 512)},
                  {"keys", std::vector<std::byte>(2 * kItems * kKeys * 128)},
                  {"lens", std::vector<std::byte>(4 * kItems)}};
      Twins twins(d.backend);
      const ConstTensorView index = twins.put(ConstTensorView(indices.data(), {kTokens, kChosen}));
      const TensorView rows = twins.put_output(TensorView(out[0].second.data(), DType::bf16, {kTokens, kChosen, 512}));
      const TensorView keys = twins.put_output(TensorView(out[1].second.data(), DType::bf16, {kItems, kKeys, 128}));
      const TensorView lens = twins.put_output(TensorView(out[2].second.data(), DType::i32, {kItems}));
      twins.send();
      d.cache.acquire(1).gather_compressed_kv(index, rows, {});
      d.cache.acquire(1).gather_all_index_keys(keys, lens);
      twins.fetch();
      return out;
    };
    expect_same(gather(t.gpu), gather(t.cpu), "large gathers");
    t.abort(step);
  }
}

// Many decodes in place: every ring wraps, entries of both ratios close, blocks open.
TEST(ParitySizes, DecodesOneByOne) {
  KV4_NEEDS_DEVICE();
  const Model model(real_config());
  for (int rewind : {0, 3})
    for (HcaMode mode : {HcaMode::online, HcaMode::raw}) {
      SCOPED_TRACE(testing::Message() << "R " << rewind << " " << to_string(mode));
      CacheOptions o = options_for(format_cases()[rewind == 0 ? 1 : 3]);
      o.max_rewind_tokens = rewind;
      o.hca_mode = mode;
      TwinCaches t(model, o, {.projection = rewind == 3});
      std::vector<RequestId> all;
      for (int i = 0; i < 5; ++i) all.push_back(t.admit());
      for (std::size_t i = 0; i < all.size(); ++i) t.run({{all[i], i, static_cast<std::int32_t>(1 + 37 * i)}});
      for (int s = 0; s < 300; ++s) {
        std::vector<Work> work;
        for (std::size_t i = 0; i < all.size(); ++i)
          work.push_back((s / 7 + static_cast<int>(i)) % 6 == 0 ? Work{} : Work{all[i], i, 1});
        t.run(work);
        if (s % 60 == 59)
          for (RequestId r : all) t.check(r, "after decode " + std::to_string(s));
        if (testing::Test::HasFailure()) return;
      }
    }
}

}  // namespace
}  // namespace kv4::test
