// Every row format against the slow one of naive_formats.h, byte for byte; error-prone rules also by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/group.h"
#include "codec/codec.h"
#include "codec/naive_formats.h"
#include "kv4/error.h"

namespace {

namespace codec = kv4::codec;
namespace naive = kv4::naive;
using kv4::Format;

constexpr std::uint32_t kSeed = 4711;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  Format format;
  int width;
  int tail;
  float global = 1.0f;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << kv4::to_string(c.format) << " width " << c.width << " tail " << c.tail << " global " << c.global;
}

int payload_bytes(const Case& c) {
  return codec::with_any_codec(c.format, [&](auto f) { return f.payload_bytes({c.width, c.tail}); });
}
int scale_bytes(const Case& c) {
  return codec::with_any_codec(c.format, [&](auto f) { return f.scale_bytes({c.width, c.tail}); });
}

constexpr int kGuard = 16;
constexpr std::uint8_t kPoison = 0xA5;

bool only_poison(const std::uint8_t* at, int count) {
  return std::all_of(at, at + count, [](std::uint8_t b) { return b == kPoison; });
}

// Encodes between guards; fails if a byte outside the row changes.
naive::Row encode(const Case& c, const std::vector<float>& x) {
  const int payload = payload_bytes(c), scale = scale_bytes(c);
  std::vector<std::uint8_t> p(static_cast<std::size_t>(payload + 2 * kGuard), kPoison),
      s(static_cast<std::size_t>(scale + 2 * kGuard), kPoison);
  codec::with_any_codec(c.format, [&](auto f) {
    f.encode(kv4::OneLane{}, {c.width, c.tail}, x.data(), p.data() + kGuard, s.data() + kGuard, c.global);
  });
  EXPECT_TRUE(only_poison(p.data(), kGuard) && only_poison(p.data() + kGuard + payload, kGuard))
      << "payload written outside its row";
  EXPECT_TRUE(only_poison(s.data(), kGuard) && only_poison(s.data() + kGuard + scale, kGuard))
      << "scale written outside its row";
  return {{p.begin() + kGuard, p.end() - kGuard}, {s.begin() + kGuard, s.end() - kGuard}};
}

std::vector<float> decode(const Case& c, const naive::Row& row) {
  std::vector<float> out(static_cast<std::size_t>(c.width + 2), -77.0f);
  codec::with_any_codec(c.format, [&](auto f) {
    f.decode(kv4::OneLane{}, {c.width, c.tail}, row.payload.data(), row.scale.data(), c.global, out.data() + 1);
  });
  EXPECT_EQ(out.front(), -77.0f);
  EXPECT_EQ(out.back(), -77.0f);
  return {out.begin() + 1, out.end() - 1};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// bf16 rows of very different magnitudes, as the cache passes them to the formats.
std::vector<float> random_row(std::mt19937& random, int width) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const int exponent = std::uniform_int_distribution<int>(-30, 30)(random);
  const int kind = static_cast<int>(random() % 8);
  std::vector<float> out(static_cast<std::size_t>(width));
  for (float& x : out) {
    x = std::ldexp(uniform(random), exponent);
    if (kind == 0 && random() % 4 != 0) x = std::copysign(0.0f, x);     // sparse, both zeros
    if (kind == 1) x = std::ldexp(x, static_cast<int>(random() % 20));  // wide range inside a tile
    if (kind == 2)
      x = naive::float_of(static_cast<std::uint32_t>(random()));  // any bit pattern, including NaN and infinity
    x = naive::round_bf16(x);
  }
  return out;
}

