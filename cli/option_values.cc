#include "option_values.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <map>

namespace kv4::cli {
namespace {

constexpr std::size_t kMaxWordBytes = 64;  // longer words have no nearest name: the distance takes length x length

/// Values by option, since CLI11 has no place for them. Options live as long as the process.
std::map<const CLI::Option*, std::vector<std::string>>& known_values() {
  static std::map<const CLI::Option*, std::vector<std::string>> values;
  return values;
}

/// Number of insertions, deletions, replacements and swaps of neighbours that turn a into b.
std::size_t count_slips(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> slips(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i)
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        slips[i][j] = i + j;
        continue;
      }
      slips[i][j] = std::min({slips[i - 1][j] + 1, slips[i][j - 1] + 1, slips[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        slips[i][j] = std::min(slips[i][j], slips[i - 2][j - 2] + 1);
    }
  return slips[a.size()][b.size()];
}

}  // namespace

void take_one_of(CLI::Option& option, std::vector<std::string> values) {
  offer_values(option, values);
  option.check(CLI::Validator(
      [values](std::string& text) {
        if (std::find(values.begin(), values.end(), text) != values.end()) return std::string();
        return fmt::format("'{}' is not known; it may be {}{}", text, list_words(values), did_you_mean(text, values));
      },
      ""));
}

void offer_values(CLI::Option& option, std::vector<std::string> values) { known_values()[&option] = std::move(values); }

const std::vector<std::string>& values_of(const CLI::Option& option) {
  static const std::vector<std::string> none;
  const auto found = known_values().find(&option);
  return found == known_values().end() ? none : found->second;
}

std::string nearest_name(std::string_view text, const std::vector<std::string>& candidates) {
  std::string best;
  if (text.empty() || text.size() > kMaxWordBytes) return best;
  std::string word(text);  // names are in lower case
  for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::size_t least = std::max<std::size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    if (candidate.size() > kMaxWordBytes) continue;
    // A prefix counts as one slip: "v4" for "v4-flash".
    const std::size_t slips = candidate.starts_with(word) ? 1 : count_slips(word, candidate);
    if (slips >= least) continue;
    least = slips;
    best = candidate;
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string near = nearest_name(word, candidates);
  return near.empty() ? "" : fmt::format("; did you mean '{}'?", near);
}

std::string list_words(const std::vector<std::string>& words) {
  std::string out;
  for (std::size_t i = 0; i < words.size(); ++i)
    out += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return out;
}

}  // namespace kv4::cli
