#include "heat_map.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "kv4/error.h"
#include "plot.h"

namespace kv4::cli {
namespace {

using Color = std::array<std::uint8_t, 3>;

// From dark blue over magenta and orange to light yellow: brightness grows all the way, also in grey.
constexpr Color kRamp[] = {{10, 7, 35},    {60, 15, 112},  {132, 32, 107}, {203, 63, 72},
                           {246, 125, 21}, {249, 201, 50}, {252, 255, 164}};
constexpr Color kNothing = {200, 200, 200};

struct Range {
  float low = 0, high = 1;
};

Range range_of(const HeatMap& map) {
  Range out{INFINITY, -INFINITY};
  for (const float v : map.values)
    if (std::isfinite(v)) out = {std::min(out.low, v), std::max(out.high, v)};
  if (!(out.low <= out.high)) return {0, 1};
  if (out.low == out.high) out.high = out.low + 1;
  return out;
}

Color color_of(float value, const Range& range) {
  if (!std::isfinite(value)) return kNothing;
  const float place = (value - range.low) / (range.high - range.low) * (std::size(kRamp) - 1);
  const std::size_t i = std::min<std::size_t>(static_cast<std::size_t>(place), std::size(kRamp) - 2);
  const float share = place - static_cast<float>(i);
  Color out;
  for (std::size_t c = 0; c < 3; ++c)
    out[c] = static_cast<std::uint8_t>(std::lround((1 - share) * kRamp[i][c] + share * kRamp[i + 1][c]));
  return out;
}

void put32(std::string& out, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 255);
}

void put_chunk(std::string& out, const char* type, const std::string& data) {
  put32(out, static_cast<std::uint32_t>(data.size()));
  const std::string body = type + data;
  out += body;
  put32(out, static_cast<std::uint32_t>(
                 crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()))));
}

std::string deflated(const std::string& raw) {
  uLongf size = compressBound(static_cast<uLong>(raw.size()));
  std::string out(size, '\0');
  const int status = compress2(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(raw.data()),
                               static_cast<uLong>(raw.size()), Z_BEST_COMPRESSION);
  if (status != Z_OK) throw Error(ErrorCode::out_of_memory, fmt::format("zlib could not compress: {}", status));
  out.resize(size);
  return out;
}

std::string base64(const std::string& bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t j = 0; j < 3; ++j)
      group = group << 8 | (i + j < bytes.size() ? static_cast<std::uint8_t>(bytes[i + j]) : 0u);
    for (std::size_t j = 0; j < 4; ++j) out += i + j <= bytes.size() ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

}  // namespace

std::string png_of(const HeatMap& map, int zoom) {
  const Range range = range_of(map);
  std::string pixels;
  for (int y = 0; y < map.rows(); ++y) {
    std::string line(1, '\0');  // no filter
    for (int x = 0; x < map.columns; ++x) {
      const Color color = color_of(map.values[static_cast<std::size_t>(y * map.columns + x)], range);
      for (int i = 0; i < zoom; ++i) line.append(reinterpret_cast<const char*>(color.data()), color.size());
    }
    for (int i = 0; i < zoom; ++i) pixels += line;
  }
  std::string header;
  put32(header, static_cast<std::uint32_t>(map.columns * zoom));
  put32(header, static_cast<std::uint32_t>(map.rows() * zoom));
  header += {8, 2, 0, 0, 0};  // 8 bits, RGB, deflate, filters, not interlaced
  std::string out = "\x89PNG\r\n\x1a\n";
  put_chunk(out, "IHDR", header);
  put_chunk(out, "IDAT", deflated(pixels));
  put_chunk(out, "IEND", "");
  return out;
}

std::string svg_of(const HeatMap& map) {
  constexpr int kLeft = 110, kTop = 40, kWidth = 800, kLine = 14;
  const Range range = range_of(map);
  const int height = std::clamp(map.rows() * kLine, 200, 700);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{}\" y=\"22\" font-size=\"15\">{}</text>\n"
      "<image x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" preserveAspectRatio=\"none\" "
      "style=\"image-rendering:pixelated\" href=\"data:image/png;base64,{}\"/>\n",
      kLeft + kWidth + 110, kTop + height + 50, kLeft, escape_html(map.title), kLeft, kTop, kWidth, height,
      base64(png_of(map, 1)));
  const double line = static_cast<double>(height) / std::max(map.rows(), 1);
  const int every = std::max(1, static_cast<int>(std::ceil(10 / line)));
  for (std::size_t i = 0; i < map.row_labels.size(); i += static_cast<std::size_t>(every))
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 6,
                       kTop + (static_cast<double>(i) + 0.5) * line + 4, escape_html(map.row_labels[i]));
  for (int i = 0; i <= 4; ++i)
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n", kLeft + i * kWidth / 4,
                       kTop + height + 16, map.x_first + (map.x_last - map.x_first) * i / 4);
  out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", kLeft + kWidth / 2,
                     kTop + height + 36, escape_html(map.x_label));
  // The legend: eight steps from the smallest value to the largest.
  for (int i = 0; i < 8; ++i) {
    const float value = range.low + (range.high - range.low) * static_cast<float>(7 - i) / 7;
    const Color c = color_of(value, range);
    out += fmt::format(
        "<rect x=\"{0}\" y=\"{1}\" width=\"16\" height=\"18\" fill=\"rgb({2},{3},{4})\"/>"
        "<text x=\"{5}\" y=\"{6}\">{7:.3g}</text>\n",
        kLeft + kWidth + 16, kTop + 18 * i, c[0], c[1], c[2], kLeft + kWidth + 38, kTop + 18 * i + 13, value);
  }
  out += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n</svg>\n", kLeft + kWidth + 16, kTop + 18 * 8 + 16,
                     escape_html(map.value_label));
  return out;
}

}  // namespace kv4::cli
