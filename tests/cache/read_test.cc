// Index scores, top-k and attention against the same computed here: scores to the bit from the gathered keys, top-k
// sets by an exact sort, attention in double from the gathered rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/group.h"
#include "codec/naive_formats.h"
#include "ops/compress_row.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

constexpr float kPoison = 12345.0f;

// The step's tokens, padding included.
struct Token {
  std::int32_t item = 0;
  bool padded = false;
  std::int64_t position = 0;
};

// A cache with an open step whose tokens are known.
struct OpenStep {
  Driver& driver;
  Step step;
  std::vector<Work> work;
  std::vector<Token> tokens;
  std::vector<std::int64_t> ends;  // of the items

  OpenStep(Driver& d, std::vector<Work> work_in) : driver(d), work(std::move(work_in)) {
    for (std::size_t i = 0; i < work.size(); ++i) {
      const bool padded = work[i].request == kNoRequest;
      const std::int64_t start = padded ? 0 : d.cache.length(work[i].request);
      for (std::int32_t c = 0; c < work[i].count; ++c)
        tokens.push_back({static_cast<std::int32_t>(i), padded, start + c});
      ends.push_back(padded ? 0 : start + work[i].count);
    }
    step = d.prepare(work).value();
    d.append(step);
  }
  std::int64_t count() const { return step.num_tokens; }
  std::int64_t visible(const Token& t, std::int64_t ratio) const { return t.padded ? 0 : (t.position + 1) / ratio; }
  std::int64_t longest(std::int64_t ratio) const {
    return std::max<std::int64_t>(1, *std::max_element(ends.begin(), ends.end()) / ratio);
  }
};

// Gathered rows of every item.
struct Rows {
  std::int64_t width = 0, per_item = 0;
  std::vector<float> values;
  std::vector<std::int32_t> lens, first;
  const float* row(std::int64_t item, std::int64_t i) const { return values.data() + (item * per_item + i) * width; }
};

enum class Which { window, entries, keys };

Rows gather(const OpenStep& s, LayerCacheHandle handle, Which which) {
  Rows out;
  const std::int64_t items = s.step.num_items, window = handle.schema().window.rows;
  out.width = which == Which::keys ? handle.schema().pages[1].kind.width : handle.head_dim();
  out.per_item = which == Which::window ? s.count() + window : s.longest(handle.schema().spec.rows[0].ratio);
  out.values.resize(static_cast<std::size_t>(items * out.per_item * out.width));
  out.lens.resize(static_cast<std::size_t>(items));
  out.first.resize(static_cast<std::size_t>(items));
  Twins twins(s.driver.backend);
  const TensorView values = twins.put_output({out.values.data(), {items, out.per_item, out.width}});
  const TensorView lens = twins.put_output({out.lens.data(), {items}});
  const TensorView first = twins.put_output({out.first.data(), {items}});
  twins.send();
  if (which == Which::window) handle.gather_swa_kv(values, lens, first);
  if (which == Which::entries) handle.gather_all_compressed_kv(values, lens);
  if (which == Which::keys) handle.gather_all_index_keys(values, lens);
  twins.fetch();
  return out;
}

// --- index scores and top-k

struct Queries {
  std::int64_t heads = 0, width = 0;
  std::vector<float> q;                // [tokens, heads, width]
  std::vector<std::uint16_t> q16;      // the same rounded, in bf16
  std::vector<std::uint8_t> payloads;  // encoded as keys are
  std::vector<std::uint8_t> scales;
  std::vector<float> weights;  // [tokens, heads]
  std::vector<float> decoded;  // [tokens, heads, width] of the encoded ones
};

