// Wrong tensors: each gives an Error that names the argument, and no byte of the cache changes.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cache/small_cache.h"

namespace {

using namespace kv4;
using small::expect_error;
using small::Inputs;
using small::SmallCache;

using Bytes = std::vector<std::byte>;

// Every byte of both pools and the cache's state of its requests.
struct Everything {
  small::CacheState state;
  Bytes blocks, slots;
  bool operator==(const Everything&) const = default;
};

void PrintTo(const Everything& e, std::ostream* out) { small::PrintTo(e.state, out); }

Everything everything(SmallCache& s, const std::vector<RequestId>& requests) {
  return {small::state_of(s.cache, requests), s.block_memory(), s.slot_memory()};
}

// A named way to spoil a tensor.
struct Spoil {
  const char* name;
  std::function<void(ConstTensorView&)> change;
};

// Spoils [a, b, (c)] tensors whose memory is large enough for all of these changes.
const std::vector<Spoil>& spoiled_inputs() {
  static const std::vector<Spoil> kAll = {
      {"missing", [](auto& t) { t = {}; }},
      {"null", [](auto& t) { t.data = nullptr; }},
      {"i32", [](auto& t) { t.dtype = DType::i32; }},
      {"u8", [](auto& t) { t.dtype = DType::u8; }},
      {"one dimension less", [](auto& t) { t.ndim -= 1; }},
      {"one dimension more", [](auto& t) { t.shape[t.ndim] = 1, t.strides[t.ndim] = 1, t.ndim += 1; }},
      {"no dimensions", [](auto& t) { t.ndim = 0; }},
      {"a token too few", [](auto& t) { t.shape[0] -= 1; }},
      {"a token too many", [](auto& t) { t.shape[0] += 1; }},
      {"a channel too few", [](auto& t) { t.shape[1] -= 1; }},
      {"a channel too many", [](auto& t) { t.shape[1] += 1; }},
      {"no tokens", [](auto& t) { t.shape[0] = 0; }},
      {"negative", [](auto& t) { t.shape[0] = -t.shape[0]; }},
      {"transposed", [](auto& t) { std::swap(t.strides[0], t.strides[1]); }},
      {"every second channel", [](auto& t) { t.strides[1] = 2; }},
      {"rows that overlap", [](auto& t) { t.strides[0] = t.shape[1] - 1; }},
      {"rows backwards", [](auto& t) { t.strides[0] = -t.strides[0]; }},
      {"one row for all", [](auto& t) { t.strides[0] = 0; }},
  };
  return kAll;
}

class BadTensor : public testing::Test {
 protected:
  BadTensor()
      : a_(s_.request(1, 22)),
        b_(s_.request(2, 7)),
        step_(s_.prepare({{a_, 1, 3}, {kNoRequest, 0, 1}, {b_, 2, 9}})),
        before_(everything(s_, {a_, b_})) {}

  void expect_refused(const std::string& what, const std::vector<std::string>& parts,
                      const std::function<void()>& call) {
    SCOPED_TRACE(what);
    expect_error(ErrorCode::bad_argument, parts, call);
    ASSERT_EQ(everything(s_, {a_, b_}), before_) << "the cache changed";
  }

  // Afterwards the step runs as if nothing had happened.
  ~BadTensor() override {
    s_.append(step_);
    s_.cache.commit(step_);
    small::CpuCache alone;
    small::expect_same_bytes(s_.cache, a_, alone.cache, alone.request(1, 25));
    small::expect_same_bytes(s_.cache, b_, alone.cache, alone.request(2, 16));
  }

