// Views for foreign kernels: planes decoded with the slow codecs of this test equal the gathers, and every table gives
// the rows' places.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cache/small_cache.h"
#include "codec/naive_formats.h"

namespace {

using namespace kv4;
using small::Gathered;
using small::SmallCache;
using test::HostViews;

using Row = std::vector<float>;

struct Formats {
  Format rows, keys;
  Arrangement arrangement = Arrangement::block_major;
  int alignment = 64;
};

class CacheViews : public testing::TestWithParam<Formats> {
 protected:
  CacheOptions options() const {
    CacheOptions o = small::options();
    o.row_format = GetParam().rows;
    o.index_format = GetParam().keys;
    o.arrangement = GetParam().arrangement;
    o.page_alignment = GetParam().alignment;
    o.index_global_scale = 0.125f;
    return o;
  }
};

const std::uint8_t* at(const PlaneView& plane, std::int64_t block, std::int64_t row) {
  return reinterpret_cast<const std::uint8_t*>(plane.data) + block * plane.block_stride + row * plane.row_stride;
}

Row window_row(Format format, std::uint64_t stream, int layer, std::int64_t position) {
  Row x;
  for (int c = 0; c < 80; ++c)
    x.push_back(naive::round_bf16(small::input_value(stream, layer, position, small::kRaw, c)));
  const naive::Row bytes = naive::encode(format, 80, 16, x.data());
  return naive::decode(format, 80, 16, bytes.payload.data(), bytes.scale.data());
}

void expect_plane_sizes(const RowSchema& row, const PlaneView& payload, const PlaneView& scale) {
  EXPECT_EQ(payload.row_bytes, row.payload_bytes);
  EXPECT_GE(payload.row_stride, payload.row_bytes);
  if (row.scale_bytes > 0) {
    EXPECT_EQ(scale.row_bytes, row.scale_bytes);
    EXPECT_GE(scale.row_stride, scale.row_bytes);
  }
}

// The last 16 channels lie in the rope plane as bf16, whatever the row format.
void expect_tail(const PlaneView& rope, std::int64_t block, std::int64_t row, const Row& values) {
  EXPECT_EQ(rope.row_bytes, 32);
  for (int c = 0; c < 16; ++c)
    ASSERT_EQ(naive::read_bf16(at(rope, block, row) + 2 * c), values[static_cast<std::size_t>(64 + c)]);
}

// --- windows

void expect_window(SmallCache& s, const Step& step, int layer, const std::vector<small::Part>& parts) {
  const Format format = *s.cache.schema().options.row_format;
  LayerCacheHandle handle = s.cache.acquire(layer);
  HostViews here(s.cache, s.backend);
  const SWAView view = here.view(handle.read_swa_view());
  ASSERT_EQ(view.num_items, step.num_items);
  ASSERT_EQ(view.rows, 11) << "window + R";
  expect_plane_sizes(handle.schema().window.row, view.payload, view.scale);
  for (int i = 0; i < view.num_items; ++i) {
    const std::int32_t* positions = view.positions + i * view.rows;
    const small::Part& part = parts[static_cast<std::size_t>(i)];
    if (part.request == kNoRequest) {
      EXPECT_EQ(view.slots[i], -1);
      EXPECT_EQ(view.head[i], 0);
      for (int r = 0; r < view.rows; ++r) EXPECT_EQ(positions[r], -1);
      continue;
    }
    const std::int64_t end = s.cache.length(part.request) + part.count;
    ASSERT_GE(view.slots[i], 0);
    ASSERT_LT(view.slots[i], s.cache.state_pool().num_slots());
    EXPECT_EQ(view.head[i], end % 11);
    for (int r = 0; r < view.rows; ++r) {
      std::int64_t want = -1;
      for (std::int64_t p = std::max<std::int64_t>(0, end - 11); p < end; ++p)
        if (p % 11 == r) want = p;
      ASSERT_EQ(positions[r], want) << "row " << r << " at length " << end;
      if (want < 0) continue;
      const Row got =
          naive::decode(format, 80, 16, at(view.payload, view.slots[i], r), at(view.scale, view.slots[i], r));
      ASSERT_EQ(got, window_row(format, part.stream, layer, want)) << "position " << want;
      expect_tail(view.rope, view.slots[i], r, got);
    }
  }
  // The same rows as the gather's, as far as the ring still has them.
  const Gathered gathered = small::gather_window(handle, step, 60);
  for (int i = 0; i < view.num_items; ++i)
    for (int r = 0; r < view.rows; ++r) {
      const std::int64_t row = view.positions[i * view.rows + r] - gathered.first[static_cast<std::size_t>(i)];
      if (view.positions[i * view.rows + r] < 0 || row < 0) continue;
      ASSERT_EQ(gathered.row(i, row),
                naive::decode(format, 80, 16, at(view.payload, view.slots[i], r), at(view.scale, view.slots[i], r)));
    }
}

TEST_P(CacheViews, Window) {
  SmallCache s(options());
  const RequestId a = s.admit(), b = s.admit();
  for (std::int32_t count : {1, 3, 4, 1, 4, 11, 2, 25, 1, 1, 4, 30}) {  // short, wrapped, longer than the ring
    const std::vector<small::Part> parts = {{a, 1, count}, {kNoRequest, 0, 2}, {b, 2, 2}};
    const Step step = s.prepare(parts);
    s.append(step);
    for (int layer = 0; layer < 4; ++layer) expect_window(s, step, layer, parts);
    s.cache.commit(step);
  }
}

// --- entries and keys

template <class View>
void expect_table(SmallCache& s, const View& view, const std::vector<small::Part>& parts, int ratio) {
  EXPECT_EQ(view.num_items, static_cast<int>(parts.size()));
  EXPECT_EQ(view.rows_per_block, 16 / ratio);
  EXPECT_EQ(view.blocks_per_request, 6);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].request == kNoRequest) {
      EXPECT_EQ(view.request_rows[i], -1);
      EXPECT_EQ(view.lens[i], 0);
      continue;
    }
    const std::int64_t end = s.cache.length(parts[i].request) + parts[i].count;
    EXPECT_EQ(view.lens[i], end / ratio);
    ASSERT_GE(view.request_rows[i], 0);
    const std::int32_t* table = view.block_table + std::int64_t{view.request_rows[i]} * view.blocks_per_request;
    for (int b = 0; b < 6; ++b) {
      if (b < (end + 15) / 16) {
        ASSERT_GE(table[b], 0);
        ASSERT_LT(table[b], 20);
      } else {
        ASSERT_EQ(table[b], -1);
      }
    }
  }
}

