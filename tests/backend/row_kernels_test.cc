// Every instruction set gives the same bytes as the plain row code, special values included.
#include <algorithm>
#include <limits>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/row_kernels.h"
#include "codec/codec.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

using cpu::RowKernels;

// Mostly ordinary values, some of them ties, tiny, huge, zeros, infinities and NaN.
float awkward(Random& random, bool special) {
  const float x = random.uniform();
  switch (special ? random.below(12) : 11) {
    case 0: return std::numeric_limits<float>::quiet_NaN();
    case 1: return random.below(2) ? INFINITY : -INFINITY;
    case 2: return random.below(2) ? 0.0f : -0.0f;
    case 3: return x * 1e-40f;
    case 4: return x * 3e38f;
    case 5: return static_cast<float>(random.between(-16, 16)) * 0.25f;
    case 6: return x * 1e-6f;
    default: return x * 8.0f;
  }
}

std::vector<float> awkward_row(Random& random, std::size_t count, bool special) {
  std::vector<float> out(count);
  for (float& x : out) x = awkward(random, special);
  return out;
}

template <class T>
::testing::AssertionResult same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0)
    return ::testing::AssertionSuccess();
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0)
      return ::testing::AssertionFailure() << "first difference at " << i << ": " << +a[i] << " and " << +b[i];
  return ::testing::AssertionFailure() << "sizes differ";
}

class RowKernelsTest : public testing::TestWithParam<const RowKernels*> {
 protected:
  const RowKernels& fast() const { return *GetParam(); }
  const RowKernels& plain() const { return cpu::plain_row_kernels(); }
};

INSTANTIATE_TEST_SUITE_P(Targets, RowKernelsTest, testing::ValuesIn(cpu::runnable_row_kernels()),
                         [](const auto& p) { return std::string(p.param->name); });

TEST_P(RowKernelsTest, Encode) {
  Random random(21);
  struct Shape {
    Format format;
    int width, tail;
  };
  const std::vector<Shape> shapes = {
      {Format::fp8_tile64, 512, 64}, {Format::fp8_tile64, 80, 16}, {Format::fp8_tile64, 70, 6},
      {Format::fp8_row, 512, 64},    {Format::fp8_row, 32, 8},     {Format::bf16, 512, 64},
      {Format::bf16, 17, 0},         {Format::mxfp4, 128, 0},      {Format::mxfp4, 32, 0},
      {Format::nvfp4, 128, 0},       {Format::nvfp4, 16, 0},       {Format::fp8, 128, 0},
      {Format::fp8, 20, 0},          {Format::mxfp4, 2048, 0},     {Format::fp8_tile32, 512, 0},
      {Format::fp8_tile32, 96, 0},   {Format::nvfp4_row, 512, 0},  {Format::nvfp4_row, 48, 0}};
  for (const Shape& s : shapes) {
    const codec::RowShape shape{s.width, s.tail};
    const auto [payload, scale] =
        codec::with_any_codec(s.format,
                              [&](auto c) { return std::pair(c.payload_bytes(shape), c.scale_bytes(shape)); });
    for (int round = 0; round < 300; ++round) {
      std::vector<float> x = awkward_row(random, static_cast<std::size_t>(s.width), round % 3 == 0);
      if (round % 5 == 0) std::fill(x.begin(), x.end(), 0.0f);
      for (float& v : x) v = codec::round_bf16(v);
      // 16 guard bytes behind each plane
      std::vector<std::uint8_t> pa(static_cast<std::size_t>(payload) + 16, 0xA5),
          sa(static_cast<std::size_t>(scale) + 16, 0xA5), pb = pa, sb = sa;
      const float global = round % 2 ? 1.0f : 0.37f;
      plain().encode(s.format, shape, x.data(), pa.data(), sa.data(), global);
      fast().encode(s.format, shape, x.data(), pb.data(), sb.data(), global);
      ASSERT_TRUE(same_bytes(pa, pb)) << to_string(s.format) << " width " << s.width << " round " << round;
      ASSERT_TRUE(same_bytes(sa, sb)) << to_string(s.format) << " width " << s.width << " round " << round;
      std::vector<float> tmp(static_cast<std::size_t>(s.width));
      std::vector<std::uint16_t> input;
      for (float v : x) input.push_back(codec::bf16_bits(v));
      fast().encode_input(s.format, shape, input.data(), DType::bf16, pb.data(), sb.data(), global, tmp.data());
      ASSERT_TRUE(same_bytes(pa, pb) && same_bytes(sa, sb)) << "input " << to_string(s.format) << " round " << round;
      for (DType type : {DType::f32, DType::bf16}) {
        std::vector<std::uint8_t> oa(static_cast<std::size_t>(s.width) * element_bytes(type) + 16, 0xA5), ob = oa;
        plain().decode(s.format, shape, pa.data(), sa.data(), global, oa.data(), type, tmp.data());
        fast().decode(s.format, shape, pa.data(), sa.data(), global, ob.data(), type, tmp.data());
        ASSERT_TRUE(same_bytes(oa, ob)) << "decode " << to_string(s.format) << " width " << s.width << " round "
                                        << round;
      }
    }
  }
}

