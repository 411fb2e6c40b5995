// A matrix as a picture: PNG, or SVG with labels around it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kv4::cli {

struct HeatMap {
  std::string title, x_label, value_label;
  int columns = 0;
  std::vector<float> values;            // [rows, columns]; NaN: nothing is there
  std::vector<std::string> row_labels;  // [rows], or empty
  double x_first = 0, x_last = 0;       // what the first and the last column stand for

  int rows() const { return columns == 0 ? 0 : static_cast<int>(values.size()) / columns; }
};

/// The file's bytes. Each value is `zoom` x `zoom` pixels; dark is small, bright is large, grey is nothing.
std::string png_of(const HeatMap& map, int zoom);
std::string svg_of(const HeatMap& map);

}  // namespace kv4::cli
