// Gathers against rows computed again here: windows by the slow codecs, entries and index keys in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cache/small_cache.h"
#include "codec/naive_formats.h"

namespace {

using namespace kv4;
using small::Gathered;
using small::SmallCache;

using Row = std::vector<float>;

const Row kZeros(80, 0.0f);

Row through(Format format, int tail, const Row& x) {
  const int width = static_cast<int>(x.size());
  const naive::Row bytes = naive::encode(format, width, tail, x.data());
  return naive::decode(format, width, tail, bytes.payload.data(), bytes.scale.data());
}

Row bf16(Row x) {
  for (float& v : x) v = naive::round_bf16(v);
  return x;
}

Row window_row(Format format, std::uint64_t stream, int layer, std::int64_t position) {
  Row x;
  for (int c = 0; c < 80; ++c) x.push_back(small::input_value(stream, layer, position, small::kRaw, c));
  return through(format, 16, bf16(x));
}

// Number j of a stream's entries (kind 0) or index keys (kind 1) before its format: the spec in double, with its bf16
// roundings.
Row finished_row(const SmallCache& s, int layer_index, int kind, std::uint64_t stream, std::int64_t j, bool hadamard) {
  const LayerCacheSchema& layer = s.cache.schema().layers[static_cast<std::size_t>(layer_index)];
  const RowKind& row = layer.pages[static_cast<std::size_t>(kind)].kind;
  const small::Weights& w = *s.weights[static_cast<std::size_t>(layer_index)];
  const std::int64_t columns = row.overlap ? 2 * row.width : row.width;
  const auto in = [&](small::Input which, std::int64_t p, std::int64_t c) {
    return static_cast<double>(
        small::input_value(stream, layer.spec.layer, p, static_cast<small::Input>(which + 2 * kind), c));
  };
  Row x(static_cast<std::size_t>(row.width));
  for (int c = 0; c < row.width; ++c) {
    double sum = 0, weight = 0;
    const auto add = [&](std::int64_t p, std::int64_t column) {
      const float bias = w.bias[kind][static_cast<std::size_t>(p % row.ratio * columns + column)];
      const double e = std::exp(in(small::kGate, p, column) + static_cast<double>(bias));
      weight += e;
      sum += e * in(small::kKv, p, column);
    };
    if (row.overlap && j > 0)
      for (std::int64_t p = (j - 1) * row.ratio; p < j * row.ratio; ++p) add(p, c);
    for (std::int64_t p = j * row.ratio; p < (j + 1) * row.ratio; ++p) add(p, row.overlap ? row.width + c : c);
    x[static_cast<std::size_t>(c)] = naive::round_bf16(static_cast<float>(sum / weight));
  }
  double squares = 0;
  for (float v : x) squares += static_cast<double>(v) * v;
  const double factor = 1.0 / std::sqrt(squares / row.width + s.cache.schema().config.rms_eps);
  for (std::size_t c = 0; c < x.size(); ++c)
    x[c] = naive::round_bf16(static_cast<float>(x[c] * factor * w.norm[kind][c]));
  const RopeTable table = build_rope_table(s.cache.schema().config.rope_compress, 16, j * row.ratio, 1);
  float* tail = x.data() + row.width - 16;
  for (std::size_t i = 0; i < 8; ++i) {
    const double a = tail[2 * i], b = tail[2 * i + 1], cosine = table.cos[i], sine = table.sin[i];
    tail[2 * i] = naive::round_bf16(static_cast<float>(a * cosine - b * sine));
    tail[2 * i + 1] = naive::round_bf16(static_cast<float>(b * cosine + a * sine));
  }
  if (!hadamard) return x;
  Row out;
  for (unsigned i = 0; i < x.size(); ++i) {
    double sum = 0;
    for (unsigned k = 0; k < x.size(); ++k) sum += (std::popcount(i & k) % 2 == 0 ? 1.0 : -1.0) * x[k];
    out.push_back(naive::round_bf16(static_cast<float>(sum / std::sqrt(static_cast<double>(x.size())))));
  }
  return out;
}

// Two bf16 steps of the largest value: intermediate roundings may differ between fp32 and double.
void expect_close(const Row& got, const Row& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  float largest = 0.0f;
  for (float v : want) largest = std::max(largest, std::fabs(v));
  const double bound = 2 * std::ldexp(1.0, std::ilogb(largest) - 7);
  for (std::size_t c = 0; c < got.size(); ++c) ASSERT_NEAR(got[c], want[c], bound) << what << " channel " << c;
}

CacheOptions plain_options() {
  CacheOptions o = small::options();
  o.row_format = Format::bf16;
  o.index_format = Format::bf16;
  o.hadamard = false;
  return o;
}

// --- entries and keys

TEST(GatherAll, EntriesAndKeysAreTheModels) {
  for (bool hadamard : {false, true}) {
    CacheOptions o = plain_options();
    o.hadamard = hadamard;
    SmallCache s(o);
    const RequestId a = s.request(1, 30), b = s.request(2, 3);
    const Step step = s.prepare({{a, 1, 7}, {kNoRequest, 0, 2}, {b, 2, 1}});
    s.append(step);
    for (int layer : {1, 2, 3}) {
      const int ratio = layer == 2 ? 8 : 4;
      const Gathered entries = small::gather_entries(s.cache.acquire(layer), step, 11);
      EXPECT_EQ(entries.lens, (std::vector<std::int32_t>{37 / ratio, 0, 4 / ratio}));
      for (int j = 0; j < 11; ++j) {
        if (j < 37 / ratio) {
          expect_close(entries.row(0, j), finished_row(s, layer, 0, 1, j, false), "entry");
        } else {
          EXPECT_EQ(entries.row(0, j), kZeros) << "past the end";
        }
        EXPECT_EQ(entries.row(1, j), kZeros) << "padded";
      }
      if (layer == 2) continue;
      expect_close(entries.row(2, 0), finished_row(s, layer, 0, 2, 0, false), "first entry");
      const Gathered keys = small::gather_keys(s.cache.acquire(layer), step, 9);
      EXPECT_EQ(keys.lens, (std::vector<std::int32_t>{9, 0, 1}));
      for (int j = 0; j < 9; ++j) expect_close(keys.row(0, j), finished_row(s, layer, 1, 1, j, hadamard), "key");
      EXPECT_EQ(keys.row(1, 0), Row(32, 0.0f));
      EXPECT_EQ(keys.row(2, 1), Row(32, 0.0f));
    }
    s.cache.abort(step);
  }
}

TEST(GatherAll, EveryFormatStoresTheSameRowsQuantised) {
  SmallCache plain([] {
    CacheOptions o = plain_options();
    o.hadamard = true;
    return o;
  }());
  const RequestId p = plain.request(1, 33);
  const Step plain_step = plain.prepare({{p, 1, 3}});
  plain.append(plain_step);
  for (Format rows : {Format::fp8_tile64, Format::fp8_row})
    for (Format keys : {Format::mxfp4, Format::nvfp4, Format::fp8}) {
      CacheOptions o = small::options();
      o.row_format = rows;
      o.index_format = keys;
      SmallCache s(o);
      const RequestId r = s.request(1, 33);
      const Step step = s.prepare({{r, 1, 3}});
      s.append(step);
      for (int layer : {1, 2}) {
        const int count = layer == 1 ? 9 : 4;
        const Gathered got = small::gather_entries(s.cache.acquire(layer), step, count);
        const Gathered want = small::gather_entries(plain.cache.acquire(layer), plain_step, count);
        for (int j = 0; j < count; ++j)
          ASSERT_EQ(got.row(0, j), through(rows, 16, want.row(0, j))) << to_string(rows) << " entry " << j;
      }
      const Gathered got = small::gather_keys(s.cache.acquire(1), step, 9),
                     want = small::gather_keys(plain.cache.acquire(1), plain_step, 9);
      for (int j = 0; j < 9; ++j)
        ASSERT_EQ(got.row(0, j), through(keys, 0, want.row(0, j))) << to_string(keys) << " key " << j;
      const Gathered narrow = small::gather_keys(s.cache.acquire(1), step, 9, DType::bf16);
      EXPECT_EQ(narrow.values, bf16(got.values)) << "bf16 is the rounded fp32";
    }
}

TEST(GatherAll, NvfpGlobalScaleIsApplied) {
  CacheOptions o = small::options();
  o.index_format = Format::nvfp4;
  o.index_global_scale = 0.0371f;
  SmallCache s(o), plain([] {
    CacheOptions p = small::options();
    p.index_format = Format::bf16;
    return p;
  }());
  const RequestId r = s.request(1, 20), p = plain.request(1, 20);
  const Step step = s.prepare({{r, 1, 1}}), plain_step = plain.prepare({{p, 1, 1}});
  const Gathered got = small::gather_keys(s.cache.acquire(1), step, 5),
                 want = small::gather_keys(plain.cache.acquire(1), plain_step, 5);
  for (int j = 0; j < 5; ++j) {
    const Row x = want.row(0, j);
    const naive::Row bytes = naive::encode(Format::nvfp4, 32, 0, x.data(), 0.0371f);
    EXPECT_EQ(got.row(0, j), naive::decode(Format::nvfp4, 32, 0, bytes.payload.data(), bytes.scale.data(), 0.0371f))
        << j;
  }
}

// --- chosen entries

struct Chosen {
  std::vector<std::int32_t> indices;  // [tokens, stride]
  std::int64_t k = 0, stride = 0;

