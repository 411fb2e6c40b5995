#include "heat_map.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "checks/sizes.h"
#include "kv4/error.h"
#include "plot.h"

namespace kv4::cli {

using namespace checks;

namespace {

using Color = std::array<std::uint8_t, 3>;

// From dark blue over magenta and orange to light yellow: brightness rises throughout, also in grey.
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

/// 1, 2 or 5 times a power of ten, at most nine.
std::vector<std::int64_t> round_places(std::int64_t first, std::int64_t last) {
  constexpr int kMost = 8;
  std::int64_t step = 1;
  for (int i = 0; (last - first) / step >= kMost; ++i) step = i % 3 == 1 ? step / 2 * 5 : step * 2;
  std::vector<std::int64_t> out;
  for (std::int64_t x = (first + step - 1) / step * step; x <= last; x += step) out.push_back(x);
  return out;
}

/// The data of the script: numbers, and labels of rows. Nothing in it can end the script.
std::string script_data(const HeatMap& map) {
  nlohmann::ordered_json out = {{"columns", map.columns},    {"first", map.x_first},     {"last", map.x_last},
                                {"block", map.block_tokens}, {"x", map.x_label},         {"value", map.value_label},
                                {"row", map.row_title},      {"labels", map.row_labels}, {"begins", map.row_begins}};
  std::string values;
  for (const float v : map.values)
    values += (values.empty() ? "" : ",") + (std::isfinite(v) ? fmt::format("{:.5g}", v) : std::string("null"));
  std::string text = out.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
  text.pop_back();
  std::string safe;
  for (const char c : text) safe += c == '<' ? "\\u003c" : c == '>' ? "\\u003e" : std::string(1, c);
  return safe + ",\"values\":[" + values + "]}";
}

// Runs only where the file itself is opened; a picture inside another page is static.
constexpr const char* kScript = R"js(
'use strict';
const root = document.documentElement, area = document.getElementById('area'), ticks = document.getElementById('ticks');
const rows = map.values.length / map.columns, box = name => Number(area.getAttribute(name));
const draw = (parent, tag, attributes, text) => {
  const element = document.createElementNS(root.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};
let low = 0, high = map.columns, at = null, from = null;
const mark = draw(area, 'rect', {
  id: 'mark',
  fill: 'none',
  stroke: '#00c8ff',
  'stroke-width': 2,
  'vector-effect': 'non-scaling-stroke',
  width: 1,
  height: 1,
  visibility: 'hidden'
});
const selection =
    draw(root, 'rect', {fill: '#888', opacity: 0.4, y: box('y'), height: box('height'), visibility: 'hidden'});
const tip = draw(root, 'g', {id: 'tip', visibility: 'hidden', 'pointer-events': 'none'});
const paper = draw(tip, 'rect', {fill: 'white', stroke: '#555', rx: 4, height: 20}),
      words = draw(tip, 'text', {x: 6, y: 14, 'aria-live': 'polite'});
const begin = column => map.first + column * (map.last - map.first + 1) / map.columns,
      shown = value => value.toLocaleString('en');
function describe([column, row]) {
  const first = Math.floor(begin(column)), last = Math.max(first, Math.ceil(begin(column + 1)) - 1),
        more = (map.begins[row] ?? 0);
  const value = map.values[row * map.columns + column], one = map.block ? 'position' : 'channel';
  const label = more || map.begins.length ? map.labels[row].split(',')[0] : map.labels[row];
  return `${map.row} ${label}, ${one} ${shown(first + more)}` + (last > first ? ` to ${shown(last + more)}` : '') +
      (map.block ? `, block ${shown(Math.floor(first / map.block))}` : '') + `: ${map.value} ` +
      (value === null ? 'nothing there' : value);
}
function point(cell) {
  at = cell;
  for (const element of [mark, tip]) element.setAttribute('visibility', cell ? 'visible' : 'hidden');
  if (!cell) return;
  mark.setAttribute('x', cell[0]);
  mark.setAttribute('y', cell[1]);
  words.textContent = describe(cell);
  paper.setAttribute('width', words.getComputedTextLength() + 12);
  const x = box('x') + (cell[0] - low) / (high - low) * box('width') + 14,
        y = box('y') + (cell[1] + 1) / rows * box('height') + 6;
  const right = root.viewBox.baseVal.width - words.getComputedTextLength() - 16,
        bottom = root.viewBox.baseVal.height - 24;
  tip.setAttribute('transform', `translate(${Math.max(2, Math.min(x, right))} ${Math.min(y, bottom)})`);
}
function zoom(first, last) {
  first = Math.max(0, Math.min(Math.floor(first), map.columns - 4));
  last = Math.min(map.columns, Math.max(Math.ceil(last), first + 4));
  low = Math.max(0, first);
  high = last;
  area.setAttribute('viewBox', `${low} 0 ${high - low} ${rows}`);
  ticks.replaceChildren();
  const span = begin(high) - begin(low), raw = span / 8, power = 10 ** Math.floor(Math.log10(raw)),
        step = Math.max(1, power * [1, 2, 5, 10].find(factor => raw <= factor * power));
  for (let x = Math.ceil(begin(low) / step) * step; x < begin(high); x += step)
    draw(
        ticks, 'text', {x: box('x') + (x + 0.5 - begin(low)) / span * box('width'), y: box('y') + box('height') + 16},
        shown(x));
  point(at && at[0] >= low && at[0] < high ? at : null);
}
function place(event) {
  const spot = new DOMPoint(event.clientX, event.clientY).matrixTransform(root.getScreenCTM().inverse());
  const x = (spot.x - box('x')) / box('width'), y = (spot.y - box('y')) / box('height');
  return {
    x: low + Math.max(0, Math.min(1, x)) * (high - low),
    row: Math.floor(y * rows),
    inside: x >= 0 && x < 1 && y >= 0 && y < 1
  };
}
const show = event => {
  const {x, row, inside} = place(event);
  point(inside ? [Math.min(map.columns - 1, Math.floor(x)), row] : null);
};
root.style.touchAction = 'pan-y';
root.style.userSelect = 'none';
root.addEventListener('pointerdown', event => {
  const {x, inside} = place(event);
  from = inside && !event.button ? x : null;
  if (from !== null) event.preventDefault();
  show(event);
});
root.addEventListener('pointermove', event => {
  show(event);
  if (from === null) return;
  const pixels =
      [from, place(event).x].sort((a, b) => a - b).map(x => box('x') + (x - low) / (high - low) * box('width'));
  selection.setAttribute('x', pixels[0]);
  selection.setAttribute('width', pixels[1] - pixels[0]);
  selection.setAttribute('visibility', 'visible');
});
root.addEventListener('pointerup', event => {
  selection.setAttribute('visibility', 'hidden');
  if (from === null) return;
  const ends = [from, place(event).x].sort((a, b) => a - b);
  from = null;
  if ((ends[1] - ends[0]) / (high - low) > 0.01) zoom(...ends);
});
root.addEventListener('pointercancel', () => {
  from = null;
  selection.setAttribute('visibility', 'hidden');
});
root.addEventListener('pointerleave', () => point(null));
root.addEventListener('dblclick', () => zoom(0, map.columns));
root.addEventListener('keydown', event => {
  const move = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key],
        middle = at ? at[0] + 0.5 : (low + high) / 2;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (move)
    point(
        at ? [Math.max(low, Math.min(high - 1, at[0] + move[0])), Math.max(0, Math.min(rows - 1, at[1] + move[1]))] :
             [low, 0]);
  else if (event.key == '+' || event.key == '=')
    zoom(middle - (middle - low) / 2, middle + (high - middle) / 2);
  else if (event.key == '-')
    zoom(middle - (middle - low) * 2, middle + (high - middle) * 2);
  else if (event.key == '0' || event.key == 'Escape')
    zoom(0, map.columns);
  else
    return;
  event.preventDefault();
});
)js";

}  // namespace

