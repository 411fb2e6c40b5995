// Blocks for a context, contexts for a memory, refused options, and the plan's arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kv4/error.h"
#include "kv4/params.h"
#include "kv4/schema.h"
#include "support/narrow_model.h"

namespace {

using kv4::build_schema;
using kv4::CacheOptions;
using kv4::CacheSchema;
using kv4::Format;
using kv4::LayerKind;
using kv4::ModelConfig;
using kv4::test::narrow_options;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

ModelConfig narrow(std::vector<LayerKind> kinds) {
  ModelConfig c = kv4::test::narrow_model(std::move(kinds));
  c.max_positions = 1 << 20;
  return c;
}

// --- blocks for a context

TEST(BlockBudget, RoundsContextUpAndKeepsTenPercent) {
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), {});
  struct {
    std::int64_t requests, context, per_request, blocks;
  } const cases[] = {{1, 1, 1, 2},        {1, 128, 1, 2},   {1, 129, 2, 3},
                     {10, 1280, 10, 110}, {7, 1000, 8, 62}, {256, 1'048'576, 8192, 2'306'868}};
  for (const auto& c : cases) {
    const kv4::BlockBudget b = kv4::compute_block_budget(s, c.requests, c.context);
    EXPECT_EQ(b.blocks_per_request, c.per_request);
    EXPECT_EQ(b.blocks, c.blocks) << c.requests << " x " << c.context;
    EXPECT_EQ(b.csa_entry_bytes, c.blocks * 21 * 18'688);
    EXPECT_EQ(b.index_key_bytes, c.blocks * 21 * 2'176);
    EXPECT_EQ(b.hca_entry_bytes, c.blocks * 20 * 640);
    EXPECT_EQ(b.bytes, b.csa_entry_bytes + b.index_key_bytes + b.hca_entry_bytes);
    EXPECT_EQ(b.bytes, c.blocks * s.block_bytes);
  }
}

TEST(BlockBudget, IsWhatAutomaticBlocksAre) {
  CacheOptions o;
  o.max_requests = 7;
  o.max_context = 1000;
  EXPECT_EQ(build_schema(kv4::model_preset("v4-pro"), o).options.num_blocks, 62);
}

TEST(BlockBudget, RefusesNothingAndTooMuch) {
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), {});
  for (std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_THROW(kv4::compute_block_budget(s, bad, 128), kv4::Error) << bad;
    EXPECT_THROW(kv4::compute_block_budget(s, 1, bad), kv4::Error) << bad;
  }
  EXPECT_THROW(kv4::compute_block_budget(s, kHuge, kHuge), kv4::Error);
  EXPECT_THROW(kv4::compute_block_budget(s, kHuge, 1), kv4::Error);
  EXPECT_THROW(kv4::compute_block_budget(s, 1, kHuge), kv4::Error);
  EXPECT_THROW(kv4::compute_block_budget(s, 1 << 20, std::int64_t{1} << 50), kv4::Error);
}

// --- and back

// A cache of the answer's size fits. One with a block more per request would not, except for the rounding of one
// request and the headroom.
void expect_inverse(const ModelConfig& config, CacheOptions options, std::int64_t bytes, std::int64_t requests) {
  SCOPED_TRACE(testing::Message() << config.name << ", " << requests << " requests in " << bytes << " bytes");
  options.max_requests = static_cast<int>(requests);
  const CacheSchema schema = build_schema(config, options);
  const kv4::ContextBudget answer = kv4::compute_context_budget(schema, bytes, requests);
  ASSERT_GT(answer.blocks, 0);
  ASSERT_GT(answer.context, 0);
  EXPECT_TRUE(answer.context % schema.block_tokens == 0 || answer.context == config.max_positions);
  EXPECT_LE(kv4::compute_block_budget(schema, requests, answer.context).blocks, answer.blocks + 1)
      << "the headroom is kept";

  options.num_blocks = answer.blocks;
  options.max_context = answer.context;
  const std::int64_t total = kv4::plan_memory(build_schema(config, options)).total_bytes;
  EXPECT_LE(total, bytes);

  if (answer.context == config.max_positions) return;
  options.num_blocks = 0;
  options.max_context = std::min(answer.context + 2 * schema.block_tokens, config.max_positions);
  EXPECT_GT(kv4::plan_memory(build_schema(config, options)).total_bytes, bytes) << "more would have fitted";
}

