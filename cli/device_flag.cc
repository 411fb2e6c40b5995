#include "device_flag.h"

#include <CLI/CLI.hpp>

#include "option_values.h"

namespace kv4::cli {

void add_device_flag(CLI::App& app, std::string& device) {
  CLI::Option* option = app.add_option("--device", device, "where the cache lives: cpu, cuda or cuda:N (GPU N)")
                            ->capture_default_str()
                            ->type_name("NAME");
  offer_values(*option, {"cpu", "cuda", "cuda:0"});
}

}  // namespace kv4::cli
