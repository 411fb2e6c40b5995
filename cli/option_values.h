// The words that an option takes: the check of them, the nearest word to one that is none, and lists for completion.
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

/// The option takes one of `values`. Another word is refused with the nearest.
void take_one_of(CLI::Option& option, std::vector<std::string> values);
/// The option takes other words, too: these are offered where a shell completes.
void offer_values(CLI::Option& option, std::vector<std::string> values);
/// Empty: none are known.
const std::vector<std::string>& values_of(const CLI::Option& option);

/// The candidate that a few slips make of `word`; empty: none is near.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);
/// "; did you mean 'lru'?", or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// The words of a policy or mode.
template <class E>
std::vector<std::string> words_of() {
  std::vector<std::string> out;
  for (const Named<E>& each : names_of<E>()) out.emplace_back(each.name);
  return out;
}
/// "a, b or c"
std::string list_words(const std::vector<std::string>& words);

}  // namespace kv4::cli