// The allowed error of a finite value: half a step of the format at that value.
double half_step(const Case& c, int channel, double x, const naive::Row& row) {
  const double a = std::fabs(x), slack = a * 1e-6;
  const bool tailed = c.format == Format::fp8_tile64 || c.format == Format::fp8_row;
  if (c.format == Format::bf16 || (tailed && channel >= c.width - c.tail)) return 0.0;
  double scale = 0;
  if (c.format == Format::fp8_tile64) scale = naive::ue8m0_value(row.scale[static_cast<std::size_t>(channel / 64)]);
  if (c.format == Format::fp8_tile32) scale = naive::ue8m0_value(row.scale[static_cast<std::size_t>(channel / 32)]);
  if (c.format == Format::nvfp4_row) scale = naive::e4m3_value(row.scale[static_cast<std::size_t>(channel / 16)]);
  if (c.format == Format::fp8_row || c.format == Format::fp8) scale = naive::read_fp32(row.scale.data());
  if (c.format == Format::mxfp4) scale = naive::ue8m0_value(row.scale[static_cast<std::size_t>(channel / 32)]);
  if (c.format == Format::nvfp4)
    scale = naive::e4m3_value(row.scale[static_cast<std::size_t>(channel / 16)]) * c.global;
  if (c.format == Format::mxfp4 || c.format == Format::nvfp4 || c.format == Format::nvfp4_row) {
    if (scale == 0.0) return 6 * 0x1p-10 * c.global * 1.0001;  // the largest amax whose scale rounds to zero
    if (a > 6 * scale) return a - 6 * scale + slack;           // the scale itself was rounded down: clamped
    return (a <= 2 * scale ? 0.25 : a <= 4 * scale ? 0.5 : 1.0) * scale + slack;
  }
  return std::max(a * 0x1p-4, scale * 0x1p-10) + slack;
}

class RowFormat : public testing::TestWithParam<Case> {};

TEST_P(RowFormat, BytesAndValuesOfRandomRows) {
  const Case c = GetParam();
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  for (int i = 0; i < 2000; ++i) {
    const std::vector<float> x = random_row(random, c.width);
    const naive::Row got = encode(c, x), want = naive::encode(c.format, c.width, c.tail, x.data(), c.global);
    ASSERT_EQ(got.payload, want.payload) << "row " << i;
    ASSERT_EQ(got.scale, want.scale) << "row " << i;
    const std::vector<float> values = decode(c, got);
    ASSERT_TRUE(
        same_bits(values, naive::decode(c.format, c.width, c.tail, got.payload.data(), got.scale.data(), c.global)))
        << "row " << i;
    ASSERT_EQ(encode(c, x), got) << "not the same twice";
  }
}

TEST_P(RowFormat, ErrorIsAtMostHalfAStep) {
  const Case c = GetParam();
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed + 1);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (int i = 0; i < 500; ++i) {
    std::vector<float> x(static_cast<std::size_t>(c.width));
    const int exponent = std::uniform_int_distribution<int>(-12, 8)(random);
    for (float& v : x) v = naive::round_bf16(std::ldexp(uniform(random), exponent));
    const naive::Row row = encode(c, x);
    const std::vector<float> y = decode(c, row);
    for (int ch = 0; ch < c.width; ++ch) {
      const double v = x[static_cast<std::size_t>(ch)];
      const bool e4m3_scale = c.format == Format::nvfp4 || c.format == Format::nvfp4_row;
      if (e4m3_scale && std::fabs(v) > 448.0 * 6 * c.global) continue;  // beyond the largest scale
      ASSERT_LE(std::fabs(v - y[static_cast<std::size_t>(ch)]), half_step(c, ch, v, row))
          << "row " << i << " channel " << ch << " value " << v;
    }
  }
}

