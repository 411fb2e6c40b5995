// The plain descriptions of a schema's layers: their contents, and that no two name the same byte.
#include "ops/layer_desc.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "schema/table_layout.h"
#include "support/narrow_model.h"

namespace kv4 {
namespace {

CacheSchema narrow_schema(Arrangement arrangement = Arrangement::block_major, Format index = Format::nvfp4) {
  CacheOptions options = test::narrow_options();
  options.index_format = index;
  options.arrangement = arrangement;
  options.block_tokens = 16;
  options.max_context = 64;
  options.max_requests = 2;
  options.spare_slots = 1;
  options.num_blocks = 6;
  options.max_step_tokens = 32;
  return build_schema(test::narrow_model({LayerKind::swa, LayerKind::csa, LayerKind::hca}), options);
}

/// Memory in which every byte may be named once.
class Memory {
 public:
  Memory(std::string name, std::int64_t bytes)
      : name_(std::move(name)), bytes_(static_cast<std::size_t>(bytes)), named_(bytes_.size()) {}
  std::byte* data() { return bytes_.data(); }
  void name(const std::uint8_t* at, std::int64_t count, const std::string& who) {
    const auto offset = reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(bytes_.data());
    ASSERT_LE(offset + static_cast<std::size_t>(count), bytes_.size()) << who << " leaves the " << name_;
    for (std::size_t i = offset; i < offset + static_cast<std::size_t>(count); ++i) {
      ASSERT_TRUE(named_[i].empty()) << who << " and " << named_[i] << " at byte " << i << " of the " << name_;
      named_[i] = who;
    }
  }