void expect_entries(SmallCache& s, const Step& step, int layer, const std::vector<small::Part>& parts) {
  const Format format = *s.cache.schema().options.row_format;
  LayerCacheHandle handle = s.cache.acquire(layer);
  HostViews here(s.cache, s.backend);
  const ClassicalView view = here.view(handle.read_classical_view());
  expect_table(s, view, parts, handle.schema().pages[0].kind.ratio);
  expect_plane_sizes(handle.schema().pages[0].row, view.payload, view.scale);
  const Gathered gathered = small::gather_entries(handle, step, 24);
  for (int i = 0; i < view.num_items; ++i) {
    ASSERT_EQ(view.lens[i], gathered.lens[static_cast<std::size_t>(i)]);
    for (int j = 0; j < view.lens[i]; ++j) {
      const std::int32_t block =
          view.block_table[view.request_rows[i] * view.blocks_per_request + j / view.rows_per_block];
      const int slot = j % view.rows_per_block;
      const Row got = naive::decode(format, 80, 16, at(view.payload, block, slot), at(view.scale, block, slot));
      ASSERT_EQ(got, gathered.row(i, j)) << "layer " << layer << " item " << i << " entry " << j;
      ASSERT_TRUE(std::any_of(got.begin(), got.end(), [](float v) { return v != 0.0f; }));
      expect_tail(view.rope, block, slot, got);
    }
  }
}

void expect_keys(SmallCache& s, const Step& step, int layer, const std::vector<small::Part>& parts) {
  const Format format = s.cache.schema().options.index_format;
  LayerCacheHandle handle = s.cache.acquire(layer);
  HostViews here(s.cache, s.backend);
  const IndexerView view = here.view(handle.read_indexer_view());
  expect_table(s, view, parts, 4);
  expect_plane_sizes(handle.schema().pages[1].row, view.keys, view.scales);
  EXPECT_EQ(view.global_scale.data != nullptr, format == Format::nvfp4);
  const Gathered gathered = small::gather_keys(handle, step, 24);
  for (int i = 0; i < view.num_items; ++i)
    for (int j = 0; j < view.lens[i]; ++j) {
      const std::int32_t block =
          view.block_table[view.request_rows[i] * view.blocks_per_request + j / view.rows_per_block];
      const int slot = j % view.rows_per_block;
      const float global = format == Format::nvfp4 ? naive::read_fp32(at(view.global_scale, block, 0)) : 1.0f;
      EXPECT_EQ(global, format == Format::nvfp4 ? 0.125f : 1.0f);
      ASSERT_EQ(naive::decode(format, 32, 0, at(view.keys, block, slot), at(view.scales, block, slot), global),
                gathered.row(i, j))
          << "key " << j;
    }
}

TEST_P(CacheViews, EntriesAndKeys) {
  SmallCache s(options());
  const RequestId a = s.admit(), b = s.admit();
  s.request(9, 20);  // another request's blocks in between
  for (std::int32_t count : {1, 2, 1, 4, 13, 2, 25, 1, 1}) {
    const std::vector<small::Part> parts = {{b, 2, 4}, {kNoRequest, 0, 1}, {a, 1, count}, {kNoRequest, 0, 2}};
    const Step step = s.prepare(parts);
    s.append(step);
    for (int layer : {1, 2, 3}) expect_entries(s, step, layer, parts);
    for (int layer : {1, 3}) expect_keys(s, step, layer, parts);
    s.cache.commit(step);
  }
}

