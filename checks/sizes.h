// Sizes in the notation of options and reports.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kv4::checks {

/// Errors name `option`. Digits may be grouped with ',' or '_'. All throw kv4::Error(bad_argument).
/// Tokens: 8192, 128K, 1M; K, M and G are binary (1M = 1,048,576).
std::int64_t parse_tokens(std::string_view text, std::string_view option, std::int64_t high = INT64_MAX);
/// Bytes: 1000000, 141GB (decimal; so is 141G), 80GiB (binary).
std::int64_t parse_bytes(std::string_view text, std::string_view option);
/// A plain whole number in [low, high].
std::int64_t parse_count(std::string_view text, std::string_view option, std::int64_t low, std::int64_t high);

std::string group_digits(std::int64_t value);   // 450,944
std::string two_places(double value);           // 3,514.25
std::string human_bytes(double bytes);          // 3.69 GB
std::string human_tokens(std::int64_t tokens);  // 1M, 128K, 1,000
std::string human_seconds(double seconds);      // 12.3 us

}  // namespace kv4::checks
