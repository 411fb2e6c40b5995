// Events for the caller's sink (kv4/log.h).
#pragma once

#include <initializer_list>
#include <string_view>

#include "kv4/log.h"

namespace kv4 {

/// Whether anybody listens: ask before texts are made.
bool log_wanted();
void log(LogLevel level, std::string_view event, std::string_view message, std::initializer_list<LogField> fields);

}  // namespace kv4