// nvfp4_row divides by its scale: every mantissa under every mantissa of amax, with ties and the ends of the range.
TEST_P(RowKernelsTest, EntriesOfEveryMantissaPair) {
  const codec::RowShape shape{128, 0};
  for (const std::uint32_t exponent : {0u, 1u, 100u, 117u, 118u, 119u, 124u, 127u, 130u, 137u, 138u, 139u, 254u})
    for (std::uint32_t mantissa = 0; mantissa < 128; ++mantissa)
      for (std::uint32_t down = 0; down < 4; ++down) {
        std::vector<float> x(128);
        for (std::uint32_t c = 0; c < 128; ++c) {
          const std::uint32_t bits = exponent >= down ? (exponent - down) << 7 | (c * 5 + mantissa) % 128 : c;
          const std::uint32_t most = exponent << 7 | mantissa;
          const std::uint32_t magnitude = c % 16 == 3 || bits > most ? most : bits;
          x[c] = codec::bf16_value(static_cast<std::uint16_t>(magnitude | (c % 3 == 1 ? 0x8000u : 0)));
        }
        for (const Format format : {Format::nvfp4_row, Format::fp8_tile32}) {
          std::vector<std::uint8_t> pa(128), sa(8), pb(128), sb(8);
          plain().encode(format, shape, x.data(), pa.data(), sa.data(), 1.0f);
          fast().encode(format, shape, x.data(), pb.data(), sb.data(), 1.0f);
          ASSERT_TRUE(same_bytes(pa, pb) && same_bytes(sa, sb))
              << to_string(format) << ", amax " << exponent << " " << mantissa << ", down " << down;
        }
      }
}

TEST_P(RowKernelsTest, EveryBf16ValueInEveryScalarFormat) {
  std::vector<float> all(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) all[i] = codec::bf16_value(static_cast<std::uint16_t>(i));
  // The row's first channel fixes amax and scale; the other channels combine all exponents and mantissas.
  for (Format format : {Format::fp8, Format::mxfp4, Format::nvfp4, Format::fp8_tile32, Format::nvfp4_row}) {
    const codec::RowShape shape{128, 0};
    for (std::size_t at = 0; at < all.size(); at += 128) {
      std::vector<std::uint8_t> pa(128), sa(16), pb(128), sb(16);
      plain().encode(format, shape, all.data() + at, pa.data(), sa.data(), 1.0f);
      fast().encode(format, shape, all.data() + at, pb.data(), sb.data(), 1.0f);
      ASSERT_TRUE(same_bytes(pa, pb)) << to_string(format) << " from bits " << at;
      ASSERT_TRUE(same_bytes(sa, sb)) << to_string(format) << " from bits " << at;
    }
  }
}