TEST_P(RowFormat, NanStaysInItsChannelAndInfinityClamps) {
  const Case c = GetParam();
  std::vector<float> x(static_cast<std::size_t>(c.width));
  for (int ch = 0; ch < c.width; ++ch)
    x[static_cast<std::size_t>(ch)] = naive::round_bf16(0.01f * static_cast<float>(ch % 37 - 18));
  const naive::Row clean = encode(c, x);
  const std::vector<float> clean_values = decode(c, clean);
  for (int at : {0, 1, c.width / 2, c.width - 1}) {
    std::vector<float> bad = x;
    // This channel must not have set a scale, or the scale would change too.
    if (std::fabs(x[static_cast<std::size_t>(at)]) >= 0.175f) continue;
    bad[static_cast<std::size_t>(at)] = kNan;
    const naive::Row row = encode(c, bad);
    if (c.format == Format::nvfp4_row) {  // e2m1 has no NaN, so its whole group reads NaN, by the scale
      const int first = at / 16 * 16;
      EXPECT_EQ(row.scale[static_cast<std::size_t>(at / 16)], 0x7F);
      const std::vector<float> y = decode(c, row);
      for (int ch = 0; ch < c.width; ++ch) {
        const std::uint32_t bits = naive::bits_of(y[static_cast<std::size_t>(ch)]);
        const bool inside = ch >= first && ch < first + 16;
        EXPECT_EQ(bits, inside ? 0x7FC00000u : naive::bits_of(clean_values[static_cast<std::size_t>(ch)])) << ch;
      }
      continue;
    }
    EXPECT_EQ(row.scale, clean.scale) << "NaN at " << at;
    const std::vector<float> y = decode(c, row);
    for (int ch = 0; ch < c.width; ++ch) {
      const float v = y[static_cast<std::size_t>(ch)];
      if (ch != at) {
        ASSERT_EQ(naive::bits_of(v), naive::bits_of(clean_values[static_cast<std::size_t>(ch)]))
            << "NaN at " << at << " reached " << ch;
      } else if (c.format == Format::mxfp4 || c.format == Format::nvfp4) {
        EXPECT_GT(v, 0.0f) << "no NaN in e2m1: +6 steps";
      } else {
        EXPECT_EQ(naive::bits_of(v), 0x7FC00000u);
      }
    }
    for (float infinity : {kInfinity, -kInfinity}) {
      bad[static_cast<std::size_t>(at)] = infinity;
      const naive::Row wide = encode(c, bad);
      EXPECT_EQ(wide, naive::encode(c.format, c.width, c.tail, bad.data(), c.global));
      const std::vector<float> z = decode(c, wide);
      const bool kept_bf16 = c.format == Format::bf16 || (c.tail > 0 && at >= c.width - c.tail);
      for (int ch = 0; ch < c.width; ++ch) {
        if (ch == at) {  // the largest code at the largest scale: may be beyond fp32 again
          EXPECT_TRUE(z[static_cast<std::size_t>(ch)] == infinity || !kept_bf16);
        } else {
          ASSERT_TRUE(std::isfinite(z[static_cast<std::size_t>(ch)])) << "infinity at " << at << " reached " << ch;
        }
      }
      if (!kept_bf16) {
        EXPECT_GT(z[static_cast<std::size_t>(at)] * (infinity > 0 ? 1.0f : -1.0f), 1.0f)
            << "keeps its sign and is large";
      }
    }
  }
}

TEST_P(RowFormat, RowsOfOnlyNanOrInfinityHaveFiniteScales) {
  const Case c = GetParam();
  for (float fill : {kNan, kInfinity, -kInfinity}) {
    const std::vector<float> x(static_cast<std::size_t>(c.width), fill);
    const naive::Row row = encode(c, x);
    EXPECT_EQ(row, naive::encode(c.format, c.width, c.tail, x.data(), c.global)) << fill;
    const bool fp32_scale = c.format == Format::fp8_row || c.format == Format::fp8;
    EXPECT_TRUE(!fp32_scale || std::isfinite(naive::read_fp32(row.scale.data())));
    for (std::uint8_t s : row.scale)
      EXPECT_TRUE(fp32_scale || (c.format == Format::nvfp4       ? (s & 0x7F) != 0x7F
                                 : c.format == Format::nvfp4_row ? std::isnan(fill) == (s == 0x7F)
                                                                 : s != 0xFF))
          << "NaN scale";
  }
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::string(kv4::to_string(info.param.format)) + "_" + std::to_string(info.index);
}

