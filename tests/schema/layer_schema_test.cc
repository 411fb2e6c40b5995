// Sizes and addresses: the published figures, and that no two rows share a byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/schema.h"
#include "kv4/state_cache_pool.h"
#include "support/narrow_model.h"

namespace {

using kv4::Arrangement;
using kv4::build_schema;
using kv4::CacheOptions;
using kv4::CacheSchema;
using kv4::DType;
using kv4::Format;
using kv4::HcaMode;
using kv4::LayerKind;
using kv4::ModelConfig;

ModelConfig tiny(int csa = 4, int hca = 8) {
  ModelConfig c = kv4::test::narrow_model({LayerKind::swa, LayerKind::csa, LayerKind::hca, LayerKind::csa});
  c.csa_ratio = csa;
  c.hca_ratio = hca;
  return c;
}

CacheOptions tiny_options() {
  CacheOptions o = kv4::test::narrow_options();
  o.max_context = 1024;
  o.max_requests = 3;
  return o;
}

std::string refusal(const ModelConfig& config, const CacheOptions& options) {
  try {
    build_schema(config, options);
  } catch (const kv4::Error& e) {
    EXPECT_EQ(e.code(), kv4::ErrorCode::bad_config) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

// --- figures

TEST(SchemaFigures, V4Flash) {
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), {});
  EXPECT_EQ(s.block_tokens, 128);
  EXPECT_EQ(s.block_bytes, 450'944);
  EXPECT_EQ(s.block_image_bytes, 450'944);
  EXPECT_EQ(s.slot_bytes, 5'139'456);
  const kv4::MemoryPlan plan = kv4::plan_memory(s);
  EXPECT_EQ(plan.block_bytes, 450'944);
  EXPECT_EQ(plan.bytes_per_token, 3523.0);
  EXPECT_EQ(plan.state_bytes_per_request, 5'139'456);
  EXPECT_EQ(plan.draft_bytes_per_request, 0);
  for (std::int64_t n : {128, 256, 8192}) EXPECT_EQ(kv4::image_bytes(s, std::vector{n}), 3'644'416) << n;
  EXPECT_EQ(kv4::image_bytes(s, std::vector<std::int64_t>{0}), 0);
  EXPECT_LT(kv4::image_bytes(s, std::vector<std::int64_t>{127}),
            43 * 127 * 584 + 21 * (7 * 8 * 1280) + 20 * 3 * 512 * 4 + 1);
}

TEST(SchemaFigures, V4FlashByPart) {
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), {});
  const kv4::LayerCacheSchema &swa = s.layer(0), &csa = s.layer(2), &hca = s.layer(3);
  EXPECT_TRUE(swa.pages.empty() && swa.pending.empty());
  EXPECT_EQ(swa.window.rows, 128);
  EXPECT_EQ(swa.window.row.bytes(), 584);
  ASSERT_EQ(csa.pages.size(), 2u);
  EXPECT_EQ(csa.pages[0].page_bytes, 18'688);
  EXPECT_EQ(csa.pages[0].rows_per_block, 32);
  EXPECT_EQ(csa.pages[1].page_bytes, 2'176);
  ASSERT_EQ(hca.pages.size(), 1u);
  EXPECT_EQ(hca.pages[0].page_bytes, 640);
  EXPECT_EQ(hca.pages[0].rows_per_block, 1);
  // Windows 3,214,336; CSA pending: 8 rows of kv and gate, both series, fp32; HCA: three accumulators and one row.
  EXPECT_EQ(43 * 128 * 584, 3'214'336);
  EXPECT_EQ(csa.pending[0].rows * csa.pending[0].row_bytes + csa.pending[1].rows * csa.pending[1].row_bytes,
            1'720'320 / 21);
  EXPECT_EQ(3 * 512 * 4 + hca.pending[0].rows * hca.pending[0].row_bytes, 204'800 / 20);
  EXPECT_EQ(csa.tail_buffer_size_a(), 8);
  EXPECT_EQ(csa.tail_buffer_size_b(), 8);
  EXPECT_EQ(hca.tail_buffer_size_a(), 1);
  EXPECT_EQ(hca.tail_buffer_size_b(), 0);
  EXPECT_EQ(swa.tail_buffer_size_a(), 0);
  EXPECT_FALSE(csa.needs_inv_scale());
  CacheOptions o;
  o.row_format = Format::fp8_row;
  EXPECT_TRUE(build_schema(kv4::model_preset("v4-flash"), o).layer(2).needs_inv_scale());
}

TEST(SchemaFigures, V4Pro) {
  const CacheSchema s = build_schema(kv4::model_preset("v4-pro"), {});
  EXPECT_EQ(s.block_bytes, 645'760);
  EXPECT_EQ(kv4::plan_memory(s).bytes_per_token, 5045.0);
}

TEST(SchemaFigures, OtherFormatsOfFlash) {
  const ModelConfig flash = kv4::model_preset("v4-flash");
  const auto block_bytes = [&](Format rows, Format keys) {
    CacheOptions o;
    o.row_format = rows;
    o.index_format = keys;
    return build_schema(flash, o).block_bytes;
  };
  EXPECT_EQ(block_bytes(Format::bf16, Format::bf16), 21 * (32 * 1024 + 32 * 256) + 20 * 1024);
  EXPECT_EQ(block_bytes(Format::fp8_row, Format::fp8), 21 * (32 * 580 + 32 * 132) + 20 * 640);
  EXPECT_EQ(block_bytes(Format::fp8_tile64, Format::nvfp4), 21 * (18'688 + (32 * 72 + 4 + 60)) + 20 * 640);
}

TEST(SchemaFigures, RewindLengthensEveryRing) {
  CacheOptions o;
  o.max_rewind_tokens = 5;
  o.hca_mode = HcaMode::raw;
  o.draft_layers = 2;
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), o);
  EXPECT_EQ(s.num_groups, 3);
  EXPECT_EQ(s.layers.size(), 45u);
  EXPECT_EQ(s.layer(0).window.rows, 133);
  EXPECT_EQ(s.layer(44).window.rows, 133);
  EXPECT_EQ(s.layer(2).pending[0].rows, 13);
  EXPECT_EQ(s.layer(2).pending[1].rows, 13);
  EXPECT_EQ(s.layer(3).pending[0].rows, 133);
  EXPECT_FALSE(s.layer(3).pending[0].online);
  const kv4::MemoryPlan plan = kv4::plan_memory(s);
  EXPECT_EQ(plan.draft_bytes_per_request, 2 * (133 * 576 + (133 * 8 + 63) / 64 * 64));
  EXPECT_EQ(plan.state_bytes_per_request + plan.draft_bytes_per_request, s.slot_bytes);
  o.hca_mode = HcaMode::online;
  EXPECT_EQ(build_schema(kv4::model_preset("v4-flash"), o).layer(3).pending[0].rows, 6);
}

TEST(SchemaFigures, BlockLengthFollowsTheRatios) {
  const auto tokens = [](int csa, int hca) {
    CacheOptions o = tiny_options();
    return build_schema(tiny(csa, hca), o).block_tokens;
  };
  EXPECT_EQ(tokens(4, 8), 128);
  EXPECT_EQ(tokens(4, 128), 128);
  EXPECT_EQ(tokens(6, 10), 150);
  EXPECT_EQ(tokens(1, 1), 128);
  EXPECT_EQ(tokens(3, 128), 384);
  CacheOptions o = tiny_options();
  o.block_tokens = 24;
  const CacheSchema s = build_schema(tiny(), o);
  EXPECT_EQ(s.block_tokens, 24);
  EXPECT_EQ(s.blocks_per_request, 43);
  EXPECT_EQ(s.layer(1).pages[0].rows_per_block, 6);
  EXPECT_EQ(s.layer(2).pages[0].rows_per_block, 3);
}

// --- addresses

struct Range {
  std::int64_t begin, end;
  bool operator<(const Range& o) const { return begin < o.begin; }
};

void expect_disjoint(std::vector<Range> ranges, std::int64_t limit) {
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ASSERT_GE(ranges[i].begin, 0);
    ASSERT_LE(ranges[i].end, limit);
    ASSERT_TRUE(i == 0 || ranges[i].begin >= ranges[i - 1].end);
  }
}

std::vector<CacheOptions> option_sets() {
  std::vector<CacheOptions> out;
  for (Arrangement a : {Arrangement::block_major, Arrangement::layer_major})
    for (int alignment : {64, 128, 576})
      for (Format keys : {Format::nvfp4, Format::fp8, Format::bf16})
        for (int rewind : {0, 3}) {
          CacheOptions o = tiny_options();
          o.arrangement = a;
          o.page_alignment = alignment;
          o.index_format = keys;
          o.max_rewind_tokens = rewind;
          o.draft_layers = rewind > 0 ? 2 : 0;
          o.hca_mode = rewind > 0 ? HcaMode::raw : HcaMode::online;
          o.pending_dtype = rewind > 0 ? DType::bf16 : DType::f32;
          o.num_blocks = 7;
          out.push_back(o);
        }
  return out;
}

TEST(SchemaAddresses, PagesNeverOverlapAndFillThePool) {
  for (const CacheOptions& o : option_sets()) {
    const CacheSchema s = build_schema(tiny(), o);
    std::vector<Range> pages;
    std::int64_t sum = 0;
    for (const kv4::LayerCacheSchema& layer : s.layers)
      for (const kv4::PageSchema& page : layer.pages) {
        EXPECT_EQ(page.page_bytes % o.page_alignment, 0);
        EXPECT_EQ(page.offset % o.page_alignment, 0);
        EXPECT_EQ(page.block_stride % o.page_alignment, 0);
        EXPECT_EQ(page.content_bytes % 64, 0);
        EXPECT_LE(page.content_bytes, page.page_bytes);
        EXPECT_GE(page.scale_offset, std::int64_t{page.rows_per_block} * page.row.payload_bytes);
        const std::int64_t scales_end = page.scale_offset + std::int64_t{page.rows_per_block} * page.row.scale_bytes;
        EXPECT_LE(scales_end, page.content_bytes);
        EXPECT_EQ(page.global_offset >= 0, page.row.format == Format::nvfp4);
        if (page.global_offset >= 0) {
          EXPECT_GE(page.global_offset, scales_end);
          EXPECT_LE(page.global_offset + 4, page.content_bytes);
          EXPECT_EQ(page.global_offset % 4, 0);
        }
        for (std::int64_t b = 0; b < s.options.num_blocks; ++b)
          pages.push_back({page.offset + b * page.block_stride, page.offset + b * page.block_stride + page.page_bytes});
        sum += page.page_bytes;
      }
    EXPECT_EQ(sum, s.block_bytes);
    expect_disjoint(pages, s.block_bytes * s.options.num_blocks);
  }
}

TEST(SchemaAddresses, BlockMajorIsContiguousByBlockLayerMajorByLayer) {
  CacheOptions o = tiny_options();
  o.num_blocks = 5;
  const CacheSchema block_major = build_schema(tiny(), o);
  o.arrangement = Arrangement::layer_major;
  const CacheSchema layer_major = build_schema(tiny(), o);
  std::int64_t at = 0;
  for (std::size_t i = 0; i < block_major.layers.size(); ++i)
    for (std::size_t k = 0; k < block_major.layers[i].pages.size(); ++k) {
      const kv4::PageSchema &b = block_major.layers[i].pages[k], &l = layer_major.layers[i].pages[k];
      EXPECT_EQ(b.offset, at);
      EXPECT_EQ(b.block_stride, block_major.block_bytes);
      EXPECT_EQ(l.offset, at * 5);
      EXPECT_EQ(l.block_stride, l.page_bytes);
      at += b.page_bytes;
    }
}

TEST(SchemaAddresses, FlashMlaPageStride) {
  CacheOptions o;
  o.page_alignment = 576;
  const CacheSchema s = build_schema(kv4::model_preset("v4-flash"), o);
  EXPECT_EQ(s.layer(2).pages[0].page_bytes % 576, 0);
  EXPECT_EQ(s.layer(2).pages[0].page_bytes, 33 * 576);
  EXPECT_EQ(s.block_bytes % 576, 0);
  EXPECT_EQ(s.block_image_bytes, 450'944) << "what is exported does not depend on it";
}

TEST(SchemaAddresses, StateSlotPartsNeverOverlap) {
  for (const CacheOptions& o : option_sets()) {
    const CacheSchema s = build_schema(tiny(), o);
    std::vector<Range> parts;
    const auto add = [&](std::int64_t at, std::int64_t bytes) {
      EXPECT_EQ(at % 64, 0);
      parts.push_back({at, at + bytes});
    };
    for (const kv4::LayerCacheSchema& layer : s.layers) {
      add(layer.window.payload_offset, std::int64_t{layer.window.rows} * layer.window.row.payload_bytes);
      if (layer.window.row.scale_bytes > 0)
        add(layer.window.scale_offset, std::int64_t{layer.window.rows} * layer.window.row.scale_bytes);
      for (std::size_t k = 0; k < layer.pending.size(); ++k) {
        const kv4::PendingSchema& p = layer.pending[k];
        EXPECT_EQ(p.row_bytes, 2 * p.columns * static_cast<int>(kv4::element_bytes(p.dtype)));
        add(p.ring_offset, p.rows * p.row_bytes);
        EXPECT_EQ(p.acc_offset >= 0, !layer.pages[k].kind.overlap);
        if (p.acc_offset >= 0) add(p.acc_offset, std::int64_t{3} * layer.pages[k].kind.width * 4);
      }
    }
    expect_disjoint(parts, s.slot_bytes);
  }
}

// --- identity

TEST(SchemaLayoutId, ChangesWithWhatBytesMean) {
  std::set<std::uint64_t> seen;
  const auto add = [&](const char* what, ModelConfig c, CacheOptions o) {
    EXPECT_TRUE(seen.insert(build_schema(c, o).layout_id).second) << what;
  };
  const auto option = [&](const char* what, auto change) {
    CacheOptions o = tiny_options();
    change(o);
    add(what, tiny(), o);
  };
  const auto model = [&](const char* what, auto change) {
    ModelConfig c = tiny();
    change(c);
    add(what, c, tiny_options());
  };
  add("itself", tiny(), tiny_options());
  option("row_format", [](CacheOptions& o) { o.row_format = Format::bf16; });
  option("index_format", [](CacheOptions& o) { o.index_format = Format::fp8; });
  option("hadamard", [](CacheOptions& o) { o.hadamard = false; });
  option("index_global_scale", [](CacheOptions& o) { o.index_global_scale = 0.5f; });
  option("pending_dtype", [](CacheOptions& o) { o.pending_dtype = DType::bf16; });
  option("block_tokens", [](CacheOptions& o) { o.block_tokens = 256; });
  option("draft_layers", [](CacheOptions& o) { o.draft_layers = 1; });
  option("layers", [](CacheOptions& o) { o.layers = {0, 1, 2}; });
  option("other layers", [](CacheOptions& o) { o.layers = {1, 2, 3}; });
  model("head_dim", [](ModelConfig& c) { c.head_dim = 40; });
  model("rope_dim", [](ModelConfig& c) { c.rope_dim = 10; });
  model("window", [](ModelConfig& c) { c.window = 16; });
  model("index_dim", [](ModelConfig& c) { c.index_dim = 32; });
  model("csa_ratio", [](ModelConfig& c) { c.csa_ratio = 2; });
  model("hca_ratio", [](ModelConfig& c) { c.hca_ratio = 16; });
  model("kinds", [](ModelConfig& c) { std::swap(c.kinds[1], c.kinds[2]); });
  model("rms_eps", [](ModelConfig& c) { c.rms_eps = 1e-5; });
  model("rope theta", [](ModelConfig& c) { c.rope_compress.theta = 160000; });
  model("rope yarn", [](ModelConfig& c) { c.rope_compress = {.theta = 160001, .yarn = true, .factor = 2}; });
}

TEST(SchemaLayoutId, DoesNotChangeWithWhereBytesLie) {
  const std::uint64_t id = build_schema(tiny(), tiny_options()).layout_id;
  const auto same = [&](const char* what, auto change) {
    CacheOptions o = tiny_options();
    change(o);
    EXPECT_EQ(build_schema(tiny(), o).layout_id, id) << what;
  };
  same("arrangement", [](CacheOptions& o) { o.arrangement = Arrangement::layer_major; });
  same("page_alignment", [](CacheOptions& o) { o.page_alignment = 576; });
  same("max_rewind_tokens", [](CacheOptions& o) { o.max_rewind_tokens = 9; });
  same("hca_mode", [](CacheOptions& o) { o.hca_mode = HcaMode::raw; });
  same("sizes", [](CacheOptions& o) {
    o.max_requests = 9, o.spare_slots = 3, o.max_context = 100, o.num_blocks = 12, o.max_step_tokens = 77;
  });
  same("block_tokens that is the default", [](CacheOptions& o) { o.block_tokens = 128; });
  same("every layer by name", [](CacheOptions& o) { o.layers = {0, 1, 2, 3}; });
  ModelConfig renamed = tiny();
  renamed.name = "other";
  renamed.num_query_heads = 16;
  EXPECT_EQ(build_schema(renamed, tiny_options()).layout_id, id);
}

// --- subset, refusals

TEST(SchemaLayers, ASubsetOwnsOnlyItsOwn) {
  CacheOptions o = tiny_options();
  o.layers = {1, 2};
  const CacheSchema s = build_schema(tiny(), o);
  ASSERT_EQ(s.layers.size(), 2u);
  EXPECT_EQ(s.layers[0].spec.layer, 1);
  EXPECT_EQ(s.layer(2).spec.kind, LayerKind::hca);
  for (int missing : {0, 3, -1, 99}) {
    try {
      s.layer(missing);
      FAIL() << "no Error was thrown for " << missing;
    } catch (const kv4::Error& e) {
      EXPECT_EQ(e.code(), kv4::ErrorCode::bad_argument);
      EXPECT_NE(std::string(e.what()).find(std::to_string(missing)), std::string::npos);
    }
  }
}

TEST(SchemaRefuses, WhatAFormatCannotTile) {
  CacheOptions o = tiny_options();
  o.row_format = Format::fp8_tile64;
  EXPECT_NE(refusal(tiny(), o).find("fp8_tile64"), std::string::npos);
  EXPECT_NE(refusal(tiny(), o).find("24"), std::string::npos);
  EXPECT_NE(refusal(tiny(), o).find("fp8_row"), std::string::npos) << "what to use instead";
  o = tiny_options();
  o.index_format = Format::mxfp4;
  EXPECT_NE(refusal(tiny(), o).find("mxfp4"), std::string::npos);
  EXPECT_NE(refusal(tiny(), o).find("16"), std::string::npos);
  o = tiny_options();
  o.row_format = Format::mxfp4;
  EXPECT_NE(refusal(tiny(), o).find("mxfp4"), std::string::npos);
  o = tiny_options();
  o.index_format = Format::fp8_row;
  EXPECT_NE(refusal(tiny(), o).find("fp8_row"), std::string::npos);
  ModelConfig odd = tiny();
  odd.index_dim = 48;
  EXPECT_NE(refusal(odd, tiny_options()).find("48"), std::string::npos) << "Hadamard needs a power of two";
  o = tiny_options();
  o.hadamard = false;
  EXPECT_EQ(build_schema(odd, o).layer(1).pages[1].row.width, 48);
}

}  // namespace