// Decodes any stored bytes: every scale, the ends of the range included, with normal codes only and with others.
TEST_P(RowKernelsTest, DecodeOfEveryScale) {
  Random random(24);
  const auto expect_same = [&](Format format, codec::RowShape shape, const std::vector<std::uint8_t>& payload,
                               const std::vector<std::uint8_t>& scale, float global) {
    std::vector<float> tmp(static_cast<std::size_t>(shape.width));
    for (DType type : {DType::f32, DType::bf16}) {
      std::vector<std::uint8_t> a(tmp.size() * element_bytes(type) + 16, 0xA5), b = a;
      plain().decode(format, shape, payload.data(), scale.data(), global, a.data(), type, tmp.data());
      fast().decode(format, shape, payload.data(), scale.data(), global, b.data(), type, tmp.data());
      ASSERT_TRUE(same_bytes(a, b)) << to_string(format) << ", scale " << +scale[0] << " " << +scale[1] << " "
                                    << +scale[2] << " " << +scale[3] << ", global " << global;
    }
  };
  const auto any_byte = [&] { return static_cast<std::uint8_t>(random.below(256)); };
  // Tiles of 64 codes: all normal, or one of any kind among them.
  const auto e4m3_codes = [&](std::size_t count) {
    std::vector<std::uint8_t> out(count + 128);  // and a tail of 64 bf16
    for (std::uint8_t& code : out) code = static_cast<std::uint8_t>(random.between(8, 0x7E) | random.below(2) << 7);
    for (std::size_t tile = 0; tile < count; tile += 64)
      if (random.below(3) == 0) out[tile + static_cast<std::size_t>(random.below(64))] = any_byte();
    return out;
  };
  for (int byte = 0; byte < 256; ++byte) {
    const std::uint8_t one = static_cast<std::uint8_t>(byte);
    for (int round = 0; round < 8; ++round) {
      std::vector<std::uint8_t> scales(8, one), fp4(64);
      for (std::uint8_t& code : fp4) code = any_byte();
      if (round > 3) scales[static_cast<std::size_t>(random.below(8))] = any_byte();
      expect_same(Format::fp8_tile64, {512, 64}, e4m3_codes(448), scales, 1.0f);
      expect_same(Format::mxfp4, {128, 0}, fp4, scales, 1.0f);
      std::vector<std::uint8_t> many(32), entry(256);
      for (std::uint8_t& code : entry) code = any_byte();
      for (std::size_t i = 0; i < many.size(); ++i) many[i] = scales[i % 8];
      expect_same(Format::fp8_tile32, {512, 0}, e4m3_codes(512), many, 1.0f);
      expect_same(Format::nvfp4_row, {512, 0}, entry, many, 1.0f);
      expect_same(Format::nvfp4_row, {48, 0}, entry, many, 1.0f);
      if (byte != 0 && byte < 0x7F) expect_same(Format::nvfp4_row, {512, 0}, entry, std::vector(32, one), 1.0f);
      for (float global : {1.0f, 0.37f, -1.0f, 0.0f, 1e-36f, 1e-38f, 1e-40f, 3e38f, 1e36f, INFINITY, NAN})
        expect_same(Format::nvfp4, {128, 0}, fp4, scales, global);
      // A float scale: any mantissa (or none) at each exponent of either sign.
      const std::uint32_t mantissa = round < 4 ? 0 : static_cast<std::uint32_t>(random.below(1 << 23));
      const std::uint32_t bits = (round % 4 == 3 ? 1u << 31 : 0) | std::uint32_t{one} << 23 | mantissa;
      std::memcpy(scales.data(), &bits, 4);
      expect_same(Format::fp8_row, {512, 64}, e4m3_codes(448), scales, 1.0f);
      expect_same(Format::fp8, {128, 0}, e4m3_codes(128), scales, 1.0f);
    }
  }
}

