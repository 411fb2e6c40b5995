// Help that fits a terminal of 80 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace kv4::cli {

class HelpFormat : public CLI::Formatter {
 public:
  static constexpr std::size_t kColumns = 80, kNameColumns = 28;

  HelpFormat() { column_width(kNameColumns); }
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_footer(const CLI::App* app) const override;
};

}  // namespace kv4::cli
