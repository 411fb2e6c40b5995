// Commands that go on until they are told to stop, and those that end early with what they have.
#pragma once

namespace kv4::cli {

/// From now on the first SIGINT or SIGTERM does not end the process, but makes interrupted() true; SIGHUP likewise,
/// unless it is ignored (nohup). The second ends it.
void catch_interrupts();
bool interrupted();
/// As shells count: 130 after SIGINT, 143 after SIGTERM.
int interrupted_exit_code();
/// So long, or until interrupted.
void sleep_ms(int milliseconds);

/// Leaves a computation whose results so far are to be shown.
struct Interrupted {};
/// Throws Interrupted.
void stop_if_interrupted();

}  // namespace kv4::cli
