// Events for the caller's sink (kv4/log.h).
#pragma once

#include <initializer_list>
#include <string_view>

#include "kv4/log.h"

namespace kv4 {

/// Whether there is a sink; without one no texts are made.
bool log_wanted();
/// Calls `tell`, which makes and logs texts, if there is a sink. A text that finds no memory is lost.
template <class Tell>
void speak(Tell&& tell) noexcept {
  if (!log_wanted()) return;
  try {
    tell();
  } catch (...) {  // a failing log must not fail the call that logs
  }
}
void log(LogLevel level, std::string_view event, std::string_view message, std::initializer_list<LogField> fields);

}  // namespace kv4
