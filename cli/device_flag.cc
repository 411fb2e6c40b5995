#include "device_flag.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "option_values.h"

namespace kv4::cli {

void add_device_flag(CLI::App& app, std::string& device) {
  CLI::Option* option = app.add_option("--device", device, "where the cache lives: cpu, cuda or cuda:N (GPU N)")
                            ->capture_default_str()
                            ->type_name("NAME");
  offer_values(*option, {"cpu", "cuda", "cuda:0"});
  option->check(CLI::Validator(
      [](std::string& text) {
        if (text == "cpu" || text == "cuda" || text.starts_with("cuda:")) return std::string();
        // "gpu" is one letter away from "cpu".
        const std::string near =
            text.starts_with("gpu") ? "; did you mean 'cuda'?" : did_you_mean(text, {"cpu", "cuda"});
        return fmt::format("'{}' is not known; it may be cpu, cuda or cuda:N, for example cuda:0{}", text, near);
      },
      ""));
}

}  // namespace kv4::cli