HeatMap wrapped(HeatMap map) {
  constexpr int kMostColumns = 1024, kLine = 512;
  if (map.columns <= kMostColumns) return map;
  const int rows = map.rows(), lines = (map.columns + kLine - 1) / kLine;
  std::vector<float> values;
  std::vector<std::string> labels;
  for (int row = 0; row < rows; ++row)
    for (int line = 0; line < lines; ++line) {
      for (int x = line * kLine; x < (line + 1) * kLine; ++x)
        values.push_back(x < map.columns ? map.values[row * map.columns + x] : NAN);
      labels.push_back(fmt::format("{}, {} on", map.row_labels[row], line * kLine));
      map.row_begins.push_back(line * kLine);
    }
  map.values = std::move(values);
  map.row_labels = std::move(labels);
  map.columns = kLine;
  map.x_last = map.x_first + kLine - 1;
  map.x_label += ", in lines";
  return map;
}

std::string png_of(const HeatMap& map, int zoom) {
  constexpr int kFlattest = 4;
  const Range range = range_of(map);
  const int rows = std::max(map.rows(), 1);
  const int line_pixels = std::max(zoom, (map.columns * zoom / kFlattest + rows - 1) / rows);
  std::string pixels;
  for (int y = 0; y < map.rows(); ++y) {
    std::string line(1, '\0');  // no filter
    for (int x = 0; x < map.columns; ++x) {
      const Color color = color_of(map.values[y * map.columns + x], range);
      for (int i = 0; i < zoom; ++i) line.append(reinterpret_cast<const char*>(color.data()), color.size());
    }
    for (int i = 0; i < line_pixels; ++i) pixels += line;
  }
  std::string header;
  put32(header, static_cast<std::uint32_t>(map.columns * zoom));
  put32(header, static_cast<std::uint32_t>(map.rows() * line_pixels));
  header += {8, 2, 0, 0, 0};  // 8 bits, RGB, deflate, filters, not interlaced
  std::string out = "\x89PNG\r\n\x1a\n";
  put_chunk(out, "IHDR", header);
  put_chunk(out, "IDAT", deflated(pixels));
  put_chunk(out, "IEND", "");
  return out;
}

