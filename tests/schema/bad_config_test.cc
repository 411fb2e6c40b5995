// Wrong configs: each gives an Error(bad_config) that names the field and its value.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/model_config.h"
#include "schema/config_json.h"

namespace {

using kv4::test_config::flash;
using kv4::test_config::Json;
using kv4::test_config::tiny;

// The message of the Error(bad_config) for a config text; a failure if there is none.
std::string refusal(const std::string& text) {
  try {
    kv4::parse_model_config(text);
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "accepted: " << text.substr(0, 300);
  return {};
}

void expect_refused(const Json& json, const std::vector<std::string>& parts) {
  const std::string message = refusal(json.dump());
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

Json with(Json json, const std::string& pointer, const Json& value) {
  json[Json::json_pointer(pointer)] = value;
  return json;
}

const std::vector<std::string> kWholeNumbers = {"num_hidden_layers", "num_attention_heads", "head_dim",
                                                "qk_rope_head_dim",  "sliding_window",      "index_n_heads",
                                                "index_head_dim",    "index_topk"};

TEST(BadConfig, MissingOrNullField) {
  std::vector<std::string> names = kWholeNumbers;
  names.insert(names.end(), {"rms_norm_eps", "rope_theta", "compress_rope_theta", "compress_ratios"});
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    Json json = flash();
    json.erase(name);
    expect_refused(json, {name});
    expect_refused(with(flash(), "/" + name, nullptr), {name});
  }
}

TEST(BadConfig, WholeNumbersOutOfRange) {
  for (const std::string& name : kWholeNumbers) {
    SCOPED_TRACE(name);
    expect_refused(with(flash(), "/" + name, -4), {name, "-4"});
    expect_refused(with(flash(), "/" + name, 0), {name, "is 0"});
    expect_refused(with(flash(), "/" + name, 4000000000), {name, "4000000000"});
    expect_refused(with(flash(), "/" + name, INT64_MAX), {name, "9223372036854775807"});
    expect_refused(with(flash(), "/" + name, UINT64_MAX), {name, "18446744073709551615"});
    expect_refused(with(flash(), "/" + name, INT64_MIN), {name, "-9223372036854775808"});
  }
  expect_refused(with(flash(), "/max_position_embeddings", 0), {"max_position_embeddings", "is 0"});
  expect_refused(with(flash(), "/max_position_embeddings", INT64_MAX),
                 {"max_position_embeddings", "9223372036854775807"});
}

TEST(BadConfig, WholeNumbersOfAnotherType) {
  for (const std::string& name : kWholeNumbers) {
    SCOPED_TRACE(name);
    expect_refused(with(flash(), "/" + name, 64.5), {name, "64.5"});
    expect_refused(with(flash(), "/" + name, 64.0), {name, "64.0"});
    expect_refused(with(flash(), "/" + name, "64"), {name, "\"64\""});
    expect_refused(with(flash(), "/" + name, true), {name, "true"});
    expect_refused(with(flash(), "/" + name, {64}), {name, "list of 1"});
    expect_refused(with(flash(), "/" + name, Json::object()), {name, "object of 0"});
  }
}

TEST(BadConfig, NumberTooLargeForAnyType) {
  std::string text = flash().dump();
  text.replace(text.find("\"head_dim\":512"), 14, "\"head_dim\":99999999999999999999999999");
  EXPECT_NE(refusal(text).find("head_dim"), std::string::npos);
}

TEST(BadConfig, RealNumbers) {
  expect_refused(with(flash(), "/rms_norm_eps", -1e-6), {"rms_norm_eps", "-1e-06"});
  expect_refused(with(flash(), "/rms_norm_eps", "tiny"), {"rms_norm_eps", "tiny"});
  for (const char* name : {"rope_theta", "compress_rope_theta"}) {
    expect_refused(with(flash(), std::string("/") + name, 0), {name, "is 0"});
    expect_refused(with(flash(), std::string("/") + name, -10000.5), {name, "-10000.5"});
    expect_refused(with(flash(), std::string("/") + name, 1e30), {name, "1e+30"});
    expect_refused(with(flash(), std::string("/") + name, "big"), {name, "big"});
  }
}

TEST(BadConfig, WidthsThatDoNotFitEachOther) {
  expect_refused(with(flash(), "/qk_rope_head_dim", 63), {"qk_rope_head_dim", "63"});
  expect_refused(with(flash(), "/qk_rope_head_dim", 514), {"qk_rope_head_dim", "514"});
  expect_refused(with(flash(), "/index_head_dim", 32), {"index_head_dim", "32"});
  expect_refused(with(flash(), "/head_dim", 511), {"head_dim", "511"});
}

TEST(BadConfig, PartialRotaryFactor) {
  for (double factor : {0.0, -0.25, 1.5})
    expect_refused(with(tiny(), "/partial_rotary_factor", factor), {"partial_rotary_factor"});
  expect_refused(with(tiny(), "/partial_rotary_factor", "half"), {"partial_rotary_factor", "half"});
  Json none = tiny();
  none.erase("partial_rotary_factor");
  none["rope_parameters"]["main"].erase("partial_rotary_factor");
  expect_refused(none, {"partial_rotary_factor"});
}

// --- which layer compresses how

TEST(BadConfig, Ratios) {
  expect_refused(with(flash(), "/compress_ratios/5", 5), {"compress_ratios[5]", "is 5"});
  expect_refused(with(flash(), "/compress_ratios/42", 64), {"compress_ratios[42]", "is 64"});
  expect_refused(with(flash(), "/compress_ratios/0", -4), {"compress_ratios[0]", "-4"});
  expect_refused(with(flash(), "/compress_ratios/0", 4.0), {"compress_ratios[0]", "4.0"});
  expect_refused(with(flash(), "/compress_ratios/0", "4"), {"compress_ratios[0]", "\"4\""});
  expect_refused(with(flash(), "/compress_ratios/0", nullptr), {"compress_ratios[0]", "null"});
  expect_refused(with(flash(), "/compress_ratios/0", {4}), {"compress_ratios[0]", "list of 1"});
  expect_refused(with(flash(), "/compress_ratios/43", 2), {"compress_ratios[43]", "is 2"});
  expect_refused(with(flash(), "/compress_ratios", 4), {"compress_ratios", "is 4"});
  expect_refused(with(flash(), "/compress_ratios", Json::array()), {"compress_ratios", "0 entries", "43"});
  Json shorter = flash();
  shorter["compress_ratios"] = kv4::test_config::ratios({0, 0}, 19, 0);
  expect_refused(shorter, {"compress_ratios", "41", "43"});
  Json longer = flash();
  longer["compress_ratios"] = std::vector<int>(5000, 4);
  expect_refused(longer, {"compress_ratios", "5000"});
}

TEST(BadConfig, LayerTypes) {
  expect_refused(with(tiny(), "/layer_types/1", "full_attention"),
                 {"layer_types[1]", "full_attention", "sliding_attention"});
  expect_refused(with(tiny(), "/layer_types/1", 4), {"layer_types[1]", "is 4"});
  expect_refused(with(tiny(), "/layer_types/1", nullptr), {"layer_types[1]", "null"});
  expect_refused(with(tiny(), "/layer_types", "sliding_attention"), {"layer_types", "sliding_attention"});
  expect_refused(with(tiny(), "/num_hidden_layers", 4), {"layer_types", "3", "4"});
}

TEST(BadConfig, Rates) {
  Json none = tiny();
  none.erase("compress_rates");
  expect_refused(none, {"compress_rates"});
  expect_refused(with(tiny(), "/compress_rates", 4), {"compress_rates", "is 4"});
  Json missing = tiny();
  missing["compress_rates"].erase("heavily_compressed_attention");
  expect_refused(missing, {"compress_rates.heavily_compressed_attention"});
  for (const Json& bad : {Json(0), Json(-8), Json(8.5), Json("8"), Json(INT64_MAX)})
    expect_refused(with(tiny(), "/compress_rates/heavily_compressed_attention", bad),
                   {"compress_rates.heavily_compressed_attention", bad.dump()});
  expect_refused(with(tiny(), "/compress_rate_csa", 0), {"compress_rate_csa", "is 0"});
}

// --- rotation

TEST(BadConfig, RopeScaling) {
  expect_refused(with(flash(), "/rope_scaling", "yarn"), {"rope_scaling", "yarn"});
  expect_refused(with(flash(), "/rope_scaling/type", "linear"), {"rope", "linear", "yarn"});
  expect_refused(with(flash(), "/rope_scaling/type", 7), {"rope_scaling.type", "is 7"});
  expect_refused(with(flash(), "/rope_scaling/factor", 0), {"rope_scaling.factor", "is 0"});
  expect_refused(with(flash(), "/rope_scaling/factor", "16"), {"rope_scaling.factor", "\"16\""});
  expect_refused(with(flash(), "/rope_scaling/beta_fast", -32), {"rope_scaling.beta_fast", "-32"});
  expect_refused(with(flash(), "/rope_scaling/beta_slow", 0), {"rope_scaling.beta_slow", "is 0"});
  expect_refused(with(flash(), "/rope_scaling/attention_factor", 1.2), {"rope_scaling.attention_factor", "1.2"});
  for (const char* name : {"factor", "original_max_position_embeddings"}) {
    Json json = flash();
    json["rope_scaling"].erase(name);
    expect_refused(json, {std::string("rope_scaling.") + name});
  }
}

TEST(BadConfig, RopeParameters) {
  Json json = tiny();
  json["rope_parameters"].erase("main");
  expect_refused(json, {"rope_parameters.main"});
  expect_refused(with(tiny(), "/rope_parameters/compress", 5), {"rope_parameters.compress", "is 5"});
  expect_refused(with(tiny(), "/rope_parameters/compress/rope_theta", -1),
                 {"rope_parameters.compress.rope_theta", "-1"});
  expect_refused(with(tiny(), "/rope_parameters", {4, 5}), {"rope_parameters", "list of 2"});
}

// --- the whole text

TEST(BadConfig, OtherModels) {
  expect_refused(with(flash(), "/model_type", "deepseek_v3"), {"model_type", "deepseek_v3", "deepseek_v4"});
  expect_refused(with(flash(), "/model_type", 4), {"model_type", "is 4"});
  const Json v41 = {{"model_type", "deepseek_v41"}, {"text_config", flash()}, {"vision_config", Json::object()}};
  expect_refused(v41, {"model_type", "deepseek_v41"});
  expect_refused(Json{{"text_config", flash()}}, {"num_hidden_layers"});
}

TEST(BadConfig, NotJsonOrNotAnObject) {
  const std::string whole = flash().dump();
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("nonsense"), whole.substr(0, whole.size() / 2), whole + "x",
        std::string("{\"head_dim\": 1e999}"), std::string("{\"a\": \"\xff\"}"), std::string("\0\0\0", 3)})
    EXPECT_NE(refusal(text).find("JSON"), std::string::npos) << text;
  for (const char* text : {"[]", "4", "null", "\"text\"", "true"})
    EXPECT_NE(refusal(text).find("object"), std::string::npos) << text;
  EXPECT_FALSE(refusal("{}").empty());
}

