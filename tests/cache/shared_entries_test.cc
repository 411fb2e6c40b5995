// V4.1's reads and writes against the same computed here: keys by their definition, lists and candidates by an exact
// sort, drafts in double from the stored rows; lists, candidates and outputs in any split; refused calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "base/group.h"
#include "ops/compress_row.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

constexpr std::int64_t kTop = 4, kIndexHeads = 20, kHeads = 3;

class SharedEntries : public testing::Test {
 protected:
  void SetUp() override {
    if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  }
  static CacheOptions options() {
    CacheOptions o = options_for(shared_format_cases()[0]);
    o.max_context = 200;
    o.block_tokens = 16;
    o.max_rewind_tokens = 5;
    o.draft_layers = 2;
    o.index_tile_tokens = 7;
    return o;
  }
  Model model_{shared_tiny_config()};
};

// The queries of a token depend on its position only, so that any split asks the same.
std::vector<float> queries(std::int64_t first, std::int64_t count, std::int64_t width, std::uint64_t salt) {
  std::vector<float> out(static_cast<std::size_t>(count * width));
  for (std::int64_t t = 0; t < count; ++t)
    fill_random(mix(salt) ^ static_cast<std::uint64_t>(first + t), 2.0f, out.data() + t * width,
                static_cast<std::size_t>(width));
  return out;
}

// What a layer gave for one token.
struct Read {
  std::vector<float> scores;  // of a ranker
  std::vector<std::int32_t> list, slots, candidates;
  std::vector<float> attention;
  bool operator==(const Read&) const = default;
};
using TokenReads = std::vector<Read>;  // [layers]

// One step with every read of every backbone layer; its tokens' reads are appended. by_scores: select_topk of given
// scores instead of index_topk.
void read_step(Driver& d, RequestId request, std::int32_t count, bool by_scores, std::vector<TokenReads>& out) {
  const std::int64_t first = d.cache.length(request);
  const Step step = d.prepare({{request, 3, count}}).value();
  d.append(step);
  const ModelConfig& config = d.cache.schema().config;
  std::vector<TokenReads> reads(static_cast<std::size_t>(count),
                                TokenReads(static_cast<std::size_t>(config.num_layers)));
  std::vector<std::int32_t> list;  // of the last ranker
  for (int layer = 0; layer < config.num_layers; ++layer) {
    LayerCacheHandle handle = d.cache.acquire(layer);
    const LayerSpec& spec = handle.schema().spec;
    Twins twins(d.backend);
    const auto salt = static_cast<std::uint64_t>(layer);
    const std::vector<float> q = queries(first, count, kHeads * config.head_dim, salt + 50),
                             index_q = queries(first, count, kIndexHeads * config.index_dim, salt + 70),
                             weights = queries(first, count, kIndexHeads, salt + 90);
    const bool ranks = spec.rows.size() > 1;
    const std::int64_t entries = spec.rows.empty() ? 1 : (first + count) / spec.rows[0].ratio + 1;
    std::vector<float> scores(static_cast<std::size_t>(count * entries)),
        attention(static_cast<std::size_t>(count * kHeads * config.head_dim));
    std::vector<std::int32_t> own(static_cast<std::size_t>(count * kTop), -7), slots(own.size(), -7);
    if (ranks) {
      IndexInputs inputs;
      inputs.q = twins.put({index_q.data(), {count, kIndexHeads, config.index_dim}});
      inputs.weights = twins.put({weights.data(), {count, kIndexHeads}});
      const TensorView scores_view = twins.put_output({scores.data(), {count, entries}}),
                       own_view = twins.put_output({own.data(), {count, kTop}}),
                       slots_view = twins.put_output({slots.data(), {count, kTop}});
      twins.send();
      if (by_scores) {
        handle.index_scores(inputs, scores_view);
        handle.select_topk(scores_view, own_view, slots_view);
      } else {
        handle.index_topk(inputs, own_view, slots_view);
        handle.index_scores(inputs, scores_view);
      }
      twins.fetch();
      list = own;
    }
    twins.clear();
    AttendInputs inputs;
    inputs.q = twins.put({q.data(), {count, kHeads, config.head_dim}});
    if (spec.ranker >= 0) inputs.topk = twins.put(ConstTensorView(list.data(), {count, kTop}));
    const TensorView out_view = twins.put_output({attention.data(), {count, kHeads, config.head_dim}});
    twins.send();
    handle.attend(inputs, out_view);
    twins.fetch();
    for (std::int32_t t = 0; t < count; ++t) {
      Read& read = reads[static_cast<std::size_t>(t)][static_cast<std::size_t>(layer)];
      const auto part = [t](const auto& all, std::int64_t width) {
        return std::vector(all.begin() + t * width, all.begin() + (t + 1) * width);
      };
      read.attention = part(attention, kHeads * config.head_dim);
      if (!ranks) continue;
      read.scores = part(scores, entries);
      read.scores.resize(static_cast<std::size_t>((first + t + 1) / spec.rows[0].ratio));
      read.list = part(own, kTop);
      std::sort(read.list.begin(), read.list.end());
      if (spec.candidate_source < 0) continue;
      const CandidateView view = handle.read_candidate_view();
      const std::vector<std::int32_t> counts = read_array(*d.backend, view.counts, count),
                                      blocks = read_array(*d.backend, view.blocks, count * view.stride);
      read.candidates.assign(blocks.begin() + t * view.stride,
                             blocks.begin() + t * view.stride + counts[static_cast<std::size_t>(t)]);
    }
  }
  d.cache.commit(step);
  for (TokenReads& r : reads) out.push_back(std::move(r));
}

