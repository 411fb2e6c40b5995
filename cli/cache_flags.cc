#include "cache_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "checks/sizes.h"
#include "codec/codec.h"
#include "kv4/error.h"
#include "kv4/names.h"
#include "option_values.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr int kMaxCount = 1 << 24;  // build_schema has the real limits; this one keeps the value an int

/// Names of the formats that `fits` accepts.
template <class Fits>
std::vector<std::string> format_names(Fits&& fits) {
  std::vector<std::string> out;
  for (const Named<Format>& format : names_of<Format>())
    if (fits(codec::format_info(format.value))) out.emplace_back(format.name);
  return out;
}

}  // namespace

void add_flags(CLI::App& app, ModelFlags& flags) {
  auto* model = app.add_option("--model", flags.model, "v4-flash, v4-pro or v4.1-flash")
                    ->capture_default_str()
                    ->type_name("NAME")
                    ->group("Model");
  take_one_of(*model, {"v4-flash", "v4-pro", "v4.1-flash"});
  app.add_option("--config", flags.config, "a Hugging Face config.json instead")
      ->type_name("FILE")
      ->excludes(model)
      ->group("Model");
}

void require_v4(const ModelConfig& config, const char* command) {
  if (config.shares_entries())
    throw Error(ErrorCode::bad_config,
                fmt::format("{} has no inputs for {}, a model of V4.1; its caches run through the library, and kv4 "
                            "plan and kv4 golden work",
                            command, config.name));
}

ModelConfig read_model(const ModelFlags& flags) {
  return flags.config.empty() ? model_preset(flags.model) : load_model_config(flags.config);
}

void add_flags(CLI::App& app, FormatFlags& flags) {
  const std::string group = "Formats";
  const auto named = [&](const char* name, std::string& value, const std::string& what,
                         const std::vector<std::string>& values) {
    CLI::Option* option =
        app.add_option(name, value, what + ": " + list_words(values))->type_name("NAME")->group(group);
    if (!value.empty()) option->capture_default_str();
    take_one_of(*option, values);
  };
  const std::vector<std::string> rows = format_names([](const auto& f) { return f.for_rows; });
  named("--rows", flags.rows, "window rows and entries, where not the model's own", rows);
  named("--window-rows", flags.window_rows, "window rows alone", rows);
  named("--entry-rows", flags.entry_rows, "entries alone", rows);
  named("--keys", flags.keys, "index keys", format_names([](const auto& f) { return f.for_keys; }));
  app.add_flag("--no-hadamard", flags.no_hadamard, "keep index keys as they are before quantising")->group(group);
  named("--pending", flags.pending, "compressor rows that wait", {to_string(DType::f32), to_string(DType::bf16)});
  named("--hca", flags.hca, "HCA rows that wait, folded or as they are", words_of<HcaMode>());
  named("--arrangement", flags.arrangement, "pages", words_of<Arrangement>());
  app.add_option("--page-alignment", flags.page_alignment, "bytes, a multiple of 64; 576 is FlashMLA's")
      ->capture_default_str()
      ->type_name("N")
      ->group(group);
  app.add_option("--block-tokens", flags.block_tokens, "tokens of a block, a multiple of every ratio; 0: automatic")
      ->capture_default_str()
      ->type_name("N")
      ->group(group);
  app.add_option("--rewind", flags.rewind, "how many tokens a request can be rewound")
      ->capture_default_str()
      ->type_name("N")
      ->group(group);
}

void apply(const FormatFlags& flags, CacheOptions& options) {
  const auto row_format = [](const std::string& name) {
    return name.empty() ? std::nullopt : std::optional(parse_format(name));
  };
  options.row_format = row_format(flags.rows);
  options.window_format = row_format(flags.window_rows);
  options.entry_format = row_format(flags.entry_rows);
  options.index_format = parse_format(flags.keys);
  options.hadamard = !flags.no_hadamard;
  options.pending_dtype = parse_pending_dtype(flags.pending);
  options.hca_mode = parse_hca_mode(flags.hca);
  options.arrangement = parse_arrangement(flags.arrangement);
  options.page_alignment = static_cast<int>(parse_count(flags.page_alignment, "--page-alignment", 1, kMaxCount));
  options.block_tokens = static_cast<int>(parse_count(flags.block_tokens, "--block-tokens", 0, kMaxCount));
  options.max_rewind_tokens = static_cast<int>(parse_count(flags.rewind, "--rewind", 0, kMaxCount));
}

std::string describe_rows(const CacheOptions& options) {
  if (options.row_format) return to_string(*options.row_format);
  return fmt::format("{} (windows) and {} (entries)", to_string(*options.window_format),
                     to_string(*options.entry_format));
}

std::string describe_formats(const CacheSchema& schema) {
  const CacheOptions& options = schema.options;
  const std::string hca =
      schema.config.shares_entries() ? "" : fmt::format("HCA {}, ", to_string(options.hca_mode));
  return fmt::format("rows {}, index keys {}{}, pending {}, {}{}, rewind {}", describe_rows(options),
                     to_string(options.index_format), options.hadamard ? " + Hadamard" : "",
                     to_string(options.pending_dtype), hca, to_string(options.arrangement), options.max_rewind_tokens);
}

}  // namespace kv4::cli
