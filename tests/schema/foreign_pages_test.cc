// Contexts through the pools of other engines and back.
#include "kv4/foreign_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {
namespace {

constexpr int kLength = 1003;  // 250 entries, an open block and an open span

struct Filled {
  std::vector<float> x = std::vector<float>(kLength * 1024), bias = std::vector<float>(4 * 1024),
                     norm = std::vector<float>(512, 1.0f), hca_bias = std::vector<float>(128 * 512);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(kLength, 3);
  KVCacheManager cache;
  RequestId request;

  static ModelConfig model() {
    ModelConfig config = model_preset("v4-flash");
    config.kinds = {LayerKind::csa, LayerKind::csa, LayerKind::hca};
    config.num_layers = 3;
    return config;
  }

  explicit Filled(CacheOptions options) : cache(model(), options), request(cache.admit().value()) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (float& value : x) value = normal(random);
    const TensorView wide(norm.data(), {512});
    for (int layer : {0, 1})
      cache.bind_weights(layer, {{bias.data(), {4, 1024}}, wide, {bias.data(), {4, 256}}, {norm.data(), {128}}});
    cache.bind_weights(2, {{hca_bias.data(), {128, 512}}, wide, {}, {}});
    const StepItem item{request, kLength, ids};
    const Step step = cache.prepare_forward({&item, 1}).value();
    const TensorView raw(x.data(), {kLength, 512}), kv(x.data(), {kLength, 1024}), index(x.data(), {kLength, 256});
    cache.acquire(0).append({raw, kv, kv, index, index});
    cache.acquire(1).append({raw, kv, kv, index, index});
    cache.acquire(2).append({raw, raw, raw, {}, {}});
    cache.commit(step);
  }
};

CacheOptions small(Format rows = Format::fp8_tile64, Format keys = Format::mxfp4) {
  CacheOptions options;
  options.max_requests = 2;
  options.max_context = 2048;
  options.max_step_tokens = kLength;
  options.row_format = rows;
  options.index_format = keys;
  return options;
}

std::vector<std::int64_t> shuffled_slots(std::int64_t count, std::int64_t room) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(room));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  slots.resize(static_cast<std::size_t>(count));
  return slots;
}

TEST(ForeignPages, SizesOfKnownPools) {
  const CacheSchema schema = build_schema(Filled::model(), small(Format::fp8_tile64, Format::fp8));
  const RowSchema& row = schema.layers[0].pages[0].row;
  EXPECT_EQ(row.bytes(), 584);
  EXPECT_EQ(planar_pages(row, 64, 576).page_bytes, 65 * 576);  // 64 x 584 = 37,376 rounded up
  EXPECT_EQ(planar_pages(row, 64, 576).scale_at, 64 * 576);
  EXPECT_EQ(interleaved_pages(row, 64).page_bytes, 64 * 584);
  EXPECT_EQ(schema.layers[0].pages[1].row.bytes(), 132);
  EXPECT_EQ(planar_pages(schema.layers[0].pages[1].row, 64).page_bytes, 64 * 132);
  const CacheSchema fp4 = build_schema(Filled::model(), small());
  EXPECT_EQ(fp4.layers[0].pages[1].row.bytes(), 68);
}

TEST(ForeignPages, AThereAndBackGivesTheSameBytes) {
  for (const Format rows_format : {Format::fp8_tile64, Format::fp8_row, Format::bf16})
    for (const Format keys_format : {Format::mxfp4, Format::fp8, Format::bf16}) {
      Filled from(small(rows_format, keys_format));
      const CacheSchema& schema = from.cache.schema();
      std::vector<std::byte> blocks = from.cache.export_blocks(from.request);
      CanonicalImage image = from.cache.export_image(from.request);
      std::vector<std::byte> again(blocks.size()), window_again = image.bytes;
      for (int layer = 0; layer < 3; ++layer) {
        for (const RowRole role : {RowRole::entry, RowRole::index_key}) {
          if (layer == 2 && role == RowRole::index_key) continue;
          const RowsView rows = entry_rows(schema, layer, role, blocks, kLength);
          EXPECT_EQ(rows.count, layer == 2 ? 7 : 250);
          for (const PageLayout& layout : {planar_pages(*rows.row, 64, 576), interleaved_pages(*rows.row, 37)}) {
            std::vector<std::byte> pool(static_cast<std::size_t>(9 * layout.page_bytes), std::byte{0xee});
            const auto slots = shuffled_slots(rows.count, 9 * layout.rows_per_page);
            copy_to_pages(rows, slots, layout, pool);
            const RowsView back = entry_rows(schema, layer, role, again, kLength);
            copy_from_pages(back, slots, layout, pool);
          }
        }
        const RowsView window = window_rows(schema, layer, image.bytes, image.lengths);
        ASSERT_EQ(window.count, 128);
        const PageLayout layout = planar_pages(*window.row, 64, 576);
        std::vector<std::byte> pool(static_cast<std::size_t>(2 * layout.page_bytes));
        const auto slots = shuffled_slots(128, 128);
        copy_to_pages(window, slots, layout, pool);
        const RowsView back = window_rows(schema, layer, window_again, image.lengths);
        for (std::int64_t i = 0; i < back.count; ++i)
          for (const auto part : {back.payload(i), back.scale(i)}) std::ranges::fill(part, std::byte{0});
        copy_from_pages(back, slots, layout, pool);
      }
      EXPECT_EQ(again, blocks) << to_string(rows_format) << " " << to_string(keys_format);
      EXPECT_EQ(window_again, image.bytes);
    }
}