// Best first; of equal scores the smaller index.
std::vector<std::int32_t> best(const std::vector<float>& scores, std::size_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(std::min(order.size(), k));
  return order;
}

// Lists and candidates by their definition, from the scores before any mask.
void check_selection(const ModelConfig& config, const TokenReads& token, const std::vector<LayerSpec>& specs) {
  const auto size = static_cast<std::size_t>(config.sharing.candidate_block_size),
             most = static_cast<std::size_t>(config.sharing.candidate_topk_blocks);
  std::vector<std::int32_t> kept;
  for (std::size_t layer = 0; layer < specs.size(); ++layer) {
    const Read& read = token[layer];
    if (specs[layer].rows.size() < 2) continue;
    std::vector<float> scores = read.scores;
    const bool source = specs[layer].candidate_source == specs[layer].layer;
    if (source) {
      std::vector<float> blocks;
      for (std::size_t j = 0; j < scores.size(); j += size)
        blocks.push_back(*std::max_element(scores.data() + j, scores.data() + std::min(j + size, scores.size())));
      if (!blocks.empty()) blocks.back() = INFINITY;
      kept = best(blocks, most);
      std::sort(kept.begin(), kept.end());
    }
    const bool masked = specs[layer].candidate_source >= 0 && !source;
    std::size_t inside = scores.size();
    if (masked) {
      inside = 0;
      for (std::size_t j = 0; j < scores.size(); ++j) {
        const bool is_kept = std::binary_search(kept.begin(), kept.end(), static_cast<std::int32_t>(j / size));
        ASSERT_EQ(scores[j] == -INFINITY, !is_kept) << "layer " << layer << " entry " << j;
        inside += is_kept;
      }
    }
    if (specs[layer].candidate_source >= 0) {
      ASSERT_EQ(read.candidates, kept) << "layer " << layer;
    }
    std::vector<std::int32_t> want = best(scores, std::min<std::size_t>(kTop, inside));
    want.resize(kTop, -1);
    std::sort(want.begin(), want.end());
    ASSERT_EQ(read.list, want) << "layer " << layer;
  }
}