  SmallCache s_;
  RequestId a_, b_;
  Step step_;  // 13 tokens, 3 items
  Everything before_;
};

TEST_F(BadTensor, Append) {
  const char* names[] = {"raw_kv", "kv", "gate", "index_kv", "index_gate"};
  ConstTensorView AppendInputs::*const fields[] = {&AppendInputs::raw_kv, &AppendInputs::kv, &AppendInputs::gate,
                                                   &AppendInputs::index_kv, &AppendInputs::index_gate};
  for (int layer : {0, 1, 2}) {
    LayerCacheHandle handle = s_.cache.acquire(layer);
    Inputs in = s_.inputs(handle.schema());
    for (std::vector<float>& rows : in.rows) rows.resize(rows.size() * 2 + 1000);  // spoiled views stay inside
    const int arguments = layer == 0 ? 1 : layer == 2 ? 3 : 5;
    for (int i = 0; i < arguments; ++i)
      for (const Spoil& spoil : spoiled_inputs()) {
        AppendInputs views = in.views();
        spoil.change(views.*fields[i]);
        expect_refused("layer " + std::to_string(layer) + " " + names[i] + ": " + spoil.name, {names[i]},
                       [&] { handle.append(views); });
      }
    if (layer == 0) continue;
    AppendInputs mixed = in.views();
    mixed.gate.dtype = DType::bf16;
    expect_refused("bf16 gate beside an fp32 kv", {"gate", "bf16", "f32"}, [&] { handle.append(mixed); });
  }
}

TEST_F(BadTensor, MessagesSayWhatWasWantedAndSeen) {
  LayerCacheHandle handle = s_.cache.acquire(1);
  std::vector<float> rows(20 * 200);
  expect_refused("too many tokens", {"raw_kv", "13", "80", "f32 [14, 80]"}, [&] {
    handle.write_swa(TensorView(rows.data(), {14, 80}));
  });
  expect_refused("wrong type", {"i32 [13, 80]"}, [&] {
    handle.write_swa(TensorView(rows.data(), DType::i32, {13, 80}));
  });
}

TEST_F(BadTensor, WriteSwa) {
  std::vector<float> rows(13 * 80 * 2 + 100);
  for (int layer : {0, 2})
    for (const Spoil& spoil : spoiled_inputs()) {
      ConstTensorView view(rows.data(), {13, 80});
      spoil.change(view);
      expect_refused(spoil.name, {"raw_kv"}, [&] { s_.cache.acquire(layer).write_swa(view); });
    }
}

TEST_F(BadTensor, FlushCompression) {
  std::vector<float> entries(13 * 80 * 2 + 100), keys(13 * 32 * 2 + 100);
  std::vector<std::uint8_t> valid(100, 1);
  const auto good = [&] {
    return FlushInputs{TensorView(entries.data(), {13, 80}), TensorView(keys.data(), {13, 32}),
                       TensorView(valid.data(), DType::u8, {13})};
  };
  LayerCacheHandle handle = s_.cache.acquire(1);
  for (const Spoil& spoil : spoiled_inputs()) {
    FlushInputs in = good();
    spoil.change(in.entries);
    expect_refused(std::string("entries: ") + spoil.name, {"entries"}, [&] { handle.flush_compression(in); });
    in = good();
    spoil.change(in.index_keys);
    expect_refused(std::string("index_keys: ") + spoil.name, {"index_keys"}, [&] { handle.flush_compression(in); });
  }
  const std::vector<Spoil> masks = {{"f32", [](auto& t) { t.dtype = DType::f32; }},
                                    {"short", [](auto& t) { t.shape[0] = 12; }},
                                    {"long", [](auto& t) { t.shape[0] = 14; }},
                                    {"matrix", [](auto& t) { t.ndim = 2, t.shape[1] = 1, t.strides[1] = 1; }},
                                    {"strided", [](auto& t) { t.strides[0] = 2; }}};
  for (const Spoil& spoil : masks) {
    FlushInputs in = good();
    spoil.change(in.valid);
    expect_refused(std::string("valid: ") + spoil.name, {"valid"}, [&] { handle.flush_compression(in); });
  }
  expect_refused("a layer without entries", {"layer 0", "SWA"}, [&] { s_.cache.acquire(0).flush_compression(good()); });
}

TEST_F(BadTensor, Gathers) {
  std::vector<float> out(3 * 60 * 80 + 13 * 8 * 80, 5.0f);
  const std::vector<float> untouched = out;
  std::vector<std::int32_t> numbers(13 * 8 * 2, -3), first(13, -3);
  const std::vector<std::int32_t> untouched_numbers = numbers;
  std::vector<std::uint8_t> valid(13 * 8, 7);
  LayerCacheHandle csa = s_.cache.acquire(1), hca = s_.cache.acquire(2), swa = s_.cache.acquire(0);
  const TensorView lens(numbers.data(), {3}), starts(first.data(), {3});
  const auto outputs = [&](std::int64_t items, std::int64_t rows, std::int64_t width) {
    std::vector<std::pair<std::string, TensorView>> bad;
    const TensorView good(out.data(), {items, rows, width});
    const auto add = [&](const char* name, auto change) {
      TensorView t = good;
      change(t);
      bad.emplace_back(name, t);
    };
    add("missing", [](auto& t) { t = {}; });
    add("i32", [](auto& t) { t.dtype = DType::i32; });
    add("flat", [](auto& t) { t.ndim = 2; });
    add("an item more", [](auto& t) { t.shape[0] += 1; });
    add("an item less", [](auto& t) { t.shape[0] -= 1; });
    add("a channel less", [](auto& t) { t.shape[2] -= 1; });
    add("a row less", [](auto& t) { t.shape[1] -= 1, t.strides[0] -= t.shape[2]; });
    add("negative rows", [](auto& t) { t.shape[1] = -1; });
    add("rows apart", [](auto& t) { t.strides[1] += 1; });
    add("items apart", [](auto& t) { t.strides[0] += 1; });
    add("channels apart", [](auto& t) { t.strides[2] = 2; });
    return bad;
  };
  std::vector<std::pair<std::string, TensorView>> bad_lens;
  bad_lens.emplace_back("missing", TensorView{});
  bad_lens.emplace_back("f32", TensorView(numbers.data(), DType::f32, {3}));
  bad_lens.emplace_back("short", TensorView(numbers.data(), {2}));
  bad_lens.emplace_back("matrix", TensorView(numbers.data(), {3, 1}));
  TensorView apart(numbers.data(), {3});
  apart.strides[0] = 2;
  bad_lens.emplace_back("apart", apart);

  // After the step a has 25 tokens: 6 CSA and 3 HCA entries; b's window needs 7 + 9 rows, a's 7 + 3.
  for (const auto& [name, t] : outputs(3, 6, 80))
    expect_refused("all entries, out " + name, {"out"}, [&, v = t] { csa.gather_all_compressed_kv(v, lens); });
  for (const auto& [name, t] : outputs(3, 3, 80))
    expect_refused("HCA entries, out " + name, {"out"}, [&, v = t] { hca.gather_all_compressed_kv(v, lens); });
  for (const auto& [name, t] : outputs(3, 6, 32))
    expect_refused("all keys, out " + name, {"out"}, [&, v = t] { csa.gather_all_index_keys(v, lens); });
  for (const auto& [name, t] : outputs(3, 16, 80))
    expect_refused("window, out " + name, {"out"}, [&, v = t] { swa.gather_swa_kv(v, lens, starts); });
  const TensorView indices(numbers.data() + 13, {13, 5});
  for (const auto& [name, t] : outputs(13, 5, 80))
    expect_refused("chosen, out " + name, {"out"}, [&, v = t] { csa.gather_compressed_kv(indices, v); });
  for (const auto& [name, t] : bad_lens) {
    expect_refused("all entries, lens " + name, {"lens"}, [&, v = t] {
      csa.gather_all_compressed_kv(TensorView(out.data(), {3, 6, 80}), v);
    });
    expect_refused("all keys, lens " + name, {"lens"}, [&, v = t] {
      csa.gather_all_index_keys(TensorView(out.data(), {3, 6, 32}), v);
    });
    expect_refused("window, lens " + name, {"lens"}, [&, v = t] {
      swa.gather_swa_kv(TensorView(out.data(), {3, 16, 80}), v, starts);
    });
    expect_refused("window, first " + name, {"first"}, [&, v = t] {
      swa.gather_swa_kv(TensorView(out.data(), {3, 16, 80}), lens, v);
    });
  }
  const TensorView chosen_out(out.data(), {13, 5, 80});
  const auto bad_indices = [&](const char* name, auto change) {
    TensorView t = indices;
    change(t);
    expect_refused(std::string("indices ") + name, {"indices"}, [&] { csa.gather_compressed_kv(t, chosen_out); });
  };
  bad_indices("missing", [](auto& t) { t = {}; });
  bad_indices("f32", [](auto& t) { t.dtype = DType::f32; });
  bad_indices("flat", [](auto& t) { t.ndim = 1; });
  bad_indices("of 12 tokens", [](auto& t) { t.shape[0] = 12; });
  bad_indices("apart", [](auto& t) { t.strides[1] = 2; });
  bad_indices("one more than out", [](auto& t) { t.shape[1] = 6, t.strides[0] = 6; });
  for (const TensorView& mask :
       {TensorView(valid.data(), DType::u8, {13, 4}), TensorView(valid.data(), DType::u8, {12, 5}),
        TensorView(valid.data(), DType::u8, {65}), TensorView(valid.data(), DType::bf16, {13, 5})})
    expect_refused("valid", {"valid"}, [&] { csa.gather_compressed_kv(indices, chosen_out, mask); });

  expect_refused("no entries", {"layer 0", "SWA"}, [&] {
    swa.gather_all_compressed_kv(TensorView(out.data(), {3, 6, 80}), lens);
  });
  expect_refused("no entries", {"layer 0", "SWA"}, [&] { swa.gather_compressed_kv(indices, chosen_out); });
  expect_refused("no keys", {"layer 2", "HCA"}, [&] {
    hca.gather_all_index_keys(TensorView(out.data(), {3, 6, 32}), lens);
  });
  EXPECT_EQ(out, untouched) << "outputs are not written either";
  EXPECT_EQ(numbers, untouched_numbers);
}

TEST_F(BadTensor, Reads) {
  std::vector<float> q(13 * 200 * 80), weights(13 * 200, 1.0f), out(13 * 200 * 80, 5.0f);
  std::vector<std::int32_t> indices(13 * 3000, -3);
  std::vector<std::uint8_t> bytes(13 * 8 * 40);
  const std::vector<float> untouched = out;
  const std::vector<std::int32_t> untouched_indices = indices;
  LayerCacheHandle csa = s_.cache.acquire(1), hca = s_.cache.acquire(2), swa = s_.cache.acquire(0);
  const IndexInputs good{{q.data(), {13, 2, 32}}, {}, {weights.data(), {13, 2}}};
  const TensorView top(indices.data(), {13, 4}), scores(out.data(), {13, 6});

  for (const Spoil& spoil : spoiled_inputs()) {
    if (std::string(spoil.name) == "u8" || std::string(spoil.name) == "rows that overlap") continue;
    IndexInputs in = good;
    spoil.change(in.q);
    if (in.q.shape[1] != 2) in.weights = TensorView(weights.data(), {13, 2});  // q and weights disagree
    expect_refused(std::string("index q: ") + spoil.name, {}, [&] { csa.index_topk(in, top); });
    in = good;
    spoil.change(in.weights);
    expect_refused(std::string("weights: ") + spoil.name, {"weights"}, [&] { csa.index_topk(in, top); });
  }
  const auto bad_query = [&](const char* name, TensorView query, TensorView scale, std::int64_t heads) {
    const IndexInputs in{query, scale, TensorView(weights.data(), {13, heads})};
    expect_refused(name, {"q"}, [&] { csa.index_topk(in, top); });
  };
  bad_query("65 heads", {q.data(), {13, 65, 32}}, {}, 65);
  bad_query("encoded without scales", {bytes.data(), DType::u8, {13, 2, 16}}, {}, 2);
  bad_query("encoded, too narrow", {bytes.data(), DType::u8, {13, 2, 15}}, {bytes.data(), DType::u8, {13, 2, 1}}, 2);
  bad_query("scales of other heads", {bytes.data(), DType::u8, {13, 2, 16}}, {bytes.data(), DType::u8, {13, 3, 1}}, 2);
  IndexInputs narrow_weights = good;
  narrow_weights.weights.dtype = DType::bf16;
  expect_refused("bf16 weights", {"weights", "f32"}, [&] { csa.index_topk(narrow_weights, top); });
  for (const TensorView& bad : {TensorView{}, TensorView(indices.data(), {13, 0}),
                                TensorView(indices.data(), {13, 2049}), TensorView(indices.data(), {12, 4}),
                                TensorView(indices.data(), DType::f32, {13, 4}), TensorView(indices.data(), {52})}) {
    expect_refused("indices", {"indices"}, [&] { csa.index_topk(good, bad); });
    expect_refused("indices", {"indices"}, [&] { csa.select_topk(scores, bad); });
    if (!bad.empty()) expect_refused("slots", {"slots"}, [&] { csa.index_topk(good, top, bad); });
  }
  for (const TensorView& bad : {TensorView{}, TensorView(out.data(), {13, 5}), TensorView(out.data(), {12, 6}),
                                TensorView(out.data(), DType::bf16, {13, 6}), TensorView(out.data(), {78})}) {
    expect_refused("scores", {"scores"}, [&] { csa.index_scores(good, bad); });
    expect_refused("scores", {"scores"}, [&] { csa.select_topk(bad, top); });
  }
  expect_refused("no keys", {"layer 2", "HCA"}, [&] { hca.index_topk(good, top); });
  expect_refused("no keys", {"layer 0", "SWA"}, [&] { swa.index_scores(good, scores); });

  AttendInputs attend;
  attend.q = TensorView(q.data(), {13, 3, 80});
  const TensorView result(out.data(), {13, 3, 80});
  const auto bad_attend = [&](const char* name, const char* word, auto change) {
    AttendInputs in = attend;
    TensorView to = result, lse;
    change(in, to, lse);
    expect_refused(name, {word}, [&] { csa.attend(in, to, lse); });
  };
  bad_attend("no q", "q", [](auto& in, auto&, auto&) { in.q = {}; });
  bad_attend("u8 q", "q", [](auto& in, auto&, auto&) { in.q.dtype = DType::u8; });
  bad_attend("flat q", "q", [](auto& in, auto&, auto&) { in.q.ndim = 2; });
  bad_attend("129 heads", "q", [](auto& in, auto&, auto&) { in.q.shape[1] = 129; });
  bad_attend("no heads", "q", [](auto& in, auto&, auto&) { in.q.shape[1] = 0; });
  bad_attend("strided heads", "q", [](auto& in, auto&, auto&) { in.q.strides[1] = 160; });
  bad_attend("too few tokens", "q", [](auto& in, auto&, auto&) { in.q.shape[0] = 12; });
  bad_attend("short sink", "sink", [&](auto& in, auto&, auto&) { in.sink = TensorView(weights.data(), {2}); });
  bad_attend("i32 sink", "sink", [&](auto& in, auto&, auto&) { in.sink = TensorView(indices.data(), {3}); });
  bad_attend("topk of 12", "topk", [&](auto& in, auto&, auto&) { in.topk = TensorView(indices.data(), {12, 4}); });
  bad_attend("f32 topk", "topk", [&](auto& in, auto&, auto&) { in.topk = TensorView(weights.data(), {13, 4}); });
  bad_attend("no out", "out", [](auto&, auto& to, auto&) { to = {}; });
  bad_attend("out of 2 heads", "out", [&](auto&, auto& to, auto&) { to = TensorView(out.data(), {13, 2, 80}); });
  bad_attend("i32 out", "out", [](auto&, auto& to, auto&) { to.dtype = DType::i32; });
  bad_attend("lse of 2 heads", "lse", [&](auto&, auto&, auto& lse) { lse = TensorView(out.data(), {13, 2}); });
  attend.topk = TensorView(indices.data(), {13, 4});
  expect_refused("a window only", {"layer 0", "SWA"}, [&] { swa.attend(attend, result); });
  EXPECT_EQ(out, untouched) << "outputs are not written either";
  EXPECT_EQ(indices, untouched_indices);
}

// --- constants

TEST(BadWeights, EachTensorIsCheckedAndOldOnesStay) {
  SmallCache s;
  const RequestId r = s.request(1, 9);
  std::vector<float> large(4096, 3.0f);
  ConstTensorView LayerWeights::*const fields[] = {&LayerWeights::position_bias, &LayerWeights::norm_weight,
                                                   &LayerWeights::index_position_bias,
                                                   &LayerWeights::index_norm_weight};
  const char* names[] = {"position_bias", "norm_weight", "index_position_bias", "index_norm_weight"};
  const std::vector<Spoil> spoils = {
      {"missing", [](auto& t) { t = {}; }},
      {"bf16", [](auto& t) { t.dtype = DType::bf16; }},
      {"larger", [](auto& t) { t.shape[0] += 1; }},
      {"smaller", [](auto& t) { t.shape[t.ndim - 1] -= 1; }},
      {"one dimension more", [](auto& t) { t.shape[t.ndim] = t.strides[t.ndim] = 1, t.ndim += 1; }},
      {"apart", [](auto& t) { t.strides[t.ndim - 1] = 2; }}};
  for (int layer : {1, 2})
    for (int i = 0; i < (layer == 1 ? 4 : 2); ++i)
      for (const Spoil& spoil : spoils) {
        SCOPED_TRACE(std::string(names[i]) + " " + spoil.name);
        LayerWeights w = s.weights[static_cast<std::size_t>(layer)]->views;
        for (ConstTensorView LayerWeights::*other : fields)
          (w.*other).data = (w.*other).data == nullptr ? nullptr : large.data();  // none of these may be taken
        spoil.change(w.*fields[i]);
        expect_error(ErrorCode::bad_argument, {"layer " + std::to_string(layer), names[i]},
                     [&] { s.cache.bind_weights(layer, w); });
      }
  expect_error(ErrorCode::bad_argument, {"layer 0", "SWA"}, [&] { s.cache.bind_weights(0, s.weights[1]->views); });
  for (int bad : {-1, 4, 99})
    expect_error(ErrorCode::bad_argument, {std::to_string(bad)},
                 [&] { s.cache.bind_weights(bad, s.weights[1]->views); });
  s.run({{r, 1, 20}});
  small::CpuCache alone;
  small::expect_same_bytes(s.cache, r, alone.cache, alone.request(1, 29));
}

TEST(BadWeights, AppendNeedsThem) {
  SmallCache s(small::options(), small::config(), false);
  const RequestId r = s.admit();
  const Step step = s.prepare({{r, 1, 5}});
  const Everything before = everything(s, {r});
  for (int layer : {1, 2}) {
    Inputs in = s.inputs(s.cache.schema().layer(layer));
    expect_error(ErrorCode::bad_state, {"layer " + std::to_string(layer), "bind_weights"},
                 [&] { s.cache.acquire(layer).append(in.views()); });
    EXPECT_EQ(everything(s, {r}), before);
  }
  std::vector<Inputs> in = {s.inputs(s.cache.schema().layer(0))};
  s.append_inputs({&s.cache.schema().layer(0)}, in);
  s.cache.abort(step);
}

TEST(BadRopeTable, IsCheckedAndTheOldOneStays) {
  SmallCache s;
  const RequestId r = s.admit();
  std::vector<float> zeros(200 * 8);
  const TensorView good(zeros.data(), {96, 8});
  TensorView apart = good;
  apart.strides[0] = 9;
  for (const TensorView& bad :
       {TensorView{}, TensorView(zeros.data(), {95, 8}), TensorView(zeros.data(), {96, 7}),
        TensorView(zeros.data(), {96, 16}), TensorView(zeros.data(), {96 * 8}),
        TensorView(zeros.data(), DType::bf16, {96, 8}), TensorView(zeros.data(), {97, 8}), apart}) {
    expect_error(ErrorCode::bad_argument, {"rope"}, [&] { s.cache.bind_rope_table(bad, good); });
    expect_error(ErrorCode::bad_argument, {"rope"}, [&] { s.cache.bind_rope_table(good, bad); });
  }
  s.run({{r, 1, 20}});
  small::CpuCache alone;
  small::expect_same_bytes(s.cache, r, alone.cache, alone.request(1, 20));
  const Step step = s.prepare({{r, 1, 1}});
  expect_error(ErrorCode::bad_state, {}, [&] { s.cache.bind_rope_table(good, good); });
  s.cache.abort(step);
}

TEST(BadRopeTable, TheEnginesOwnIsUsed) {
  small::CpuCache ours;
  SmallCache theirs;
  RopeTable table = build_rope_table(small::config().rope_compress, 16, 0, 96);
  kv4::test::Twins tables(theirs.backend);
  theirs.cache.bind_rope_table(tables.put(TensorView(table.cos.data(), {96, 8})),
                               tables.put(TensorView(table.sin.data(), {96, 8})));
  tables.send();
  const RequestId a = ours.request(1, 50);
  small::expect_same_bytes(ours.cache, a, theirs.cache, theirs.request(1, 50));
  for (float& v : table.sin) v = -v;
  tables.send();
  EXPECT_NE(ours.cache.export_blocks(a), theirs.cache.export_blocks(theirs.request(1, 50)))
      << "read at each append, not copied";
}

TEST(BadBackend, NullOrWithoutThreads) {
  expect_error(ErrorCode::bad_argument, {"backend"},
               [] { KVCacheManager(small::config(), small::options(), nullptr); });
  for (int bad : {0, -1, 1025})
    expect_error(ErrorCode::bad_argument, {std::to_string(bad)}, [&] { make_cpu_backend(bad); });
}

}  // namespace
