// The option --device of commands that work on a cache; checks/device_tensors.h makes the backend from it.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace kv4::cli {

/// --device: cpu, cuda or cuda:N.
void add_device_flag(CLI::App& app, std::string& device);

}  // namespace kv4::cli