// A cache with pages at 576 bytes is such a pool itself: 32 rows per page, a page per block.
TEST(ForeignPages, OurOwnPagesAt576AreFlashMlaPages) {
  CacheOptions options = small();
  options.page_alignment = 576;
  options.arrangement = Arrangement::layer_major;
  Filled from(options);
  const CacheSchema& schema = from.cache.schema();
  std::vector<std::byte> blocks = from.cache.export_blocks(from.request);
  const RowsView rows = entry_rows(schema, 1, RowRole::entry, blocks, kLength);
  const PageLayout layout = planar_pages(*rows.row, 32, 576);
  const PageSchema& page = schema.layers[1].pages[0];
  ASSERT_EQ(layout.page_bytes, page.block_stride);
  const std::vector<BlockId> ids = from.cache.blocks(from.request);
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < rows.count; ++i) slots.push_back(ids[static_cast<std::size_t>(i / 32)] * 32 + i % 32);
  std::vector<std::byte> pool(static_cast<std::size_t>(from.cache.allocator().num_blocks()) *
                              static_cast<std::size_t>(layout.page_bytes));
  copy_to_pages(rows, slots, layout, pool);
  const std::byte* own = from.cache.kv_pool().base() + page.offset;
  for (const std::int64_t slot : slots) {
    const std::int64_t at = slot / 32 * layout.page_bytes;
    const auto same = [&](std::int64_t offset, std::int64_t size) {
      return std::equal(pool.data() + at + offset, pool.data() + at + offset + size, own + at + offset);
    };
    ASSERT_TRUE(same(slot % 32 * 576, 576)) << slot;
    ASSERT_TRUE(same(layout.scale_at + slot % 32 * 8, 8)) << slot;
  }
}

TEST(ForeignPages, BlocksFromAnotherPoolGoOnAsIfComputedHere) {
  Filled from(small());
  std::vector<std::byte> blocks = from.cache.export_blocks(from.request), moved(blocks.size());
  const CacheSchema& schema = from.cache.schema();
  for (const LayerCacheSchema& layer : schema.layers)
    for (const PageSchema& page : layer.pages) {
      const RowsView rows = entry_rows(schema, layer.spec.layer, page.kind.role, blocks, kLength);
      const PageLayout layout = planar_pages(*rows.row, 64, 576);
      std::vector<std::byte> pool(static_cast<std::size_t>(4 * layout.page_bytes));
      const auto slots = shuffled_slots(rows.count, 256);
      copy_to_pages(rows, slots, layout, pool);
      copy_from_pages(entry_rows(schema, layer.spec.layer, page.kind.role, moved, kLength), slots, layout, pool);
    }
  const RequestId imported = from.cache.import_image(from.cache.export_image(from.request), from.ids, moved).value();
  EXPECT_EQ(from.cache.export_blocks(imported), blocks);
}

TEST(ForeignPages, RefusesWhatDoesNotFit) {
  Filled from(small());
  const CacheSchema& schema = from.cache.schema();
  std::vector<std::byte> blocks = from.cache.export_blocks(from.request);
  const RowsView rows = entry_rows(schema, 0, RowRole::entry, blocks, kLength);
  const PageLayout layout = planar_pages(*rows.row, 64, 576);
  std::vector<std::byte> pool(static_cast<std::size_t>(4 * layout.page_bytes), std::byte{7});
  const std::vector<std::byte> before = pool;
  std::vector<std::int64_t> slots = shuffled_slots(rows.count, 256);
  const auto message = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  slots.back() = 256;
  EXPECT_NE(message([&] { copy_to_pages(rows, slots, layout, pool); }).find("slot 256"), std::string::npos);
  slots.pop_back();
  EXPECT_NE(message([&] { copy_to_pages(rows, slots, layout, pool); }).find("249 slots for 250"), std::string::npos);
  slots.push_back(-1);
  PageLayout narrow = layout;
  narrow.payload_stride = 512;
  EXPECT_NE(message([&] { copy_to_pages(rows, slots, narrow, pool); }).find("576 + 8"), std::string::npos);
  EXPECT_EQ(pool, before);
  EXPECT_NE(message([&] { entry_rows(schema, 2, RowRole::index_key, blocks, kLength); }).find("no index keys"),
            std::string::npos);
  EXPECT_NE(message([&] { entry_rows(schema, 0, RowRole::entry, std::span(blocks).first(100), kLength); }).find("100"),
            std::string::npos);
  const CacheSchema nvfp4 = build_schema(Filled::model(), small(Format::fp8_tile64, Format::nvfp4));
  EXPECT_NE(message([&] { entry_rows(nvfp4, 0, RowRole::index_key, blocks, 0); }).find("nvfp4"), std::string::npos);
}

}  // namespace
}  // namespace kv4