// fp8_row divides: every mantissa by every mantissa of the largest, through all exponents of the code and below.
TEST_P(RowKernelsTest, Fp8RowOfEveryMantissaPair) {
  const codec::RowShape shape{512, 0};
  for (std::uint32_t exponent : {1, 8, 9, 10, 13, 14, 15, 127, 254}) {
    for (std::uint32_t mantissa = 0; mantissa < 128; ++mantissa) {
      const std::uint32_t amax = exponent << 7 | mantissa;
      for (std::uint32_t down = 0; down < 24 && down <= exponent; down += 3) {
        std::vector<std::uint16_t> x(512);
        for (std::uint32_t c = 0; c < 512; ++c) {  // three exponents by all mantissas, amax, and again with signs
          const std::uint32_t below = down + c / 128;
          x[c] = static_cast<std::uint16_t>(c < 384 && below <= exponent ? (exponent - below) << 7 | c % 128 : amax);
          if (x[c] > amax) x[c] = static_cast<std::uint16_t>(amax);
          x[c] = static_cast<std::uint16_t>(x[c] | (c * 7 % 3 == 0 ? 0x8000u : 0));
        }
        std::vector<float> values(512), tmp(512);
        for (std::size_t c = 0; c < 512; ++c) values[c] = codec::bf16_value(x[c]);
        std::vector<std::uint8_t> pa(512), sa(4), pb(512), sb(4), pc(512), sc(4);
        plain().encode(Format::fp8_row, shape, values.data(), pa.data(), sa.data(), 1.0f);
        fast().encode(Format::fp8_row, shape, values.data(), pb.data(), sb.data(), 1.0f);
        fast().encode_input(Format::fp8_row, shape, x.data(), DType::bf16, pc.data(), sc.data(), 1.0f, tmp.data());
        ASSERT_TRUE(same_bytes(pa, pb) && same_bytes(sa, sb)) << "amax bits " << amax << ", down " << down;
        ASSERT_TRUE(same_bytes(pa, pc) && same_bytes(sa, sc)) << "input, amax bits " << amax << ", down " << down;
      }
    }
  }
}

TEST_P(RowKernelsTest, FoldAndFinish) {
  Random random(22);
  for (int width : {512, 128, 80, 64, 16, 20}) {
    const std::size_t w = static_cast<std::size_t>(width);
    for (int round = 0; round < 60; ++round) {
      const bool special = round % 3 == 0;
      // Overlapping entries have 4 or 8 rows; most rows of a window have one type.
      const int count = round % 2 == 0 ? (round % 4 == 0 ? 8 : 4) : static_cast<int>(random.between(1, 23));
      const std::int64_t same_type = random.below(6);  // above 2: a type per row
      std::vector<std::vector<float>> kv, gate, bias;
      std::vector<std::vector<std::uint16_t>> kv16, gate16;
      std::vector<ops::SourceRow> rows;
      for (int r = 0; r < count; ++r) {
        kv.push_back(awkward_row(random, w, special));
        gate.push_back(awkward_row(random, w, special));
        bias.push_back(awkward_row(random, w, false));
        for (float& g : gate.back()) g *= 10.0f;
        std::vector<std::uint16_t>&k16 = kv16.emplace_back(), &g16 = gate16.emplace_back();
        for (std::size_t i = 0; i < w; ++i) {
          k16.push_back(codec::bf16_bits(kv.back()[i]));
          g16.push_back(codec::bf16_bits(gate.back()[i]));
        }
      }
      for (std::size_t r = 0; r < static_cast<std::size_t>(count); ++r) {
        const ops::RowType type = static_cast<ops::RowType>(same_type < 3 ? same_type : random.below(3));
        const bool narrow = type == ops::RowType::bf16;
        rows.push_back({narrow ? static_cast<const void*>(kv16[r].data()) : kv[r].data(),
                        narrow ? static_cast<const void*>(gate16[r].data()) : gate[r].data(),
                        bias[r].data(),
                        type,
                        {kv[r].data(), gate[r].data()}});
      }
      std::vector<float> a(3 * w), b(3 * w);
      plain().fold(width, rows.data(), count, true, a.data());
      const int split = static_cast<int>(random.between(0, count));
      if (split > 0) fast().fold(width, rows.data(), split, true, b.data());
      fast().fold(width, rows.data() + split, count - split, split == 0, b.data());
      ASSERT_TRUE(same_bytes(a, b)) << "fold, width " << width << " round " << round;

      std::vector<float> ra(w), rb(w);
      plain().pool(width, rows.data(), count, b.data(), ra.data());
      fast().pool(width, rows.data(), count, b.data(), rb.data());
      ASSERT_TRUE(same_bytes(ra, rb)) << "pool, width " << width << " round " << round;
      plain().mean(width, a.data(), ra.data());
      fast().mean(width, a.data(), rb.data());
      ASSERT_TRUE(same_bytes(ra, rb)) << "mean, width " << width << " round " << round;

      const std::vector<float> norm = awkward_row(random, w, false);
      const int pairs = width >= 64 ? 32 : 4;
      std::vector<float> cos(static_cast<std::size_t>(pairs)), sin(cos.size()), tmp(1024);
      for (std::size_t i = 0; i < cos.size(); ++i) cos[i] = random.uniform(), sin[i] = random.uniform();
      plain().finish({width, norm.data(), 1e-6f, pairs, cos.data(), sin.data(), ra.data(), tmp.data()});
      fast().finish({width, norm.data(), 1e-6f, pairs, cos.data(), sin.data(), rb.data(), tmp.data()});
      ASSERT_TRUE(same_bytes(ra, rb)) << "finish, width " << width << " round " << round;
      if ((width & (width - 1)) != 0) continue;
      plain().hadamard(width, ra.data());
      fast().hadamard(width, rb.data());
      ASSERT_TRUE(same_bytes(ra, rb)) << "hadamard, width " << width << " round " << round;
    }
  }
}

