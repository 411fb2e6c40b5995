#include "accept_header.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

namespace kv4::cli {
namespace {

std::string_view trimmed(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

/// Takes the part of `text` before the separator and drops the separator; a quoted separator does not count.
std::string_view take_part(std::string_view& text, char separator) {
  bool quoted = false;
  std::size_t end = 0;
  for (; end < text.size() && (quoted || text[end] != separator); ++end) quoted ^= text[end] == '"';
  const std::string_view out = text.substr(0, end);
  text.remove_prefix(std::min(text.size(), end + 1));
  return trimmed(out);
}

bool same(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

struct MediaRange {
  std::string_view name, version;
  double quality = 1000;
};

/// 0 to 1000; 0 where `text` is not a quality.
double parse_quality(std::string_view text) {
  const std::string copy(text.substr(0, 8));
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  return end == copy.c_str() || *end != '\0' || !(value >= 0 && value <= 1) ? 0 : 1000 * value;
}

MediaRange parse_range(std::string_view text) {
  MediaRange out{.name = take_part(text, ';'), .version = {}};
  while (!text.empty()) {
    std::string_view value = take_part(text, ';');
    const std::string_view name = take_part(value, '=');
    if (value.size() >= 2 && value.front() == '"' && value.back() == '"') value = value.substr(1, value.size() - 2);
    if (same(name, "version")) out.version = value;
    if (same(name, "q")) out.quality = parse_quality(value);
  }
  return out;
}

}  // namespace

double preference(std::string_view accept, std::string_view type) {
  const MediaRange offered = parse_range(type);
  const std::string_view family = offered.name.substr(0, offered.name.find('/'));
  double best = 0;
  int best_fit = 0;  // 1: */*, 2: text/*, 3: text/plain, 4: text/plain with the version
  while (!accept.empty()) {
    const MediaRange range = parse_range(take_part(accept, ','));
    int fit = 0;
    if (range.name == "*/*") fit = 1;
    if (range.name.ends_with("/*") && same(range.name.substr(0, range.name.size() - 2), family)) fit = 2;
    if (same(range.name, offered.name) && range.version.empty()) fit = 3;
    if (same(range.name, offered.name) && same(range.version, offered.version)) fit = 4;
    if (fit == 0 || fit < best_fit) continue;
    const double wanted = fit <= 2 ? range.quality / 2000 : range.quality;
    best = fit == best_fit ? std::max(best, wanted) : wanted;
    best_fit = fit;
  }
  return best;
}

}  // namespace kv4::cli
