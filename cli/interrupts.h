// Commands that serve until they are told to stop.
#pragma once

namespace kv4::cli {

/// From now on SIGINT and SIGTERM do not end the process, but make interrupted() true.
void catch_interrupts();
bool interrupted();
/// So long, or until interrupted.
void sleep_ms(int milliseconds);

}  // namespace kv4::cli