TEST(ContextBudget, IsTheInverseForTheRealModels) {
  for (const char* name : {"v4-flash", "v4-pro"})
    for (std::int64_t requests : {1, 4, 32})
      for (std::int64_t gigabytes : {1, 8, 80}) {
        CacheOptions o;
        o.max_step_tokens = 64;
        if (gigabytes * 1'000'000'000 < (requests + 2) * 10'000'000) continue;
        expect_inverse(kv4::model_preset(name), o, gigabytes * 1'000'000'000, requests);
      }
}

TEST(ContextBudget, FitsAtTheLongestContext) {
  // Everything that grows with the context counts, including the rope angles. Budgets are around the point where 1M
  // tokens just fit.
  const ModelConfig flash = kv4::model_preset("v4-flash");
  CacheOptions o;
  o.max_requests = 1;
  o.max_step_tokens = 16;
  o.max_context = flash.max_positions;
  const CacheSchema s = build_schema(flash, o);
  const std::int64_t exact = kv4::plan_memory(s).total_bytes;
  for (std::int64_t extra = 0; extra < 2 * s.block_bytes; extra += 50'000) {
    expect_inverse(flash, o, exact - s.block_bytes + extra, 1);
    if (HasFailure()) return;
  }
}

TEST(ContextBudget, FitsWhereBlocksAreSmall) {
  for (const std::vector<LayerKind>& kinds : {std::vector{LayerKind::hca}, std::vector{LayerKind::csa, LayerKind::hca}})
    for (std::int64_t requests : {1, 3, 16})
      for (std::int64_t bytes : {3'000'000, 10'000'000, 37'000'000}) {
        CacheOptions o = narrow_options();
        o.max_step_tokens = 16;
        expect_inverse(narrow(kinds), o, bytes, requests);
      }
}

TEST(ContextBudget, TooLittleIsNothing) {
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), {});
  for (std::int64_t bytes : {0, 1, 1'000'000}) {
    const kv4::ContextBudget b = kv4::compute_context_budget(s, bytes, 1);
    EXPECT_EQ(b.blocks, 0);
    EXPECT_EQ(b.context, 0);
  }
  EXPECT_THROW(kv4::compute_context_budget(s, -1, 1), kv4::Error);
  EXPECT_THROW(kv4::compute_context_budget(s, 1 << 30, 0), kv4::Error);
}

TEST(ContextBudget, AbsurdAnswersCanStillBeBuiltOrAreRefused) {
  for (std::int64_t requests : {std::int64_t{1}, std::int64_t{16}, kHuge}) try {
      const CacheSchema s = build_schema(narrow({LayerKind::hca}), narrow_options());
      const kv4::ContextBudget b = kv4::compute_context_budget(s, kHuge, requests);
      CacheOptions o = narrow_options();
      o.num_blocks = b.blocks;
      o.max_context = b.context;
      if (requests > 65536) {
        EXPECT_EQ(b.context, 0) << "a cache has at most 65,536 requests";
        continue;
      }
      o.max_requests = static_cast<int>(requests);
      EXPECT_NO_THROW(build_schema(s.config, o)) << b.blocks << " blocks";
    } catch (const kv4::Error&) {
    }
}

// --- the plan

