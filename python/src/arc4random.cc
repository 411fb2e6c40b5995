// Defines arc4random: Debian 12's static libstdc++ takes it from glibc 2.36. With this definition a wheel needs only
// 2.34.
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

extern "C" __attribute__((visibility("hidden"))) std::uint32_t arc4random() noexcept {
  std::uint32_t value = 0;
  // Up to 256 bytes come complete or not at all.
  if (getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) std::abort();
  return value;
}
