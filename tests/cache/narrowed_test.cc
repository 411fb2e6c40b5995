// Narrowed prefill of V4.1: entries and keys of all tokens, decoder rows of the last ones only. The inputs of these
// tests do not depend on windows, so blocks, lists and the state at the end are those of a whole prefill.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cache/prefix_options.h"
#include "cache/session_records.h"
#include "kv4/error.h"
#include "kv4/preempted_request.h"

namespace kv4::test {
namespace {

constexpr std::int64_t kTop = 4, kHeads = 3;

class Narrowed : public testing::TestWithParam<bool> {  // whether the last owner has window rows of all tokens
 protected:
  void SetUp() override {
    if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  }
  static CacheOptions options() {
    CacheOptions o = options_for(shared_format_cases()[0]);
    o.max_context = 200;
    o.block_tokens = 16;
    o.max_rewind_tokens = 3;
    return o;
  }
  Model model_{shared_tiny_config()};
};
INSTANTIATE_TEST_SUITE_P(LastOwnersWindow, Narrowed, testing::Bool(),
                         [](const auto& whole) { return whole.param ? "Whole" : "Short"; });

// The decoder's tokens of a step, as indices of the step's tokens.
std::vector<std::int64_t> decoder_tokens(const std::vector<Work>& work) {
  std::vector<std::int64_t> out;
  std::int64_t first = 0;
  for (const Work& w : work) {
    const bool narrow = w.request != kNoRequest && w.decoder_count > 0;
    for (std::int64_t i = narrow ? w.count - w.decoder_count : 0; i < w.count; ++i) out.push_back(first + i);
    first += w.count;
  }
  return out;
}

struct Reads {
  std::vector<float> attention;    // [decoder tokens, heads, width]
  std::vector<std::int32_t> list;  // [decoder tokens, k] of a ranker, ascending
  std::vector<float> window;       // gathered rows of each item
  std::vector<std::int32_t> first, lens;
};

// One step through all layers; what the last owner and the decoder read for the tokens `picked`.
std::vector<Reads> run_step(Driver& d, const std::vector<Work>& work, bool whole_window, bool keep,
                            const std::vector<std::int64_t>& picked) {
  const Step step = d.prepare(work).value();
  const ModelConfig& config = d.cache.schema().config;
  const bool narrowed = step.num_decoder_tokens != step.num_tokens;
  EXPECT_EQ(step.num_decoder_tokens, narrowed ? std::ssize(picked) : step.num_tokens);
  std::vector<Reads> out(static_cast<std::size_t>(config.num_layers));
  std::vector<std::int32_t> list;
  const std::int64_t width = config.head_dim, items = std::ssize(work);
  for (const LayerCacheSchema& layer : d.cache.schema().layers) {
    const int id = layer.spec.layer, last = config.last_owner();
    LayerInputs in = d.inputs_of(step, layer);
    std::vector<float> narrow;
    if (narrowed && (id > last || (id == last && !whole_window))) {
      for (const std::int64_t token : picked)
        narrow.insert(narrow.end(), in.wide[0].begin() + token * width, in.wide[0].begin() + (token + 1) * width);
      in.views.raw_kv = {narrow.data(), {std::ssize(picked), width}};
    }
    std::vector<LayerInputs> inputs;
    inputs.push_back(std::move(in));
    d.append_inputs({&layer}, inputs);
    if (id < last) continue;
    LayerCacheHandle handle = d.cache.acquire(id);
    Reads& reads = out[static_cast<std::size_t>(id)];
    const std::int64_t count = narrowed ? std::ssize(picked) : step.num_tokens;
    // Queries depend on the token of the step, so both caches ask the same.
    std::vector<float> q, index_q, weights;
    for (const std::int64_t token : picked) {
      std::vector<float> row(static_cast<std::size_t>(kHeads * width + 2 * config.index_dim + 2));
      fill_random(static_cast<std::uint64_t>(token * 100 + id), 2.0f, row.data(), row.size());
      q.insert(q.end(), row.begin(), row.begin() + kHeads * width);
      index_q.insert(index_q.end(), row.begin() + kHeads * width, row.end() - 2);
      weights.insert(weights.end(), row.end() - 2, row.end());
    }
    // A whole step has rows for all its tokens: those of other tokens are zero.
    const auto spread = [&](std::vector<float>& rows) {
      if (narrowed) return;
      const std::size_t size = rows.size() / picked.size();
      std::vector<float> all(size * static_cast<std::size_t>(step.num_tokens));
      for (std::size_t i = 0; i < picked.size(); ++i)
        std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(i * size), size,
                    all.begin() + picked[i] * static_cast<std::ptrdiff_t>(size));
      rows = all;
    };
    for (std::vector<float>* rows : {&q, &index_q, &weights}) spread(*rows);
    Twins twins(d.backend);
    if (layer.spec.rows.size() > 1) {
      list.assign(static_cast<std::size_t>(count * kTop), -7);
      const IndexInputs index{twins.put({index_q.data(), {count, 2, config.index_dim}}), {},
                              twins.put({weights.data(), {count, 2}})};
      const TensorView to = twins.put_output({list.data(), {count, kTop}});
      twins.send();
      handle.index_topk(index, to);
      twins.fetch();
      twins.clear();
    }
    std::vector<float> attention(static_cast<std::size_t>(count * kHeads * width));
    const std::int64_t room = config.window + step.num_tokens;
    reads.window.resize(static_cast<std::size_t>(items * room * width));
    reads.first.resize(static_cast<std::size_t>(items));
    reads.lens.resize(static_cast<std::size_t>(items));
    AttendInputs attend;
    attend.q = twins.put({q.data(), {count, kHeads, width}});
    attend.topk = twins.put(ConstTensorView(list.data(), {count, kTop}));
    const TensorView to = twins.put_output({attention.data(), {count, kHeads, width}}),
                     rows = twins.put_output({reads.window.data(), {items, room, width}}),
                     lens = twins.put_output({reads.lens.data(), {items}}),
                     first = twins.put_output({reads.first.data(), {items}});
    twins.send();
    handle.attend(attend, to);
    handle.gather_swa_kv(rows, lens, first);
    twins.fetch();
    const auto pick = [&](const auto& all, std::int64_t size) {
      if (narrowed) return std::vector(all.begin(), all.end());
      std::decay_t<decltype(std::vector(all.begin(), all.end()))> some;
      for (const std::int64_t token : picked)
        some.insert(some.end(), all.begin() + token * size, all.begin() + (token + 1) * size);
      return some;
    };
    reads.attention = pick(attention, kHeads * width);
    reads.list = pick(list, kTop);
    for (std::size_t t = 0; t < picked.size(); ++t)
      std::sort(reads.list.begin() + static_cast<std::ptrdiff_t>(t * kTop),
                reads.list.begin() + static_cast<std::ptrdiff_t>((t + 1) * kTop));
  }
  keep ? d.cache.commit(step) : d.cache.abort(step);
  return out;
}

std::vector<Reads> run_step(Driver& d, const std::vector<Work>& work, bool whole_window, bool keep = true) {
  return run_step(d, work, whole_window, keep, decoder_tokens(work));
}

TEST_P(Narrowed, EntriesAndStateAreThoseOfAWholePrefill) {
  const bool whole = GetParam();
  Driver d(model_, options(), test_backend(2)), reference(model_, options(), make_cpu_backend());
  const RequestId a = d.admit(), b = d.admit(), ra = reference.admit(), rb = reference.admit();
  const std::int64_t window = model_.config.window, width = model_.config.head_dim, row = kHeads * width;
  const std::vector<std::vector<Work>> steps = {
      {{a, 1, 40, 8}, {kNoRequest, 0, 2}, {b, 2, 7}},  // one of two is narrowed
      {{b, 2, 1}, {a, 1, 25, 16}},
      {{a, 1, 5, 5}, {b, 2, 21, 9}},  // all tokens of the first
      {{a, 1, 3}, {b, 2, 1}}};
  for (const std::vector<Work>& work : steps) {
    std::vector<Work> same = work;
    for (Work& w : same) {
      w.request = w.request == a ? ra : w.request == b ? rb : kNoRequest;
      w.decoder_count = 0;
    }
    std::vector<std::int64_t> begins;  // first position of the decoder's windows, by item
    for (const Work& w : work)
      begins.push_back(w.request == kNoRequest || w.decoder_count == 0 || w.decoder_count == w.count
                           ? -1
                           : d.cache.length(w.request) + w.count - w.decoder_count);
    std::vector<std::int64_t> lengths;
    for (const Work& w : work) lengths.push_back(w.request == kNoRequest ? 0 : d.cache.length(w.request));
    const std::vector<Reads> got = run_step(d, work, whole),
                             want = run_step(reference, same, whole, true, decoder_tokens(work));
    for (int layer = model_.config.last_owner(); layer < model_.config.num_layers; ++layer) {
      SCOPED_TRACE("layer " + std::to_string(layer));
      const Reads &mine = got[static_cast<std::size_t>(layer)], &all = want[static_cast<std::size_t>(layer)];
      ASSERT_EQ(mine.list, all.list);
      const bool cut = layer > model_.config.last_owner() || !whole;  // windows begin with the decoder's tokens
      std::size_t token = 0;
      for (std::size_t i = 0; i < work.size(); ++i) {
        const Work& w = work[i];
        const std::int64_t begin = cut ? begins[i] : -1;
        if (w.request != kNoRequest) {
          EXPECT_EQ(mine.first[i], begin >= 0 ? begin : std::max<std::int64_t>(0, lengths[i] - window + 1));
          EXPECT_EQ(mine.first[i] + mine.lens[i], lengths[i] + w.count);
        }
        const std::int64_t count = w.request != kNoRequest && w.decoder_count > 0 ? w.decoder_count : w.count;
        for (std::int64_t c = 0; c < count; ++c, ++token) {
          const std::int64_t position = lengths[i] + w.count - count + c;
          bool differs = false;
          for (std::int64_t k = 0; k < row; ++k) {
            const std::size_t at = token * static_cast<std::size_t>(row) + static_cast<std::size_t>(k);
            differs = differs || std::abs(mine.attention[at] - all.attention[at]) > 1e-5f;
          }
          // With a shorter window a query sees fewer rows; from a whole window on it sees the same.
          EXPECT_EQ(differs, begin >= 0 && position - window + 1 < begin) << "item " << i << " position " << position;
        }
      }
    }
    for (const auto& [mine, other] : {std::pair(a, ra), std::pair(b, rb)})
      expect_same(bytes_of(d.cache, mine), bytes_of(reference.cache, other), "after the step");
  }
}

// A narrowed query with a short window: its own row alone, and its list.
TEST_P(Narrowed, TheFirstQuerySeesItsOwnRowOnly) {
  const bool whole = GetParam();
  Driver d(model_, options());
  const RequestId r = d.admit();
  const std::vector<Reads> got = run_step(d, {{r, 1, 30, 8}}, whole);
  for (int layer = model_.config.last_owner(); layer < model_.config.num_layers; ++layer) {
    const Reads& reads = got[static_cast<std::size_t>(layer)];
    const bool cut = layer > model_.config.last_owner() || !whole;
    EXPECT_EQ(reads.first[0], cut ? 22 : 0) << layer;
    EXPECT_EQ(reads.lens[0], cut ? 8 : 30) << layer;
  }
}

TEST_P(Narrowed, AbortsLeaveNoTraceAndRewindsEndAtTheStep) {
  Driver d(model_, options()), clean(model_, options());
  const RequestId r = d.admit(), c = clean.admit();
  d.feed(r, 5, {21});
  clean.feed(c, 5, {21});
  run_step(d, {{r, 9, 30, 10}}, GetParam(), false);
  expect_same(bytes_of(d.cache, r), bytes_of(clean.cache, c), "aborted");
  EXPECT_EQ(d.cache.rewind_floor(r), clean.cache.rewind_floor(c));
  run_step(d, {{r, 5, 30, 10}}, GetParam());
  clean.feed(c, 5, {30});
  EXPECT_EQ(d.cache.rewind_floor(r), 51);
  EXPECT_THROW(d.cache.rewind(r, 50), Error);
  d.feed(r, 77, {3});
  d.cache.rewind(r, 51);
  d.feed(r, 5, {4, 1});
  clean.feed(c, 5, {5});
  expect_same(bytes_of(d.cache, r), bytes_of(clean.cache, c), "rewound to the step's end");
  const RequestId child = d.cache.fork(r).value();
  d.feed(child, 5, {9});
  clean.feed(c, 5, {9});
  expect_same(bytes_of(d.cache, child), bytes_of(clean.cache, c), "forked");
}

// Blocks are those of their tokens and are kept; the state is not: no snapshot, no session.
TEST_P(Narrowed, BlocksAreKeptAndTheStateIsNot) {
  CacheOptions o = prefix_options({.kind = SnapshotPolicy::Kind::full}, shared_format_cases()[0]);
  Driver d(model_, o);
  std::vector<std::int32_t> ids;
  for (std::int64_t p = 0; p < 100; ++p) ids.push_back(Driver::token_id(6, p));
  const RequestId r = d.cache.admit(Prompt{ids, 0, "", {}}).value().request;
  run_step(d, {{r, 6, 70, 8}}, GetParam());
  d.feed(r, 6, {30});
  PreemptedRequest aside(HostMemory(d.backend, preempted_bytes(d.cache, r)));
  preempt(d.cache, r, aside);
  const RequestId back = resume(d.cache, aside).value();
  d.feed(back, 6, {30});
  EXPECT_EQ(d.cache.prefix_statistics().blocks, 8);
  EXPECT_EQ(d.cache.prefix_statistics().snapshots, 0);
  try {
    save(d.cache, back);
    ADD_FAILURE() << "a session was made";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("has a narrowed prefill"), std::string::npos) << e.what();
  }
}