TEST_F(SharedEntries, ListsAndCandidatesByDefinitionInAnySplit) {
  Driver slow(model_, options(), cpu::make_cpu_backend_on(1, cpu::plain_row_kernels()));
  std::vector<TokenReads> want;
  const RequestId one = slow.admit();
  constexpr std::int32_t kTokens = 60;
  for (std::int32_t t = 0; t < kTokens; ++t) read_step(slow, one, 1, false, want);
  const std::vector<LayerSpec> specs = layer_schedule(model_.config);
  std::int64_t masked_away = 0;
  for (std::int32_t t = 0; t < kTokens; ++t) {
    SCOPED_TRACE(t);
    check_selection(model_.config, want[static_cast<std::size_t>(t)], specs);
    for (const float score : want[static_cast<std::size_t>(t)][8].scores) masked_away += score == -INFINITY;
  }
  EXPECT_GT(masked_away, 100);  // the masks had something to do
  Random random(5);
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    Driver d(model_, options(), test_backend(1 + round % 3));
    const RequestId r = d.admit();
    std::vector<TokenReads> got;
    for (const std::int32_t chunk : random_chunks(random, kTokens, round == 0 ? kTokens : 20))
      read_step(d, r, chunk, round % 2 != 0, got);
    for (std::size_t t = 0; t < want.size(); ++t)
      for (std::size_t layer = 0; layer < specs.size(); ++layer) {
        SCOPED_TRACE("token " + std::to_string(t) + " layer " + std::to_string(layer));
        ASSERT_EQ(got[t][layer].list, want[t][layer].list);
        ASSERT_EQ(got[t][layer].scores, want[t][layer].scores);
        ASSERT_EQ(got[t][layer].candidates, want[t][layer].candidates);
        for (std::size_t c = 0; c < want[t][layer].attention.size(); ++c)
          ASSERT_NEAR(got[t][layer].attention[c], want[t][layer].attention[c], 1e-5);
      }
  }
}

