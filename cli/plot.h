// Charts of a page: their data, a legend and a table of the figures as HTML. chart_script.h draws them, with the values
// under the pointer and a zoom; a reader without scripts has the tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kv4::cli {

/// A unit decides how a value is written: 1,500; 7.07 GB; 64K (binary, as in options); 88.2 %; 5.06 ms.
enum class Unit { count, bytes, tokens, share, seconds };
std::string format_value(double value, Unit unit);

struct Series {
  std::string name, color;     // palette.h
  std::vector<double> values;  // [x values]; NaN: no value
  bool dashed = false;
};

/// Lines may overlap only where a dashed one lies over a wide one; otherwise they are stacked, side by side, or in
/// panels of their own. Every series stays visible, also where values are equal.
enum class Marks { lines, stack, groups };

/// Panels of a plot stand one above the other and share the x axis.
struct Panel {
  std::string label;
  Unit unit = Unit::count;
  Marks marks = Marks::lines;
  std::vector<Series> series;
  double high = 0;  // of the axis; 0: from the data
};

struct Plot {
  std::string title, x_label;
  Unit x_unit = Unit::count;
  std::vector<double> x;
  std::vector<Panel> panels;
  bool even = false;           // x values at equal distances, each labelled: for groups
  double bytes_per_token = 0;  // not 0: x labels also give bytes
  std::string bytes_of = {};   // what these bytes are
};
std::string draw(const Plot& plot);

/// A part of a bar.
struct BarPart {
  std::string name, color;
  double value;
};
struct Bar {
  std::string name;
  std::vector<BarPart> parts;
};
/// Horizontal bars over an axis of values.
struct BarChart {
  std::string title, label;
  Unit unit = Unit::count;
  std::vector<Bar> bars;
  bool wide = false;  // full page width
  double high = 0;    // of the axis; 0: from the data
};
std::string draw(const BarChart& chart);

/// For text in a page.
std::string escape_html(const std::string& text);

}  // namespace kv4::cli