TEST(MemoryPlan, PartsAddUpAndAreNamed) {
  CacheOptions o;
  o.draft_layers = 1;
  o.max_requests = 4;
  o.spare_slots = 2;
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), o);
  const kv4::MemoryPlan plan = kv4::plan_memory(s);
  std::int64_t sum = 0;
  for (const kv4::MemoryPart& part : plan.parts) {
    EXPECT_GT(part.bytes, 0) << part.name;
    EXPECT_FALSE(part.name.empty());
    sum += part.bytes;
  }
  EXPECT_EQ(sum, plan.total_bytes);
  const auto part = [&](const std::string& name) {
    for (const kv4::MemoryPart& p : plan.parts)
      if (p.name == name) return p.bytes;
    return std::int64_t{-1};
  };
  EXPECT_EQ(part("CSA entries"), s.options.num_blocks * 21 * 18'688);
  EXPECT_EQ(part("index keys"), s.options.num_blocks * 21 * 2'176);
  EXPECT_EQ(part("HCA entries"), s.options.num_blocks * 20 * 640);
  EXPECT_EQ(part("windows"), 4 * 3'214'336);
  EXPECT_EQ(part("CSA pending"), 4 * 1'720'320);
  EXPECT_EQ(part("HCA state"), 4 * 204'800);
  EXPECT_EQ(part("draft windows"), 4 * 128 * 584);
  EXPECT_EQ(part("spare slots"), 2 * s.slot_bytes);
}

std::int64_t planned_attend_bytes(const ModelConfig& config, int step_tokens, std::int64_t context, Format format) {
  CacheOptions o;
  o.max_step_tokens = step_tokens;
  o.max_context = context;
  o.row_format = format;
  for (const kv4::MemoryPart& part : kv4::plan_memory(build_schema(config, o)).parts)
    if (part.name == "attend workspace") return part.bytes;
  return 0;
}

TEST(MemoryPlan, HasRoomForTheStagedRowsOfAChunk) {
  constexpr Format kTiles = Format::fp8_tile64;
  constexpr std::int64_t kShort = 8192, kLong = 1 << 20, kWindow = 128;
  const ModelConfig flash = kv4::model_preset("v4-flash"), pro = kv4::model_preset("v4-pro");
  const std::int64_t partials = kv4::ops::attend_workspace_bytes();
  const auto with_rows = [](std::int64_t tokens, std::int64_t entries) {
    return kv4::ops::staged_attend_workspace_bytes(tokens, 1, kWindow, entries);
  };
  EXPECT_EQ(planned_attend_bytes(flash, 255, kShort, kTiles), 0) << "so few tokens do not stage";
  EXPECT_EQ(planned_attend_bytes(flash, 255, kLong, kTiles), partials) << "of KV splits";
  EXPECT_EQ(planned_attend_bytes(flash, 256, kShort, kTiles), with_rows(256, kShort / 4));
  EXPECT_EQ(planned_attend_bytes(flash, 4096, kLong, kTiles), with_rows(4096, kLong / 4));
  EXPECT_EQ(planned_attend_bytes(flash, 512, kLong, kTiles), with_rows(512, 512 * (128 + 512) / 8))
      << "the tokens meet no more rows eight times";
  EXPECT_EQ(planned_attend_bytes(pro, 512, kLong, kTiles), with_rows(512, 512 * (128 + 1024) / 8));
  EXPECT_EQ(planned_attend_bytes(flash, 4096, kLong, Format::bf16), 0);
  // 64 rows of zeros; windows that begin and end within a block; the entries; 4 bytes per token.
  EXPECT_EQ(with_rows(4096, 262144) - partials, (64 + 4096 + 128 + 128 + 262144) * 1024 + 4 * 4096);
  EXPECT_EQ(with_rows(300, 1) - partials, (64 + 576 + 64) * 1024 + 2048);
}

// --- options that are refused

template <class Change>
std::string refusal(Change change) {
  CacheOptions o = narrow_options();
  change(o);
  try {
    build_schema(narrow({LayerKind::csa, LayerKind::hca}), o);
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config) << e.what();
    return e.what();
  }
  return "accepted";
}

TEST(CacheOptionsRefused, NumbersOutOfRange) {
  const std::vector<std::pair<int CacheOptions::*, const char*>> fields = {
      {&CacheOptions::page_alignment, "page_alignment"},       {&CacheOptions::block_tokens, "block_tokens"},
      {&CacheOptions::max_rewind_tokens, "max_rewind_tokens"}, {&CacheOptions::draft_layers, "draft_layers"},
      {&CacheOptions::max_requests, "max_requests"},           {&CacheOptions::spare_slots, "spare_slots"},
      {&CacheOptions::max_step_tokens, "max_step_tokens"}};
  for (const auto& [field, name] : fields)
    for (int bad : {-1, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
      const std::string message = refusal([&, f = field](CacheOptions& o) { o.*f = bad; });
      EXPECT_NE(message.find(name), std::string::npos) << name << " = " << bad << ": " << message;
      EXPECT_NE(message.find(std::to_string(bad)), std::string::npos) << name << " = " << bad << ": " << message;
    }
  for (auto [field, name] : {std::pair{&CacheOptions::max_requests, "max_requests"},
                             std::pair{&CacheOptions::max_step_tokens, "max_step_tokens"}})
    EXPECT_NE(refusal([f = field](CacheOptions& o) { o.*f = 0; }).find(name), std::string::npos) << "a pool of nothing";
  for (auto [field, name] :
       {std::pair{&CacheOptions::max_context, "max_context"}, std::pair{&CacheOptions::num_blocks, "num_blocks"}})
    for (std::int64_t bad : {std::int64_t{-1}, kHuge, std::int64_t{1} << 40}) {
      const std::string message = refusal([&, f = field](CacheOptions& o) { o.*f = bad; });
      EXPECT_NE(message.find(name), std::string::npos) << message;
      EXPECT_NE(message.find(std::to_string(bad)), std::string::npos) << message;
    }
  EXPECT_NE(refusal([](CacheOptions& o) { o.max_context = 0; }).find("max_context"), std::string::npos);
}

TEST(CacheOptionsRefused, ValuesThatCannotWork) {
  EXPECT_NE(refusal([](CacheOptions& o) { o.block_tokens = 12; }).find("multiple of 8"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.block_tokens = 130; }).find("130"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.page_alignment = 100; }).find("100"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.page_alignment = 0; }).find("page_alignment"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.pending_dtype = kv4::DType::u8; }).find("u8"), std::string::npos);
  for (float bad :
       {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e-38f})
    EXPECT_NE(refusal([&](CacheOptions& o) { o.index_global_scale = bad; }).find("index_global_scale"),
              std::string::npos)
        << bad;
}

