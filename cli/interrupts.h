// Commands that serve until they are told to stop.
#pragma once

namespace kv4::cli {

/// From now on SIGINT and SIGTERM do not end the process, but make interrupted() true; SIGHUP neither, unless it is
/// ignored (nohup).
void catch_interrupts();
bool interrupted();
/// After catch_interrupts(): ends the process by the signal that came, as if it had not been caught.
void end_by_interrupt();
/// So long, or until interrupted.
void sleep_ms(int milliseconds);

}  // namespace kv4::cli
