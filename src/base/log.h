// Events for the caller's sink (kv4/log.h).
#pragma once

#include <initializer_list>
#include <string_view>

#include "kv4/log.h"

namespace kv4 {

/// Whether anybody listens: texts are made for nobody else.
bool log_wanted();
/// Calls `tell`, which makes texts and logs them, where anybody listens. A text that finds no memory is lost.
template <class Tell>
void speak(Tell&& tell) noexcept {
  if (!log_wanted()) return;
  try {
    tell();
  } catch (...) {  // a log that fails must not fail what it reports
  }
}
void log(LogLevel level, std::string_view event, std::string_view message, std::initializer_list<LogField> fields);

}  // namespace kv4
