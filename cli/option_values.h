// The words that an option takes: their check, the nearest word to a wrong one, and lists for completion.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kv4/names.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kv4::cli {

/// The option takes one of `values`. For another word, the refusal names the nearest.
void take_one_of(CLI::Option& option, std::vector<std::string> values);
/// The option takes other words too; shells offer these in completion.
void offer_values(CLI::Option& option, std::vector<std::string> values);
/// Empty: no values are known.
const std::vector<std::string>& values_of(const CLI::Option& option);

/// The candidate that is a few slips away from `word`; empty: none is near.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);
/// "; did you mean 'lru'?", or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// The words of an enum, such as a policy or mode.
template <class E>
std::vector<std::string> words_of() {
  std::vector<std::string> out;
  for (const Named<E>& each : names_of<E>()) out.emplace_back(each.name);
  return out;
}
/// "a, b or c"
std::string list_words(const std::vector<std::string>& words);

}  // namespace kv4::cli