Queries make_queries(const OpenStep& s, LayerCacheHandle handle, std::int64_t heads, std::uint64_t seed) {
  const PageSchema& page = handle.schema().pages[1];
  const CacheOptions& options = s.driver.cache.schema().options;
  Queries out;
  out.heads = heads;
  out.width = page.kind.width;
  const std::size_t rows = static_cast<std::size_t>(s.count() * heads), width = static_cast<std::size_t>(out.width);
  out.q.resize(rows * width);
  out.weights.resize(rows);
  fill_random(seed, 2.0f, out.q.data(), out.q.size());
  fill_random(seed + 1, 1.0f, out.weights.data(), out.weights.size());
  Random random(seed);
  for (std::size_t i = 0; i < rows; ++i) {
    if (random.below(4) == 0)  // groups of very different size
      for (std::size_t c = 0; c < width; ++c)
        out.q[i * width + c] *= std::ldexp(1.0f, static_cast<int>(c / 32) * 9 - 12);
    std::vector<float> row;
    for (std::size_t c = 0; c < width; ++c) {
      const float x = naive::round_bf16(out.q[i * width + c]);
      out.q16.push_back(static_cast<std::uint16_t>(naive::bits_of(x) >> 16));
      row.push_back(x);
    }
    if (options.hadamard) ops::hadamard_row(OneLane{}, static_cast<int>(width), row.data());
    const naive::Row bytes =
        naive::encode(page.row.format, static_cast<int>(width), 0, row.data(), options.index_global_scale);
    const std::vector<float> values = naive::decode(page.row.format, static_cast<int>(width), 0, bytes.payload.data(),
                                                    bytes.scale.data(), options.index_global_scale);
    out.payloads.insert(out.payloads.end(), bytes.payload.begin(), bytes.payload.end());
    out.scales.insert(out.scales.end(), bytes.scale.begin(), bytes.scale.end());
    out.decoded.insert(out.decoded.end(), values.begin(), values.end());
  }
  return out;
}

// The error bound of a fast score: docs/formats.md, Index scores.
double error_bound(const Queries& q, std::size_t token, const float* key) {
  double size = 0;
  for (std::size_t h = 0; h < static_cast<std::size_t>(q.heads); ++h) {
    const std::size_t head = token * static_cast<std::size_t>(q.heads) + h;
    for (std::size_t c = 0; c < static_cast<std::size_t>(q.width); ++c)
      size += std::abs(double{q.weights[head]} * q.decoded[head * static_cast<std::size_t>(q.width) + c] * key[c]);
  }
  return 1e-3 * size + 0x1p-80;  // random numbers are no worst case
}

// docs/formats.md, Index scores.
float exact_score(const Queries& q, std::size_t token, Format format, const float* key) {
  float chains[4] = {};
  for (std::int64_t h = 0; h < q.heads; ++h) {
    const std::size_t head = token * static_cast<std::size_t>(q.heads) + static_cast<std::size_t>(h);
    const float* x = q.decoded.data() + head * static_cast<std::size_t>(q.width);
    float dot = 0;
    if (format == Format::mxfp4) {
      for (std::int64_t g = 0; g < q.width; g += 32) {
        double sum = 0;
        for (std::int64_t c = g; c < g + 32; ++c) sum += static_cast<double>(x[c]) * static_cast<double>(key[c]);
        dot += static_cast<float>(sum);
      }
    } else {
      for (std::int64_t c = 0; c < q.width; ++c) dot = std::fma(x[c], key[c], dot);
    }
    chains[h / 16] = std::fma(q.weights[head], dot > 0 ? dot : 0.0f, chains[h / 16]);
  }
  return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

enum class QueryType { f32, bf16, encoded };

IndexInputs put_queries(Queries& q, std::int64_t tokens, QueryType type, Twins& twins) {
  IndexInputs in;
  if (type == QueryType::f32) in.q = twins.put({q.q.data(), {tokens, q.heads, q.width}});
  if (type == QueryType::bf16) in.q = twins.put({q.q16.data(), DType::bf16, {tokens, q.heads, q.width}});
  if (type == QueryType::encoded) {
    const std::int64_t rows = tokens * q.heads;
    const std::int64_t payload = static_cast<std::int64_t>(q.payloads.size()) / rows;
    const std::int64_t scale = static_cast<std::int64_t>(q.scales.size()) / rows;
    in.q = twins.put({q.payloads.data(), DType::u8, {tokens, q.heads, payload}});
    if (scale > 0) in.q_scale = twins.put({q.scales.data(), DType::u8, {tokens, q.heads, scale}});
  }
  in.weights = twins.put({q.weights.data(), {tokens, q.heads}});
  return in;
}

// The k best in ascending order, then -1.
std::vector<std::int32_t> best(const float* scores, std::int64_t visible, std::int64_t k) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(visible));
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](std::int32_t j) {
    return std::isnan(scores[j]) ? -std::numeric_limits<double>::infinity() : static_cast<double>(scores[j]);
  };
  const auto is_nan = [&](std::int32_t j) { return std::isnan(scores[j]); };
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return rank(a) != rank(b) ? rank(a) > rank(b) : is_nan(a) < is_nan(b);
  });
  order.resize(static_cast<std::size_t>(std::min(visible, k)));
  std::sort(order.begin(), order.end());
  order.resize(static_cast<std::size_t>(k), -1);
  return order;
}