TEST(BadConfig, DeepNesting) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  for (const char* name : {"head_dim", "compress_ratios", "rope_scaling", "model_type"}) {
    Json json = flash();
    json.erase(name);
    std::string text = json.dump();
    text.insert(1, "\"" + std::string(name) + "\":" + deep + ",");
    EXPECT_NE(refusal(text).find(name), std::string::npos) << name;
  }
}

TEST(BadConfig, MessagesStayShort) {
  expect_refused(with(flash(), "/model_type", std::string(100'000, 'x')), {"model_type"});
  for (const char* name : {"/model_type", "/head_dim", "/rope_scaling/type", "/sliding_window"})
    EXPECT_LT(refusal(with(flash(), name, std::string(100'000, 'x')).dump()).size(), 1000u) << name;
}

// --- configs built by hand

template <class Change>
std::string invalid(Change change) {
  kv4::ModelConfig config = kv4::model_preset("v4-flash");
  change(config);
  try {
    kv4::validate(config);
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config);
    return e.what();
  }
  return "accepted";
}

TEST(BadConfig, ValidateNamesTheField) {
  using kv4::ModelConfig;
  const std::vector<std::pair<int ModelConfig::*, const char*>> fields = {
      {&ModelConfig::num_layers, "num_layers"}, {&ModelConfig::num_query_heads, "num_query_heads"},
      {&ModelConfig::head_dim, "head_dim"},     {&ModelConfig::rope_dim, "rope_dim"},
      {&ModelConfig::window, "window"},         {&ModelConfig::index_heads, "index_heads"},
      {&ModelConfig::index_dim, "index_dim"},   {&ModelConfig::index_topk, "index_topk"},
      {&ModelConfig::csa_ratio, "csa_ratio"},   {&ModelConfig::hca_ratio, "hca_ratio"}};
  for (const auto& [field, name] : fields)
    for (int bad : {0, -1, INT32_MIN, INT32_MAX}) {
      const std::string message = invalid([&, f = field](ModelConfig& c) { c.*f = bad; });
      EXPECT_NE(message.find(name), std::string::npos) << name << " = " << bad << ": " << message;
      EXPECT_NE(message.find(std::to_string(bad)), std::string::npos) << name << " = " << bad << ": " << message;
    }
  EXPECT_NE(invalid([](ModelConfig& c) { c.kinds.pop_back(); }).find("kinds"), std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.max_positions = 0; }).find("max_positions"), std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.rms_eps = -1; }).find("rms_eps"), std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.rms_eps = 1.5; }).find("rms_eps"), std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.rms_eps = std::nan(""); }).find("rms_eps"), std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.rope_main.theta = 0; }).find("rope_main"), std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.rope_compress.factor = std::nan(""); }).find("rope_compress"),
            std::string::npos);
  EXPECT_NE(invalid([](ModelConfig& c) { c.rope_compress.original_length = 0; }).find("rope_compress"),
            std::string::npos);
}

}  // namespace
