// V4.1's config: both spellings, the preset, the schedule of shared layers, and every check with its message.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/model_config.h"
#include "prefix/block_hash.h"
#include "schema/config_json.h"
#include "support/device.h"

namespace {

using kv4::LayerKind;
using kv4::LayerSpec;
using kv4::ModelConfig;
using kv4::RowRole;
using kv4::test_config::Json;
using kv4::test_config::v41_flash;
using kv4::test_config::v41_own;

ModelConfig parse(const Json& json) { return kv4::parse_model_config(json.dump()); }

void expect_flash(const ModelConfig& c) {
  const ModelConfig preset = kv4::model_preset("v4.1-flash");
  EXPECT_TRUE(c.shares_entries());
  EXPECT_EQ(c.num_layers, 40);
  EXPECT_EQ(c.num_query_heads, 64);
  EXPECT_EQ(c.head_dim, 512);
  EXPECT_EQ(c.rope_dim, 64);
  EXPECT_EQ(c.window, 128);
  EXPECT_EQ(c.rms_eps, 1e-20);
  EXPECT_EQ(c.index_heads, 32);
  EXPECT_EQ(c.index_dim, 128);
  EXPECT_EQ(c.index_topk, 512);
  EXPECT_EQ(c.max_positions, 1 << 20);
  EXPECT_EQ(c.kinds, preset.kinds);
  EXPECT_EQ(c.sharing.ratios, preset.sharing.ratios);
  EXPECT_EQ(c.sharing.owners, (std::vector{2, 8, 14, 20}));
  EXPECT_EQ(c.sharing.index_sources, (std::vector{2, 8, 14, 20, 24, 28, 32, 36}));
  EXPECT_EQ(c.sharing.candidate_source, 20);
  EXPECT_EQ(c.sharing.candidate_block_size, 8);
  EXPECT_EQ(c.sharing.candidate_topk_blocks, 2048);
  EXPECT_EQ(c.rope_main.theta, 10000.0);
  EXPECT_FALSE(c.rope_main.yarn);
  EXPECT_EQ(c.rope_compress.theta, 160000.0);
  EXPECT_TRUE(c.rope_compress.yarn);
  EXPECT_EQ(c.rope_compress.factor, 16.0);
  EXPECT_EQ(c.rope_compress.original_length, 65536.0);
  EXPECT_EQ(c.rope_compress.beta_fast, 32.0);
  EXPECT_EQ(c.rope_compress.beta_slow, 1.0);
  EXPECT_EQ(c.draft_hint, 3);
  EXPECT_EQ(c.draft_block, 5);
  EXPECT_EQ(c.draft_targets, (std::vector{37, 38, 39}));
  EXPECT_EQ(c.engram.layers, (std::vector{1, 14}));
  EXPECT_EQ(c.engram.max_ngram, 4);
  EXPECT_EQ(c.engram.pad_id, 2);
}

TEST(ModelConfigV41, PresetAndBothSpellingsAreOneModel) {
  expect_flash(kv4::model_preset("v4.1-flash"));
  expect_flash(parse(v41_flash()));
  expect_flash(parse(v41_own()));
  Json typed = v41_own();
  typed["model_type"] = "deepseek_v41";
  expect_flash(parse(typed));
  expect_flash(parse(v41_flash()["text_config"]));  // the text model's config alone says deepseek_v41_text
  Json untyped = v41_flash();
  untyped.erase("model_type");
  expect_flash(parse(untyped));
  untyped["text_config"].erase("model_type");
  expect_flash(parse(untyped));  // recognised by kv_source_layer_ids
  Json doubled = v41_own();
  doubled["num_hidden_layers"] = 40;
  expect_flash(parse(doubled));
}

TEST(ModelConfigV41, ReleasedConfig) {
  const std::string path = kv4::test::source_path("../shared/configs/deepseek-v4.1-flash.json");
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "not beside the checkout: " << path;
  expect_flash(kv4::load_model_config(path));
}

TEST(ModelConfigV41, FieldsThatMayBeAbsent) {
  Json json = v41_flash();
  Json& text = json["text_config"];
  for (const char* name : {"max_position_embeddings", "rope_scaling", "dspark_block_size", "dspark_target_layer_ids",
                           "num_nextn_predict_layers", "engram_layer_ids", "engram_max_ngram_size",
                           "engram_pad_token_id"})
    text.erase(name);
  const ModelConfig c = parse(json);
  EXPECT_EQ(c.draft_hint, 3);  // the list has three entries behind the backbone
  EXPECT_EQ(c.draft_block, 0);
  EXPECT_FALSE(c.rope_compress.yarn);
  EXPECT_TRUE(c.engram.layers.empty());

  for (const Json& none : {Json(-1), Json(-7), Json()}) {
    Json without = v41_flash();
    without["text_config"]["candidate_source_layer_id"] = none;
    without["text_config"].erase("candidate_topk_blocks");
    EXPECT_EQ(parse(without).sharing.candidate_source, -1) << none;
  }
  Json unscaled = v41_own();
  unscaled["original_seq_len"] = 0;
  EXPECT_FALSE(parse(unscaled).rope_compress.yarn);

  Json windows = v41_own();  // no entries at all
  windows["compress_ratios"] = std::vector<int>(40, 0);
  windows["model_type"] = "deepseek_v41";
  for (const char* name : {"kv_source_layers", "index_source_layers", "candidate_source_layer", "index_topk"})
    windows.erase(name);
  EXPECT_TRUE(parse(windows).shares_entries());
  for (const LayerSpec& spec : kv4::layer_schedule(parse(windows))) EXPECT_TRUE(spec.rows.empty());
}

TEST(ModelConfigV41, OneTypeForOneSetOfRatios) {
  const auto refused = [](const Json& json, const std::string& part) {
    try {
      parse(json);
      ADD_FAILURE() << "accepted; expected " << part;
    } catch (const kv4::Error& e) {
      EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  Json json = v41_flash()["text_config"];
  json["model_type"] = "deepseek_v4";
  refused(json, "compress_ratios[2] is 2; V4 knows 0");
  json = kv4::test_config::flash();
  json["model_type"] = "deepseek_v41";
  refused(json, "compress_ratios[2] is 4; V4.1 knows 0");
  json = v41_flash();
  json["text_config"]["model_type"] = "deepseek_v4";
  refused(json, "must name one model");
  json = v41_flash();
  json["model_type"] = "deepseek_v4";
  refused(json, "must name one model");
  json = v41_flash();
  json["model_type"] = "deepseek_v5";
  refused(json, "config field 'model_type' is 'deepseek_v5'");
  json = v41_flash();
  json["text_config"]["model_type"] = "llama";
  refused(json, "config field 'text_config.model_type' is 'llama'");
  json = v41_flash();
  json["text_config"] = 7;
  refused(json, "config field 'text_config' is 7; it must be an object");
  json = v41_own();
  json["num_hidden_layers"] = 41;
  refused(json, "'num_hidden_layers' and 'n_layers' are 41 and 40");
}

struct Wrong {
  const char* name;
  std::function<void(Json&)> change;  // of the text model's fields
  std::vector<std::string> parts;     // of the message
};

const Wrong kWrong[] = {
    {"ratio", [](Json& f) { f["compress_ratios"][5] = 3; }, {"compress_ratios[5] is 3", "0 (window only), 1 and 2"}},
    {"ratio of V4", [](Json& f) { f["compress_ratios"][5] = 128; }, {"compress_ratios[5] is 128"}},
    {"ratio as a fraction", [](Json& f) { f["compress_ratios"][5] = 1.5; }, {"compress_ratios[5] is 1.5"}},
    {"short list", [](Json& f) { f["compress_ratios"].erase(0); f["num_hidden_layers"] = 43; },
     {"'compress_ratios' has 42 entries"}},
    {"draft with a ratio", [](Json& f) { f["compress_ratios"][41] = 1; }, {"compress_ratios[41] is 1", "draft stage"}},
    {"first is no owner", [](Json& f) { f["kv_source_layer_ids"] = {8, 14, 20}; },
     {"layer 2 has ratio 2", "[8, 14, 20]", "must own"}},
    {"no owner at all", [](Json& f) { f["kv_source_layer_ids"] = Json::array(); }, {"layer 2 has ratio 2", "[]"}},
    {"owner without a ratio", [](Json& f) { f["kv_source_layer_ids"] = {1, 2, 8, 14, 20}; },
     {"layer 1", "ratio 0", "1 or 2"}},
    {"owner that does not rank", [](Json& f) { f["index_source_layer_ids"] = {2, 14, 20, 24}; },
     {"layer 8 owns entries", "index_source_layer_ids"}},
    {"other ratio than the owner's", [](Json& f) { f["compress_ratios"][10] = 1; },
     {"layer 10 has ratio 1", "layer 8, whose ratio is 2"}},
    {"candidate source that does not rank", [](Json& f) { f["candidate_source_layer_id"] = 21; },
     {"candidate_source_layer_id is 21", "[2, 8, 14, 20, 24, 28, 32, 36]"}},
    {"candidate source beyond the model", [](Json& f) { f["candidate_source_layer_id"] = 40; },
     {"candidate_source_layer_id is 40"}},
    {"candidates of another owner", [](Json& f) { f["candidate_source_layer_id"] = 14; },
     {"layer 20 ranks within the candidates of layer 14", "entries of layer 14"}},
    {"too few candidates", [](Json& f) { f["candidate_topk_blocks"] = 64; },
     {"layer 20", "candidate_topk_blocks = 64", "at least 505 entries", "index_topk = 512"}},
    {"index source without a ratio", [](Json& f) { f["index_source_layer_ids"] = {0, 2, 8, 14, 20}; },
     {"layer 0", "ratio 0"}},
    {"owner beyond the backbone", [](Json& f) { f["kv_source_layer_ids"] = {2, 8, 14, 20, 40}; },
     {"kv_source_layer_ids", "layer 40", "0 to 39"}},
    {"owners out of order", [](Json& f) { f["kv_source_layer_ids"] = {2, 14, 8, 20}; },
     {"kv_source_layer_ids", "layer 8 after layer 14", "ascending"}},
    {"an owner twice", [](Json& f) { f["index_source_layer_ids"] = {2, 2, 8, 14, 20}; },
     {"index_source_layer_ids", "layer 2 after layer 2"}},
    {"owner that is no number", [](Json& f) { f["kv_source_layer_ids"][1] = "8"; },
     {"kv_source_layer_ids[1] is \"8\"", "whole number"}},
    {"negative owner", [](Json& f) { f["kv_source_layer_ids"][0] = -2; }, {"kv_source_layer_ids[0] is -2"}},
    {"owners as an object", [](Json& f) { f["kv_source_layer_ids"] = {{"a", 1}}; }, {"kv_source_layer_ids", "a list"}},
    {"no blocks", [](Json& f) { f["candidate_topk_blocks"] = 0; }, {"candidate_topk_blocks", "is 0"}},
    {"no block size", [](Json& f) { f.erase("candidate_block_size"); }, {"candidate_block_size"}},
    {"no index heads", [](Json& f) { f.erase("index_n_heads"); }, {"index_n_heads"}},
    {"narrow keys", [](Json& f) { f["index_head_dim"] = 32; }, {"index_dim", "is 32"}},
    {"no index sources", [](Json& f) { f.erase("index_source_layer_ids"); },
     {"index_source_layer_ids", "'index_source_layers'"}},
    {"no layers", [](Json& f) { f.erase("num_hidden_layers"); }, {"num_hidden_layers", "'n_layers'"}},
    {"draft target beyond the backbone", [](Json& f) { f["dspark_target_layer_ids"] = {37, 40}; },
     {"dspark_target_layer_ids", "layer 40"}},
    {"engram beyond the backbone", [](Json& f) { f["engram_layer_ids"] = {40}; }, {"engram_layer_ids", "layer 40"}},
    {"engram without its length", [](Json& f) { f.erase("engram_max_ngram_size"); }, {"engram_max_ngram_size"}},
};

TEST(ModelConfigV41, EveryCheckNamesTheLayerAndWhatItMayHold) {
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(wrong.name);
    Json json = v41_flash();
    wrong.change(json["text_config"]);
    try {
      parse(json);
      ADD_FAILURE() << "accepted";
    } catch (const kv4::Error& e) {
      EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config);
      for (const std::string& part : wrong.parts)
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "'" << part << "' is not in: " << e.what();
    }
  }
}

TEST(ModelConfigV41, FewestCandidatesThatHoldAList) {
  Json json = v41_flash();
  json["text_config"]["candidate_topk_blocks"] = 65;  // 64 x 8 + 1 = 513 entries
  EXPECT_EQ(parse(json).sharing.candidate_topk_blocks, 65);
  json["text_config"]["index_topk"] = 513;
  EXPECT_EQ(parse(json).index_topk, 513);
  json["text_config"]["index_topk"] = 514;
  EXPECT_THROW(parse(json), kv4::Error);
}

TEST(ModelConfigV41, ConfigsBuiltByHand) {
  const auto refused = [](const std::function<void(ModelConfig&)>& change) {
    ModelConfig c = kv4::model_preset("v4.1-flash");
    change(c);
    EXPECT_THROW(kv4::validate(c), kv4::Error);
  };
  refused([](ModelConfig& c) { c.sharing = {}; });  // kinds say shared
  refused([](ModelConfig& c) { c.sharing.ratios.pop_back(); });
  refused([](ModelConfig& c) { c.sharing.ratios[3] = -1; });
  refused([](ModelConfig& c) { c.kinds[3] = LayerKind::csa; });
  refused([](ModelConfig& c) { c.kinds[3] = LayerKind::swa; });
  refused([](ModelConfig& c) { c.sharing.owners[0] = -1; });
  refused([](ModelConfig& c) { c.sharing.candidate_source = -2; });
  refused([](ModelConfig& c) { c.sharing.candidate_block_size = 0; });
  ModelConfig v4 = kv4::model_preset("v4-flash");
  v4.kinds[3] = LayerKind::shared;
  EXPECT_THROW(kv4::validate(v4), kv4::Error);
}

TEST(LayerScheduleV41, OwnersRankersAndCandidates) {
  const std::vector<LayerSpec> layers = kv4::layer_schedule(kv4::model_preset("v4.1-flash"), 3);
  ASSERT_EQ(layers.size(), 43u);
  const std::set<int> rankers = {2, 8, 14, 20, 24, 28, 32, 36};
  for (int i = 0; i < 40; ++i) {
    SCOPED_TRACE(i);
    const LayerSpec& spec = layers[static_cast<std::size_t>(i)];
    EXPECT_EQ(spec.layer, i);
    EXPECT_EQ(spec.group, 0);
    if (i < 2) {
      EXPECT_EQ(spec.kind, LayerKind::swa);
      EXPECT_TRUE(spec.rows.empty());
      EXPECT_EQ(spec.ranker, -1);
      continue;
    }
    const int owner = i < 8 ? 2 : i < 14 ? 8 : i < 20 ? 14 : 20;
    const bool ranks = rankers.contains(i);
    EXPECT_EQ(spec.kind, LayerKind::shared);
    EXPECT_EQ(spec.ranker, i < 24 ? owner : i / 4 * 4);
    EXPECT_EQ(spec.candidate_source, i >= 20 && ranks ? 20 : -1);
    ASSERT_EQ(spec.rows.size(), ranks ? 2u : 1u);
    for (const kv4::RowKind& row : spec.rows) {
      EXPECT_EQ(row.owner_layer, owner);
      EXPECT_EQ(row.ratio, i < 20 ? 2 : 1);
      EXPECT_FALSE(row.overlap);
      EXPECT_EQ(row.width, row.role == RowRole::entry ? 512 : 128);
    }
    EXPECT_EQ(spec.rows[0].role, RowRole::entry);
    if (ranks) {
      EXPECT_EQ(spec.rows[1].role, RowRole::index_key);
    }
  }
  for (int d = 0; d < 3; ++d) {
    const LayerSpec& spec = layers[static_cast<std::size_t>(40 + d)];
    EXPECT_EQ(spec.kind, LayerKind::swa);
    EXPECT_EQ(spec.group, d + 1);
    EXPECT_TRUE(spec.rows.empty());
  }
}

// A candidate source that owns nothing, between its owner's rankers.
TEST(LayerScheduleV41, CandidateSourceNeedNotOwn) {
  Json json = v41_flash();
  json["text_config"]["candidate_source_layer_id"] = 28;
  const std::vector<LayerSpec> layers = kv4::layer_schedule(parse(json));
  EXPECT_EQ(layers[20].candidate_source, -1);
  EXPECT_EQ(layers[24].candidate_source, -1);
  EXPECT_EQ(layers[28].candidate_source, 28);
  EXPECT_EQ(layers[29].candidate_source, -1);
  EXPECT_EQ(layers[36].candidate_source, 28);
}

TEST(LayerScheduleV41, LayersOfV4OwnWhatTheyReadAndRankForThemselves) {
  for (const char* name : {"v4-flash", "v4-pro"})
    for (const LayerSpec& spec : kv4::layer_schedule(kv4::model_preset(name))) {
      for (const kv4::RowKind& row : spec.rows) EXPECT_EQ(row.owner_layer, spec.layer);
      EXPECT_EQ(spec.ranker, spec.kind == LayerKind::csa ? spec.layer : -1);
      EXPECT_EQ(spec.candidate_source, -1);
    }
}

// Digests of a release before V4.1: keys of V4's blocks do not change.
TEST(ModelConfigV41, SharingIsPartOfTheConfigDigestAndV4sStays) {
  EXPECT_EQ(kv4::to_hex(kv4::digest_config(kv4::model_preset("v4-flash"))),
            "ee0c7223af41473e4b0c21d04a123fec2b3948a6262b4a1f803c632c6c840e60");
  EXPECT_EQ(kv4::to_hex(kv4::digest_config(kv4::model_preset("v4-pro"))),
            "99c4a8fc5e44580ab34f5008fdb0db46dfd053337faa276ddd194bacabd370cd");
  const kv4::Sha256 plain = kv4::digest_config(kv4::model_preset("v4.1-flash"));
  const auto differs = [&](const std::function<void(ModelConfig&)>& change) {
    ModelConfig c = kv4::model_preset("v4.1-flash");
    change(c);
    EXPECT_NE(kv4::digest_config(c), plain);
  };
  differs([](ModelConfig& c) { c.sharing.index_sources.pop_back(); });
  differs([](ModelConfig& c) { c.sharing.candidate_source = 24; });
  differs([](ModelConfig& c) { c.sharing.candidate_block_size = 16; });
  differs([](ModelConfig& c) { c.sharing.candidate_topk_blocks = 100; });
  differs([](ModelConfig& c) { c.sharing.owners = {2, 8, 20}; });
}

}  // namespace