struct Choice {
  std::vector<std::int32_t> indices, slots;  // [tokens, k]
};

// Checks that `call`, which fills (indices, slots), selects the k best of `scores` [tokens, columns].
template <class Call>
void expect_best(const OpenStep& s, LayerCacheHandle handle, const std::vector<float>& scores, std::int64_t columns,
                 std::int64_t k, const std::string& what, Call&& call) {
  Choice got;
  got.indices.assign(static_cast<std::size_t>(s.count() * k), -7);
  got.slots = got.indices;
  {
    Twins twins(s.driver.backend);
    const TensorView indices = twins.put_output({got.indices.data(), {s.count(), k}});
    const TensorView slots = twins.put_output({got.slots.data(), {s.count(), k}});
    call(twins, indices, slots);
    twins.fetch();
  }
  HostViews host(s.driver.cache, s.driver.backend);
  const IndexerView view = host.view(handle.read_indexer_view());
  for (std::int64_t t = 0; t < s.count(); ++t) {
    const Token& token = s.tokens[static_cast<std::size_t>(t)];
    const auto begin = got.indices.begin() + t * k;
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int32_t j = begin[i], slot = got.slots[static_cast<std::size_t>(t * k + i)];
      std::int32_t want = -1;
      if (j >= 0) {
        const std::int32_t* table =
            view.block_table + std::int64_t{view.request_rows[token.item]} * view.blocks_per_request;
        want = table[j / view.rows_per_block] * view.rows_per_block + j % view.rows_per_block;
      }
      ASSERT_EQ(slot, want) << what << ": token " << t << " place " << i;
    }
    std::vector<std::int32_t> set(begin, begin + k);
    std::stable_partition(set.begin(), set.end(), [](std::int32_t j) { return j >= 0; });
    ASSERT_TRUE(std::equal(set.begin(), set.end(), begin)) << what << ": unused places come last";
    std::sort(set.begin(), std::find(set.begin(), set.end(), -1));
    ASSERT_EQ(set, best(scores.data() + t * columns, s.visible(token, handle.schema().spec.rows[1].ratio), k))
        << what << ": token " << t;
  }
}

// The top-k of fast scores, whatever they are here.
void check_fast_choice(const OpenStep& s, LayerCacheHandle handle, Queries& q, std::int64_t columns,
                       std::int64_t k) {
  std::vector<float> fast(static_cast<std::size_t>(s.count() * columns), kPoison);
  {
    Twins twins(s.driver.backend);
    const IndexInputs in = put_queries(q, s.count(), QueryType::f32, twins);
    const TensorView out = twins.put_output({fast.data(), {s.count(), columns}});
    twins.send();
    handle.index_scores(in, out, ScoreMode::fast);
    twins.fetch();
  }
  expect_best(s, handle, fast, columns, k, "fast index_topk " + std::to_string(k),
              [&](Twins& twins, const TensorView& indices, const TensorView& slots) {
                const IndexInputs in = put_queries(q, s.count(), QueryType::f32, twins);
                twins.send();
                handle.index_topk(in, indices, slots, ScoreMode::fast);
              });
}

