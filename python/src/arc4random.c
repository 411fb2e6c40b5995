/* What a static libstdc++ of Debian 12 takes from glibc 2.36 for std::random_device. With this one a wheel needs 2.34. */
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

__attribute__((visibility("hidden"))) uint32_t arc4random(void) {
  uint32_t value;
  if (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value) abort(); /* up to 256 bytes come whole or not at all */
  return value;
}
