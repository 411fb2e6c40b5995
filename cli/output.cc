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

LostOutput::LostOutput(const std::string& path, int error)
    : std::runtime_error(path + " could not be written" +
                         (error == 0 ? "" : ": " + std::generic_category().message(error))) {}

}  // namespace kv4::cli
