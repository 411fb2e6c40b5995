// Schema and plan of V4.1 to the byte; V4's unchanged beside it; and refusals of caches that not every backend runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/foreign_pages.h"
#include "kv4/schema.h"
#include "kv4/state_cache_pool.h"
#include "schema/layout_text.h"
#include "schema/operations.h"

namespace {

using kv4::build_schema;
using kv4::CacheOptions;
using kv4::CacheSchema;
using kv4::Format;
using kv4::LayerCacheSchema;
using kv4::LayerKind;
using kv4::ModelConfig;
using kv4::PageSchema;
using kv4::RowRole;

CacheSchema flash(const CacheOptions& options = {}) {
  return build_schema(kv4::model_preset("v4.1-flash"), options);
}

TEST(SchemaV41, BlockOf128Tokens) {
  const CacheSchema s = flash();
  EXPECT_EQ(s.block_tokens, 128);
  EXPECT_EQ(s.block_bytes, 113920);
  EXPECT_EQ(s.block_image_bytes, 113920);
  EXPECT_EQ(kv4::plan_memory(s).bytes_per_token, 890.0);
  struct Page {
    int layer;
    RowRole role;
    int rows;
    std::int64_t scales_at, bytes, offset;
  };
  const Page pages[] = {{2, RowRole::entry, 64, 16384, 18432, 0},
                        {2, RowRole::index_key, 64, 4096, 4352, 18432},
                        {8, RowRole::entry, 64, 16384, 18432, 22784},
                        {8, RowRole::index_key, 64, 4096, 4352, 41216},
                        {14, RowRole::entry, 64, 16384, 18432, 45568},
                        {14, RowRole::index_key, 64, 4096, 4352, 64000},
                        {20, RowRole::entry, 128, 32768, 36864, 68352},
                        {20, RowRole::index_key, 128, 8192, 8704, 105216}};
  std::size_t count = 0;
  for (const LayerCacheSchema& layer : s.layers) count += layer.pages.size();
  EXPECT_EQ(count, std::size(pages));
  for (const Page& want : pages) {
    SCOPED_TRACE(want.layer);
    const PageSchema& page = s.layer(want.layer).pages[want.role == RowRole::entry ? 0 : 1];
    EXPECT_EQ(page.kind.role, want.role);
    EXPECT_EQ(page.kind.owner_layer, want.layer);
    EXPECT_EQ(page.row.format, want.role == RowRole::entry ? Format::nvfp4_row : Format::mxfp4);
    EXPECT_EQ(page.row.bytes(), want.role == RowRole::entry ? 288 : 68);
    EXPECT_EQ(page.row.tail, 0);
    EXPECT_EQ(page.rows_per_block, want.rows);
    EXPECT_EQ(page.scale_offset, want.scales_at);
    EXPECT_EQ(page.page_bytes, want.bytes);
    EXPECT_EQ(page.offset, want.offset);
  }
}

TEST(SchemaV41, ReadersHaveAWindowAndReferToPagesOfOthers) {
  const CacheSchema s = flash();
  ASSERT_EQ(s.layers.size(), 40u);
  for (const LayerCacheSchema& layer : s.layers) {
    EXPECT_EQ(layer.window.row.format, Format::fp8_tile32);
    EXPECT_EQ(layer.window.row.bytes(), 528);
    EXPECT_EQ(layer.window.row.tail, 0);
    EXPECT_EQ(layer.window.rows, 128);
    const bool owner = layer.spec.kind == LayerKind::shared && layer.spec.rows[0].owner_layer == layer.spec.layer;
    EXPECT_EQ(layer.pages.size(), owner ? 2u : 0u);
    EXPECT_EQ(layer.pending.size(), layer.pages.size());
  }
  EXPECT_EQ(s.layer(3).spec.rows[0].owner_layer, 2);
  EXPECT_EQ(s.layer(36).spec.rows[1].owner_layer, 20);
  EXPECT_FALSE(s.options.hadamard);
}

TEST(SchemaV41, StateOfARequest) {
  struct Figures {
    int rewind;
    std::int64_t windows, pending, slot, drafts;
  };
  for (const Figures& f : {Figures{0, 2703360, 24576, 2727936, 202752}, Figures{5, 2810880, 86016, 2896896, 210816},
                           Figures{8, 2872320, 122880, 2995200, 215424}}) {
    SCOPED_TRACE(f.rewind);
    CacheOptions o;
    o.max_rewind_tokens = f.rewind;
    EXPECT_EQ(flash(o).slot_bytes, f.slot);
    o.draft_layers = 3;
    const CacheSchema s = flash(o);
    EXPECT_EQ(s.slot_bytes, f.slot + f.drafts);
    const kv4::MemoryPlan plan = kv4::plan_memory(s);
    EXPECT_EQ(plan.state_bytes_per_request, f.slot);
    EXPECT_EQ(plan.draft_bytes_per_request, f.drafts);
    std::int64_t sum = 0, windows = 0, pending = 0;
    for (const kv4::MemoryPart& part : plan.parts) {
      sum += part.bytes;
      if (part.name == "windows") windows = part.bytes;
      if (part.name == "pending rows") pending = part.bytes;
      EXPECT_TRUE(part.name.find("CSA") == std::string::npos && part.name.find("HCA") == std::string::npos);
    }
    EXPECT_EQ(sum, plan.total_bytes);
    EXPECT_EQ(windows, f.windows * s.options.max_requests);
    EXPECT_EQ(pending, f.pending * s.options.max_requests);
    for (const int owner : {2, 8, 14}) {
      EXPECT_EQ(s.layer(owner).pending[0].rows, 2 + f.rewind);
      EXPECT_EQ(s.layer(owner).pending[0].row_bytes, 4096);
      EXPECT_EQ(s.layer(owner).pending[1].rows, 0);
    }
    EXPECT_EQ(s.layer(20).pending[0].rows, 0);
  }
  CacheOptions narrow;
  narrow.pending_dtype = kv4::DType::bf16;
  EXPECT_EQ(flash(narrow).layer(2).pending[0].row_bytes, 2048);
}

TEST(SchemaV41, CanonicalImages) {
  const CacheSchema s = flash();
  const auto bytes = [&](std::int64_t n) { return kv4::image_bytes(s, std::vector{n}); };
  EXPECT_EQ(bytes(0), 0);
  EXPECT_EQ(bytes(1), 33408);
  for (const std::int64_t n : {128, 130, 4096}) EXPECT_EQ(bytes(n), 2703360) << n;
  for (const std::int64_t n : {129, 4095}) EXPECT_EQ(bytes(n), 2715648) << n;
  EXPECT_EQ(bytes(2), 2 * 40 * 528);
  CacheOptions o;
  o.draft_layers = 3;
  EXPECT_EQ(kv4::image_bytes(flash(o), std::vector<std::int64_t>(4, 128)), 2906112);
}

TEST(SchemaV41, OtherBlocksAlignmentsAndArrangements) {
  CacheOptions o;
  o.block_tokens = 512;
  EXPECT_EQ(flash(o).block_bytes, 455680);
  o.block_tokens = 2;
  EXPECT_EQ(flash(o).layer(2).pages[0].rows_per_block, 1);
  o.block_tokens = 129;
  EXPECT_THROW(flash(o), kv4::Error);
  o = {};
  o.page_alignment = 512;  // as vLLM pads every page
  EXPECT_EQ(flash(o).block_bytes, 114688);
  EXPECT_EQ(flash(o).block_image_bytes, 113920);
  o = {};
  o.arrangement = kv4::Arrangement::layer_major;
  EXPECT_EQ(flash(o).layout_id, flash().layout_id);
  EXPECT_EQ(flash(o).layer(20).pages[1].block_stride, 8704);
}

TEST(SchemaV41, BlockBudget) {
  const kv4::BlockBudget b = kv4::compute_block_budget(flash(), 4, 1000);
  EXPECT_EQ(b.blocks_per_request, 8);
  EXPECT_EQ(b.blocks, 36);  // 32 and a tenth
  EXPECT_EQ(b.shared_entry_bytes, 36 * (3 * 18432 + 36864));
  EXPECT_EQ(b.index_key_bytes, 36 * (3 * 4352 + 8704));
  EXPECT_EQ(b.csa_entry_bytes, 0);
  EXPECT_EQ(b.hca_entry_bytes, 0);
  EXPECT_EQ(b.bytes, b.shared_entry_bytes + b.index_key_bytes);
  EXPECT_EQ(b.bytes, 36 * 113920);
}

TEST(SchemaV41, FormatsByModelByBothAndAlone) {
  const CacheSchema own = flash();
  EXPECT_EQ(own.options.window_format, Format::fp8_tile32);
  EXPECT_EQ(own.options.entry_format, Format::nvfp4_row);
  EXPECT_EQ(own.options.row_format, std::nullopt);
  CacheOptions o;
  o.row_format = Format::fp8_tile64;  // the engines' format for V4.1 on Hopper
  o.index_format = Format::fp8;
  EXPECT_EQ(kv4::plan_memory(flash(o)).bytes_per_token, 1790.0);
  EXPECT_EQ(flash(o).options.row_format, Format::fp8_tile64);
  EXPECT_EQ(flash(o).layer(0).window.row.bytes(), 584);
  o.entry_format = Format::nvfp4_row;
  EXPECT_EQ(flash(o).layer(2).pages[0].row.bytes(), 288);
  EXPECT_EQ(flash(o).layer(2).window.row.bytes(), 584);
  EXPECT_EQ(build_schema(kv4::model_preset("v4-flash"), {}).options.row_format, Format::fp8_tile64);
  o = {};
  o.window_format = Format::mxfp4;
  EXPECT_THROW(flash(o), kv4::Error);
  EXPECT_NE(flash(own.options).layout_id, build_schema(kv4::model_preset("v4-flash"), {}).layout_id);
  EXPECT_EQ(flash(own.options).layout_id, own.layout_id);  // resolved options give the same layout again
}

TEST(SchemaV41, ACutKeepsOwnersRankersAndCandidatesTogether) {
  const auto refused = [](std::vector<int> layers, const std::string& part) {
    CacheOptions o;
    o.layers = std::move(layers);
    try {
      flash(o);
      ADD_FAILURE() << "accepted";
    } catch (const kv4::Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  refused({3, 4}, "layers has 3 without 2, whose entries it reads");
  refused({20, 25}, "layers has 25 without 24, whose index list it reads");
  CacheOptions o;
  o.layers = {0, 1};
  EXPECT_EQ(flash(o).block_bytes, 0);
  o.layers = {20, 21, 24, 25};
  EXPECT_EQ(flash(o).block_bytes, 36864 + 8704);
}

TEST(SchemaV41, RowsMoveToAndFromPagesOfOtherEngines) {
  const CacheSchema s = flash();
  const kv4::RowSchema &window = s.layer(0).window.row, &entry = s.layer(2).pages[0].row;
  EXPECT_EQ(kv4::planar_pages(window, 64, 512).page_bytes, 33792);  // 64 x 528
  EXPECT_EQ(kv4::planar_pages(entry, 64, 256).page_bytes, 18432);
  EXPECT_EQ(kv4::interleaved_pages(window, 64).payload_stride, 528);
  EXPECT_EQ(kv4::interleaved_pages(entry, 64).scale_stride, 288);
  EXPECT_EQ(kv4::interleaved_pages(entry, 64).scale_at, 256);

  const std::int64_t length = 200;  // 100 entries of layer 2 in two blocks
  std::vector<std::byte> blocks(static_cast<std::size_t>(2 * s.block_image_bytes));
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::byte>(i * 7 % 251);
  for (const bool split : {false, true}) {
    const kv4::RowsView rows = kv4::entry_rows(s, 8, RowRole::entry, blocks, length);
    ASSERT_EQ(rows.count, 100);
    const kv4::PageLayout layout = split ? kv4::planar_pages(entry, 64, 256) : kv4::interleaved_pages(entry, 64);
    std::vector<std::byte> pool(static_cast<std::size_t>(2 * layout.page_bytes));
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < 100; ++i) slots.push_back(99 - i);
    kv4::copy_to_pages(rows, slots, layout, pool);
    std::vector<std::byte> back(blocks.size());
    kv4::copy_from_pages(kv4::entry_rows(s, 8, RowRole::entry, back, length), slots, layout, pool);
    const kv4::RowsView returned = kv4::entry_rows(s, 8, RowRole::entry, back, length);
    for (std::int64_t i = 0; i < 100; ++i) {
      EXPECT_TRUE(std::ranges::equal(returned.payload(i), rows.payload(i))) << i;
      EXPECT_TRUE(std::ranges::equal(returned.scale(i), rows.scale(i))) << i;
    }
  }
  try {
    kv4::entry_rows(s, 9, RowRole::entry, blocks, length);
    FAIL() << "no Error was thrown";
  } catch (const kv4::Error& e) {
    EXPECT_NE(std::string(e.what()).find("layer 9 reads the entries of layer 8"), std::string::npos) << e.what();
  }
}

// --- what cannot run everywhere

std::string refusal(const ModelConfig& config, const CacheOptions& options, bool has_shared_entries) {
  try {
    kv4::require_operations(build_schema(config, options), has_shared_entries);
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config);
    return e.what();
  }
  return "";
}

CacheOptions small_options() {
  CacheOptions o;
  o.max_requests = 1;
  o.max_context = 256;
  o.max_step_tokens = 16;
  return o;
}

TEST(SchemaV41, RunsOnTheCpuOnly) {
  CacheOptions o = small_options();
  const ModelConfig model = kv4::model_preset("v4.1-flash");
  const std::string words = refusal(model, o, false);
  EXPECT_EQ(words,
            "a cache of v4.1-flash cannot run on this backend, which has no operations on entries that layers share "
            "(V4.1); use make_cpu_backend()");
  EXPECT_EQ(refusal(model, o, true), "");
  o.row_format = Format::fp8_tile64;  // the row format is not the reason
  EXPECT_EQ(refusal(model, o, false), words);
}

TEST(SchemaV41, RowsOfV41AndTwoFormatsRunOnTheCpuOnly) {
  const ModelConfig v4 = kv4::model_preset("v4-flash");
  CacheOptions o = small_options();
  o.layers = {2};
  EXPECT_EQ(refusal(v4, o, false), "");
  o.row_format = Format::fp8_tile32;
  EXPECT_EQ(refusal(v4, o, true), "");
  EXPECT_NE(refusal(v4, o, false).find("rows in fp8_tile32 cannot run"), std::string::npos);
  o.row_format = Format::fp8_tile64;
  o.entry_format = Format::bf16;
  EXPECT_EQ(refusal(v4, o, true), "");
  EXPECT_NE(refusal(v4, o, false).find("window rows in fp8_tile64 and entries in bf16"), std::string::npos);
  o.entry_format = Format::fp8_tile64;
  EXPECT_EQ(refusal(v4, o, false), "");
}

// --- V4 as it was

struct Before {
  const char* model;
  int options;
  std::uint64_t layout_id;
  std::int64_t block_bytes, slot_bytes, total_bytes;
};

// Values from before V4.1, when an attend workspace had no room for staged rows: it was empty for these contexts.
constexpr Before kBefore[] = {
    {"v4-flash", 0, 0x6186bc7c32815df0u, 450944, 5139456, 618434288},
    {"v4-flash", 1, 0xdeb752ccdf12542eu, 797312, 7561216, 1059968944},
    {"v4-flash", 2, 0x1ceb36d3ecbdbaa5u, 448256, 5239680, 617631792},
    {"v4-flash", 3, 0x96c8036102083610u, 84672, 918528, 73315840},
    {"v4-pro", 0, 0x357bd0f28708213cu, 645760, 7334912, 880349296},
    {"v4-pro", 1, 0x1e4f6a9e047f0fb8u, 1141504, 10770432, 1511654576},
    {"v4-pro", 2, 0xef98eb78c3b5f337u, 641920, 7430784, 878664944},
    {"v4-pro", 3, 0x96c8036102083610u, 84672, 918528, 73315840},
};

CacheOptions before_options(int which) {
  CacheOptions o;
  o.index_tile_tokens = 128;  // the default then
  if (which == 1) {
    o.row_format = Format::bf16;
    o.index_format = Format::fp8;
    o.hadamard = false;
  }
  if (which == 2) {
    o.row_format = Format::fp8_row;
    o.max_rewind_tokens = 5;
    o.draft_layers = 2;
    o.pending_dtype = kv4::DType::bf16;
  }
  if (which == 3) {
    o.layers = {2, 3, 4};
    o.block_tokens = 256;
    o.hca_mode = kv4::HcaMode::raw;
    o.arrangement = kv4::Arrangement::layer_major;
  }
  return o;
}

TEST(SchemaV41, V4sLayoutIdsAndSizesAreAsTheyWere) {
  for (const Before& b : kBefore) {
    SCOPED_TRACE(testing::Message() << b.model << ", options " << b.options);
    const CacheSchema s = build_schema(kv4::model_preset(b.model), before_options(b.options));
    EXPECT_EQ(s.layout_id, b.layout_id);
    EXPECT_EQ(s.block_bytes, b.block_bytes);
    EXPECT_EQ(s.slot_bytes, b.slot_bytes);
    const kv4::MemoryPlan plan = kv4::plan_memory(s);
    std::int64_t others = plan.total_bytes;
    for (const kv4::MemoryPart& part : plan.parts)
      if (part.name == "attend workspace") others -= part.bytes;
    EXPECT_EQ(others, b.total_bytes);
  }
}

TEST(SchemaV41, LayoutTextOfTwoRowFormatsAndOfV41) {
  CacheOptions o;
  o.num_blocks = 4;
  o.window_format = Format::bf16;
  const CacheSchema mixed = build_schema(kv4::model_preset("v4-flash"), o);
  const std::string text = kv4::describe_layout(mixed);
  EXPECT_NE(text.find("rows bf16/fp8_tile64 keys"), std::string::npos) << text;
  EXPECT_EQ(kv4::describe_layout(kv4::parse_layout(text, 1000)), text);
  try {
    kv4::parse_layout(kv4::describe_layout(flash()), 1000);
    FAIL() << "no Error was thrown";
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_file);
    EXPECT_NE(std::string(e.what()).find("layouts of V4"), std::string::npos) << e.what();
  }
}

}  // namespace
