// The log: the library never prints; a caller that wants its events gives it a sink.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "kv4/export.h"

namespace kv4 {

/// The urgency of an event.
enum class LogLevel : std::uint8_t { info, warning, error };

/// "info", "warning", "error".
KV4_API const char* to_string(LogLevel level);

/// One detail of an event.
struct LogField {
  std::string_view name, value;
};

/// One event, valid during the call only.
struct LogRecord {
  LogLevel level = LogLevel::info;
  std::string_view event;    // a name that stays the same: "tier.opened" (docs/operations.md lists them)
  std::string_view message;  // a sentence for people
  std::span<const LogField> fields;
};

/// Called by any thread, the library's own included, one call at a time. It must not call kv4; its exceptions are lost.
using LogSink = std::function<void(const LogRecord&)>;

/// Sets the sink of all caches and tiers of the process. An empty sink: no log, as at the start. When it returns, the
/// previous sink is not being called any more.
KV4_API void set_log_sink(LogSink sink);

}  // namespace kv4