TEST_P(CacheViews, ReadingTwiceGivesTheSame) {
  SmallCache s(options());
  const RequestId a = s.request(1, 13);
  const Step step = s.prepare({{a, 1, 20}});
  LayerCacheHandle handle = s.cache.acquire(1);
  const SWAView first = handle.read_swa_view();
  const std::vector<std::int32_t> positions = test::read_array(*s.backend, first.positions, first.rows);
  s.append(step);
  const SWAView second = handle.read_swa_view();
  EXPECT_EQ(second.positions, first.positions) << "fixed addresses";
  EXPECT_EQ(test::read_array(*s.backend, second.positions, second.rows), positions);
  EXPECT_EQ(handle.read_classical_view().block_table, s.cache.acquire(2).read_classical_view().block_table)
      << "one table for every layer";
  s.cache.commit(step);
  s.prepare({{a, 1, 1}});
  EXPECT_EQ(s.cache.acquire(1).read_swa_view().positions, first.positions) << "also in the next step";
}

std::string formats_name(const testing::TestParamInfo<Formats>& info) {
  return std::string(to_string(info.param.rows)) + "_" + to_string(info.param.keys) + "_" +
         to_string(info.param.arrangement);
}

INSTANTIATE_TEST_SUITE_P(All, CacheViews,
                         testing::Values(Formats{Format::fp8_tile64, Format::mxfp4},
                                         Formats{Format::fp8_row, Format::nvfp4, Arrangement::layer_major},
                                         Formats{Format::bf16, Format::bf16},
                                         Formats{Format::fp8_tile64, Format::fp8, Arrangement::layer_major, 576},
                                         Formats{Format::fp8_row, Format::mxfp4, Arrangement::block_major, 576},
                                         Formats{Format::fp8_tile64, Format::nvfp4}),
                         formats_name);

TEST(CacheViewsOf, LayersWithoutEntriesOrKeysAreRefused) {
  SmallCache s;
  const RequestId a = s.request(1, 3);
  s.prepare({{a, 1, 1}});
  small::expect_error(ErrorCode::bad_argument, {"layer 0", "SWA"}, [&] { s.cache.acquire(0).read_classical_view(); });
  small::expect_error(ErrorCode::bad_argument, {"layer 0", "SWA"}, [&] { s.cache.acquire(0).read_indexer_view(); });
  small::expect_error(ErrorCode::bad_argument, {"layer 2", "HCA"}, [&] { s.cache.acquire(2).read_indexer_view(); });
}

TEST(CacheViewsOf, TablesForgetBlocksThatAreGone) {
  SmallCache s;
  const auto table_of = [&](RequestId r) {
    const Step step = s.prepare({{r, 1, 1}});
    HostViews here(s.cache, s.backend);
    const ClassicalView view = here.view(s.cache.acquire(1).read_classical_view());
    const std::int32_t* first = view.block_table + view.request_rows[0] * view.blocks_per_request;
    std::vector<std::int32_t> out(first, first + view.blocks_per_request);
    s.cache.abort(step);
    return out;
  };
  const RequestId a = s.request(1, 50);
  EXPECT_EQ(table_of(a), (std::vector<std::int32_t>{0, 1, 2, 3, -1, -1}));
  s.cache.rewind(a, 47);
  EXPECT_EQ(table_of(a), (std::vector<std::int32_t>{0, 1, 2, -1, -1, -1})) << "rewound";
  const Step step = s.prepare({{a, 1, 40}});
  s.cache.abort(step);
  EXPECT_EQ(table_of(a), (std::vector<std::int32_t>{0, 1, 2, -1, -1, -1})) << "aborted";
  s.cache.release(a);
  const RequestId b = s.admit();
  ASSERT_EQ(a % 4, b % 4);
  EXPECT_EQ(table_of(b), (std::vector<std::int32_t>{0, -1, -1, -1, -1, -1})) << "another request in the same row";
}

TEST(CacheViewsOf, DraftStagesHaveTheirOwnPositions) {
  CacheOptions o = small::options();
  o.draft_layers = 1;
  SmallCache s(o);
  const RequestId a = s.request(1, 30);
  s.run({{a, 1, 5}}, 1);
  const Step step = s.prepare({{a, 1, 2}}, 1);
  s.append(step);
  HostViews here(s.cache, s.backend);
  const SWAView view = here.view(s.cache.acquire(4).read_swa_view());
  EXPECT_EQ(view.head[0], 7);
  for (int r = 0; r < 11; ++r) EXPECT_EQ(view.positions[r], r < 7 ? r : -1);
  EXPECT_EQ(
      naive::decode(Format::fp8_tile64, 80, 16, at(view.payload, view.slots[0], 6), at(view.scale, view.slots[0], 6)),
      window_row(Format::fp8_tile64, 1, 4, 6));
}

}  // namespace
