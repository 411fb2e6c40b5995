#include "sizes.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <span>

#include "kv4/error.h"

namespace kv4::checks {
namespace {

struct Unit {
  std::string_view suffix;  // lower case
  std::int64_t factor;
};

constexpr std::int64_t kKi = 1024, kMi = kKi * 1024, kGi = kMi * 1024, kTi = kGi * 1024;
constexpr std::int64_t kK = 1000, kM = kK * 1000, kG = kM * 1000, kT = kG * 1000;
constexpr std::array kTokenUnits{Unit{"", 1},    Unit{"k", kKi},  Unit{"m", kMi},
                                 Unit{"g", kGi}, Unit{"ki", kKi}, Unit{"mi", kMi}};
constexpr std::array kByteUnits{Unit{"", 1},      Unit{"b", 1},     Unit{"k", kK},   Unit{"m", kM},   Unit{"g", kG},
                                Unit{"t", kT},    Unit{"kb", kK},   Unit{"mb", kM},  Unit{"gb", kG},  Unit{"tb", kT},
                                Unit{"ki", kKi},  Unit{"mi", kMi},  Unit{"gi", kGi}, Unit{"ti", kTi}, Unit{"kib", kKi},
                                Unit{"mib", kMi}, Unit{"gib", kGi}, Unit{"tib", kTi}};

struct Reading {
  std::string_view text;
  std::string_view option;
  std::string_view what;  // "a number of tokens"
  std::string_view example;
};

[[noreturn]] void refuse(const Reading& reading, std::string_view why) {
  throw Error(ErrorCode::bad_argument, fmt::format("{} '{}' is not {}: {}; write for example {}", reading.option,
                                                   reading.text, reading.what, why, reading.example));
}

void check_range(const Reading& reading, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::bad_argument,
              fmt::format("{} '{}' is outside {} to {}; write for example {}", reading.option, reading.text,
                          group_digits(low), group_digits(high), reading.example));
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Reads digits[.digits]suffix as a whole number; rounds a fraction of a unit down.
std::int64_t read_number(const Reading& reading, std::span<const Unit> units) {
  constexpr __int128 kLimit = std::numeric_limits<std::int64_t>::max();
  __int128 value = 0, scale = 1;
  bool digits = false, fraction = false;
  std::size_t i = 0;
  const std::string_view text = reading.text;
  if (text.starts_with('-')) refuse(reading, "it is negative");
  for (; i < text.size(); ++i) {
    const char c = text[i];
    if (is_digit(c)) {
      value = value * 10 + (c - '0');
      if (fraction) scale *= 10;
      if (value / scale > kLimit || scale > kLimit / 10) refuse(reading, "it is too large");
      digits = true;
    } else if (c == '.' && digits && !fraction) {
      fraction = true;
    } else if (!((c == ',' || c == '_') && digits && !fraction && i + 1 < text.size() && is_digit(text[i + 1]))) {
      break;
    }
  }
  if (!digits) refuse(reading, text.empty() ? "it is empty" : "it does not start with a digit");
  while (i < text.size() && text[i] == ' ') ++i;
  const std::string_view unit_text = text.substr(i);
  std::string suffix(unit_text);
  for (char& c : suffix) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const Unit& unit : units) {
    if (unit.suffix != suffix) continue;
    if (fraction && unit.factor == 1) refuse(reading, "it has a fraction");
    const __int128 whole = value * unit.factor / scale;
    if (whole > kLimit) refuse(reading, "it is too large");
    return static_cast<std::int64_t>(whole);
  }
  refuse(reading, units.size() == 1 ? fmt::format("'{}' does not belong there", unit_text)
                                    : fmt::format("unknown unit '{}'", unit_text));
}

}  // namespace

std::int64_t parse_tokens(std::string_view text, std::string_view option, std::int64_t high) {
  const Reading reading{text, option, "a number of tokens", "8192, 128K or 1M"};
  const std::int64_t tokens = read_number(reading, kTokenUnits);
  check_range(reading, tokens, 1, high);
  return tokens;
}

std::int64_t parse_bytes(std::string_view text, std::string_view option) {
  const Reading reading{text, option, "a number of bytes", "141GB or 80GiB"};
  const std::int64_t bytes = read_number(reading, kByteUnits);
  check_range(reading, bytes, 1, INT64_MAX);
  return bytes;
}

std::int64_t parse_count(std::string_view text, std::string_view option, std::int64_t low, std::int64_t high) {
  const std::string example = std::to_string(low > 0 ? low : 1 <= high ? 1 : 0);
  const Reading reading{text, option, "a whole number", example};
  const std::int64_t value = read_number(reading, std::array{Unit{"", 1}});
  check_range(reading, value, low, high);
  return value;
}

std::string group_digits(std::int64_t value) {
  const std::string digits = std::to_string(value);
  const std::size_t sign = digits.front() == '-' ? 1 : 0;
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > sign && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string two_places(double value) {
  const auto hundredths = std::llround(value * 100);
  return fmt::format("{}.{:02}", group_digits(hundredths / 100), hundredths % 100);
}

std::string human_bytes(double bytes) {
  constexpr std::array kUnits{"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  while (std::abs(bytes) >= 999.5 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 10 ? 2 : bytes < 100 ? 1 : 0, kUnits[unit]);
}

std::string human_tokens(std::int64_t tokens) {
  if (tokens >= kMi && tokens % kMi == 0) return group_digits(tokens / kMi) + "M";
  if (tokens >= kKi && tokens % kKi == 0) return group_digits(tokens / kKi) + "K";
  return group_digits(tokens);
}

std::string human_seconds(double seconds) {
  if (seconds < 1e-6) return fmt::format("{:.1f} ns", seconds * 1e9);
  if (seconds < 1e-3) return fmt::format("{:.2f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace kv4::checks
