// Operations on pools that the caller keeps: rows by slot, foreign lists of attend, index scores of key ranges.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "ops/attend_row.h"
#include "support/device.h"

namespace kv4 {
namespace {

using test::Twins;

constexpr std::int32_t kMinInt = std::numeric_limits<std::int32_t>::min(),
                       kMaxInt = std::numeric_limits<std::int32_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// One lane, for codecs.
struct OneLane {
  int lane() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  float max(float x) const { return x; }
};

std::vector<float> random_rows(std::int64_t count, int width, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(count * width));
  for (float& x : rows) x = codec::round_bf16(normal(random));
  return rows;
}

template <class T>
ConstTensorView bytes_of(const std::vector<T>& values) {
  return {values.data(), DType::u8, {std::ssize(values) * static_cast<std::int64_t>(sizeof(T))}};
}

/// Pages of rows with gaps between pages, all payloads of a page before its scales.
struct ForeignPool {
  Format format;
  RowShape shape;
  std::int64_t pages, rows, payload, scale, page_bytes;
  std::vector<std::uint8_t> memory;

  ForeignPool(Format format_in, RowShape shape_in, std::int64_t pages_in, std::int64_t rows_in)
      : format(format_in), shape(shape_in), pages(pages_in), rows(rows_in) {
    codec::with_codec(format, [&](auto codec) {
      payload = codec.payload_bytes(shape);
      scale = codec.scale_bytes(shape);
    });
    page_bytes = (rows * (payload + scale) / 576 + 2) * 576;
    memory.assign(static_cast<std::size_t>(pages * page_bytes), 0x7F);  // NaN in every format but mxfp4
  }
  std::int32_t slots() const { return static_cast<std::int32_t>(pages * rows); }
  ops::RowPlanes planes(std::uint8_t* at) const {
    return {format, shape, {at, page_bytes, payload}, {at + rows * payload, page_bytes, scale}, {}};
  }
  void encode(std::int64_t slot, const float* x) {
    const ops::RowPlanes to = planes(memory.data());
    codec::with_codec(format, [&](auto codec) {
      codec.encode(OneLane{}, shape, x, to.payload.at(slot / rows, slot % rows), to.scale.at(slot / rows, slot % rows),
                   1.0f);
    });
  }
  std::vector<float> decode(std::int64_t slot) {
    const ops::RowPlanes from = planes(memory.data());
    std::vector<float> x(static_cast<std::size_t>(shape.width));
    codec::with_codec(format, [&](auto codec) {
      codec.decode(OneLane{}, shape, from.payload.at(slot / rows, slot % rows), from.scale.at(slot / rows, slot % rows),
                   1.0f, x.data());
    });
    return x;
  }
  TensorView view() { return {memory.data(), DType::u8, {std::ssize(memory)}}; }
};

struct Kind {
  Format format;
  RowShape shape;
};
constexpr Kind kKinds[] = {{Format::fp8_tile64, {512, 64}}, {Format::fp8_row, {512, 64}}, {Format::bf16, {512, 64}},
                           {Format::mxfp4, {128, 0}},       {Format::fp8, {128, 0}},      {Format::bf16, {100, 0}}};

TEST(ForeignPools, RowsBySlot) {
  for (const Kind& kind : kKinds)
    for (const bool wide : {false, true})
      for (const DType type : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(testing::Message() << to_string(kind.format) << " width " << kind.shape.width << " wide " << wide);
        Twins twins(test::test_backend());
        ForeignPool pool(kind.format, kind.shape, 3, 5), expected = pool;
        const int width = kind.shape.width;
        const std::vector<std::int32_t> slots = {14, -1, 0, 15, kMaxInt, kMinInt, 7};
        const std::vector<std::int64_t> wide_slots = {14, -1, 0, 15, std::int64_t{1} << 40, -(std::int64_t{1} << 40),
                                                      7};
        const std::int64_t count = std::ssize(slots);
        const std::vector<float> rows = random_rows(count, width, 1);
        std::vector<std::uint16_t> bf16_rows(rows.size());
        std::transform(rows.begin(), rows.end(), bf16_rows.begin(), codec::bf16_bits);
        for (std::int64_t i = 0; i < count; ++i)
          if (slots[i] >= 0 && slots[i] < pool.slots()) expected.encode(slots[i], rows.data() + i * width);

        std::vector<float> gathered(rows.size(), 5.0f);
        std::vector<std::uint8_t> valid(static_cast<std::size_t>(count), 9);
        ops::SlotRowsParams p;
        p.rows = pool.planes(static_cast<std::uint8_t*>(twins.put_output(pool.view()).data));
        p.rows_per_block = static_cast<std::int32_t>(pool.rows);
        p.num_slots = pool.slots();
        p.slots = twins.put(wide ? bytes_of(wide_slots) : bytes_of(slots)).data;
        p.has_wide_slots = wide;
        p.num_rows = count;
        p.in = {twins.put(type == DType::f32 ? bytes_of(rows) : bytes_of(bf16_rows)).data, type, width};
        p.out = {twins.put_output({gathered.data(), DType::f32, {count, width}}).data, DType::f32};
        p.valid = static_cast<std::uint8_t*>(twins.put_output({valid.data(), DType::u8, {count}}).data);
        twins.send();
        twins.backend()->write_slots(p);
        twins.backend()->gather_slots(p);
        twins.fetch();
        EXPECT_EQ(pool.memory, expected.memory);
        for (std::int64_t i = 0; i < count; ++i) {
          const bool there = slots[i] >= 0 && slots[i] < pool.slots();
          EXPECT_EQ(valid[i], there);
          const std::vector<float> row = there ? expected.decode(slots[i]) : std::vector<float>(width, 0.0f);
          EXPECT_EQ(std::memcmp(row.data(), gathered.data() + i * width, row.size() * 4), 0) << "row " << i;
        }
      }
}

/// attend over two pools with lists of any kind.
struct ListProblem {
  static constexpr int kRequests = 3, kEach = 2, kHeads = 5, kWidth = 512, kTokens = kRequests * kEach;
  static constexpr int kFirst = 20, kSecond = 9;  // slots of a token

