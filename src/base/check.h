// Always-on checks at the API: throw Error naming value, range and fix.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "kv4/error.h"

namespace kv4 {

template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(code, fmt::format(text, std::forward<Args>(args)...));
}

template <class... Args>
void require(bool ok, ErrorCode code, fmt::format_string<Args...> text, Args&&... args) {
  if (!ok) [[unlikely]]
    fail(code, text, std::forward<Args>(args)...);
}

/// For sizes: a product or sum that does not fit 63 bits is a config error, not a small number.
std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* what);
std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* what);
/// Rounds up to a multiple.
std::int64_t round_up(std::int64_t value, std::int64_t multiple, const char* what);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

}  // namespace kv4