void check_index(const OpenStep& s, LayerCacheHandle handle, std::int64_t heads, std::uint64_t seed) {
  const RowKind& kind = handle.schema().spec.rows[1];
  const Rows keys = gather(s, handle, Which::keys);
  const std::int64_t columns = s.longest(kind.ratio) + 3;
  Queries q = make_queries(s, handle, heads, seed);
  std::vector<float> want(static_cast<std::size_t>(s.count() * columns), -INFINITY);
  for (std::int64_t t = 0; t < s.count(); ++t) {
    const Token& token = s.tokens[static_cast<std::size_t>(t)];
    for (std::int64_t j = 0; j < s.visible(token, kind.ratio); ++j)
      want[static_cast<std::size_t>(t * columns + j)] =
          exact_score(q, static_cast<std::size_t>(t), handle.schema().pages[1].row.format, keys.row(token.item, j));
  }
  for (const QueryType type : {QueryType::f32, QueryType::bf16, QueryType::encoded}) {
    std::vector<float> scores(want.size(), kPoison);
    Twins twins(s.driver.backend);
    const IndexInputs in = put_queries(q, s.count(), type, twins);
    const TensorView out = twins.put_output({scores.data(), {s.count(), columns}});
    twins.send();
    handle.index_scores(in, out);
    twins.fetch();
    for (std::size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(scores[i], want[i]) << "score " << i % static_cast<std::size_t>(columns) << " of token "
                                    << i / static_cast<std::size_t>(columns) << ", query type "
                                    << static_cast<int>(type);
    twins.send();
    handle.index_scores(in, out, ScoreMode::fast);
    twins.fetch();
    for (std::int64_t t = 0; t < s.count(); ++t) {
      const Token& token = s.tokens[static_cast<std::size_t>(t)];
      for (std::int64_t j = 0; j < columns; ++j) {
        const std::size_t at = static_cast<std::size_t>(t * columns + j);
        if (j < s.visible(token, kind.ratio))
          ASSERT_NEAR(scores[at], want[at], error_bound(q, static_cast<std::size_t>(t), keys.row(token.item, j)))
              << "fast score " << j << " of token " << t;
        else
          ASSERT_EQ(scores[at], want[at]) << "fast score " << j << " of token " << t;
      }
    }
  }
  const std::int64_t some = std::max<std::int64_t>(1, s.longest(kind.ratio) / 3);
  for (const std::int64_t k : {std::int64_t{1}, some, s.longest(kind.ratio) + 5})
    expect_best(s, handle, want, columns, k, "index_topk " + std::to_string(k),
                [&](Twins& twins, const TensorView& indices, const TensorView& slots) {
                  const IndexInputs in = put_queries(q, s.count(), QueryType::f32, twins);
                  twins.send();
                  handle.index_topk(in, indices, slots);
                });
  check_fast_choice(s, handle, q, columns, some);
  // Given scores: many equal ones, zeros of both signs, NaN, infinities.
  std::vector<float> given(want.size());
  Random random(seed);
  const float values[] = {0.0f, -0.0f, 1.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 1e-40f, -1e-40f, 0.5f, 0.50001f};
  for (float& x : given) x = values[random.below(12)];
  expect_best(s, handle, given, columns, some, "select_topk",
              [&](Twins& twins, const TensorView& indices, const TensorView& slots) {
                const ConstTensorView scores = twins.put({given.data(), {s.count(), columns}});
                twins.send();
                handle.select_topk(scores, indices, slots);
              });
}

// --- attention

struct AttendCase {
  std::int64_t heads = 3;
  bool narrow = true;  // q and out in bf16
  bool sink = true, inverse_rope = false;
  bool chosen = true;  // where there are entries
};

double bf16_step(double x) { return std::abs(x) * 0x1p-8; }

struct Head {
  std::vector<double> out;
  double lse = 0;
};

Head attend_head(const float* q, const std::vector<const float*>& rows, std::int64_t width, double sink) {
  std::vector<double> z;
  double most = sink;
  for (const float* row : rows) {
    double dot = 0;
    for (std::int64_t i = 0; i < width; ++i) dot += static_cast<double>(q[i]) * static_cast<double>(row[i]);
    z.push_back(dot / std::sqrt(static_cast<double>(width)));
    most = std::max(most, z.back());
  }
  Head head{std::vector<double>(static_cast<std::size_t>(width)), -INFINITY};
  if (std::isinf(most)) return head;
  double sum = std::exp(sink - most);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const double e = std::exp(z[r] - most);
    sum += e;
    for (std::size_t i = 0; i < head.out.size(); ++i) head.out[i] += e * static_cast<double>(rows[r][i]);
  }
  for (double& x : head.out) x /= sum;
  head.lse = most + std::log(sum);
  return head;
}

