#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kv4::cli {
namespace {

constexpr double kWidth = 640, kHeight = 300, kLeft = 56, kRight = 16, kTop = 36, kBottom = 44;
const char* const kColors[] = {"#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2"};

const char* color(std::size_t i) { return kColors[i % std::size(kColors)]; }

/// 1, 2 or 5 times a power of ten, so that at most `most` of them fit.
double round_step(double span, int most) {
  const double raw = span / most, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (raw <= factor * power) return factor * power;
  return 10 * power;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (size >= 1e9) return fmt::format("{:.4g}G", value / 1e9);
  if (size >= 1e6) return fmt::format("{:.4g}M", value / 1e6);
  if (size >= 1e4) return fmt::format("{:.4g}K", value / 1e3);
  return fmt::format("{:.4g}", value);
}

/// From values to places on the page.
struct Scale {
  double low, high, from, to;
  bool log = false;
  double place(double value) const {
    const double share = log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    return from + share * (to - from);
  }
};

Scale scale_of(const Plot& plot, bool x) {
  double low = INFINITY, high = -INFINITY;
  for (const Series& s : plot.series)
    for (const double v : x ? s.x : s.y) low = std::min(low, v), high = std::max(high, v);
  if (!(low < INFINITY)) low = high = 0;
  if (!x) low = 0, high = plot.y_max > 0 ? plot.y_max : high * 1.05;
  if (!(high > low)) high = low + 1;
  return x ? Scale{low, high, kLeft, kWidth - kRight, plot.log_x && low > 0}
           : Scale{low, high, kHeight - kBottom, kTop};
}

std::vector<double> ticks(const Scale& scale) {
  std::vector<double> out;
  if (!scale.log) {
    const double step = round_step(scale.high - scale.low, 6);
    for (double v = std::ceil(scale.low / step) * step; v <= scale.high * (1 + 1e-9); v += step) out.push_back(v);
    return out;
  }
  for (double power = std::pow(10.0, std::floor(std::log10(scale.low))); power <= scale.high; power *= 10)
    for (const double factor : {1.0, 2.0, 5.0})
      if (power * factor >= scale.low * (1 - 1e-9) && power * factor <= scale.high * (1 + 1e-9))
        out.push_back(power * factor);
  return out;
}

std::string open_figure(const std::string& title, double height) {
  return fmt::format(
      "<figure><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n<text class=\"title\" x=\"{}\" "
      "y=\"18\">{}</text>\n",
      kWidth, height, escape_html(title), kLeft, escape_html(title));
}

std::string draw_axes(const Plot& plot, const Scale& x, const Scale& y) {
  std::string out;
  for (const double v : ticks(y))
    out += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text class=\"tick end\" x=\"{}\" "
        "y=\"{:.1f}\">{}</text>\n",
        kLeft, kWidth - kRight, y.place(v), y.place(v), kLeft - 6, y.place(v) + 4, short_number(v));
  for (const double v : ticks(x))
    out += fmt::format("<text class=\"tick middle\" x=\"{:.1f}\" y=\"{}\">{}</text>\n", x.place(v),
                       kHeight - kBottom + 16, short_number(v));
  out += fmt::format("<text class=\"tick middle\" x=\"{}\" y=\"{}\">{}</text>\n", (kLeft + kWidth - kRight) / 2,
                     kHeight - 6, escape_html(plot.x_label));
  out += fmt::format("<text class=\"tick middle\" transform=\"translate(12 {}) rotate(-90)\">{}</text>\n",
                     (kTop + kHeight - kBottom) / 2, escape_html(plot.y_label));
  return out;
}

}  // namespace

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  }
  return out;
}

std::string draw_lines(const Plot& plot) {
  const Scale x = scale_of(plot, true), y = scale_of(plot, false);
  std::string out = open_figure(plot.title, kHeight) + draw_axes(plot, x, y);
  double legend = kWidth - kRight;
  for (std::size_t i = plot.series.size(); i-- > 0;) {
    const Series& s = plot.series[i];
    legend -= 16 + 7.5 * static_cast<double>(s.name.size());
    out += fmt::format("<text class=\"legend\" fill=\"{}\" x=\"{:.1f}\" y=\"18\">{}</text>\n", color(i), legend,
                       escape_html(s.name));
    std::string points, dots;
    const int radius = s.x.size() > 40 ? 2 : 3;
    for (std::size_t k = 0; k < s.x.size(); ++k) {
      const double px = x.place(s.x[k]), py = y.place(std::min(s.y[k], y.high));
      points += fmt::format("{:.1f},{:.1f} ", px, py);
      dots +=
          fmt::format("<circle fill=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"><title>{}: {} at {}</title></circle>\n",
                      color(i), px, py, radius, escape_html(s.name), short_number(s.y[k]), short_number(s.x[k]));
    }
    out += fmt::format("<polyline fill=\"none\" stroke=\"{}\"{} points=\"{}\"/>\n{}", color(i),
                       s.dashed ? " stroke-dasharray=\"5 4\"" : "", points, dots);
  }
  return out + "</svg></figure>\n";
}

std::string draw_bars(const std::string& title, const std::string& unit, const std::vector<Bar>& bars) {
  constexpr double kBarHeight = 22, kNameWidth = 170, kValueWidth = 110;
  double high = 0;
  for (const Bar& bar : bars) high = std::max(high, bar.value);
  std::string out = open_figure(title, kTop + kBarHeight * 1.4 * static_cast<double>(bars.size()) + 8);
  double top = kTop;
  for (std::size_t i = 0; i < bars.size(); ++i, top += kBarHeight * 1.4) {
    const double width = high > 0 ? bars[i].value / high * (kWidth - kNameWidth - kValueWidth) : 0;
    out += fmt::format(
        "<text class=\"tick end\" x=\"{}\" y=\"{}\">{}</text><rect fill=\"{}\" x=\"{}\" y=\"{}\" width=\"{:.1f}\" "
        "height=\"{}\"/><text class=\"tick\" x=\"{:.1f}\" y=\"{}\">{} {}</text>\n",
        kNameWidth - 8, top + 15, escape_html(bars[i].name), color(i), kNameWidth, top, width, kBarHeight,
        kNameWidth + width + 6, top + 15, short_number(bars[i].value), escape_html(unit));
  }
  return out + "</svg></figure>\n";
}

}  // namespace kv4::cli