TEST_P(RowKernelsTest, ConvertLoadAndAngles) {
  Random random(23);
  for (std::size_t n : {512, 128, 1024, 20, 7}) {
    const std::vector<float> x = awkward_row(random, n, true);
    std::vector<std::uint16_t> a(n), b(n);
    plain().convert({static_cast<std::int64_t>(n), x.data(), DType::f32, a.data(), DType::bf16});
    fast().convert({static_cast<std::int64_t>(n), x.data(), DType::f32, b.data(), DType::bf16});
    ASSERT_TRUE(same_bytes(a, b));
    std::vector<float> fa(n), fb(n);
    plain().convert({static_cast<std::int64_t>(n), a.data(), DType::bf16, fa.data(), DType::f32});
    fast().convert({static_cast<std::int64_t>(n), a.data(), DType::bf16, fb.data(), DType::f32});
    ASSERT_TRUE(same_bytes(fa, fb));
    for (DType type : {DType::f32, DType::bf16}) {
      const void* from = type == DType::f32 ? static_cast<const void*>(x.data()) : a.data();
      plain().load_as_bf16(from, type, static_cast<int>(n), fa.data());
      fast().load_as_bf16(from, type, static_cast<int>(n), fb.data());
      ASSERT_TRUE(same_bytes(fa, fb));
    }
  }
  const RopeSpec rope{.theta = 160000.0, .yarn = true, .factor = 16.0};
  for (int rope_dim : {64, 16, 6}) {
    const std::vector<double> table = build_rope_angles(rope, rope_dim, 1 << 20);
    const RopeAngles angles = view_rope_angles(table.data(), rope_dim, 1 << 20);
    const std::size_t pairs = static_cast<std::size_t>(rope_dim / 2);
    std::vector<float> ca(pairs), sa(pairs), cb(pairs), sb(pairs);
    for (int i = 0; i < 2000; ++i) {
      const std::int64_t position = random.below(1 << 20);
      plain().angles(angles, position, ca.data(), sa.data());
      fast().angles(angles, position, cb.data(), sb.data());
      ASSERT_TRUE(same_bytes(ca, cb) && same_bytes(sa, sb)) << "position " << position;
    }
  }
}

