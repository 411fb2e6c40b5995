// Valid configs: both layouts, presets, the layer schedule.
#include "kv4/model_config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "kv4/error.h"
#include "schema/config_json.h"

namespace {

using kv4::LayerKind;
using kv4::ModelConfig;
using kv4::RopeSpec;
using kv4::test_config::Json;

ModelConfig parse(const Json& json) { return kv4::parse_model_config(json.dump()); }

int count(const ModelConfig& c, LayerKind kind) {
  return static_cast<int>(std::count(c.kinds.begin(), c.kinds.end(), kind));
}

bool same_rope(const RopeSpec& a, const RopeSpec& b) {
  return a.theta == b.theta && a.yarn == b.yarn && a.factor == b.factor && a.original_length == b.original_length &&
         a.beta_fast == b.beta_fast && a.beta_slow == b.beta_slow;
}

void expect_same_model(const ModelConfig& a, const ModelConfig& b) {
  EXPECT_EQ(a.num_layers, b.num_layers);
  EXPECT_EQ(a.num_query_heads, b.num_query_heads);
  EXPECT_EQ(a.head_dim, b.head_dim);
  EXPECT_EQ(a.rope_dim, b.rope_dim);
  EXPECT_EQ(a.window, b.window);
  EXPECT_EQ(a.index_heads, b.index_heads);
  EXPECT_EQ(a.index_dim, b.index_dim);
  EXPECT_EQ(a.index_topk, b.index_topk);
  EXPECT_EQ(a.csa_ratio, b.csa_ratio);
  EXPECT_EQ(a.hca_ratio, b.hca_ratio);
  EXPECT_EQ(a.rms_eps, b.rms_eps);
  EXPECT_EQ(a.max_positions, b.max_positions);
  EXPECT_EQ(a.kinds, b.kinds);
  EXPECT_TRUE(same_rope(a.rope_main, b.rope_main));
  EXPECT_TRUE(same_rope(a.rope_compress, b.rope_compress));
}

TEST(ModelConfigJson, FlashIsThePreset) {
  const ModelConfig c = parse(kv4::test_config::flash());
  EXPECT_EQ(c.num_layers, 43);
  EXPECT_EQ(count(c, LayerKind::swa), 2);
  EXPECT_EQ(count(c, LayerKind::csa), 21);
  EXPECT_EQ(count(c, LayerKind::hca), 20);
  EXPECT_EQ(c.kinds[1], LayerKind::swa);
  EXPECT_EQ(c.kinds[2], LayerKind::csa);
  EXPECT_EQ(c.kinds[3], LayerKind::hca);
  EXPECT_EQ(c.kinds[42], LayerKind::csa);
  EXPECT_EQ(c.head_dim, 512);
  EXPECT_EQ(c.rope_dim, 64);
  EXPECT_EQ(c.window, 128);
  EXPECT_EQ(c.index_topk, 512);
  EXPECT_EQ(c.csa_ratio, 4);
  EXPECT_EQ(c.hca_ratio, 128);
  EXPECT_EQ(c.max_positions, 1048576);
  EXPECT_TRUE(same_rope(c.rope_main, {}));
  EXPECT_TRUE(same_rope(c.rope_compress, {.theta = 160000, .yarn = true, .factor = 16}));
  EXPECT_EQ(c.draft_hint, 1);
  expect_same_model(c, kv4::model_preset("v4-flash"));
}

TEST(ModelConfigJson, EntriesAfterTheBackboneAreDraftStages) {
  const ModelConfig c = parse(kv4::test_config::flash_0731());
  EXPECT_EQ(c.draft_hint, 3);
  expect_same_model(c, kv4::model_preset("v4-flash"));
  Json exact = kv4::test_config::flash();
  exact["compress_ratios"].erase(43);
  EXPECT_EQ(parse(exact).draft_hint, 0);
}

TEST(ModelConfigJson, ProIsThePreset) {
  const ModelConfig c = parse(kv4::test_config::pro());
  EXPECT_EQ(count(c, LayerKind::swa), 0);
  EXPECT_EQ(count(c, LayerKind::csa), 30);
  EXPECT_EQ(count(c, LayerKind::hca), 31);
  EXPECT_EQ(c.num_query_heads, 128);
  EXPECT_EQ(c.index_topk, 1024);
  expect_same_model(c, kv4::model_preset("v4-pro"));
}

TEST(ModelConfigJson, LayerTypesWithRates) {
  const ModelConfig c = parse(kv4::test_config::tiny());
  EXPECT_EQ(c.kinds, (std::vector{LayerKind::hca, LayerKind::csa, LayerKind::swa}));
  EXPECT_EQ(c.head_dim, 32);
  EXPECT_EQ(c.rope_dim, 8);
  EXPECT_EQ(c.index_dim, 16);
  EXPECT_EQ(c.window, 8);
  EXPECT_EQ(c.csa_ratio, 4);
  EXPECT_EQ(c.hca_ratio, 8);
  EXPECT_TRUE(same_rope(c.rope_compress, {.theta = 160000}));
}

TEST(ModelConfigJson, LayerTypesWinOverRatiosAndMayRunLonger) {
  Json json = kv4::test_config::tiny();
  json["layer_types"].push_back("sliding_attention");
  json["compress_ratios"] = {4, 4, 4};
  json["num_nextn_predict_layers"] = 1;
  const ModelConfig c = parse(json);
  EXPECT_EQ(c.kinds.size(), 3u);
  EXPECT_EQ(c.kinds[0], LayerKind::hca);
  EXPECT_EQ(c.draft_hint, 1);
}

TEST(ModelConfigJson, FlatRates) {
  Json json = kv4::test_config::tiny();
  json.erase("compress_rates");
  json["compress_rate_csa"] = 6;
  json["compress_rate_hca"] = 24;
  const ModelConfig c = parse(json);
  EXPECT_EQ(c.csa_ratio, 6);
  EXPECT_EQ(c.hca_ratio, 24);
  json["layer_types"] = {"sliding_attention", "compressed_sparse_attention", "sliding_attention"};
  json.erase("compress_rate_hca");
  EXPECT_EQ(parse(json).csa_ratio, 6) << "a rate that no layer uses is not asked for";
}

TEST(ModelConfigJson, RopeWidthAndScalingInTheirOtherPlaces) {
  Json json = kv4::test_config::tiny();
  json.erase("partial_rotary_factor");
  EXPECT_EQ(parse(json).rope_dim, 8) << "from rope_parameters.main";
  json["qk_rope_head_dim"] = 4;
  EXPECT_EQ(parse(json).rope_dim, 4);
  json["rope_parameters"]["compress"] = {
      {"rope_type", "yarn"}, {"rope_theta", 160000}, {"factor", 16}, {"original_max_position_embeddings", 65536}};
  EXPECT_TRUE(same_rope(parse(json).rope_compress, {.theta = 160000, .yarn = true, .factor = 16}))
      << "betas default to 32 and 1";

  Json flash = kv4::test_config::flash();
  flash["rope_scaling"]["rope_type"] = "yarn";
  flash["rope_scaling"].erase("type");
  expect_same_model(parse(flash), kv4::model_preset("v4-flash"));
  flash["rope_scaling"] = nullptr;
  EXPECT_FALSE(parse(flash).rope_compress.yarn);
  EXPECT_EQ(parse(flash).rope_compress.theta, 160000.0);
}

TEST(ModelConfigJson, WithoutCsaNoIndexFieldsAreNeeded) {
  Json json = kv4::test_config::tiny();
  json["layer_types"] = {"heavily_compressed_attention", "sliding_attention", "sliding_attention"};
  for (const char* name : {"index_n_heads", "index_head_dim", "index_topk"}) json.erase(name);
  EXPECT_EQ(count(parse(json), LayerKind::csa), 0);
}

TEST(ModelConfigJson, LoadReadsAFile) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("kv4_config_" + std::to_string(::getpid()) + ".json");
  std::ofstream(path) << kv4::test_config::pro().dump(2);
  expect_same_model(kv4::load_model_config(path.string()), kv4::model_preset("v4-pro"));
  std::filesystem::remove(path);
  try {
    kv4::load_model_config(path.string());
    FAIL() << "no Error was thrown";
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_file);
    EXPECT_NE(std::string(e.what()).find(path.string()), std::string::npos);
  }
  const auto expect_refused = [](const std::string& name, const char* part) {
    try {
      kv4::load_model_config(name);
      ADD_FAILURE() << name << " was read";
    } catch (const kv4::Error& e) {
      EXPECT_EQ(e.code(), kv4::ErrorCode::bad_file);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  expect_refused(std::filesystem::temp_directory_path().string(), "it is a folder");
  expect_refused("/dev/zero", "it is a device");
  for (const char* text : {"root:x:0:0", "{}"}) {
    std::ofstream(path) << text;
    try {
      kv4::load_model_config(path.string());
      ADD_FAILURE() << text << " was read";
    } catch (const kv4::Error& e) {
      EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config);
      EXPECT_EQ(std::string(e.what()).find(path.string() + ": "), 0U) << e.what();
    }
    std::filesystem::remove(path);
  }
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);  // nobody writes to it: whoever opens it as a file waits for ever
  expect_refused(path.string(), "it is a FIFO");
  std::filesystem::remove(path);
  std::ofstream(path) << "{}";
  std::filesystem::resize_file(path, (1 << 20) + 1);
  expect_refused(path.string(), "at most 1048576");
  std::filesystem::remove(path);
}