  DType type;
  ForeignPool first{Format::fp8_tile64, {512, 64}, 4, 53}, second;
  std::vector<float> q = random_rows(kTokens * kHeads, kWidth, 2);
  std::vector<float> sink = {0.5f, -kInfinity, 4.0f, -2.0f, kInfinity};
  std::vector<std::int32_t> first_lens = {20, 0, 7}, second_lens = {3, 0, 100};
  // [tokens, n] as they count: what is no row is -1
  std::vector<std::int32_t> clean_first, clean_second;

  /// Queries, output, and the format of the second pool.
  explicit ListProblem(DType type_in = DType::f32, Format format = Format::bf16)
      : type(type_in), second(format, {512, 64}, 5, 2) {
    for (ForeignPool* pool : {&first, &second}) {
      const std::vector<float> rows = random_rows(pool->slots(), kWidth, 3);
      for (std::int32_t slot = 0; slot < pool->slots(); slot += 2) pool->encode(slot, rows.data() + slot * kWidth);
    }
  }

  struct Result {
    std::vector<float> out = std::vector<float>(kTokens * kHeads * kWidth), lse = std::vector<float>(kTokens * kHeads),
                       largest = std::vector<float>(kTokens * kHeads);
  };

  /// Lists [requests, each + 1, n + 3] with gaps, lengths per request; every second slot exists, the others hold NaN.
  std::vector<std::int32_t> foreign_list(const ForeignPool& pool, int n, const std::vector<std::int32_t>& lens,
                                         std::vector<std::int32_t>& clean) {
    std::mt19937 random(4);
    const std::int32_t none[] = {-1, kMinInt, kMaxInt, pool.slots(), pool.slots() + 1};
    std::vector<std::int32_t> list(static_cast<std::size_t>(kRequests * (kEach + 1) * (n + 3)), 1);  // NaN in the gaps
    clean.assign(static_cast<std::size_t>(kTokens * n), -1);
    for (int request = 0; request < kRequests; ++request)
      for (int token = 0; token < kEach; ++token)
        for (int i = 0; i < n; ++i) {
          std::int32_t& to = list[(request * (kEach + 1) + token) * (n + 3) + i];
          const bool there = random() % 4 != 0;
          to = there ? static_cast<std::int32_t>(random() % unsigned(pool.slots() / 2)) * 2 : none[random() % 5];
          if (i >= lens[request])
            to = 1;  // behind the length: NaN
          else if (there)
            clean[(request * kEach + token) * n + i] = to;
        }
    return list;
  }

