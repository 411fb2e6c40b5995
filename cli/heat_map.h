// A matrix as a picture: PNG, or SVG with labels around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kv4::cli {

struct HeatMap {
  std::string title, x_label, value_label;
  std::string row_title;  // "layer"
  int columns = 0;
  std::vector<float> values;             // [rows, columns]; NaN: no value
  std::vector<std::string> row_labels;   // [rows], or empty
  std::int64_t x_first = 0, x_last = 0;  // columns share this range evenly; the ends are in it
  int block_tokens = 0;                  // not 0: x is a position, and this is a block's size
  std::vector<std::int64_t> row_begins;  // [rows], or empty: each row's offset in x, where long rows are wrapped

  int rows() const { return columns == 0 ? 0 : static_cast<int>(values.size()) / columns; }
};

/// Rows of more than 1,024 columns continue in lines of 512 below.
HeatMap wrapped(HeatMap map);

/// The file's bytes. Each value is `zoom` pixels wide and at least as high: the picture is not flatter than 4:1. Dark
/// is small, bright is large, grey is no value.
std::string png_of(const HeatMap& map, int zoom);
/// With labels and a legend; where scripts run, also the value under the pointer and a zoom by drag or keys.
std::string svg_of(const HeatMap& map);

}  // namespace kv4::cli