 private:
  std::string name_;
  std::vector<std::byte> bytes_;
  std::vector<std::string> named_;
};

void name_rows(Memory& memory, const ops::RowPlanes& planes, const RowSchema& row, std::int64_t blocks,
               std::int64_t rows, const std::string& who) {
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (std::int64_t r = 0; r < rows; ++r) {
      memory.name(planes.payload.at(b, r), row.payload_bytes, who + " payload");
      memory.name(planes.scale.at(b, r), row.scale_bytes, who + " scale");
    }
    if (planes.global.data != nullptr) memory.name(planes.global.at(b, 0), 4, who + " global");
  }
}

TEST(LayerDesc, NoTwoRowsShareAByte) {
  for (const Arrangement arrangement : {Arrangement::block_major, Arrangement::layer_major}) {
    const CacheSchema schema = narrow_schema(arrangement);
    const std::int64_t slots = schema.options.max_requests + schema.options.spare_slots;
    Memory blocks("block pool", schema.block_bytes * schema.options.num_blocks);
    Memory state("state pool", schema.slot_bytes * slots);
    Memory undo("undo rows", schema.undo_row_bytes * slots);
    Memory scratch("scratch", scratch_layout(schema).bytes);
    const ops::LayerMemory memory{
        .blocks = blocks.data(), .slots = state.data(), .undo_rows = undo.data(), .scratch = scratch.data()};
    for (std::size_t l = 0; l < schema.layers.size(); ++l) {
      const LayerCacheSchema& layer = schema.layers[l];
      const ops::LayerDesc desc = ops::describe_layer(schema, static_cast<int>(l), memory);
      const std::string who = "layer " + std::to_string(l);
      name_rows(state, desc.window.ring, layer.window.row, slots, desc.window.rows, who + " window");
      name_rows(undo, desc.window.undo_row, layer.window.row, slots, 1, who + " undo row");
      name_rows(scratch, desc.window.scratch, layer.window.row, 1, schema.options.max_step_tokens, who + " scratch");
      for (int k = 0; k < desc.num_kinds; ++k) {
        const ops::KindDesc& kind = desc.kinds[k];
        const std::string kind_name = who + " kind " + std::to_string(k);
        name_rows(blocks, kind.page, layer.pages[static_cast<std::size_t>(k)].row, schema.options.num_blocks,
                  kind.rows_per_block, kind_name);
        for (std::int64_t s = 0; s < slots; ++s) {
          const std::int64_t element = kind.pending.dtype == DType::f32 ? 4 : 2;
          for (std::int64_t r = 0; r < kind.pending.rows; ++r)
            state.name(kind.pending.ring.at(s, r), 2 * kind.pending.columns * element, kind_name + " pending");
          if (kind.pending.accumulator.data != nullptr)
            state.name(kind.pending.accumulator.at(s, 0), 3 * 4 * kind.page.shape.width, kind_name + " accumulator");
        }
      }
    }
  }
}

TEST(LayerDesc, KindsOfTheLayers) {
  const CacheSchema schema = narrow_schema();
  const ops::LayerDesc swa = ops::describe_layer(schema, 0, {}), csa = ops::describe_layer(schema, 1, {}),
                       hca = ops::describe_layer(schema, 2, {});
  for (const ops::LayerDesc* layer : {&swa, &csa, &hca}) {
    EXPECT_EQ(layer->window_tokens, 8);
    EXPECT_EQ(layer->window.rows, 8 + schema.options.max_rewind_tokens);
    EXPECT_EQ(layer->window.ring.format, schema.layers[0].window.row.format);
    EXPECT_EQ(layer->window.ring.shape.width, 32);
    EXPECT_EQ(layer->eps, static_cast<float>(schema.config.rms_eps));
  }
  EXPECT_EQ(swa.num_kinds, 0);

  ASSERT_EQ(csa.num_kinds, 2);
  EXPECT_EQ(csa.kinds[0].ratio, 4);
  EXPECT_EQ(csa.kinds[0].rows_per_block, 4);
  EXPECT_TRUE(csa.kinds[0].overlap);
  EXPECT_EQ(csa.kinds[0].page.format, Format::fp8_row);
  EXPECT_EQ(csa.kinds[0].page.shape.width, 32);
  EXPECT_EQ(csa.kinds[0].page.shape.tail, 8);
  EXPECT_EQ(csa.kinds[0].pending.columns, 64);  // of the entry before, and its own
  EXPECT_EQ(csa.kinds[1].page.format, Format::nvfp4);
  EXPECT_EQ(csa.kinds[1].page.shape.width, 16);
  EXPECT_EQ(csa.kinds[1].page.shape.tail, 0);
  EXPECT_EQ(csa.kinds[1].global_scale, schema.options.index_global_scale);
  EXPECT_EQ(csa.kinds[1].hadamard, schema.options.hadamard);
  EXPECT_FALSE(csa.kinds[0].hadamard);  // entries are never transformed

  ASSERT_EQ(hca.num_kinds, 1);
  EXPECT_EQ(hca.kinds[0].ratio, 8);
  EXPECT_EQ(hca.kinds[0].rows_per_block, 2);
  EXPECT_FALSE(hca.kinds[0].overlap);
  EXPECT_EQ(hca.kinds[0].pending.columns, 32);
  EXPECT_EQ(hca.kinds[0].pending.online, schema.layers[2].pending[0].online);
}

TEST(LayerDesc, HadamardIsForIndexKeysWhereTheOptionsSaySo) {
  CacheSchema schema = narrow_schema();
  for (const bool hadamard : {false, true}) {
    schema.options.hadamard = hadamard;
    const ops::LayerDesc csa = ops::describe_layer(schema, 1, {});
    EXPECT_FALSE(csa.kinds[0].hadamard);
    EXPECT_EQ(csa.kinds[1].hadamard, hadamard);
  }
}

TEST(LayerDesc, PagesHaveAGlobalScaleOnlyInNvfp4) {
  std::vector<std::byte> memory(static_cast<std::size_t>(narrow_schema().block_bytes) * 6);
  const ops::LayerMemory places{.blocks = memory.data()};
  EXPECT_NE(ops::describe_layer(narrow_schema(), 1, places).kinds[1].page.global.data, nullptr);
  EXPECT_EQ(ops::describe_layer(narrow_schema(), 1, places).kinds[0].page.global.data, nullptr);
  const CacheSchema fp8 = narrow_schema(Arrangement::block_major, Format::fp8);
  EXPECT_EQ(ops::describe_layer(fp8, 1, places).kinds[1].page.global.data, nullptr);
}

TEST(LayerDesc, PositionsOfALayerStandBesideThoseOfTheOthers) {
  const CacheSchema schema = narrow_schema();
  std::vector<std::int32_t> watermarks(9), undo_positions(9);  // [3 slots, 3 layers]
  ops::LayerMemory memory;
  memory.fold_watermarks = watermarks.data();
  memory.undo_positions = undo_positions.data();
  for (int l = 0; l < 3; ++l) {
    const ops::LayerDesc desc = ops::describe_layer(schema, l, memory);
    EXPECT_EQ(&desc.window.undo_position(2), &undo_positions[static_cast<std::size_t>(6 + l)]);
    for (int k = 0; k < desc.num_kinds; ++k) {
      EXPECT_EQ(desc.kinds[k].pending.fold_watermarks, watermarks.data() + l);
      EXPECT_EQ(desc.kinds[k].pending.fold_watermark_stride, 3);
    }
  }
}

TEST(LayerDesc, WithoutMemoryThereAreNoAddresses) {
  const ops::LayerDesc hca = ops::describe_layer(narrow_schema(), 2, {});
  EXPECT_EQ(hca.window.ring.payload.data, nullptr);
  EXPECT_EQ(hca.window.scratch.scale.data, nullptr);
  EXPECT_EQ(hca.window.undo_row.payload.data, nullptr);
  EXPECT_EQ(hca.kinds[0].page.payload.data, nullptr);
  EXPECT_EQ(hca.kinds[0].pending.ring.data, nullptr);
  EXPECT_EQ(hca.kinds[0].pending.accumulator.data, nullptr);
  EXPECT_EQ(hca.kinds[0].bias, nullptr);
}

}  // namespace
}  // namespace kv4