  Result run(bool foreign, ops::LseMode mode, const std::shared_ptr<Backend>& backend = test::test_backend()) {
    Result result;
    Twins twins(backend);
    const std::vector<std::int32_t> lists[2] = {foreign_list(first, kFirst, first_lens, clean_first),
                                                foreign_list(second, kSecond, second_lens, clean_second)};
    const auto list = [&](const ForeignPool& pool, int n, const std::vector<std::int32_t>& slots,
                          const std::vector<std::int32_t>& clean, const std::vector<std::int32_t>& lens) {
      ops::SlotList to;
      to.slots = static_cast<const std::int32_t*>(twins.put(bytes_of(foreign ? slots : clean)).data);
      to.stride = n;
      if (!foreign) return to;
      to.lens = static_cast<const std::int32_t*>(twins.put(bytes_of(lens)).data);
      to.stride = n + 3;
      to.count = n;
      to.limit = pool.slots();
      to.tokens_per_request = kEach;
      to.request_stride = (kEach + 1) * (n + 3);
      return to;
    };
    ops::AttendParams p;
    p.num_heads = kHeads;
    p.step.num_tokens = kTokens;
    p.softmax_scale = 0.05f;
    std::vector<std::uint16_t> bf16_q(q.size()), bf16_out(result.out.size());
    std::transform(q.begin(), q.end(), bf16_q.begin(), codec::bf16_bits);
    const bool is_bf16 = type == DType::bf16;
    p.q = {twins.put(is_bf16 ? bytes_of(bf16_q) : bytes_of(q)).data, type, kHeads * kWidth};
    std::vector<float> finite = sink;  // of LseMode::all
    finite.back() = 30.0f;
    p.sink = static_cast<const float*>(twins.put(bytes_of(mode == ops::LseMode::all ? finite : sink)).data);
    p.layer.window.ring = first.planes(static_cast<std::uint8_t*>(twins.put_output(first.view()).data));
    p.layer.window.rows = static_cast<std::int32_t>(first.rows);
    p.layer.num_kinds = 1;
    p.layer.kinds[0].page = second.planes(static_cast<std::uint8_t*>(twins.put_output(second.view()).data));
    p.layer.kinds[0].rows_per_block = static_cast<std::int32_t>(second.rows);
    p.layer.kinds[0].ratio = 1;
    p.window_slots = list(first, kFirst, lists[0], clean_first, first_lens);
    p.entry_slots = list(second, kSecond, lists[1], clean_second, second_lens);
    const auto output = [&](std::vector<float>& to) {
      return static_cast<float*>(twins.put_output({to.data(), DType::f32, {std::ssize(to)}}).data);
    };
    p.out = {output(result.out), type};
    if (is_bf16) {
      p.out.data = twins.put_output({bf16_out.data(), DType::bf16, {std::ssize(bf16_out)}}).data;
      p.list_workspace_bytes = ops::attend_list_bytes(kTokens, kHeads, kFirst, kSecond);
    }
    std::vector<std::uint8_t> room(static_cast<std::size_t>(p.list_workspace_bytes));
    if (is_bf16)
      p.list_workspace =
          static_cast<std::uint8_t*>(twins.put_output({room.data(), DType::u8, {std::ssize(room)}}).data);
    p.lse = output(result.lse);
    p.lse_mode = mode;
    if (!is_bf16) p.max_logits = output(result.largest);
    twins.send();
    twins.backend()->attend(p);
    twins.fetch();
    if (is_bf16) std::transform(bf16_out.begin(), bf16_out.end(), result.out.begin(), codec::bf16_value);
    return result;
  }
};

TEST(ForeignPools, ForeignListsOfAttend) {
  ListProblem problem;
  for (const ops::LseMode mode : {ops::LseMode::all, ops::LseMode::rows}) {
    const ListProblem::Result plain = problem.run(false, mode), foreign = problem.run(true, mode);
    EXPECT_EQ(plain.out, foreign.out);  // NaN is in every row that no list names
    EXPECT_EQ(plain.lse, foreign.lse);
    EXPECT_EQ(plain.largest, foreign.largest);
  }
}

/// With a list workspace, for which a tuned kernel may take foreign lists, beside the CPU.
TEST(ForeignPools, ForeignListsWithAWorkspace) {
  ListProblem problem(DType::bf16, Format::fp8_tile64);
  for (const ops::LseMode mode : {ops::LseMode::all, ops::LseMode::rows}) {
    const ListProblem::Result expected = problem.run(false, mode, make_cpu_backend()), result = problem.run(true, mode);
    for (std::size_t i = 0; i < expected.out.size(); ++i)
      ASSERT_NEAR(result.out[i], expected.out[i], 1e-3f + std::abs(expected.out[i]) / 64) << i;
    for (std::size_t i = 0; i < expected.lse.size(); ++i)
      if (std::isinf(expected.lse[i]))
        EXPECT_EQ(result.lse[i], expected.lse[i]) << i;
      else
        EXPECT_NEAR(result.lse[i], expected.lse[i], 1e-4f + std::abs(expected.lse[i]) * 8 / 65536) << i;
  }
}

TEST(ForeignPools, LseModes) {
  ListProblem problem;
  const ListProblem::Result all = problem.run(true, ops::LseMode::all), rows = problem.run(true, ops::LseMode::rows);
  for (int token = 0; token < ListProblem::kTokens; ++token)
    for (int head = 0; head < ListProblem::kHeads; ++head) {
      SCOPED_TRACE(testing::Message() << "token " << token << " head " << head);
      const std::size_t at = static_cast<std::size_t>(token * ListProblem::kHeads + head);
      const bool lonely = token / ListProblem::kEach == 1, last = head == ListProblem::kHeads - 1;
      const float sink = last ? 30.0f : problem.sink[head];
      const float of_rows = lonely ? -kInfinity : rows.lse[at];
      if (lonely) {
        EXPECT_EQ(rows.lse[at], kInfinity);
        EXPECT_EQ(rows.largest[at], -kInfinity);
      }
      const float expected = std::max(of_rows, sink) + std::log1p(std::exp(-std::abs(of_rows - sink)));
      if (lonely && sink == -kInfinity)
        EXPECT_EQ(all.lse[at], -kInfinity);
      else
        EXPECT_NEAR(all.lse[at], expected, 1e-4);
      for (int c = 0; c < ListProblem::kWidth; c += 37) {
        const std::size_t channel = at * ListProblem::kWidth + static_cast<std::size_t>(c);
        if (lonely || last)
          EXPECT_EQ(rows.out[channel], 0.0f);
        else
          EXPECT_EQ(rows.out[channel], all.out[channel]);
      }
    }
}

/// A sink added afterwards is a sink in the denominator.
TEST(ForeignPools, SinksAddedAfterwards) {
  const float sinks[] = {-kInfinity, -300.0f, -2.0f, 0.0f, 1.5f, 90.0f, kInfinity};
  for (const float lse : {-kInfinity, -40.0f, 0.3f, 70.0f})
    for (const float& sink : sinks) {
      SCOPED_TRACE(testing::Message() << "lse " << lse << " sink " << sink);
      const ops::Attention rows = lse == -kInfinity ? ops::Attention{} : ops::Attention{lse - 2.0f, std::exp(2.0f)};
      const ops::AttentionEnd without = ops::end_attention(rows, nullptr), with = ops::end_attention(rows, &sink),
                              all = ops::add_sink(without.lse, &sink, ops::LseMode::all),
                              only_rows = ops::add_sink(without.lse, &sink, ops::LseMode::rows);
      EXPECT_NEAR(all.factor * without.factor, with.factor, 1e-6f);
      EXPECT_EQ(all.factor, only_rows.factor);
      if (std::isinf(with.lse))
        EXPECT_EQ(all.lse, with.lse);
      else
        EXPECT_NEAR(all.lse, with.lse, 2e-5f);
      EXPECT_EQ(only_rows.lse, ops::lse_of_rows(rows));
      EXPECT_EQ(ops::add_sink(without.lse, nullptr, ops::LseMode::all).lse, without.lse);
    }
}

TEST(ForeignPools, TablesOfKeyRanges) {
  Twins twins(test::test_backend());
  const std::vector<std::int32_t> lens = {10, 0, 99}, token_lens = {1, 2, 3, kMinInt, kMaxInt, 0},
                                  ends = {5, 6, -1, 40, kMaxInt, 0};
  std::vector<ops::StepRecord> records(6);
  std::vector<std::int32_t> table(70, -1);
  std::vector<float> ones(ops::kMaxIndexHeads);
  struct Case {
    ops::KeyRanges ranges;
    std::vector<std::int32_t> positions, rows;
  };
  const auto there = [&](const std::vector<std::int32_t>& values) {
    return static_cast<const std::int32_t*>(twins.put(bytes_of(values)).data);
  };
  ops::RangeTablesParams p;
  const TensorView out(records.data(), DType::u8, {6 * std::int64_t{sizeof(ops::StepRecord)}});
  p.tokens = static_cast<ops::StepRecord*>(twins.put_output(out).data);
  p.block_table = static_cast<std::int32_t*>(twins.put_output({table.data(), {std::ssize(table)}}).data);
  p.table_rows = 1;
  p.table_width = static_cast<std::int32_t>(table.size());
  p.ones = static_cast<float*>(twins.put_output({ones.data(), {std::ssize(ones)}}).data);
  const std::vector<Case> cases = {
      {{6, 0, 2, there(lens), false, nullptr, nullptr, 30}, {8, 9, -1, -1, 29, 29}, {0, 0, 1, 1, 2, 2}},
      {{6, 0, 2, there(token_lens), true, nullptr, nullptr, 30}, {0, 1, 2, -1, 29, -1}, {0, 0, 1, 1, 2, 2}},
      {{6, 0, 1, nullptr, false, there(token_lens), there(ends), 30}, {4, 5, -1, 29, 29, -1}, {0, 0, 0, 0, 0, 0}}};
  twins.send();
  for (const Case& c : cases) {
    p.ranges = c.ranges;
    twins.backend()->make_range_tables(p);
    twins.fetch();
    for (std::size_t token = 0; token < 6; ++token) {
      EXPECT_EQ(records[token].position, c.positions[token]) << "token " << token;
      EXPECT_EQ(records[token].row, c.rows[token]) << "token " << token;
    }
  }
  for (std::size_t i = 0; i < table.size(); ++i) EXPECT_EQ(table[i], static_cast<std::int32_t>(i));
  const std::vector<std::int32_t> ids = {3, 8, -1, 77, 9, kMinInt, kMaxInt, 0};  // two rows of three, and gaps
  p.page_ids = there(ids);
  p.page_id_stride = 5;
  p.num_pages = 9;
  p.table_rows = 2;
  p.table_width = 3;
  twins.send();
  twins.backend()->make_range_tables(p);
  twins.fetch();
  EXPECT_EQ(std::vector<std::int32_t>(table.begin(), table.begin() + 6), (std::vector<std::int32_t>{3, 8, 0, 0, 0, 0}));
  EXPECT_EQ(ones, std::vector<float>(ops::kMaxIndexHeads, 1.0f));
}

TEST(ForeignPools, PlacedScores) {
  constexpr int kTokens = 3, kStride = 20, kLogits = 12, kLogitStride = 14;
  Twins twins(test::test_backend());
  std::vector<float> scores(kTokens * kStride);
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i) + 0.001f;
  const std::vector<float> given = scores;
  const std::vector<std::int32_t> begins = {2, 0, 9}, ends = {10, 0, 40};
  std::vector<float> logits(kTokens * kLogitStride, -7.0f);
  std::vector<std::uint16_t> compact(kTokens * kLogitStride, 9);
  ops::PlaceScoresParams p;
  p.ranges.num_tokens = kTokens;
  p.ranges.begins = static_cast<const std::int32_t*>(twins.put(bytes_of(begins)).data);
  p.ranges.ends = static_cast<const std::int32_t*>(twins.put(bytes_of(ends)).data);
  p.ranges.max_keys = kStride;
  float* const scores_there = static_cast<float*>(twins.put_output({scores.data(), {std::ssize(scores)}}).data);
  p.scores = scores_there;
  p.score_stride = kStride;
  p.logits = {twins.put_output({logits.data(), {std::ssize(logits)}}).data, DType::f32};
  p.logit_stride = kLogitStride;
  p.num_logits = kLogits;
  ops::PlaceScoresParams in_place = p, compacted = p;
  compacted.logits = {twins.put_output({compact.data(), DType::bf16, {std::ssize(compact)}}).data, DType::bf16};
  compacted.is_compact = true;
  in_place.logits = {scores_there, DType::f32};
  in_place.logit_stride = in_place.num_logits = kStride;
  twins.send();
  twins.backend()->place_scores(p);
  twins.backend()->place_scores(compacted);
  twins.backend()->place_scores(in_place);
  twins.fetch();
  for (int token = 0; token < kTokens; ++token) {
    const int begin = begins[token], end = std::min(ends[token], kStride);
    for (int j = 0; j < kLogitStride; ++j) {
      SCOPED_TRACE(testing::Message() << "token " << token << " logit " << j);
      const auto score = [&](int key) { return key >= begin && key < end ? given[token * kStride + key] : -kInfinity; };
      const std::size_t at = static_cast<std::size_t>(token * kLogitStride + j);
      EXPECT_EQ(logits[at], j < kLogits ? score(j) : -7.0f);
      EXPECT_EQ(compact[at], j < kLogits ? codec::bf16_bits(score(begin + j)) : 9);
    }
    for (int j = 0; j < kStride; ++j)
      EXPECT_EQ(scores[token * kStride + j], j < begin ? -kInfinity : given[token * kStride + j]);
  }
}

}  // namespace
}  // namespace kv4