// Many equal scores, at the cut and in blocks: the smaller index is taken, and the newest block is kept.
TEST_F(SharedEntries, EqualScoresTakeTheSmallerIndexAndTheNewestBlockIsKept) {
  Driver d(model_, options());
  const RequestId r = d.admit();
  d.feed(r, 3, {40});
  const Step step = d.prepare({{r, 3, 2}}).value();
  d.append(step);
  const std::vector<float> q(static_cast<std::size_t>(2 * model_.config.index_dim)), weights(2);  // all scores are 0
  const auto list_of = [&](int layer) {
    Twins twins(d.backend);
    std::vector<std::int32_t> list(2 * kTop, -7);
    IndexInputs inputs;
    inputs.q = twins.put({q.data(), {2, 1, model_.config.index_dim}});
    inputs.weights = twins.put({weights.data(), {2, 1}});
    const TensorView out = twins.put_output({list.data(), {2, kTop}});
    twins.send();
    d.cache.acquire(layer).index_topk(inputs, out);
    twins.fetch();
    std::sort(list.begin(), list.begin() + kTop);
    std::sort(list.begin() + kTop, list.end());
    return list;
  };
  EXPECT_EQ(list_of(6), (std::vector<std::int32_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  // Blocks 0 and 1, and that of the newest entry, 40 or 41.
  const CandidateView view = d.cache.acquire(7).read_candidate_view();
  EXPECT_EQ(view.block_entries, 3);
  EXPECT_EQ(view.num_tokens, 2);
  EXPECT_EQ(read_array(*d.backend, view.counts, 2), (std::vector<std::int32_t>{3, 3}));
  EXPECT_EQ(read_array(*d.backend, view.blocks, 6), (std::vector<std::int32_t>{0, 1, 13, 0, 1, 13}));
  EXPECT_EQ(list_of(7), (std::vector<std::int32_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  d.cache.abort(step);
}

// Keys by the bound weight, or latents out and keys in: equal bytes; rows of tokens that complete no entry stay.
TEST_F(SharedEntries, KeysFromLatentsOutsideAreTheSame) {
  Driver inside(model_, options()), outside(model_, options());
  Model unbound(shared_tiny_config());
  std::vector<std::unique_ptr<Twins>> kept;
  for (const LayerCacheSchema& layer : outside.cache.schema().layers) {
    if (layer.pages.empty()) continue;
    Twins& twins = *kept.emplace_back(std::make_unique<Twins>(outside.backend));
    LayerWeights weights = unbound.layers[static_cast<std::size_t>(layer.spec.layer)].views;
    weights.index_key_weight = {};
    for (ConstTensorView* t : {&weights.norm_weight, &weights.index_norm_weight, &weights.raw_norm_weight})
      *t = twins.put(*t);
    twins.send();
    outside.cache.bind_weights(layer.spec.layer, weights);
  }
  const RequestId a = inside.admit(), b = outside.admit();
  const std::int64_t width = model_.config.head_dim, key_width = model_.config.index_dim;
  for (const std::int32_t count : {1, 3, 17, 2, 1, 1, 30}) {
    inside.run({{a, 9, count}});
    const std::int64_t first = outside.cache.length(b);
    const Step step = outside.prepare({{b, 9, count}}).value();
    for (const LayerCacheSchema& layer : outside.cache.schema().layers) {
      if (layer.spec.group != 0) continue;
      if (layer.pages.empty()) {
        outside.append_layer(step, layer);
        continue;
      }
      const int ratio = layer.pages[0].kind.ratio;
      LayerInputs in = outside.inputs_of(step, layer);
      Twins twins(outside.backend);
      AppendInputs placed = in.views;
      for (ConstTensorView* t : {&placed.raw_kv, &placed.kv, &placed.gate}) *t = twins.put(*t);
      std::vector<std::uint16_t> latents(static_cast<std::size_t>(count * width), 0x1234);
      const TensorView out = twins.put_output({latents.data(), DType::bf16, {count, width}});
      twins.send();
      LayerCacheHandle handle = outside.cache.acquire(layer.spec.layer);
      handle.append(placed, out);
      twins.fetch();
      std::vector<float> keys(static_cast<std::size_t>(count * key_width), NAN);
      for (std::int64_t t = 0; t < count; ++t) {
        const auto row = latents.begin() + t * width;
        if ((first + t + 1) % ratio != 0) {
          EXPECT_TRUE(std::all_of(row, row + width, [](std::uint16_t x) { return x == 0x1234; }));
          continue;
        }
        std::vector<float> latent;
        for (std::int64_t c = 0; c < width; ++c) latent.push_back(codec::bf16_value(row[c]));
        ops::project_latent(OneLane{}, static_cast<int>(width), latent.data(),
                            model_.layers[static_cast<std::size_t>(layer.spec.layer)].key_weight.data(),
                            static_cast<int>(key_width), keys.data() + t * key_width);
      }
      Twins again(outside.backend);
      const ConstTensorView placed_keys = again.put({keys.data(), {count, key_width}});
      again.send();
      handle.append_index_keys(placed_keys);
    }
    outside.cache.commit(step);
    expect_same(bytes_of(outside.cache, b), bytes_of(inside.cache, a), "after " + std::to_string(first + count));
  }
}

// Every query of a draft sees the last window of the stage and all rows of the draft; nothing is stored.
TEST_F(SharedEntries, DraftsSeeTheirWholeBlockAndAreNotStored) {
  Driver d(model_, options());
  const RequestId r = d.admit();
  const std::int64_t width = model_.config.head_dim, window = model_.config.window;
  const int stage = model_.config.num_layers;
  constexpr std::int64_t kBlock = 5;
  for (const std::int32_t more : {1, 4, 9, 20}) {
    d.feed(r, 3, {more});
    d.run({{r, 3, more}}, 1);
    const std::int64_t length = d.cache.length(r, 1), seen = std::min(length, window);
    const Bytes before = bytes_of(d.cache, r);
    // The stage's window, as a step of one token reads it.
    std::vector<float> ring(static_cast<std::size_t>(window * width));
    std::vector<std::int32_t> lens(1), firsts(1);
    {
      const Step peek = d.prepare({{r, 3, 1}}, 1).value();
      Twins twins(d.backend);
      std::vector<float> all(static_cast<std::size_t>((window + 1) * width));
      const TensorView to = twins.put_output({all.data(), {1, window + 1, width}}),
                       len = twins.put_output({lens.data(), {1}}), first = twins.put_output({firsts.data(), {1}});
      twins.send();
      d.cache.acquire(stage).gather_swa_kv(to, len, first);
      twins.fetch();
      d.cache.abort(peek);
      // A query at `length` sees one row less of the past than a draft does: window - 1.
      std::copy_n(all.begin(), static_cast<std::size_t>(std::min(length, window - 1) * width), ring.begin());
    }
    const Step step = d.prepare({{r, 3, kBlock}}, 1).value();
    const std::vector<float> rows = queries(length, kBlock, width, 1), q = queries(length, kBlock, kHeads * width, 2);
    std::vector<float> out(static_cast<std::size_t>(kBlock * kHeads * width)), lse(kBlock * kHeads);
    Twins twins(d.backend);
    DraftInputs inputs;
    inputs.raw_kv = twins.put({rows.data(), {kBlock, width}});
    inputs.attend.q = twins.put({q.data(), {kBlock, kHeads, width}});
    const TensorView out_view = twins.put_output({out.data(), {kBlock, kHeads, width}}),
                     lse_view = twins.put_output({lse.data(), {kBlock, kHeads}});
    twins.send();
    d.cache.acquire(stage).attend_draft(inputs, out_view, lse_view);
    twins.fetch();
    d.cache.abort(step);
    expect_same(bytes_of(d.cache, r), before, "after a draft");

    // The rows as stored: the oldest one from the image, the others as gathered; the draft's own through the codec.
    const RowSchema& stored = d.cache.schema().layers[static_cast<std::size_t>(stage)].window.row;
    std::vector<std::vector<float>> all;
    const std::int64_t gathered = std::min(length, window - 1);
    if (seen > gathered) {
      const auto decoded = [&] {  // windows of all layers before this stage's
        std::size_t at = 0;
        for (int layer = 0; layer < stage; ++layer)
          at += static_cast<std::size_t>(std::min(d.cache.length(r), window) * stored.bytes());
        std::vector<float> row(static_cast<std::size_t>(width));
        const auto* payload = reinterpret_cast<const std::uint8_t*>(before.image.bytes.data() + at);
        const auto* scale = payload + seen * stored.payload_bytes;
        codec::Fp8Tile32::decode(OneLane{}, {static_cast<int>(width), 0}, payload, scale, 1.0f, row.data());
        return row;
      };
      all.push_back(decoded());
    }
    for (std::int64_t i = 0; i < gathered; ++i)
      all.emplace_back(ring.begin() + i * width, ring.begin() + (i + 1) * width);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      std::vector<float> row(static_cast<std::size_t>(width));
      std::transform(rows.begin() + i * width, rows.begin() + (i + 1) * width, row.begin(), codec::round_bf16);
      std::vector<std::uint8_t> payload(static_cast<std::size_t>(stored.payload_bytes)),
          scale(static_cast<std::size_t>(stored.scale_bytes));
      const codec::RowShape shape{static_cast<int>(width), 0};
      codec::Fp8Tile32::encode(OneLane{}, shape, row.data(), payload.data(), scale.data(), 1.0f);
      codec::Fp8Tile32::decode(OneLane{}, shape, payload.data(), scale.data(), 1.0f, row.data());
      all.push_back(row);
    }
    ASSERT_EQ(std::ssize(all), seen + kBlock);
    for (std::int64_t t = 0; t < kBlock * kHeads; ++t) {
      std::vector<double> logits;
      for (const std::vector<float>& row : all) {
        double z = 0;
        for (std::int64_t c = 0; c < width; ++c)
          z += double{q[static_cast<std::size_t>(t * width + c)]} * row[static_cast<std::size_t>(c)];
        logits.push_back(z / std::sqrt(static_cast<double>(width)));
      }
      const double top = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (double& z : logits) sum += z = std::exp(z - top);
      ASSERT_NEAR(lse[static_cast<std::size_t>(t)], top + std::log(sum), 1e-4);
      for (std::int64_t c = 0; c < width; ++c) {
        double want = 0;
        for (std::size_t i = 0; i < all.size(); ++i) want += logits[i] / sum * all[i][static_cast<std::size_t>(c)];
        ASSERT_NEAR(out[static_cast<std::size_t>(t * width + c)], want, 1e-4) << "query " << t;
      }
    }
  }
}

TEST_F(SharedEntries, LastTokenIdsFollowRewindsForksAndImages) {
  Driver d(model_, options());
  const RequestId r = d.admit();
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(d.cache.last_token_ids(r, 3), (Ids{2, 2, 2}));
  const auto run = [&](RequestId request, Ids ids) {
    const StepItem item{request, static_cast<std::int32_t>(ids.size()), ids, -1};
    d.cache.commit(d.cache.prepare_forward({&item, 1}).value());
  };
  run(r, {11, 12});
  EXPECT_EQ(d.cache.last_token_ids(r, 3), (Ids{12, 11, 2}));
  Ids many;
  for (std::int32_t i = 0; i < 30; ++i) many.push_back(100 + i);
  run(r, many);
  EXPECT_EQ(d.cache.last_token_ids(r, 3), (Ids{129, 128, 127}));
  const RequestId child = d.cache.fork(r).value();
  d.cache.rewind(r, 29);
  EXPECT_EQ(d.cache.last_token_ids(r, 3), (Ids{126, 125, 124}));
  EXPECT_EQ(d.cache.last_token_ids(child, 3), (Ids{129, 128, 127}));
  run(child, {-1, 7});
  EXPECT_EQ(d.cache.last_token_ids(child, 4), (Ids{7, -1, -1, -1}));
  run(child, {8, 9, 10});
  EXPECT_EQ(d.cache.last_token_ids(child, 3), (Ids{10, 9, 8}));
  EXPECT_EQ(d.cache.last_token_ids(child, 0), Ids{});
  EXPECT_THROW(d.cache.last_token_ids(child, -1), Error);
  EXPECT_THROW(d.cache.last_token_ids(child, 1 << 20), Error);
}

// --- refused calls

template <class Call>
void expect_refused(Call call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "accepted; wanted: " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST_F(SharedEntries, WrongCallsAreRefusedAndChangeNothing) {
  Driver d(model_, options());
  const RequestId r = d.admit();
  d.feed(r, 3, {21});
  const Bytes before = bytes_of(d.cache, r);
  const std::int64_t width = model_.config.head_dim, key_width = model_.config.index_dim;
  const std::vector<float> floats(static_cast<std::size_t>(2 * 64 * width));
  std::vector<std::uint16_t> latents(static_cast<std::size_t>(2 * width));
  std::vector<std::int32_t> list(2 * kTop);
  const ConstTensorView rows(floats.data(), {2, width}), keys(floats.data(), {2, key_width}),
      q(floats.data(), {2, kHeads, width}), index_q(floats.data(), {2, 1, key_width}), weight(floats.data(), {2, 1});
  std::vector<float> results(floats.size());
  const TensorView out(results.data(), {2, kHeads, width}), choice(list.data(), {2, kTop});
  const Step step = d.prepare({{r, 3, 2}}).value();
  const auto append = [&](int layer, ConstTensorView kv, ConstTensorView gate, ConstTensorView index = {}) {
    AppendInputs inputs;
    inputs.raw_kv = rows;
    inputs.kv = kv;
    inputs.gate = gate;
    inputs.index_kv = index;
    d.cache.acquire(layer).append(inputs);
  };
  expect_refused([&] { append(3, rows, {}); }, "layer 3 reads the entries of layer 2; leave kv and gate empty");
  expect_refused([&] { append(1, rows, {}); }, "gate must be f32 or bf16 [2, 64]");
  expect_refused([&] { append(4, rows, rows); }, "layer 4 makes an entry of each token");
  expect_refused([&] { append(4, rows, {}, keys); }, "leave index_kv and index_gate empty");
  expect_refused([&] { append(1, keys, rows); }, "kv must be f32 or bf16 [2, 64]");
  AppendInputs inputs;
  inputs.raw_kv = rows;
  const TensorView latent_rows(latents.data(), DType::bf16, {2, width});
  expect_refused([&] { d.cache.acquire(3).append(inputs, latent_rows); }, "layer 2 owns those that it reads");
  expect_refused([&] { d.cache.acquire(0).append(inputs, latent_rows); }, "layer 0 owns no entries made from latents");
  inputs.kv = rows;
  expect_refused([&] { d.cache.acquire(4).append(inputs, TensorView(latents.data(), DType::bf16, {2, width - 1})); },
                 "latents must be bf16 [2, 64]");
  expect_refused([&] { d.cache.acquire(3).append_index_keys(keys); }, "layer 3 owns no entries");
  expect_refused([&] { d.cache.acquire(4).append_index_keys(rows); }, "index_keys must be f32 or bf16 [2, 32]");
  expect_refused([&] { d.cache.acquire(5).flush_compression({rows, keys, {}}); }, "layer 5 owns no entries");
  IndexInputs index{index_q, {}, weight};
  expect_refused([&] { d.cache.acquire(5).index_topk(index, choice); }, "it has no index keys to search");
  expect_refused([&] { d.cache.acquire(7).index_topk(index, choice); },
                 "layer 7 ranks within the candidates of layer 6, which has made no list in this step");
  expect_refused([&] { d.cache.acquire(6).read_candidate_view(); }, "has made no list in this step");
  expect_refused([&] { d.cache.acquire(4).read_candidate_view(); }, "layer 4 neither picks candidates");
  DraftInputs draft;
  draft.raw_kv = rows;
  draft.attend.q = q;
  expect_refused([&] { d.cache.acquire(0).attend_draft(draft, out); }, "layer 0 is no draft stage");
  d.cache.abort(step);
  const Step stage = d.prepare({{r, 3, 2}}, 1).value();
  draft.attend.topk = choice;
  expect_refused([&] { d.cache.acquire(model_.config.num_layers).attend_draft(draft, out); }, "leave topk empty");
  draft.attend.topk = {};
  draft.raw_kv = keys;
  expect_refused([&] { d.cache.acquire(model_.config.num_layers).attend_draft(draft, out); }, "raw_kv must be");
  d.cache.abort(stage);
  expect_same(bytes_of(d.cache, r), before, "after refused calls");

  LayerWeights weights = model_.layers[4].views;
  weights.position_bias = rows;
  expect_refused([&] { d.cache.bind_weights(4, weights); }, "layer 4: V4.1 has no position_bias");
  weights = model_.layers[4].views;
  weights.index_key_weight.dtype = DType::f32;
  expect_refused([&] { d.cache.bind_weights(4, weights); }, "index_key_weight must be a dense bf16 tensor [32, 64]");
  weights = model_.layers[4].views;
  weights.norm_weight = {};
  expect_refused([&] { d.cache.bind_weights(4, weights); }, "layer 4: norm_weight must be");
  weights = {};
  weights.raw_norm_weight = model_.layers[3].views.raw_norm_weight;
  weights.index_key_weight = model_.layers[4].views.index_key_weight;
  expect_refused([&] { d.cache.bind_weights(3, weights); }, "layer 3 takes no index_key_weight");
}

TEST_F(SharedEntries, AppendNeedsKeysOneWayOrTheOther) {
  const CacheOptions o = options();
  KVCacheManager cache(model_.config, o, make_cpu_backend());
  LayerWeights weights = model_.layers[4].views;
  weights.index_key_weight = {};
  const RequestId r = cache.admit().value();
  const std::vector<float> row(static_cast<std::size_t>(model_.config.head_dim));
  const std::int32_t id = 1;
  const StepItem item{r, 1, {&id, 1}, -1};
  AppendInputs inputs;
  inputs.raw_kv = inputs.kv = {row.data(), {1, model_.config.head_dim}};
  Step step = cache.prepare_forward({&item, 1}).value();
  expect_refused([&] { cache.acquire(4).append(inputs); }, "layer 4 has no weights");
  cache.abort(step);
  cache.bind_weights(4, weights);
  step = cache.prepare_forward({&item, 1}).value();
  expect_refused([&] { cache.acquire(4).append(inputs); }, "layer 4 needs its index keys: bind index_key_weight");
  cache.abort(step);
}

}  // namespace
}  // namespace kv4::test
