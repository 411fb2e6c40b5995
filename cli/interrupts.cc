#include "interrupts.h"

#include <chrono>
#include <csignal>
#include <thread>

namespace kv4::cli {
namespace {

volatile std::sig_atomic_t interrupt_seen = 0;  // the signal's number

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { interrupt_seen = signal; };
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction before {};
  if (sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

bool interrupted() { return interrupt_seen != 0; }

int interrupted_exit_code() { return 128 + interrupt_seen; }

// In short naps: another thread may receive the signal, which then does not wake this one.
void sleep_ms(int milliseconds) {
  constexpr int kNap = 50;
  for (int slept = 0; slept < milliseconds && !interrupted(); slept += kNap)
    std::this_thread::sleep_for(std::chrono::milliseconds(kNap));
}

void stop_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

}  // namespace kv4::cli
