// Interrupts for commands that run until they are told to stop, and for those that end early with partial results.
#pragma once

namespace kv4::cli {

/// From now on the first SIGINT or SIGTERM does not end the process, but makes interrupted() true; the second ends it.
/// SIGHUP likewise, unless it is ignored (nohup).
void catch_interrupts();
bool interrupted();
/// The shells' convention: 130 after SIGINT, 143 after SIGTERM.
int interrupted_exit_code();
/// Sleeps for the given time, or until interrupted.
void sleep_ms(int milliseconds);

/// Leaves a computation whose partial results are to be shown.
struct Interrupted {};
/// Throws Interrupted if interrupted().
void stop_if_interrupted();

}  // namespace kv4::cli