// Tokens of a chunk share a key's expansion: each score equals the plain code's score of that token alone.
TEST_P(RowKernelsTest, ScoresOfSeveralTokens) {
  Random random(25);
  constexpr int kWidth = 128, kRows = cpu::kScoreKeys + 5;
  const codec::RowShape shape{kWidth, 0};
  const float global = 0.37f;
  for (const Format format : {Format::mxfp4, Format::nvfp4, Format::fp8, Format::bf16}) {
    const int payload = codec::with_codec(format, [&](auto c) { return c.payload_bytes(shape); });
    const int scale = codec::with_codec(format, [&](auto c) { return c.scale_bytes(shape); });
    const auto encoded = [&](int count) {
      std::vector<std::uint8_t> out(static_cast<std::size_t>(count * (payload + scale)));
      for (int i = 0; i < count; ++i) {
        std::vector<float> x = awkward_row(random, kWidth, false);
        for (float& v : x) v = codec::round_bf16(v);
        plain().encode(format, shape, x.data(), out.data() + i * (payload + scale),
                       out.data() + i * (payload + scale) + payload, global);
      }
      return out;
    };
    std::vector<std::uint8_t> keys = encoded(kRows), factor(4);
    std::memcpy(factor.data(), &global, 4);
    ops::RowPlanes page;
    page.format = format;
    page.shape = shape;
    page.payload = {keys.data(), std::ssize(keys), payload + scale};
    page.scale = {keys.data() + payload, std::ssize(keys), payload + scale};
    if (format == Format::nvfp4) page.global = {factor.data(), 4, 0};
    for (const int heads : {1, 6, 64})
      for (const int tokens : {1, 2, 7, cpu::kScoreTokens}) {
        const int first = static_cast<int>(random.between(0, 5));
        const int count = static_cast<int>(random.between(1, cpu::kScoreKeys));
        const std::int64_t query_bytes = cpu::query_bytes(kWidth);
        const std::vector<std::uint8_t> queries = encoded(tokens * heads);
        const std::vector<float> weights = awkward_row(random, static_cast<std::size_t>(tokens * heads), false);
        std::vector<int> seen;
        for (int t = 0; t < tokens; ++t) seen.push_back(static_cast<int>(random.between(t == 0 ? count : 0, count)));
        std::vector<std::vector<float>> scores;
        for (const RowKernels* table : {&plain(), &fast()}) {
          std::vector<float> tmp(cpu::kScoreKeys * kWidth), heads_of(tokens * heads * query_bytes / 4);
          auto* prepared = reinterpret_cast<std::uint8_t*>(heads_of.data());
          for (int q = 0; q < tokens * heads; ++q) {
            const std::uint8_t* at = queries.data() + q * (payload + scale);
            table->prepare_query(format, shape, at, at + payload, global, prepared + q * query_bytes);
          }
          std::vector<float>& out = scores.emplace_back(tokens * (cpu::kScoreKeys + 1), -3.0f);
          const auto query = [&](int t) {
            return cpu::ScoreQuery{prepared + t * heads * query_bytes, weights.data() + t * heads,
                                   seen[static_cast<std::size_t>(t)], out.data() + t * (cpu::kScoreKeys + 1)};
          };
          std::vector<cpu::ScoreQuery> all;
          for (int t = 0; t < tokens; ++t) all.push_back(query(t));
          if (table == &plain())  // one call per token
            for (const cpu::ScoreQuery& one : all)
              table->score({heads, &one, 1, page, 0, first, one.count, tmp.data()});
          else
            table->score({heads, all.data(), tokens, page, 0, first, count, tmp.data()});
        }
        ASSERT_TRUE(same_bytes(scores[1], scores[0]))
            << to_string(format) << " on " << fast().name << ", " << heads << " heads, " << tokens << " tokens";
      }
  }
}

