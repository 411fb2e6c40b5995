// Flags of model and formats that several commands share.
#pragma once

#include <string>

#include "kv4/model_config.h"
#include "kv4/options.h"
#include "kv4/schema.h"

namespace CLI {
class App;
}

namespace kv4::cli {

struct ModelFlags {
  std::string model = "v4-flash";
  std::string config;  // a file; wins over `model`
};
void add_flags(CLI::App& app, ModelFlags& flags);
ModelConfig read_model(const ModelFlags& flags);
/// Throws Error(bad_config) for a model of V4.1, which `command` has no inputs for.
void require_v4(const ModelConfig& config, const char* command);

/// Formats and layout; each command has its own sizes.
struct FormatFlags {
  std::string rows, window_rows, entry_rows;  // empty: the model's own
  std::string keys = "mxfp4";
  bool no_hadamard = false;
  std::string pending = "f32";
  std::string hca = "online";
  std::string arrangement = "block_major";
  std::string page_alignment = "64";
  std::string block_tokens = "0";
  std::string rewind = "0";
};
void add_flags(CLI::App& app, FormatFlags& flags);
/// Throws Error(bad_argument) naming the flag, its value and the allowed values.
void apply(const FormatFlags& flags, CacheOptions& options);

/// "rows fp8_tile64, keys mxfp4 + Hadamard, ..."
std::string describe_formats(const CacheSchema& schema);
/// "fp8_tile64", or both formats where window rows and entries differ.
std::string describe_rows(const CacheOptions& options);

}  // namespace kv4::cli
