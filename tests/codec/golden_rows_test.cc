// Fixed rows and their bytes, computed with exact fractions by an independent program. A change here changes the
// meaning of stored caches.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/group.h"
#include "codec/codec.h"

namespace {

namespace codec = kv4::codec;
using kv4::Format;

struct Golden {
  Format format;
  int row;
  int width;
  int tail;
  float global;
  const char* payload;
  const char* scale;
};

// Channel c of row k; exact in bf16.
float channel(int k, int c) { return std::ldexp(static_cast<float>((c * 37 + 11 * k) % 101 - 50), 3 * k - 8); }

constexpr Golden kRows[] = {
    {Format::fp8_tile64, 0, 72, 8, 1.0f,
     "fced74fadc78f7667bf270fcea76f90079f66a7cf072fbe677f85c7af46d7cee74fae078f8647bf270fceb75fad079f6697cf172fbe876f95"
     "87af46c7cef73faa0bc003e00bea03c283eb0bd703d44be",
     "7400000000000000"},
    {Format::fp8_tile64, 1, 72, 8, 1.0f,
     "fad879f6687bf271fce976f9507af56b7cf072fbe478f8607af46efced74fadc78f7667bf270fcea76f90079f66a7cf072fbe677f85c7af46"
     "d7cee74fae078f8403eac3f28bf003fc0bfb0be503f98bf",
     "7700000000000000"},
    {Format::fp8_tile64, 3, 72, 8, 1.0f,
     "f072fbe677f85c7af46d7cee74fae078f8647bf270fceb75fad079f6697cf172fbe876f9587af46c7cef73fae278f8627af36ffcec74fad87"
     "9f6687bf271fce9604290c20040984250c2b041c04200c2",
     "7d00000000000000"},
    {Format::fp8_row, 0, 24, 8, 1.0f, "feef75fbdd7af8687cf372fdeb77fa00143ed8bd203d3c3e88bda03d30bee0bc", "4992e439"},
    {Format::fp8_row, 2, 24, 8, 1.0f, "f86a7df273fde978fa597bf66e7ef17528c1a0bf004100c1a03f2841b0c07040", "0000e03c"},
    {Format::bf16, 1, 16, 4, 1.0f, "9cbf80bd8c3f68bf803eb43f18bf103fb8bf90be603f90bf003d983f50bfb03e", ""},
    {Format::mxfp4, 0, 64, 0, 1.0f, "adc3481ca5d2390cb4512a9dc4402ba5d3481cb5d2398cc4512a9dc4402ba5d3", "7b7b"},
    {Format::mxfp4, 4, 64, 0, 1.0f, "490cb5d23a8cc4512a9dc3401ba5d2490cb4523a8dc4512b9dc3481ca5d2490c", "8787"},
    {Format::nvfp4, 0, 32, 0, 1.0f, "bfe5692ec7f45a0ed6724cafe6613dc7", "1010"},
    {Format::nvfp4, 1, 32, 0, 0.125f, "9fe6724dafe6703dc7f56a1ed7f45b9e", "3f40"},
    {Format::nvfp4, 3, 32, 0, 1.0f, "4cafe6613dc7f5692ed7f45b8ee6724c", "5858"},
    {Format::fp8, 0, 32, 0, 1.0f, "fced74fadc78f7667bf270fcea76f90079f66a7cf072fbe677f85c7af46d7cee", "0000003a"},
    {Format::fp8, 2, 32, 0, 1.0f, "f6697cf172fbe876f9587af46c7cef73fae278f8627af36ffcec74fad879f668", "0000003d"},
};

std::string hex(const std::vector<std::uint8_t>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (std::uint8_t b : bytes) {
    out += kDigits[b >> 4];
    out += kDigits[b & 15];
  }
  return out;
}

TEST(CodecGolden, Rows) {
  for (const Golden& g : kRows) {
    SCOPED_TRACE(testing::Message() << kv4::to_string(g.format) << " row " << g.row);
    const codec::RowShape shape{g.width, g.tail};
    std::vector<float> x;
    for (int c = 0; c < g.width; ++c) x.push_back(channel(g.row, c));
    std::vector<std::uint8_t> payload(std::string(g.payload).size() / 2), scale(std::string(g.scale).size() / 2 + 1);
    codec::with_codec(g.format, [&](auto f) {
      ASSERT_EQ(static_cast<std::size_t>(f.payload_bytes(shape)), payload.size());
      ASSERT_EQ(static_cast<std::size_t>(f.scale_bytes(shape)), scale.size() - 1);
      f.encode(kv4::OneLane{}, shape, x.data(), payload.data(), scale.data(), g.global);
    });
    scale.pop_back();
    EXPECT_EQ(hex(payload), g.payload);
    EXPECT_EQ(hex(scale), g.scale);
  }
}

}  // namespace