template <class Call>
void expect_refused(Call call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "accepted; wanted: " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(NarrowedRefusals, NameTheValueAndTheRange) {
  if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  const Model model(shared_tiny_config()), v4(tiny_config());
  CacheOptions o = options_for(shared_format_cases()[0]);
  o.draft_layers = 1;
  Driver d(model, o), old(v4, options_for(format_cases()[0]));
  const RequestId r = d.admit(), other = old.admit();
  expect_refused([&] { (void)old.prepare({{other, 1, 20, 8}}); }, "only steps of V4.1's backbone can be narrowed");
  expect_refused([&] { (void)d.prepare({{r, 1, 20, 8}}, 1); }, "only steps of V4.1's backbone can be narrowed");
  expect_refused([&] { (void)d.prepare({{r, 1, 20, 7}}); },
                 "item 0 has decoder_count 7 of 20 tokens; it must be from 8 to 20, or 0 for all");
  expect_refused([&] { (void)d.prepare({{r, 1, 20, 21}}); }, "it must be from 8 to 20");
  expect_refused([&] { (void)d.prepare({{r, 1, 20, -1}}); }, "it must be from 8 to 20");
  const Step step = d.prepare({{r, 1, 20, 8}}).value();
  const std::vector<float> floats(static_cast<std::size_t>(20 * model.config.head_dim));
  const auto append = [&](int layer, std::int64_t rows) {
    AppendInputs inputs;
    inputs.raw_kv = {floats.data(), {rows, model.config.head_dim}};
    d.cache.acquire(layer).append(inputs);
  };
  expect_refused([&] { append(5, 20); }, "raw_kv must be f32 or bf16 [8, 64]");
  expect_refused([&] { append(3, 8); }, "raw_kv must be f32 or bf16 [20, 64]");
  expect_refused([&] { append(4, 9); }, "raw_kv must be f32 or bf16 [20, 64]");
  expect_refused([&] { d.cache.acquire(5).read_swa_view(); }, "has no view of its window in a narrowed step");
  d.cache.abort(step);
  EXPECT_EQ(d.cache.length(r), 0);
}

}  // namespace
}  // namespace kv4::test