std::string svg_of(const HeatMap& map) {
  constexpr int kLeft = 110, kTop = 40, kWidth = 800, kLine = 14, kLegendSteps = 8;
  const Range range = range_of(map);
  const int rows = std::max(map.rows(), 1), height = std::clamp(rows * kLine, 200, 700);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"11\" "
      "tabindex=\"0\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{}\" y=\"22\" font-size=\"15\">{}</text>\n"
      "<svg id=\"area\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" viewBox=\"0 0 {} {}\" "
      "preserveAspectRatio=\"none\"><image width=\"{}\" height=\"{}\" preserveAspectRatio=\"none\" "
      "style=\"image-rendering:pixelated\" href=\"data:image/png;base64,{}\"/></svg>\n",
      kLeft + kWidth + 110, kTop + height + 50, kLeft, escape_html(map.title), kLeft, kTop, kWidth, height, map.columns,
      rows, map.columns, rows, base64(png_of(map, 1)));
  const double line = static_cast<double>(height) / rows;
  const int every = std::max(1, static_cast<int>(std::ceil(10 / line)));
  for (std::size_t i = 0; i < map.row_labels.size(); i += every)
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 6,
                       kTop + (static_cast<double>(i) + 0.5) * line + 4, escape_html(map.row_labels[i]));
  out += "<g id=\"ticks\" text-anchor=\"middle\">\n";
  const auto span = static_cast<double>(map.x_last - map.x_first + 1);
  for (const std::int64_t x : round_places(map.x_first, map.x_last))
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n",
                       kLeft + (static_cast<double>(x - map.x_first) + 0.5) / span * kWidth, kTop + height + 16,
                       group_digits(x));
  out += fmt::format("</g>\n<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", kLeft + kWidth / 2,
                     kTop + height + 36, escape_html(map.x_label));
  // The legend: steps from the smallest value to the largest, with enough digits to tell them apart; then grey.
  const double step = static_cast<double>(range.high - range.low) / (kLegendSteps - 1);
  const int digits = std::clamp(1 - static_cast<int>(std::floor(std::log10(step))), 0, 9);
  for (int i = 0; i <= kLegendSteps; ++i) {
    const float value = i == kLegendSteps ? NAN : range.high - static_cast<float>(step * i);
    const Color c = color_of(value, range);
    out += fmt::format(
        "<rect x=\"{0}\" y=\"{1}\" width=\"16\" height=\"18\" fill=\"rgb({2},{3},{4})\"/>"
        "<text x=\"{5}\" y=\"{6}\">{7}</text>\n",
        kLeft + kWidth + 16, kTop + 18 * i, c[0], c[1], c[2], kLeft + kWidth + 38, kTop + 18 * i + 13,
        std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "nothing");
  }
  out += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n", kLeft + kWidth + 16, kTop + 18 * (kLegendSteps + 1) + 16,
                     escape_html(map.value_label));
  return out + fmt::format("<script><![CDATA[\nconst map = {};\n{}]]></script>\n</svg>\n", script_data(map), kScript);
}

}  // namespace kv4::cli
