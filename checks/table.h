// Plain text tables and bars; columns line up for any UTF-8 text without wide characters.
#pragma once

#include <string>
#include <vector>

namespace kv4::checks {

class Table {
 public:
  /// `alignment`: one 'l' or 'r' per column.
  Table(std::string alignment, std::vector<std::string> header);
  void row(std::vector<std::string> cells);  // missing cells are empty
  void rule();
  std::string str() const;

 private:
  std::string alignment_;
  std::vector<std::vector<std::string>> rows_;  // rows_[0] is the header, an empty row a rule
};

/// `share` in [0, 1] of `width` cells, drawn to an eighth of a cell; a nonzero share is always visible.
std::string draw_bar(double share, int width);

/// Columns of standard output; 100 where it is no terminal.
int terminal_width();

}  // namespace kv4::checks