// All gathers of a step with a padded item, into more rows than exist: several blocks, shared by threads.
std::vector<std::uint8_t> gather_everything(Driver& driver, RequestId request) {
  std::vector<std::uint8_t> all;
  std::vector<std::int32_t> lens(2), first(2);
  const Step step = driver.prepare({{request, 1, 2}, {kNoRequest, 0, 1}}).value();
  driver.append(step);
  for (const LayerCacheSchema& layer : driver.cache.schema().layers) {
    LayerCacheHandle handle = driver.cache.acquire(layer.spec.layer);
    const std::vector<RowKind>& rows_read = layer.spec.rows;  // its own, or those of an owner
    const std::int64_t room = !rows_read.empty() && rows_read[0].ratio < 4 ? 200 : 45;
    for (const DType type : {DType::bf16, DType::f32}) {
      const auto gather = [&](std::int64_t rows, std::int64_t width, auto&& into) {
        std::vector<std::uint8_t> out(static_cast<std::size_t>(2 * rows * width) * element_bytes(type), 0xA5);
        into(TensorView(out.data(), type, {2, rows, width}));
        all.insert(all.end(), out.begin(), out.end());
      };
      const TensorView n(lens.data(), {2}), from(first.data(), {2});
      gather(200, layer.window.row.width, [&](const TensorView& out) { handle.gather_swa_kv(out, n, from); });
      if (rows_read.empty()) continue;
      gather(room, rows_read[0].width, [&](const TensorView& out) { handle.gather_all_compressed_kv(out, n); });
      if (rows_read.size() < 2) continue;
      gather(room, rows_read[1].width, [&](const TensorView& out) { handle.gather_all_index_keys(out, n); });
    }
    if (rows_read.size() < 2) continue;
    for (const int heads : {1, 6, 64}) {
      std::vector<float> q(static_cast<std::size_t>(3 * heads * rows_read[1].width)),
          weights(static_cast<std::size_t>(3 * heads)), scores(static_cast<std::size_t>(3 * room));
      fill_random(5, 3.0f, q.data(), q.size());
      fill_random(6, 1.0f, weights.data(), weights.size());
      std::vector<std::int32_t> chosen(3 * 7);
      const IndexInputs in{{q.data(), {3, heads, rows_read[1].width}}, {}, {weights.data(), {3, heads}}};
      handle.index_scores(in, {scores.data(), {3, room}});
      handle.index_topk(in, {chosen.data(), {3, 7}});
      const auto add = [&](const auto& values) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
        all.insert(all.end(), bytes, bytes + values.size() * sizeof(values[0]));
      };
      add(scores);
      add(chosen);
    }
  }
  driver.cache.abort(step);
  return all;
}

// Attention is not defined to the bit: every table must be close to the plain one, and threads change nothing. bf16
// queries may use bf16 products; more than 96 rows are several tiles.
TEST_P(RowKernelsTest, Attention) {
  for (const auto& [width, heads] :
       {std::pair(512, 64), std::pair(512, 3), std::pair(512, 72), std::pair(80, 5), std::pair(32, 1)}) {
    const Model model(base_config(width, 16, 32, 128, 4, 128, {LayerKind::hca}));
    CacheOptions o = options_for({Format::bf16, Format::bf16, false, DType::f32});
    Driver a(model, o, cpu::make_cpu_backend_on(1, plain())), b(model, o, cpu::make_cpu_backend_on(1, fast())),
        c(model, o, cpu::make_cpu_backend_on(3, fast()));
    std::vector<float> q(static_cast<std::size_t>(2 * heads * width));
    fill_random(7, 2.0f, q.data(), q.size());
    std::vector<std::uint16_t> q_bf16(q.size());
    std::transform(q.begin(), q.end(), q_bf16.begin(), codec::bf16_bits);
    for (const DType type : {DType::f32, DType::bf16}) {
      std::vector<std::vector<float>> outs;
      for (Driver* d : {&a, &b, &c}) {
        const RequestId r = d->admit();
        d->feed(r, 1, {300});
        const Step step = d->prepare({{r, 1, 2}}).value();
        d->append(step);
        std::vector<float>& out = outs.emplace_back(q.size());
        AttendInputs in;
        in.q = TensorView(type == DType::f32 ? static_cast<void*>(q.data()) : q_bf16.data(), type, {2, heads, width});
        d->cache.acquire(0).attend(in, {out.data(), {2, heads, width}});
        d->cache.abort(step);
        d->cache.release(r);
      }
      for (std::size_t i = 0; i < outs[0].size(); ++i)
        ASSERT_NEAR(outs[1][i], outs[0][i], 1e-5) << fast().name << " " << to_string(type) << " " << heads;
      EXPECT_TRUE(same_bytes(outs[2], outs[1])) << "threads";
    }
  }
}