void inverse_rope(const RopeTable& table, std::vector<double>& row) {
  double* tail = row.data() + row.size() - 2 * table.cos.size();
  for (std::size_t i = 0; i < table.cos.size(); ++i) {
    const double a = tail[2 * i], b = tail[2 * i + 1], cos = table.cos[i], sin = table.sin[i];
    tail[2 * i] = a * cos + b * sin;
    tail[2 * i + 1] = b * cos - a * sin;
  }
}

// Within `bound` of the largest value, plus the rounding of a bf16 output; and in the same direction.
void expect_near(const std::vector<float>& got, const std::vector<double>& want, double bound, bool narrow) {
  double largest = 0, dot = 0, got_square = 0, want_square = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double g = static_cast<double>(got[i]);
    largest = std::max(largest, std::abs(want[i]));
    dot += g * want[i];
    got_square += g * g;
    want_square += want[i] * want[i];
  }
  for (std::size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(got[i], want[i], bound * largest + (narrow ? bf16_step(want[i]) : 0.0)) << "number " << i;
  EXPECT_GE(dot, 0.99999 * std::sqrt(got_square * want_square));
}

void check_attention(const OpenStep& s, LayerCacheHandle handle, const AttendCase& c, std::uint64_t seed) {
  const ModelConfig& config = s.driver.cache.schema().config;
  const std::int64_t width = handle.head_dim(), tokens = s.count(), heads = c.heads;
  const std::vector<RowKind>& kinds = handle.schema().spec.rows;
  const Rows window = gather(s, handle, Which::window);
  Rows entries;
  if (!kinds.empty()) entries = gather(s, handle, Which::entries);

  Random random(seed);
  std::vector<float> q(static_cast<std::size_t>(tokens * heads * width)), sinks(static_cast<std::size_t>(heads));
  fill_random(seed, 2.0f, q.data(), q.size());
  fill_random(seed + 1, 3.0f, sinks.data(), sinks.size());
  std::vector<std::uint16_t> q16;
  for (float& x : q) {
    if (c.narrow) x = naive::round_bf16(x);
    q16.push_back(static_cast<std::uint16_t>(naive::bits_of(x) >> 16));
  }
  const bool chosen = c.chosen && !kinds.empty();
  const std::int64_t k = chosen ? s.longest(kinds[0].ratio) / 2 + 3 : 0;
  std::vector<std::int32_t> topk;
  for (std::int64_t i = 0; i < tokens * k; ++i)
    topk.push_back(static_cast<std::int32_t>(random.between(-2, s.longest(kinds[0].ratio) + 2)));
  for (std::int64_t t = 0; t < tokens; ++t) {  // no entry twice
    const auto begin = topk.begin() + t * k;
    for (auto i = begin; i != begin + k; ++i)
      if (std::find(begin, i, *i) != i) *i = -1;
  }

  std::vector<float> out(q.size(), kPoison), lse(static_cast<std::size_t>(tokens * heads), kPoison);
  std::vector<std::uint16_t> out16(q.size(), 0x7FC1);
  {
    Twins twins(s.driver.backend);
    AttendInputs in;
    in.q = twins.put(c.narrow ? TensorView(q16.data(), DType::bf16, {tokens, heads, width})
                              : TensorView(q.data(), {tokens, heads, width}));
    if (c.sink) in.sink = twins.put({sinks.data(), {heads}});
    if (chosen) in.topk = twins.put({topk.data(), {tokens, k}});
    in.inverse_rope = c.inverse_rope;
    const TensorView to = twins.put_output(c.narrow ? TensorView(out16.data(), DType::bf16, {tokens, heads, width})
                                                    : TensorView(out.data(), {tokens, heads, width}));
    const TensorView lse_to = twins.put_output({lse.data(), {tokens, heads}});
    twins.send();
    handle.attend(in, to, lse_to);
    twins.fetch();
  }
  if (c.narrow)
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(naive::bf16_value(out16[i]));

  std::vector<double> want;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const Token& token = s.tokens[static_cast<std::size_t>(t)];
    std::vector<const float*> rows;
    if (!token.padded) {
      for (std::int64_t p = std::max<std::int64_t>(0, token.position + 1 - config.window); p <= token.position; ++p)
        rows.push_back(window.row(token.item, p - window.first[static_cast<std::size_t>(token.item)]));
      const std::int64_t visible = kinds.empty() ? 0 : s.visible(token, kinds[0].ratio);
      for (std::int64_t j = 0; j < visible; ++j)
        if (!chosen || std::find(topk.begin() + t * k, topk.begin() + (t + 1) * k, j) != topk.begin() + (t + 1) * k)
          rows.push_back(entries.row(token.item, j));
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      const bool sink = c.sink && !token.padded;
      Head head = attend_head(q.data() + (t * heads + h) * width, rows, width,
                              sink ? static_cast<double>(sinks[static_cast<std::size_t>(h)]) : -INFINITY);
      if (c.inverse_rope && !token.padded)
        inverse_rope(build_rope_table(kinds.empty() ? config.rope_main : config.rope_compress, config.rope_dim,
                                      token.position, 1),
                     head.out);
      want.insert(want.end(), head.out.begin(), head.out.end());
      const float log_sum = lse[static_cast<std::size_t>(t * heads + h)];
      if (std::isinf(head.lse))
        ASSERT_EQ(log_sum, head.lse) << "token " << t;
      else
        ASSERT_NEAR(log_sum, head.lse, 1e-4 + 2e-3 * std::abs(head.lse)) << "token " << t << " head " << h;
    }
  }
  expect_near(out, want, device() == Device::cuda && c.narrow ? 2e-3 : 1e-5, c.narrow);
}

