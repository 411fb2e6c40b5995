// NaN and infinity in the inputs: only the token's own window row and the entries that cover it may differ from a clean
// run.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cache/small_cache.h"

namespace {

using namespace kv4;
using small::Gathered;
using small::Inputs;
using small::SmallCache;

const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Bad {
  small::Input which;
  float value;
  std::int64_t channel;  // -1: all
};

constexpr std::int64_t kAt = 21;  // position of the spoiled token: CSA entry 5, then 6 (overlap); HCA entry 2

// Tokens 0..43 of streams 1 and 2 side by side, in the given chunks. `bad` goes into stream 1 at kAt in every layer.
struct Replay {
  SmallCache s;
  RequestId a, b;
  Step step;  // open, its last token appended

  Replay(const CacheOptions& o, const Bad* bad, const std::vector<std::int32_t>& chunks)
      : s(o), a(s.admit()), b(s.admit()) {
    std::int64_t length = 0;
    for (std::int32_t n : chunks) {
      step = s.prepare({{b, 2, 1}, {a, 1, n}});
      s.append(step, [&](const LayerCacheSchema&, Inputs& in) {
        if (bad == nullptr || kAt < length || kAt >= length + n || in.width[bad->which] == 0) return;
        float* row = in.row(bad->which, 1 + kAt - length);
        for (std::int64_t c = 0; c < in.width[bad->which]; ++c)
          if (bad->channel < 0 || bad->channel == c) row[c] = bad->value;
      });
      length += n;
      if (length < 44) s.cache.commit(step);
    }
  }
};

bool same(const std::vector<float>& x, const std::vector<float>& y) {
  return std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

// Scores and attention of the step's first token, which belongs to the other request.
std::vector<float> first_reads(Replay& r, int layer) {
  LayerCacheHandle handle = r.s.cache.acquire(layer);
  const std::int64_t tokens = r.step.num_tokens, heads = 3;
  std::vector<float> q(static_cast<std::size_t>(tokens * heads * 80)), out(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = small::noise(i);
  std::vector<float> scores(static_cast<std::size_t>(tokens * 11));
  test::Twins twins(r.s.backend);
  AttendInputs attend;
  attend.q = twins.put({q.data(), {tokens, heads, 80}});
  const IndexInputs index{twins.put({q.data(), {tokens, heads, 32}}), {}, twins.put({q.data(), {tokens, heads}})};
  const TensorView to = twins.put_output({out.data(), {tokens, heads, 80}});
  const TensorView scores_to = twins.put_output({scores.data(), {tokens, 11}});
  twins.send();
  handle.attend(attend, to);
  if (handle.schema().pages.size() > 1) handle.index_scores(index, scores_to);
  twins.fetch();
  out.resize(static_cast<std::size_t>(heads * 80));
  out.insert(out.end(), scores.begin(), scores.begin() + 11);
  return out;
}

void expect_contained(const CacheOptions& o, const Bad& bad, const std::vector<std::int32_t>& chunks) {
  Replay clean(o, nullptr, chunks), dirty(o, &bad, chunks);
  EXPECT_EQ(dirty.s.cache.export_image(dirty.b), clean.s.cache.export_image(clean.b)) << "the other request";
  EXPECT_EQ(dirty.s.cache.export_blocks(dirty.b), clean.s.cache.export_blocks(clean.b)) << "the other request";
  for (int layer = 0; layer < 4; ++layer) {
    LayerCacheHandle x = dirty.s.cache.acquire(layer), y = clean.s.cache.acquire(layer);
    const std::vector<float> reads = first_reads(dirty, layer);
    ASSERT_TRUE(same(reads, first_reads(clean, layer))) << "the other request reads something else, layer " << layer;
    const int rows = 8 + chunks.back();
    const Gathered windows = small::gather_window(x, dirty.step, rows),
                   clean_windows = small::gather_window(y, clean.step, rows);
    for (int i = 0; i < rows; ++i) {
      const std::int64_t position = windows.first[1] + i;
      if (position == kAt && bad.which == small::kRaw) continue;
      ASSERT_TRUE(same(windows.row(1, i), clean_windows.row(1, i)))
          << "window row of position " << position << " layer " << layer;
    }
    if (layer == 0) continue;
    const int ratio = layer == 2 ? 8 : 4, count = 44 / ratio;
    const bool main = bad.which == small::kKv || bad.which == small::kGate,
               index = bad.which == small::kIndexKv || bad.which == small::kIndexGate;
    const auto covers = [&](int j) { return j == kAt / ratio || (layer != 2 && j == kAt / ratio + 1); };
    const Gathered entries = small::gather_entries(x, dirty.step, count),
                   clean_entries = small::gather_entries(y, clean.step, count);
    for (int j = 0; j < count; ++j) {
      if (main && covers(j)) {
        EXPECT_TRUE(bad.channel >= 0 || !same(entries.row(1, j), clean_entries.row(1, j)))
            << "entry " << j << " hides it";
        continue;
      }
      ASSERT_TRUE(same(entries.row(1, j), clean_entries.row(1, j))) << "entry " << j << " layer " << layer;
    }
    if (layer == 2) continue;
    const Gathered keys = small::gather_keys(x, dirty.step, count),
                   clean_keys = small::gather_keys(y, clean.step, count);
    for (int j = 0; j < count; ++j) {
      if (index && covers(j)) continue;
      ASSERT_TRUE(same(keys.row(1, j), clean_keys.row(1, j))) << "key " << j << " layer " << layer;
    }
  }
  // Past the window and the entries that cover it, no trace of it remains.
  dirty.s.cache.commit(dirty.step);
  clean.s.cache.commit(clean.step);
  EXPECT_EQ(dirty.s.cache.export_image(dirty.a), clean.s.cache.export_image(clean.a));
}

class NotANumber : public testing::TestWithParam<Format> {};

TEST_P(NotANumber, StaysInItsRowAndItsEntries) {
  const std::vector<std::vector<std::int32_t>> splits = {
      {20, 4, 4, 16}, {40, 4}, {20, 1, 1, 1, 1, 4, 4, 4, 4, 4}, {44}};
  for (small::Input which : {small::kRaw, small::kKv, small::kGate, small::kIndexKv, small::kIndexGate})
    for (float value : {kNan, kInfinity, -kInfinity})
      for (std::int64_t channel : {std::int64_t{-1}, std::int64_t{3}, std::int64_t{31}})
        for (std::size_t split = 0; split < splits.size(); ++split) {
          SCOPED_TRACE(testing::Message()
                       << "input " << which << " value " << value << " channel " << channel << " split " << split);
          CacheOptions o = small::options();
          o.row_format = GetParam();
          o.index_format = GetParam() == Format::bf16      ? Format::bf16
                           : GetParam() == Format::fp8_row ? Format::nvfp4
                                                           : Format::mxfp4;
          o.hca_mode = split % 2 == 0 ? HcaMode::online : HcaMode::raw;
          o.pending_dtype = split == 2 ? DType::bf16 : DType::f32;
          expect_contained(o, {which, value, channel}, splits[split]);
          if (HasFatalFailure()) return;
        }
}

INSTANTIATE_TEST_SUITE_P(All, NotANumber, testing::Values(Format::fp8_tile64, Format::fp8_row, Format::bf16),
                         [](const auto& p) { return std::string(to_string(p.param)); });

TEST(NotANumberOnce, SplitsAgreeToTheByteAndNanHasOnePattern) {
  for (small::Input which : {small::kRaw, small::kKv, small::kGate, small::kIndexKv})
    for (std::uint32_t bits : {0x7FC00000u, 0xFFC12345u, 0x7F800001u, 0x7F800000u, 0xFF800000u}) {
      SCOPED_TRACE(testing::Message() << "input " << which << " bits " << std::hex << bits);
      float value;
      std::memcpy(&value, &bits, 4);
      const bool nan = std::isnan(value);
      const Bad bad{which, value, 3}, canonical{which, kNan, 3};
      Replay whole(small::options(), &bad, {44}), pieces(small::options(), &bad, {22, 1, 1, 20}),
          other(small::options(), &canonical, {44});
      for (Replay* r : {&whole, &pieces, &other}) r->s.cache.commit(r->step);
      EXPECT_EQ(whole.s.cache.export_image(whole.a), pieces.s.cache.export_image(pieces.a));
      EXPECT_EQ(whole.s.cache.export_blocks(whole.a), pieces.s.cache.export_blocks(pieces.a));
      if (nan) {
        EXPECT_EQ(whole.s.cache.export_blocks(whole.a), other.s.cache.export_blocks(other.a))
            << "one pattern for every NaN";
      }
    }
}

// While the token is still pending: the image holds its rows.
TEST(NotANumberOnce, PendingNanHasOnePattern) {
  for (small::Input which : {small::kRaw, small::kKv, small::kGate, small::kIndexKv, small::kIndexGate})
    for (DType pending : {DType::f32, DType::bf16})
      for (std::uint32_t bits : {0xFFC00000u, 0x7FC12345u, 0x7FA00000u}) {
        SCOPED_TRACE(testing::Message() << "input " << which << " bits " << std::hex << bits << " pending "
                                        << to_string(pending));
        float value;
        std::memcpy(&value, &bits, 4);
        CacheOptions o = small::options();
        o.pending_dtype = pending;
        CanonicalImage images[2];
        for (int i = 0; i < 2; ++i) {
          SmallCache s(o);
          const RequestId r = s.request(1, static_cast<std::int32_t>(kAt));
          const Step step = s.prepare({{r, 1, 1}});
          s.append(step, [&](const LayerCacheSchema&, Inputs& in) {
            if (in.width[which] > 0) in.row(which, 0)[3] = i == 0 ? value : kNan;
          });
          s.cache.commit(step);
          images[i] = s.cache.export_image(r);
        }
        EXPECT_TRUE(images[0] == images[1]) << "NaN is stored as one pattern";
      }
}

}  // namespace