INSTANTIATE_TEST_SUITE_P(All, RowFormat,
                         testing::Values(Case{Format::fp8_tile64, 512, 64}, Case{Format::fp8_tile64, 80, 16},
                                         Case{Format::fp8_tile64, 1100, 12}, Case{Format::fp8_row, 512, 64},
                                         Case{Format::fp8_row, 32, 8}, Case{Format::bf16, 512, 64},
                                         Case{Format::bf16, 128, 0}, Case{Format::bf16, 2, 2},
                                         Case{Format::mxfp4, 128, 0}, Case{Format::mxfp4, 32, 0},
                                         Case{Format::nvfp4, 128, 0}, Case{Format::nvfp4, 16, 0},
                                         Case{Format::nvfp4, 128, 0, 0.03125f}, Case{Format::nvfp4, 128, 0, 0.3f},
                                         Case{Format::fp8, 128, 0}, Case{Format::fp8, 16, 0},
                                         Case{Format::fp8_tile32, 512, 0}, Case{Format::fp8_tile32, 32, 0},
                                         Case{Format::nvfp4_row, 512, 0}, Case{Format::nvfp4_row, 16, 0}),
                         case_name);

// --- rules by hand

std::vector<float> row_of(int width, float at0) {
  std::vector<float> x(static_cast<std::size_t>(width));
  x[0] = at0;
  return x;
}

TEST(RowRules, SizesOfTheRealRows) {
  const auto sizes = [](Format f, int width, int tail) {
    return std::pair(payload_bytes({f, width, tail}), scale_bytes({f, width, tail}));
  };
  EXPECT_EQ(sizes(Format::fp8_tile64, 512, 64), std::pair(576, 8));
  EXPECT_EQ(sizes(Format::fp8_row, 512, 64), std::pair(576, 4));
  EXPECT_EQ(sizes(Format::bf16, 512, 64), std::pair(1024, 0));
  EXPECT_EQ(sizes(Format::mxfp4, 128, 0), std::pair(64, 4));
  EXPECT_EQ(sizes(Format::nvfp4, 128, 0), std::pair(64, 8));
  EXPECT_EQ(sizes(Format::fp8, 128, 0), std::pair(128, 4));
  EXPECT_EQ(sizes(Format::bf16, 128, 0), std::pair(256, 0));
  EXPECT_EQ(sizes(Format::fp8_tile32, 512, 0), std::pair(512, 16));
  EXPECT_EQ(sizes(Format::nvfp4_row, 512, 0), std::pair(256, 32));
}

TEST(RowRules, Tile64FloorsAmaxNotTheScale) {
  const Case c{Format::fp8_tile64, 80, 16};
  const auto scale = [&](float amax) { return static_cast<int>(encode(c, row_of(80, amax)).scale[0]); };
  EXPECT_EQ(scale(0.0f), 127 - 22);  // 1e-4 / 448 = 2.23e-7, the next power of two is 2^-22
  EXPECT_EQ(scale(1e-5f), 127 - 22);
  EXPECT_EQ(scale(1e-4f), 127 - 22);
  EXPECT_EQ(scale(2e-4f), 127 - 21);
  EXPECT_EQ(scale(448.0f), 127);  // exactly 1
  EXPECT_EQ(scale(std::nextafter(448.0f, 500.0f)), 128);
  EXPECT_EQ(scale(224.0f), 126);
  const naive::Row row = encode(c, row_of(80, 448.0f));
  EXPECT_EQ(row.payload[0], 0x7E);
  EXPECT_EQ(std::vector<std::uint8_t>(row.scale.begin() + 1, row.scale.end()), std::vector<std::uint8_t>(7, 0))
      << "padding is zero";
}

TEST(RowRules, Tile64TilesDoNotShareScales) {
  const Case c{Format::fp8_tile64, 512, 64};
  std::vector<float> x(512, 1.0f);
  for (int t = 0; t < 7; ++t) x[static_cast<std::size_t>(64 * t + 63)] = std::ldexp(448.0f, t);
  const naive::Row row = encode(c, x);
  for (int t = 0; t < 7; ++t) EXPECT_EQ(row.scale[static_cast<std::size_t>(t)], 127 + t);
  EXPECT_EQ(row.scale[7], 0);
}

