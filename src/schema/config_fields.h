// Fields of a config.json, with errors that name the field, its value and the values allowed.
#pragma once

#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kv4/model_config.h"

namespace kv4 {

using Json = nlohmann::json;

constexpr int kMaxLayers = 4096;
constexpr int kMaxWidth = 65536;
constexpr int kMaxRatio = 1 << 20;
constexpr double kMinTheta = 1.0001, kMaxTheta = 1e12;

inline std::string clipped(const std::string& text) { return text.size() > 60 ? text.substr(0, 57) + "..." : text; }

inline std::string shown(const Json& value) {
  if (value.is_structured())
    return fmt::format("{} of {} elements", value.is_array() ? "a list" : "an object", value.size());
  return clipped(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

inline void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  require(value >= low && value <= high, ErrorCode::bad_config, "{} is {}; it must be from {} to {}", name, value, low,
          high);
}

/// Reads fields of one JSON object; `where` prefixes names in messages.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* name) const { return object_.contains(name) && !object_.at(name).is_null(); }

  const Json& get(const char* name) const {
    require(has(name), ErrorCode::bad_config, "config field '{}{}' is missing; a DeepSeek-V4 config.json has it",
            where_, name);
    return object_.at(name);
  }

  std::int64_t integer(const char* name, std::int64_t low, std::int64_t high) const {
    const Json& value = get(name);
    const bool fits = value.is_number_unsigned() ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX)
                                                 : value.is_number_integer();
    const std::int64_t number = fits ? value.get<std::int64_t>() : low - 1;
    require(fits && number >= low && number <= high, ErrorCode::bad_config,
            "config field '{}{}' is {}; it must be a whole number from {} to {}", where_, name, shown(value), low,
            high);
    return number;
  }

  int small(const char* name, int low, int high) const { return static_cast<int>(integer(name, low, high)); }

  double real(const char* name, double low, double high) const {
    const Json& value = get(name);
    const double number = value.is_number() ? value.get<double>() : low - 1;
    require(value.is_number() && number >= low && number <= high, ErrorCode::bad_config,
            "config field '{}{}' is {}; it must be a number from {} to {}", where_, name, shown(value), low, high);
    return number;
  }

  const Json& array(const char* name) const {
    const Json& value = get(name);
    require(value.is_array(), ErrorCode::bad_config, "config field '{}{}' is {}; it must be a list", where_, name,
            shown(value));
    return value;
  }

  Fields object(const char* name) const {
    const Json& value = get(name);
    require(value.is_object(), ErrorCode::bad_config, "config field '{}{}' is {}; it must be an object", where_, name,
            shown(value));
    return Fields(value, where_ + name + ".");
  }

  std::string text(const char* name) const {
    const Json& value = get(name);
    require(value.is_string(), ErrorCode::bad_config, "config field '{}{}' is {}; it must be a string", where_, name,
            shown(value));
    return value.get<std::string>();
  }

  /// The name that a field has in the config: Hugging Face's or `own`, that of DeepSeek's inference/config.json. Both
  /// may be there with one value. Neither: Hugging Face's name, whose lookup then fails or finds nothing.
  const char* spelling(const char* name, const char* own) const {
    if (!has(own)) return name;
    if (!has(name)) return own;
    require(get(name) == get(own), ErrorCode::bad_config,
            "config fields '{}{}' and '{}' are {} and {}; they are two spellings of one field and must agree", where_,
            name, own, shown(get(name)), shown(get(own)));
    return name;
  }

  /// The same for a required field.
  const char* needed(const char* name, const char* own) const {
    require(has(name) || has(own), ErrorCode::bad_config,
            "config field '{}{}' is missing; a DeepSeek-V4.1 config.json has it, DeepSeek's own as '{}'", where_, name,
            own);
    return spelling(name, own);
  }

 private:
  const Json& object_;
  std::string where_;
};

/// `compress_ratios`: a number for each backbone layer, then for draft stages.
inline const Json& ratio_list(const Fields& f, int num_layers) {
  const Json& list = f.array("compress_ratios");
  require(std::ssize(list) >= num_layers, ErrorCode::bad_config,
          "config field 'compress_ratios' has {} entries for num_hidden_layers = {}; it needs at least one per layer",
          list.size(), num_layers);
  require(list.size() <= kMaxLayers, ErrorCode::bad_config,
          "config field 'compress_ratios' has {} entries; at most {} are allowed", list.size(), kMaxLayers);
  return list;
}

/// Reads both rotations, from "rope_scaling" or "rope_parameters".
void read_ropes(const Fields& f, ModelConfig& config);

}  // namespace kv4
