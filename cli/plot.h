// Line and bar plots as SVG text for self-contained pages: axes with round ticks, a legend, values under the pointer.
#pragma once

#include <string>
#include <vector>

namespace kv4::cli {

struct Series {
  std::string name;
  std::vector<double> x, y;
  bool dashed = false;
};

struct Plot {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  bool log_x = false;
  double y_max = 0;  // 0: by the data
};

/// Lines through the points; every point says its values when pointed at.
std::string draw_lines(const Plot& plot);

struct Bar {
  std::string name;
  double value;
};
/// One horizontal bar each, the value beside it.
std::string draw_bars(const std::string& title, const std::string& unit, const std::vector<Bar>& bars);

/// Of text in a page.
std::string escape_html(const std::string& text);

}  // namespace kv4::cli
