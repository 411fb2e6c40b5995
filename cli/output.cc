#include "output.h"

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace kv4::cli {

void flush_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw std::system_error(errno, std::generic_category(), "the output is lost");
}

}  // namespace kv4::cli