void check_reads(Driver& driver, const std::vector<Work>& work, std::int64_t index_heads,
                 const std::vector<AttendCase>& attends, std::uint64_t seed) {
  const OpenStep s(driver, work);
  for (const LayerCacheSchema& layer : driver.cache.schema().layers) {
    SCOPED_TRACE("layer " + std::to_string(layer.spec.layer) + " " + to_string(layer.spec.kind));
    LayerCacheHandle handle = driver.cache.acquire(layer.spec.layer);
    if (layer.pages.size() > 1) check_index(s, handle, index_heads, seed + 7);
    for (const AttendCase& c : attends) check_attention(s, handle, c, seed + 11);
  }
  driver.cache.commit(s.step);
}

class Reads : public testing::TestWithParam<FormatCase> {};

TEST_P(Reads, SmallWidths) {
  const Model model(tiny_config());
  for (const int rewind : {0, 3}) {
    CacheOptions options = options_for(GetParam());
    options.max_rewind_tokens = rewind;
    options.max_context = 96;
    options.index_tile_tokens = 5;
    options.index_global_scale = 0.37f;
    Driver driver(model, options);
    const RequestId a = driver.admit(), b = driver.admit();
    const std::vector<AttendCase> cases = {{3, false, true, true, true}, {1, true, false, false, false}};
    check_reads(driver, {{a, 1, 3}}, 2, cases, 1);
    check_reads(driver, {{kNoRequest, 0, 2}, {a, 1, 37}, {b, 2, 20}}, 5, cases, 2);
    check_reads(driver, {{b, 2, 1}, {kNoRequest, 0, 1}, {a, 1, 1}}, 64, cases, 3);
    const RequestId c = driver.cache.fork(a).value();
    check_reads(driver, {{c, 3, 4}, {a, 1, 2}, {b, 2, 30}}, 17, cases, 4);
  }
}

TEST_P(Reads, RealWidths) {
  const Model model(real_config());
  CacheOptions options = options_for(GetParam());
  options.max_context = 512;
  options.max_requests = 3;
  Driver driver(model, options);
  const RequestId a = driver.admit(), b = driver.admit();
  driver.run({{a, 1, 300}, {b, 2, 130}});
  const std::vector<AttendCase> cases = {
      {4, false, true, true, true}, {8, true, true, true, true}, {64, true, true, false, false}};
  check_reads(driver, {{a, 1, 1}, {kNoRequest, 0, 1}, {b, 2, 6}}, 64, cases, 1);
  check_reads(driver, {{a, 1, 84}}, 8, {cases[1]}, 2);
  check_reads(driver, {{b, 2, 1}, {a, 1, 1}}, 33, {cases[0]}, 3);
}

INSTANTIATE_TEST_SUITE_P(Formats, Reads, testing::ValuesIn(format_cases()),
                         [](const auto& c) { return c.param.name(); });

}  // namespace
}  // namespace kv4::test