TEST(CacheOptionsRefused, LayerLists) {
  EXPECT_NE(refusal([](CacheOptions& o) { o.layers = {2}; }).find("layers[0] is 2"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.layers = {0, -1}; }).find("-1"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.layers = {1, 0}; }).find("layers[1]"), std::string::npos);
  EXPECT_NE(refusal([](CacheOptions& o) { o.layers = {1, 1}; }).find("layers[1]"), std::string::npos);
}

TEST(CacheOptionsRefused, RatiosWithoutACommonBlock) {
  ModelConfig c = narrow({LayerKind::csa, LayerKind::hca});
  c.csa_ratio = 8191;
  c.hca_ratio = 8209;
  EXPECT_THROW(build_schema(c, narrow_options()), kv4::Error);
}

TEST(CacheOptionsRefused, SizesThatOverflow) {
  ModelConfig c = narrow({LayerKind::csa, LayerKind::hca});
  c.head_dim = 65536;
  c.index_dim = 65536;
  c.max_positions = std::int64_t{1} << 30;
  CacheOptions o = narrow_options();
  o.block_tokens = 1 << 24;
  o.num_blocks = (std::int64_t{1} << 31) - 1;
  try {
    build_schema(c, o);
    FAIL() << "no Error was thrown";
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config);
    EXPECT_NE(std::string(e.what()).find("63 bits"), std::string::npos) << e.what();
  }
  o.block_tokens = 0;
  o.num_blocks = 0;
  o.max_requests = 65536;
  o.max_context = std::int64_t{1} << 30;
  EXPECT_THROW(build_schema(c, o), kv4::Error) << "more than 2^31 blocks";
}

}  // namespace