TEST(RowRules, Fp8RowOfZerosHasInverseScaleOne) {
  const Case c{Format::fp8_row, 32, 8};
  std::vector<float> x(32, 0.0f);
  x[30] = 5.0f;  // the tail does not count
  EXPECT_EQ(naive::read_fp32(encode(c, x).scale.data()), 1.0f);
  x[3] = -896.0f;
  const naive::Row row = encode(c, x);
  EXPECT_EQ(naive::read_fp32(row.scale.data()), 2.0f);
  EXPECT_EQ(row.payload[3], 0xFE);
}

TEST(RowRules, Mxfp4SmallestScaleIsTwoToMinus126) {
  const Case c{Format::mxfp4, 32, 0};
  EXPECT_EQ(encode(c, row_of(32, 0.0f)).scale[0], 1);
  EXPECT_EQ(encode(c, row_of(32, 0x1p-133f)).scale[0], 1);
  EXPECT_EQ(encode(c, row_of(32, 6 * 0x1p-126f)).scale[0], 1);
  EXPECT_EQ(encode(c, row_of(32, 6 * 0x1p-126f)).payload[0], 0x07);
  EXPECT_EQ(encode(c, row_of(32, 6.0f)).scale[0], 127);
  EXPECT_EQ(encode(c, row_of(32, 6.03125f)).scale[0], 128);
  std::vector<float> x(32, 0.0f);
  x[0] = 6.0f;
  x[1] = -0.5f;
  x[2] = -0.0f;
  x[3] = 5.0f;  // tie between 4 and 6: the even code
  const naive::Row row = encode(c, x);
  EXPECT_EQ(row.payload[0], 0x97);
  EXPECT_EQ(row.payload[1], 0x68);
}

TEST(RowRules, Nvfp4ZeroScaleStoresZeros) {
  const Case c{Format::nvfp4, 16, 0};
  std::vector<float> x(16, -0.0f);
  EXPECT_EQ(encode(c, x), (naive::Row{std::vector<std::uint8_t>(8, 0), {0}}));
  for (float& v : x) v = -0x1p-8f;  // / 6 is below half of the smallest e4m3
  EXPECT_EQ(encode(c, x), (naive::Row{std::vector<std::uint8_t>(8, 0), {0}}));
  for (float& v : x) v = -0x1p-7f;
  EXPECT_EQ(encode(c, x).scale[0], 1);
  EXPECT_NE(encode(c, x).payload[0], 0);
  const Case fine{Format::nvfp4, 16, 0, 0x1p-10f};
  EXPECT_NE(encode(fine, x).scale[0], 1) << "the global scale shifts the range";
}

TEST(RowRules, Fp8KeyScaleIsAPowerOfTwo) {
  const Case c{Format::fp8, 16, 0};
  EXPECT_EQ(naive::read_fp32(encode(c, row_of(16, 0.0f)).scale.data()), 0x1p-22f);
  EXPECT_EQ(naive::read_fp32(encode(c, row_of(16, 448.0f)).scale.data()), 1.0f);
  EXPECT_EQ(naive::read_fp32(encode(c, row_of(16, 450.0f)).scale.data()), 2.0f);
}

TEST(RowNames, ParseIsTheInverseOfToString) {
  for (Format f : {Format::fp8_tile64, Format::fp8_row, Format::bf16, Format::mxfp4, Format::nvfp4, Format::fp8,
                   Format::fp8_tile32, Format::nvfp4_row})
    EXPECT_EQ(kv4::parse_format(kv4::to_string(f)), f);
  for (kv4::HcaMode m : {kv4::HcaMode::online, kv4::HcaMode::raw}) EXPECT_EQ(kv4::parse_hca_mode(kv4::to_string(m)), m);
  for (kv4::Arrangement a : {kv4::Arrangement::block_major, kv4::Arrangement::layer_major})
    EXPECT_EQ(kv4::parse_arrangement(kv4::to_string(a)), a);
  try {
    kv4::parse_format("fp16");
    FAIL() << "no Error was thrown";
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_argument);
    EXPECT_NE(std::string(e.what()).find("'fp16'"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("mxfp4"), std::string::npos) << "lists the names";
  }
  EXPECT_THROW(kv4::parse_hca_mode(""), kv4::Error);
  EXPECT_THROW(kv4::parse_arrangement("Block_major"), kv4::Error);
}

}  // namespace
