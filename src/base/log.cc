#include "base/log.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace kv4 {

namespace {

std::mutex sink_mutex;
LogSink& sink =
    *new LogSink;  // under sink_mutex; never destroyed: a stuck tier's thread may speak while the process ends
std::atomic<bool> sink_set{false};

}  // namespace

const char* to_string(LogLevel level) {
  switch (level) {
    case LogLevel::info: return "info";
    case LogLevel::warning: return "warning";
    case LogLevel::error: break;
  }
  return "error";
}

void set_log_sink(LogSink given) {
  const std::lock_guard lock(sink_mutex);
  sink_set = static_cast<bool>(given);
  sink = std::move(given);
}

bool log_wanted() { return sink_set.load(std::memory_order_relaxed); }

void log(LogLevel level, std::string_view event, std::string_view message, std::initializer_list<LogField> fields) {
  const std::lock_guard lock(sink_mutex);
  if (!sink) return;
  try {
    sink({level, event, message, {fields.begin(), fields.size()}});
  } catch (...) {  // a failing log must not fail the call that logs
  }
}

}  // namespace kv4
