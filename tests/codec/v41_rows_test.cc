// V4.1's row formats: the corner cases of their specification with bytes written out, the example row of
// docs/formats.md, and recorded vectors of another implementation where they are available.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "base/group.h"
#include "checks/safetensors.h"
#include "codec/codec.h"
#include "support/device.h"

namespace {

namespace codec = kv4::codec;
using kv4::Format;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

struct Row {
  std::vector<std::uint8_t> payload, scale;
};

Row encode(Format format, const std::vector<float>& x) {
  const codec::RowShape shape{static_cast<int>(x.size()), 0};
  Row out;
  codec::with_any_codec(format, [&](auto f) {
    out.payload.resize(static_cast<std::size_t>(f.payload_bytes(shape)));
    out.scale.resize(static_cast<std::size_t>(f.scale_bytes(shape)));
    f.encode(kv4::OneLane{}, shape, x.data(), out.payload.data(), out.scale.data(), 1.0f);
  });
  return out;
}

std::vector<float> decode(Format format, int width, const Row& row) {
  std::vector<float> out(static_cast<std::size_t>(width));
  codec::with_any_codec(format, [&](auto f) {
    f.decode(kv4::OneLane{}, {width, 0}, row.payload.data(), row.scale.data(), 1.0f, out.data());
  });
  return out;
}

using Bytes = std::vector<std::uint8_t>;

// One group of 32 channels (two of 16) that begins with `first`; zeros follow.
struct Group {
  std::vector<float> first;
  Bytes fp8, fp8_scale, nvfp4, nvfp4_scale, mxfp4, mxfp4_scale;  // the first bytes; empty: not specified
};

const Group kGroups[] = {
    {{0.0f, 0.0f}, {0x00, 0x00}, {0x69}, {0x00}, {0x01}, {0x00}, {0x01}},
    {{1e-6f, -1e-6f, 0.0f}, {0x48, 0xC8, 0x00}, {0x69}, {0x80, 0x00}, {0x01}, {0xE6, 0x00}, {0x69}},
    {{448.0f}, {0x7E}, {0x7F}, {0x07}, {0x69}, {0x06}, {0x86}},
    {{450.0f}, {0x76}, {0x80}, {0x07}, {0x69}, {}, {}},
    {{6.375f}, {}, {}, {}, {0x38}, {}, {}},   // 6 * 1.0625: a tie of the scale, to the even one
    {{7.125f}, {}, {}, {}, {0x3A}, {}, {}},   // 6 * 1.1875
    {{2688.0f}, {}, {}, {0x07}, {0x7E}, {}, {}},
    {{2704.0f}, {}, {}, {0x07}, {0x7E}, {}, {}},
    {{1e30f, -1e30f}, {}, {}, {0xF7}, {0x7E}, {}, {}},
    {{kNan, 1.0f, -2.0f, 0.0f}, {0x7F, 0x70, 0xF8, 0x00}, {0x78}, Bytes(8, 0), {0x7F, 0x01}, {0x47, 0x0E}, {0x7E}},
    {{kInfinity, 1.0f, -2.0f, 0.0f}, {0x7E, 0x00, 0x80, 0x00}, {0xF7}, {0x07, 0x08}, {0x7E}, {0x07, 0x08}, {0xFD}},
};

void expect_begins(const Bytes& got, const Bytes& want, const std::string& what) {
  ASSERT_LE(want.size(), got.size());
  EXPECT_EQ(Bytes(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(want.size())), want) << what;
}

TEST(RowsV41, CornersOfTheSpecification) {
  for (const Group& g : kGroups) {
    SCOPED_TRACE(g.first[0]);
    std::vector<float> x(32, 0.0f);
    for (std::size_t c = 0; c < g.first.size(); ++c) x[c] = codec::round_bf16(g.first[c]);
    const Row fp8 = encode(Format::fp8_tile32, x), nvfp4 = encode(Format::nvfp4_row, x), mx = encode(Format::mxfp4, x);
    expect_begins(fp8.payload, g.fp8, "fp8_tile32");
    expect_begins(fp8.scale, g.fp8_scale, "fp8_tile32 scale");
    expect_begins(nvfp4.payload, g.nvfp4, "nvfp4_row");
    expect_begins(nvfp4.scale, g.nvfp4_scale, "nvfp4_row scale");
    expect_begins(mx.payload, g.mxfp4, "mxfp4");
    expect_begins(mx.scale, g.mxfp4_scale, "mxfp4 scale");
  }
}

TEST(RowsV41, InfinityReads2688AndNanReachesItsGroupOnly) {
  std::vector<float> x(32, 0.0f);
  x[0] = kInfinity;
  x[1] = 1.0f;
  x[2] = -2.0f;
  x[17] = kNan;
  x[18] = 3.0f;
  const std::vector<float> y = decode(Format::nvfp4_row, 32, encode(Format::nvfp4_row, x));
  EXPECT_EQ(y[0], 2688.0f);
  EXPECT_EQ(codec::float_bits(y[1]), 0u);
  EXPECT_EQ(codec::float_bits(y[2]), 0x80000000u);
  for (std::size_t c = 0; c < 16; ++c) EXPECT_FALSE(std::isnan(y[c])) << c;
  for (std::size_t c = 16; c < 32; ++c) EXPECT_EQ(codec::float_bits(y[c]), codec::kNanBits) << c;
}

// Each group is divided by its rounded scale; multiplying by the scale's reciprocal would cross a tie for some scale.
TEST(RowsV41, EveryTieUnderEveryScaleGoesToTheEvenCode) {
  const float ties[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const int even[] = {0, 2, 2, 4, 4, 6, 6};
  for (int byte = 1; byte < 0x7F; ++byte) {
    const float scale = codec::e4m3_value(static_cast<std::uint8_t>(byte));
    std::vector<float> x(16, 0.0f);
    x[0] = 6.0f * scale;  // exact in bf16: at most 6 bits
    for (std::size_t i = 0; i < std::size(ties); ++i) {
      x[2 * i + 1] = ties[i] * scale;
      x[2 * i + 2] = -ties[i] * scale;
    }
    for (const float v : x) ASSERT_EQ(codec::round_bf16(v), v);
    const Row row = encode(Format::nvfp4_row, x);
    ASSERT_EQ(row.scale[0], byte);
    EXPECT_EQ(row.payload[0] & 15, 7);
    const auto code = [&](std::size_t c) { return row.payload[c / 2] >> (4 * (c % 2)) & 15; };
    for (std::size_t i = 0; i < std::size(ties); ++i) {
      EXPECT_EQ(code(2 * i + 1), even[i]) << "scale " << byte << " tie " << ties[i];
      EXPECT_EQ(code(2 * i + 2), even[i] | 8) << "scale " << byte << " tie " << -ties[i];
    }
  }
}

// The row of docs/formats.md.
TEST(RowsV41, ExampleRow) {
  std::vector<float> x(512, 0.0f);
  const float first[] = {1, -2, 0.10009766f, 3.140625f, 100, 500, -0.00099945068f, 0};
  std::copy(std::begin(first), std::end(first), x.begin());
  x[64] = 0.30078125f, x[65] = -0.69921875f;
  x[448] = 1, x[449] = -0.5f, x[450] = 3.140625f, x[451] = 500;
  for (float& v : x) v = codec::round_bf16(v);

  const Row fp8 = encode(Format::fp8_tile32, x);
  Bytes payload(512, 0), scale(16, 0x69);
  const auto put = [](Bytes& at, std::size_t offset, const Bytes& bytes) {
    std::copy(bytes.begin(), bytes.end(), at.begin() + static_cast<std::ptrdiff_t>(offset));
  };
  put(payload, 0, {0x30, 0xB8, 0x15, 0x3D, 0x64, 0x78, 0x80, 0x00});
  put(payload, 64, {0x72, 0xFB});
  put(payload, 448, {0x30, 0xA8, 0x3D, 0x78});
  put(scale, 0, {0x80, 0x69, 0x76});
  put(scale, 14, {0x80});
  EXPECT_EQ(fp8.payload, payload);
  EXPECT_EQ(fp8.scale, scale);

  const Row nvfp4 = encode(Format::nvfp4_row, x);
  payload.assign(256, 0), scale.assign(32, 0x01);
  put(payload, 0, {0x80, 0x00, 0x72, 0x08});
  put(payload, 32, {0xF5});
  put(payload, 224, {0x80, 0x70});
  put(scale, 0, {0x6A});
  put(scale, 4, {0x1F});
  put(scale, 28, {0x6A});
  EXPECT_EQ(nvfp4.payload, payload);
  EXPECT_EQ(nvfp4.scale, scale);
}

// Rows of a number and its negative under all lower bits, for every bf16 value: decoded and stored again, they stay.
TEST(RowsV41, ValuesReadBackAreFixedPoints) {
  for (const Format format : {Format::fp8_tile32, Format::nvfp4_row})
    for (std::uint32_t first = 0; first < 65536; first += 32) {
      std::vector<float> x;
      for (std::uint32_t i = 0; i < 32; ++i)
        x.push_back(codec::bf16_value(static_cast<std::uint16_t>((first + i) * 40503u)));
      const Row once = encode(format, x);
      const std::vector<float> y = decode(format, 32, once);
      const Row twice = encode(format, y);
      const std::vector<float> z = decode(format, 32, twice);
      ASSERT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0)
          << kv4::to_string(format) << " from " << first;
    }
}

// --- recorded vectors

struct Recorded {
  Format format;
  const char* name;
  int group;
};
constexpr Recorded kRecorded[] = {
    {Format::fp8_tile32, "fp8_tile32", 32}, {Format::nvfp4_row, "nvfp4_row", 16}, {Format::mxfp4, "mxfp4", 32}};

TEST(RowsV41, RecordedVectors) {
  const std::string path = kv4::test::source_path("../shared/golden41/codecs41.safetensors");
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "not beside the checkout: " << path;
  const kv4::checks::SafeTensors file = kv4::checks::load_safetensors(path);
  const std::vector<std::uint16_t> amax = file.halves("sweep.amax", {-1});
  EXPECT_EQ(amax.size(), 32640u);
  for (const Recorded& r : kRecorded) {
    SCOPED_TRACE(r.name);
    const std::string name = r.name;
    const std::vector<std::int64_t> shape = file.tensor(name + ".in").shape;
    ASSERT_EQ(shape.size(), 2u);
    const auto rows = static_cast<std::size_t>(shape[0]), width = static_cast<std::size_t>(shape[1]);
    ASSERT_GT(rows, 0u);
    const std::vector<float> in = file.floats(name + ".in", shape), out = file.floats(name + ".out", {-1, -1});
    const Bytes codes = file.octets(name + ".codes", {-1, -1}), scales = file.octets(name + ".scales", {-1, -1});
    ASSERT_EQ(out.size(), in.size());
    std::size_t wrong_codes = 0, wrong_scales = 0, wrong_values = 0;
    for (std::size_t i = 0; i < rows; ++i) {
      const Row row = encode(r.format, {in.begin() + static_cast<std::ptrdiff_t>(i * width),
                                        in.begin() + static_cast<std::ptrdiff_t>((i + 1) * width)});
      ASSERT_EQ(codes.size(), rows * row.payload.size());
      ASSERT_EQ(scales.size(), rows * row.scale.size());
      for (std::size_t b = 0; b < row.payload.size(); ++b)
        wrong_codes += row.payload[b] != codes[i * row.payload.size() + b];
      for (std::size_t b = 0; b < row.scale.size(); ++b)
        wrong_scales += row.scale[b] != scales[i * row.scale.size() + b];
      const std::vector<float> back = decode(r.format, static_cast<int>(width), row);
      for (std::size_t c = 0; c < width; ++c) {
        const float want = out[i * width + c];
        wrong_values += std::isnan(want) ? !std::isnan(back[c]) : codec::float_bits(back[c]) != codec::float_bits(want);
      }
    }
    EXPECT_EQ(wrong_codes, 0u);
    EXPECT_EQ(wrong_scales, 0u);
    EXPECT_EQ(wrong_values, 0u);

    const Bytes sweep = file.octets("sweep." + name, {-1});
    ASSERT_EQ(sweep.size(), amax.size());
    for (std::size_t i = 0; i < amax.size(); ++i) {
      const std::vector<float> x(static_cast<std::size_t>(r.group), codec::bf16_value(amax[i]));
      ASSERT_EQ(encode(r.format, x).scale[0], sweep[i]) << "amax bits " << amax[i];
    }
  }
}

}  // namespace
