// Always-on checks at the API: throw an Error that names the value, the range and the fix.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <new>
#include <string>

#include "kv4/error.h"

namespace kv4 {

/// Throws an Error(out_of_memory) that was made when the library was loaded, so throwing takes no memory. Every public
/// call that allocates ends with `catch (const std::bad_alloc&) { fail_for_memory(); }`.
[[noreturn]] void fail_for_memory();

template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> text, Args&&... args) {
  try {
    throw Error(code, fmt::format(text, std::forward<Args>(args)...));
  } catch (const std::bad_alloc&) {
    fail_for_memory();
  }
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
