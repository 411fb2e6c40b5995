#include "table.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace kv4::checks {
namespace {

std::size_t display_width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

std::string repeat(const char* text, std::size_t times) {
  std::string out;
  for (std::size_t i = 0; i < times; ++i) out += text;
  return out;
}

}  // namespace

Table::Table(std::string alignment, std::vector<std::string> header) : alignment_(std::move(alignment)) {
  row(std::move(header));
}

void Table::row(std::vector<std::string> cells) {
  cells.resize(alignment_.size());
  rows_.push_back(std::move(cells));
}

void Table::rule() { rows_.emplace_back(); }

std::string Table::str() const {
  std::vector<std::size_t> widths(alignment_.size(), 0);
  for (const auto& cells : rows_) {
    for (std::size_t c = 0; c < cells.size(); ++c) widths[c] = std::max(widths[c], display_width(cells[c]));
  }
  std::string out;
  const auto rule_line = [&] {
    std::string line;
    for (std::size_t c = 0; c < widths.size(); ++c) line += "  " + repeat("─", widths[c]);
    return line + "\n";
  };
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    const auto& cells = rows_[r];
    std::string line;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string space(widths[c] - display_width(cells[c]), ' ');
      line += "  " + (alignment_[c] == 'r' ? space + cells[c] : cells[c] + space);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += cells.empty() ? rule_line() : line + "\n";
    if (r == 0) out += rule_line();
  }
  return out;
}

std::string draw_bar(double share, int width) {
  static const char* const kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const double cells = std::clamp(share, 0.0, 1.0) * width;
  std::size_t eighths = std::lround(cells * 8);
  if (eighths == 0 && share > 0) eighths = 1;
  return repeat("█", eighths / 8) + kEighths[eighths % 8];
}

int terminal_width() {
  winsize size{};
  if (isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
}

}  // namespace kv4::checks