  Gathered gather(LayerCacheHandle handle, const Step& step, DType type, bool with_valid) {
    test::Twins twins(test::test_backend());
    ConstTensorView index = twins.put(TensorView(indices.data(), {step.num_tokens, stride}));
    twins.send();
    index.shape[1] = k;
    return small::gather_with(step.num_tokens, k, 80, type, [&](const small::GatherPlaces& to) {
      const KVPair pair = handle.gather_compressed_kv(index, to.out, with_valid ? to.valid : TensorView{});
      EXPECT_TRUE(pair.k.data == to.out.data && pair.v.data == to.out.data);
    });
  }
};

TEST(GatherChosen, OnlyVisibleEntriesOfTheTokensOwnRequest) {
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max(),
                         kMin = std::numeric_limits<std::int32_t>::min();
  SmallCache s;
  const RequestId a = s.request(1, 21), b = s.request(2, 45), fresh = s.admit();
  const Step step =
      s.prepare({{a, 1, 6}, {kNoRequest, 0, 2}, {b, 2, 1}, {fresh, 3, 5}});  // positions 21..26, -, 45, 0..4
  s.append(step);
  const std::int64_t positions[] = {21, 22, 23, 24, 25, 26, -1, -1, 45, 0, 1, 2, 3, 4};
  const int items[] = {0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3};
  for (int layer : {1, 2, 3}) {
    const int ratio = layer == 2 ? 8 : 4;
    LayerCacheHandle handle = s.cache.acquire(layer);
    const Gathered all = small::gather_entries(handle, step, 12);
    Chosen chosen;
    chosen.k = 9;
    chosen.stride = 11;
    const std::int32_t pattern[] = {0, -1, 5, 2, 6, kMax, 1, kMin, 11, /* beyond k: */ 0, 0};
    for (int t = 0; t < step.num_tokens; ++t)
      chosen.indices.insert(chosen.indices.end(), std::begin(pattern), std::end(pattern));
    for (DType type : {DType::f32, DType::bf16})
      for (bool with_valid : {true, false}) {
        const Gathered got = chosen.gather(handle, step, type, with_valid);
        for (int t = 0; t < step.num_tokens; ++t)
          for (int i = 0; i < 9; ++i) {
            const std::int64_t visible = (positions[t] + 1) / ratio;
            const bool seen = positions[t] >= 0 && pattern[i] >= 0 && pattern[i] < visible;
            Row want = seen ? all.row(items[t], pattern[i]) : kZeros;
            ASSERT_EQ(got.row(t, i), type == DType::bf16 ? bf16(want) : want)
                << "layer " << layer << " token " << t << " index " << pattern[i];
            ASSERT_EQ(got.valid[static_cast<std::size_t>(t * 9 + i)], with_valid ? seen : 9);
          }
      }
    EXPECT_NE(all.row(0, 0), all.row(2, 0)) << "the requests differ";
    EXPECT_NE(all.row(0, 0), kZeros);
  }
}

TEST(GatherChosen, NoPlacesAtAll) {
  SmallCache s;
  const RequestId a = s.request(1, 9);
  s.prepare({{a, 1, 1}});
  std::int32_t index = 3;
  float out = 5.0f;
  test::Twins twins(s.backend);
  const void* const indices = twins.put(TensorView(&index, {1})).data;
  void* const place = twins.put_output(TensorView(&out, {1})).data;
  twins.send();
  s.cache.acquire(1).gather_compressed_kv({indices, DType::i32, {1, 0}}, {place, DType::f32, {1, 0, 80}});
  twins.fetch();
  EXPECT_EQ(out, 5.0f);
}

// --- windows

TEST(GatherWindow, RowsOfEveryLengthAndStep) {
  for (Format format : {Format::fp8_tile64, Format::fp8_row, Format::bf16}) {
    CacheOptions o = small::options();
    o.row_format = format;
    SmallCache s(o);
    const RequestId a = s.admit(), b = s.admit();
    std::int64_t end_a = 0, end_b = 0;
    for (std::int32_t count : {1, 2, 4, 3, 7, 1, 26, 1, 4, 5, 1, 30}) {
      const std::int64_t length_a = end_a, length_b = end_b;
      end_a += count;
      end_b += 2;
      const Step step = s.prepare({{b, 2, 2}, {kNoRequest, 0, 3}, {a, 1, count}});
      s.append(step);
      for (int layer : {0, 1, 2}) {
        const std::int64_t rows = 8 + count + 1;
        const Gathered got = small::gather_window(s.cache.acquire(layer), step, rows);
        const std::int64_t first_a = std::max<std::int64_t>(0, length_a - 7),
                           first_b = std::max<std::int64_t>(0, length_b - 7);
        EXPECT_EQ(got.first[0], first_b);
        EXPECT_EQ(got.first[2], first_a);
        EXPECT_EQ(got.lens, (std::vector<std::int32_t>{static_cast<std::int32_t>(end_b - first_b), 0,
                                                       static_cast<std::int32_t>(end_a - first_a)}));
        for (std::int64_t i = 0; i < rows; ++i) {
          ASSERT_EQ(got.row(0, i), first_b + i < end_b ? window_row(format, 2, layer, first_b + i) : kZeros)
              << "length " << length_b << " row " << i;
          ASSERT_EQ(got.row(1, i), kZeros);
          ASSERT_EQ(got.row(2, i), first_a + i < end_a ? window_row(format, 1, layer, first_a + i) : kZeros)
              << "length " << length_a << " + " << count << " row " << i;
        }
        const Gathered narrow = small::gather_window(s.cache.acquire(layer), step, rows, DType::bf16);
        EXPECT_EQ(narrow.values, bf16(got.values));
        EXPECT_EQ(narrow.lens, got.lens);
      }
      s.cache.commit(step);
    }
  }
}

// --- entries made elsewhere

TEST(FlushCompression, StoresValidRowsThatClose) {
  CacheOptions o = small::options();
  o.index_format = Format::fp8;
  SmallCache s(o, small::config(), false);  // no weights needed
  const RequestId a = s.admit();
  const auto value = [](int stream, int token, int c) {
    return small::noise(static_cast<std::uint64_t>((stream * 100 + token) * 1000 + c));
  };
  const auto row = [&](int stream, int token, int width) {
    Row x;
    for (int c = 0; c < width; ++c) x.push_back(value(stream, token, c));
    return x;
  };
  const Step step = s.prepare({{kNoRequest, 0, 1}, {a, 1, 26}});
  std::vector<float> entries, keys, raw(27 * 80, 0.5f);
  std::vector<std::uint8_t> valid;
  for (int t = 0; t < 27; ++t) {
    for (float v : row(1, t, 80)) entries.push_back(v);
    for (float v : row(2, t, 32)) keys.push_back(v);
    valid.push_back(t == 1 + 11 ? 0 : t % 3 == 0 ? 255 : 1);  // the entry that closes at position 11 is not valid
  }
  test::Twins twins(s.backend);
  FlushInputs in;
  in.entries = twins.put(TensorView(entries.data(), {27, 80}));
  in.index_keys = twins.put(TensorView(keys.data(), {27, 32}));
  in.valid = twins.put(TensorView(valid.data(), DType::u8, {27}));
  const ConstTensorView window_rows = twins.put(TensorView(raw.data(), {27, 80}));
  twins.send();
  for (int layer = 0; layer < 4; ++layer) s.cache.acquire(layer).write_swa(window_rows);
  for (int layer : {1, 2}) s.cache.acquire(layer).flush_compression(in);
  in.valid = {};
  s.cache.acquire(3).flush_compression(in);  // no mask: all

  for (int layer : {1, 2, 3}) {
    const int ratio = layer == 2 ? 8 : 4;
    const Gathered got = small::gather_entries(s.cache.acquire(layer), step, 6);
    EXPECT_EQ(got.lens, (std::vector<std::int32_t>{0, 26 / ratio}));
    for (int j = 0; j < 26 / ratio; ++j) {
      const int last = 1 + (j + 1) * ratio - 1;
      const bool written = layer == 3 || valid[static_cast<std::size_t>(last)] != 0;
      EXPECT_EQ(got.row(1, j), written ? through(Format::fp8_tile64, 16, bf16(row(1, last, 80))) : kZeros)
          << "layer " << layer << " entry " << j;
    }
    if (layer == 2) continue;
    const Gathered stored = small::gather_keys(s.cache.acquire(layer), step, 6);
    for (int j = 0; j < 6; ++j) {
      const int last = 1 + 4 * j + 3;
      if (layer == 1 && valid[static_cast<std::size_t>(last)] == 0) {
        EXPECT_EQ(stored.row(1, j), Row(32, 0.0f));
        continue;
      }
      const Row x = bf16(row(2, last, 32));
      Row turned;
      for (unsigned i = 0; i < 32; ++i) {  // keys come before the transform
        double sum = 0;
        for (unsigned k = 0; k < 32; ++k) sum += (std::popcount(i & k) % 2 == 0 ? 1.0 : -1.0) * x[k];
        turned.push_back(naive::round_bf16(static_cast<float>(sum / std::sqrt(32.0))));
      }
      const Row want = through(Format::fp8, 0, turned);
      float largest = 0.0f;
      for (float v : want) largest = std::max(largest, std::fabs(v));
      for (std::size_t c = 0; c < 32; ++c) ASSERT_NEAR(stored.row(1, j)[c], want[c], largest * 0.05f) << j;
    }
  }
  s.cache.commit(step);
  EXPECT_EQ(s.cache.length(a), 26);
}

TEST(FlushCompression, OfWhatAppendMadeGivesTheSameBytes) {
  CacheOptions o = plain_options();
  SmallCache made(o), flushed(o);
  const RequestId a = made.request(1, 24), b = flushed.admit();
  const Step read = made.prepare({{a, 1, 1}});
  const Step step = flushed.prepare({{b, 1, 24}});
  for (int layer : {1, 2, 3}) {
    const int ratio = layer == 2 ? 8 : 4;
    const Gathered entries = small::gather_entries(made.cache.acquire(layer), read, 6);
    std::vector<float> rows(24 * 80, 7.0f), keys(24 * 32, 7.0f);
    const Gathered stored = layer == 2 ? Gathered{} : small::gather_keys(made.cache.acquire(layer), read, 6);
    for (int j = 0; j < 24 / ratio; ++j) {
      const Row entry = entries.row(0, j);
      std::copy(entry.begin(), entry.end(), rows.begin() + ((j + 1) * ratio - 1) * 80);
      if (layer == 2) continue;
      const Row key = stored.row(0, j);
      std::copy(key.begin(), key.end(), keys.begin() + ((j + 1) * ratio - 1) * 32);
    }
    test::Twins twins(flushed.backend);
    FlushInputs in;
    in.entries = twins.put(TensorView(rows.data(), {24, 80}));
    in.index_keys = twins.put(TensorView(keys.data(), {24, 32}));
    twins.send();
    flushed.cache.acquire(layer).flush_compression(in);
  }
  made.cache.abort(read);
  flushed.cache.commit(step);
  EXPECT_EQ(made.cache.export_blocks(a), flushed.cache.export_blocks(b));
}

}  // namespace