TEST(ModelPreset, UnknownNamesTheKnown) {
  try {
    kv4::model_preset("v5");
    FAIL() << "no Error was thrown";
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_argument);
    EXPECT_NE(std::string(e.what()).find("'v5'"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("v4-flash"), std::string::npos);
  }
}

// --- schedule

TEST(LayerSchedule, RowsOfEachKind) {
  const ModelConfig c = kv4::model_preset("v4-flash");
  const std::vector<kv4::LayerSpec> layers = kv4::layer_schedule(c);
  ASSERT_EQ(layers.size(), 43u);
  for (int i = 0; i < 43; ++i) {
    const kv4::LayerSpec& spec = layers[static_cast<std::size_t>(i)];
    EXPECT_EQ(spec.layer, i);
    EXPECT_EQ(spec.group, 0);
    EXPECT_EQ(spec.kind, c.kinds[static_cast<std::size_t>(i)]);
    EXPECT_EQ(spec.rows.size(), spec.kind == LayerKind::swa ? 0u : spec.kind == LayerKind::hca ? 1u : 2u);
    for (const kv4::RowKind& row : spec.rows) {
      EXPECT_EQ(row.owner_layer, i);
      EXPECT_EQ(row.overlap, spec.kind == LayerKind::csa);
      EXPECT_EQ(row.ratio, spec.kind == LayerKind::csa ? 4 : 128);
      EXPECT_EQ(row.width, row.role == kv4::RowRole::index_key ? 128 : 512);
    }
  }
  EXPECT_EQ(layers[2].rows[0].role, kv4::RowRole::entry);
  EXPECT_EQ(layers[2].rows[1].role, kv4::RowRole::index_key);
}

TEST(LayerSchedule, DraftStagesFollowTheBackboneWithTheirOwnGroups) {
  const std::vector<kv4::LayerSpec> layers = kv4::layer_schedule(kv4::model_preset("v4-flash"), 3);
  ASSERT_EQ(layers.size(), 46u);
  for (int d = 0; d < 3; ++d) {
    const kv4::LayerSpec& spec = layers[static_cast<std::size_t>(43 + d)];
    EXPECT_EQ(spec.layer, 43 + d);
    EXPECT_EQ(spec.group, d + 1);
    EXPECT_EQ(spec.kind, LayerKind::swa);
    EXPECT_TRUE(spec.rows.empty());
  }
  for (int bad : {-1, 65, 1 << 30})
    EXPECT_THROW(kv4::layer_schedule(kv4::model_preset("v4-flash"), bad), kv4::Error) << bad;
}

TEST(LayerSchedule, NamesOfKinds) {
  EXPECT_STREQ(kv4::to_string(LayerKind::swa), "SWA");
  EXPECT_STREQ(kv4::to_string(LayerKind::csa), "CSA");
  EXPECT_STREQ(kv4::to_string(LayerKind::hca), "HCA");
}

}  // namespace