// V4.1: pooling two rows of the same or of different types, rotation alone, and the projection of a latent.
TEST_P(RowKernelsTest, RotateProjectAndPoolTwo) {
  Random random(26);
  for (const int width : {512, 64, 48, 20}) {
    const auto w = static_cast<std::size_t>(width);
    for (int round = 0; round < 40; ++round) {
      const bool special = round % 4 == 0;
      std::vector<float> row = awkward_row(random, w, special), cos = awkward_row(random, w / 2, false),
                         sin = awkward_row(random, w / 2, false), zeros(w);
      for (const int pairs : {width / 2, width / 4, 3}) {
        std::vector<float> a = row, b = row;
        plain().rotate(pairs, cos.data(), sin.data(), a.data());
        fast().rotate(pairs, cos.data(), sin.data(), b.data());
        ASSERT_TRUE(same_bytes(a, b)) << width << " pairs " << pairs;
      }
      for (const int rows : {128, 32, 10}) {
        std::vector<std::uint16_t> weight;
        for (const float x : awkward_row(random, w * static_cast<std::size_t>(rows), special))
          weight.push_back(codec::bf16_bits(x));
        std::vector<float> a(static_cast<std::size_t>(rows)), b = a;
        plain().project({width, row.data(), weight.data(), rows, a.data()});
        fast().project({width, row.data(), weight.data(), rows, b.data()});
        ASSERT_TRUE(same_bytes(a, b)) << width << " to " << rows;
      }
      std::vector<float> kv = awkward_row(random, 2 * w, special), gate = awkward_row(random, 2 * w, special);
      std::vector<std::uint16_t> kv16(w), gate16(w);
      std::transform(kv.begin(), kv.begin() + width, kv16.begin(), codec::bf16_bits);
      std::transform(gate.begin(), gate.begin() + width, gate16.begin(), codec::bf16_bits);
      const ops::RowType first = round % 3 == 0   ? ops::RowType::bf16
                                 : round % 3 == 1 ? ops::RowType::f32
                                                  : ops::RowType::f32_as_bf16;
      const bool narrow = first == ops::RowType::bf16;
      const ops::SourceRow sources[] = {
          {narrow ? static_cast<const void*>(kv16.data()) : kv.data(),
           narrow ? static_cast<const void*>(gate16.data()) : gate.data(),
           zeros.data(),
           first,
           {kv.data(), gate.data()}},
          {kv.data() + w, gate.data() + w, zeros.data(), ops::RowType::f32, {kv.data(), gate.data()}}};
      std::vector<float> acc(3 * w), a(w), b(w);
      plain().pool(width, sources, 2, acc.data(), a.data());
      fast().pool(width, sources, 2, acc.data(), b.data());
      ASSERT_TRUE(same_bytes(a, b)) << "pool " << width << " round " << round;
    }
  }
}

// The whole cache on every table and on several threads: real widths, a long chunk, decodes, an image.
TEST_P(RowKernelsTest, WholeCache) {
  for (const FormatCase& f : all_format_cases()) {
    const Model model(f.shared ? shared_real_config() : real_config());
    CacheOptions o = options_for(f);
    o.max_rewind_tokens = 2;
    Driver a(model, o, cpu::make_cpu_backend_on(1, plain())), b(model, o, cpu::make_cpu_backend_on(3, fast()));
    const RequestId ra = a.admit(), rb = b.admit();
    a.feed(ra, 1, {141, 1, 3, 1});
    b.feed(rb, 1, {141, 1, 3, 1});
    EXPECT_TRUE(same_bytes(gather_everything(b, rb), gather_everything(a, ra))) << f.name() << " on " << fast().name;
    expect_same(bytes_of(b.cache, rb), bytes_of(a.cache, ra), f.name() + " on " + fast().name);
  }
}

}  // namespace
}  // namespace kv4::test
