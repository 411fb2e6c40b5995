// Index scores and top-k of kv4/cuda.h on pools of the test. Exact scores have the bits of ops/score_row.h on the host,
// fast scores are within their error bound, and chosen sets equal those of an exact sort.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/group.h"
#include "codec/codec.h"
#include "kv4/backend.h"
#include "kv4/cuda.h"
#include "ops/compress_row.h"
#include "ops/score_row.h"
#include "parity/racecheck.h"
#include "support/launched_kernels.h"

namespace {

using namespace kv4;
using Bytes = std::vector<std::uint8_t>;

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(size_, 1) * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceArray(std::size_t size, T value) : DeviceArray(std::vector<T>(size, value)) {}
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> host(size_);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

// edges: mxfp4 rows whose scales are a fixed number of binades apart, and rows of the largest code only;
// rare_edges: a few such keys.
// codes: fp8 codes of any value but NaN, so that products differ much in size.
// cutoff: fp8 rows with one product of 2^16 and then many of 7/8 of its ulp.
// out_of_range: fp8 codes, and a few scales and weights of any value at all.
enum class Data { normal, spread, extreme, repeated, edges, rare_edges, codes, cutoff, out_of_range };

struct Case {
  std::string name;
  Format format = Format::mxfp4;
  int width = 128, heads = 64, rows_per_block = 32;
  DType q = DType::bf16;
  bool hadamard = true;
  Data data = Data::normal;
  std::vector<int> counts = {1};  // tokens of each request
  std::vector<int> lengths = {4000};
  int top = 512;
  int tile_tokens = 1000;     // the workspace has room for this many
  double fast_roundings = 0;  // fp8: the error bound of fast scores, in 2^-24 of the sum of magnitudes; 0: unchecked
  std::vector<std::string> kernels = {};  // kernels that must have run on an H200; empty: unchecked
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// A request's rows of float keys and a step of its tokens, stored as in an engine.
class IndexKernel : public testing::TestWithParam<Case> {
 protected:
  static constexpr int kRatio = 4;
  static constexpr float kGlobal = 0.75f;

  void SetUp() override {
    if (const std::string why = why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
  }

  RowShape shape() const { return {c_.width, 0}; }
  float global() const { return c_.format == Format::nvfp4 ? kGlobal : 1.0f; }
  template <class F>
  static auto with(Format format, F&& f) {
    return codec::with_codec(format, f);
  }
  int payload_bytes() const {
    return with(c_.format, [&](auto codec) { return codec.payload_bytes(shape()); });
  }
  int scale_bytes() const {
    return with(c_.format, [&](auto codec) { return codec.scale_bytes(shape()); });
  }
  void encode(const float* x, std::uint8_t* payload, std::uint8_t* scale) const {
    with(c_.format, [&](auto codec) { codec.encode(OneLane{}, shape(), x, payload, scale, global()); });
  }

  void change_to_edge(std::uint8_t* payload, std::uint8_t* scale) {
    const unsigned apart = 1 + random_() % 6;
    for (int g = 0; g < scale_bytes(); ++g) scale[g] = static_cast<std::uint8_t>(127 - random_() % apart);
    if (random_() % 4 == 0) std::memset(payload, random_() % 2 == 0 ? 0x77 : 0xFF, payload_bytes());
    if (random_() % 4 == 0) std::memset(payload, random_() % 2 == 0 ? 0x00 : 0x88, 16);  // zeros of any scale
  }

  // 256 in channel 0, zeros in the other channels of the first k-step (index/fp8_fast.cuh), `small` in all others.
  static void change_to_cutoff(std::uint8_t* payload, std::uint8_t* scale, std::uint8_t small) {
    for (int c = 0; c < 128; ++c) payload[c] = c == 0 ? 0x78 : c < 64 && c % 16 < 4 ? 0 : small;
    const float one = 1.0f;
    std::memcpy(scale, &one, 4);
  }

  std::uint8_t random_code() { return static_cast<std::uint8_t>(random_() % 127 + (random_() % 2 == 0 ? 128 : 0)); }

  // Zeros, denormals, infinities, NaN, and numbers out of the range of fast sums.
  float out_of_range_number() {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr float kNumbers[] = {0.0f,
                                  -0.0f,
                                  0x1p-149f,
                                  0x1p-127f,
                                  0x1p-126f,
                                  0x1.8p-41f,
                                  0x1p-40f,
                                  0x1p30f,
                                  0x1.8p30f,
                                  0x1p60f,
                                  0x1p100f,
                                  0x1p127f,
                                  kInfinity,
                                  -kInfinity,
                                  -1.0f,
                                  -0x1p31f,
                                  -0x1p-60f,
                                  3e38f,
                                  std::numeric_limits<float>::quiet_NaN()};
    return kNumbers[random_() % std::size(kNumbers)];
  }

  std::vector<float> random_row() {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(c_.width));
    for (float& v : x) v = codec::round_bf16(normal(random_));
    if (c_.data != Data::spread && c_.data != Data::extreme) return x;
    const bool rare = c_.data == Data::extreme;
    for (int g = 0; g < c_.width; g += 16) {
      const int binades = static_cast<int>(random_() % (rare ? 200 : 9)) - (rare ? 100 : 4);
      const float by = random_() % 8 == 0 ? 0.0f : std::ldexp(1.0f, binades);
      for (int i = g; i < std::min(g + 16, c_.width); ++i) x[i] *= by;
    }
    if (random_() % 8 == 0) std::fill(x.begin(), x.end(), 0.0f);
    return x;
  }

  // Pages of shuffled blocks: payloads, scales, a global scale.
  void make_pages() {
    const int rows = c_.rows_per_block, requests = static_cast<int>(c_.lengths.size());
    int longest = 0;
    for (std::size_t r = 0; r < c_.lengths.size(); ++r) longest = std::max(longest, c_.lengths[r] + c_.counts[r]);
    blocks_per_request_ = longest / kRatio / rows + 2;
    const int blocks = requests * blocks_per_request_;
    table_.resize(static_cast<std::size_t>(blocks));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random_);
    scale_at_ = rows * payload_bytes();
    global_at_ = (scale_at_ + rows * scale_bytes() + 15) / 16 * 16;
    page_bytes_ = global_at_ + 64;
    pool_.assign(static_cast<std::size_t>(blocks) * page_bytes_, 0xFF);
    std::vector<std::vector<float>> some;
    for (int i = 0; i < 7; ++i) some.push_back(random_row());
    for (int block = 0; block < blocks; ++block) {
      std::uint8_t* page = &pool_[static_cast<std::size_t>(block) * page_bytes_];
      const float scale = global();
      std::memcpy(page + global_at_, &scale, 4);
      for (int row = 0; row < rows; ++row) {
        const std::vector<float> x = c_.data == Data::repeated ? some[random_() % some.size()] : random_row();
        std::uint8_t* scales = page + scale_at_ + row * scale_bytes();
        encode(x.data(), page + row * payload_bytes(), scales);
        if (c_.data == Data::extreme && c_.format == Format::mxfp4 && random_() % 16 == 0)
          scales[random_() % scale_bytes()] = static_cast<std::uint8_t>(random_());
        if (c_.data == Data::edges || (c_.data == Data::rare_edges && random_() % 200 == 0))
          change_to_edge(page + row * payload_bytes(), scales);
        if (c_.format == Format::fp8 && c_.data == Data::spread && random_() % 16 == 0)
          page[row * payload_bytes() + random_() % c_.width] = codec::kE4m3Nan;
        if (c_.data == Data::cutoff) change_to_cutoff(page + row * payload_bytes(), scales, 0x1E);
        if (c_.data == Data::codes || c_.data == Data::out_of_range)
          for (int c = 0; c < c_.width; ++c) page[row * payload_bytes() + c] = random_code();
        if (c_.data == Data::out_of_range && random_() % 8 == 0) {
          const float number = out_of_range_number();
          std::memcpy(scales, &number, 4);
          if (random_() % 4 == 0) std::memset(page + row * payload_bytes(), 0, payload_bytes());
          if (random_() % 8 == 0) page[row * payload_bytes() + random_() % c_.width] = codec::kE4m3Nan;
        }
      }
    }
    // Blocks behind the last entry may have any id.
    for (int r = 0; r < requests; ++r) {
      const int entries = (c_.lengths[r] + c_.counts[r]) / kRatio;
      for (int b = entries / rows + 1; b < blocks_per_request_; ++b) table_[r * blocks_per_request_ + b] = -1;
    }
  }

  void make_step() {
    int first = 0;
    for (std::size_t r = 0; r < c_.lengths.size(); ++r) {
      ops::StepRecord record;
      record.row = static_cast<int>(r);
      record.length = c_.lengths[r];
      record.count = c_.counts[r];
      record.first_token = first;
      for (int i = 0; i < c_.counts[r]; ++i) {
        record.position = c_.lengths[r] + i;
        tokens_.push_back(record);
      }
      first += c_.counts[r];
    }
    tokens_.insert(tokens_.begin() + static_cast<int>(tokens_.size()) / 2, ops::StepRecord{});  // padding
  }

  void make_queries() {
    const std::size_t rows = tokens_.size() * static_cast<std::size_t>(c_.heads), width = c_.width;
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < rows; ++i) {
      std::vector<float> x = random_row();
      if (c_.q == DType::f32)
        for (float& v : x) v *= 1.0001f;
      q_values_.insert(q_values_.end(), x.begin(), x.end());
      float weight = normal(random_) * 0.01f;
      if (c_.data == Data::extreme && random_() % 64 == 0)
        weight = std::ldexp(weight, static_cast<int>(random_() % 200) - 100);
      weights_.push_back(random_() % 16 == 0 ? 0.0f : weight);
      for (float& v : x) v = codec::round_bf16(v);
      if (c_.q != DType::u8 && c_.hadamard) ops::hadamard_row(OneLane{}, c_.width, x.data());
      Bytes payload(payload_bytes()), scale(scale_bytes());
      encode(x.data(), payload.data(), scale.data());
      if (c_.data == Data::edges) change_to_edge(payload.data(), scale.data());
      if (c_.data == Data::cutoff) change_to_cutoff(payload.data(), scale.data(), 0x18);
      if (c_.data == Data::codes || c_.data == Data::out_of_range)
        std::generate(payload.begin(), payload.end(), [&] { return random_code(); });
      if (c_.data == Data::out_of_range && i % c_.heads == 1) {  // of a token, or none
        const std::size_t token = i / c_.heads;
        const float number = out_of_range_number();
        if (token % 4 == 1) std::memcpy(scale.data(), &number, 4);
        if (token % 4 == 2) weights_.back() = number;
        if (token % 4 == 3) payload[random_() % payload.size()] = codec::kE4m3Nan;
      }
      q_payload_.insert(q_payload_.end(), payload.begin(), payload.end());
      q_scale_.insert(q_scale_.end(), scale.begin(), scale.end());
    }
    ASSERT_EQ(q_values_.size(), rows * width);
  }

  const std::uint8_t* page_of(const ops::StepRecord& token, int entry) const {
    const int block = table_[token.row * blocks_per_request_ + entry / c_.rows_per_block];
    return &pool_[static_cast<std::size_t>(block) * page_bytes_];
  }

  float score_of(std::size_t token, int entry) const {
    const std::uint8_t* page = page_of(tokens_[token], entry);
    const std::uint8_t* key = page + entry % c_.rows_per_block * payload_bytes();
    const std::uint8_t* key_scale = page + scale_at_ + entry % c_.rows_per_block * scale_bytes();
    ops::ScoreSum sum;
    std::vector<float> k(c_.width), q(c_.width);
    const auto decode = [&](const std::uint8_t* payload, const std::uint8_t* scale, std::vector<float>& x) {
      with(c_.format, [&](auto codec) { codec.decode(OneLane{}, shape(), payload, scale, global(), x.data()); });
    };
    if (c_.format != Format::mxfp4) decode(key, key_scale, k);
    for (int h = 0; h < c_.heads; ++h) {
      const std::size_t at = token * c_.heads + h;
      const std::uint8_t *payload = &q_payload_[at * payload_bytes()], *scale = q_scale_.data() + at * scale_bytes();
      float dot;
      if (c_.format == Format::mxfp4) {
        dot = ops::mxfp4_dot(c_.width, payload, scale, key, key_scale);
      } else {
        decode(payload, scale, q);
        dot = ops::row_dot(c_.width, q.data(), k.data());
      }
      sum.add(h, weights_[at], dot);
    }
    return sum.total();
  }

  // Sum of the magnitudes of all terms of score_of, without NaN.
  double size_of(std::size_t token, int entry) const {
    const std::uint8_t* page = page_of(tokens_[token], entry);
    const int row = entry % c_.rows_per_block;
    std::vector<float> k(c_.width), q(c_.width);
    codec::Fp8Key::decode(OneLane{}, shape(), page + row * payload_bytes(), page + scale_at_ + row * 4, 1.0f, k.data());
    double size = 0;
    for (int h = 0; h < c_.heads; ++h) {
      const std::size_t at = token * c_.heads + h;
      codec::Fp8Key::decode(OneLane{}, shape(), &q_payload_[at * payload_bytes()], &q_scale_[at * 4], 1.0f, q.data());
      for (int c = 0; c < c_.width; ++c) {
        const double part = std::abs(double{weights_[at]} * q[c] * k[c]);
        if (!std::isnan(part)) size += part;
      }
    }
    return size;
  }

  // The error bound of docs/formats.md, for fp8 keys; all other formats have exact scores.
  bool is_within_error_bound(float fast, float exact, std::size_t token, int entry) const {
    if (codec::float_bits(codec::canonical_nan(fast)) == codec::float_bits(codec::canonical_nan(exact))) return true;
    const double bound = c_.data == Data::normal ? 1e-3 : 2e-2;  // random numbers are no worst case
    return c_.format == Format::fp8 &&
           std::abs(double{fast} - double{exact}) <= bound * size_of(token, entry) + 0x1p-80;
  }

  int visible(const ops::StepRecord& token) const { return token.padded() ? 0 : (token.position + 1) / kRatio; }

  // Compares the fast scores that index_topk leaves in its workspace with exact ones. With products that differ much in
  // size, a tensor core that keeps fewer bits than the error bound of topk/rescore.cuh assumes would fail here.
  void check_fast(const Bytes& workspace, const std::vector<float>& exact, std::int64_t stride) const {
    const std::int64_t fast_stride = (std::int64_t{blocks_per_request_} * c_.rows_per_block + 63) / 64 * 64;
    for (std::size_t t = 0; t < tokens_.size(); ++t)
      for (int j = 0; visible(tokens_[t]) > c_.top && j < visible(tokens_[t]); ++j) {
        float fast;
        std::memcpy(&fast, &workspace[4 * (t * fast_stride + j)], 4);
        const double most = 0x1p-24 * c_.fast_roundings * size_of(t, j);
        ASSERT_NEAR(fast, exact[t * stride + j], most) << "token " << t << " key " << j;
      }
  }

  ops::KindDesc make_kind(std::uint8_t* pool) const {
    ops::KindDesc kind;
    kind.page.format = c_.format;
    kind.page.shape = shape();
    kind.page.payload = {pool, page_bytes_, payload_bytes()};
    kind.page.scale = {pool + scale_at_, page_bytes_, scale_bytes()};
    if (c_.format == Format::nvfp4) kind.page.global = {pool + global_at_, page_bytes_, 0};
    kind.ratio = kRatio;
    kind.rows_per_block = c_.rows_per_block;
    kind.hadamard = c_.hadamard;
    kind.global_scale = global();
    return kind;
  }

  Case c_;
  std::mt19937 random_{20261115};
  int blocks_per_request_ = 0, scale_at_ = 0, global_at_ = 0;
  std::int64_t page_bytes_ = 0;
  Bytes pool_, q_payload_, q_scale_;
  std::vector<std::int32_t> table_;
  std::vector<ops::StepRecord> tokens_;
  std::vector<float> q_values_, weights_;
};

std::vector<std::int32_t> best_of(const std::vector<float>& scores, int top) {
  std::vector<std::uint64_t> order;  // the best first: score, then entry
  for (std::size_t i = 0; i < scores.size(); ++i)
    order.push_back(std::uint64_t{~ops::score_order(scores[i])} << 32 | static_cast<std::uint32_t>(i));
  const std::size_t count = std::min<std::size_t>(order.size(), top);
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end());
  std::vector<std::int32_t> best;
  for (std::size_t i = 0; i < count; ++i) best.push_back(static_cast<std::int32_t>(order[i]));
  std::sort(best.begin(), best.end());
  return best;
}

// A token's row of indices as a sorted set; -1 fills the end.
void expect_chosen(const std::int32_t* got, int top, const std::vector<std::int32_t>& want) {
  std::vector<std::int32_t> chosen(got, got + top);
  for (std::size_t i = want.size(); i < chosen.size(); ++i) ASSERT_EQ(chosen[i], -1) << "place " << i;
  chosen.resize(want.size());
  std::sort(chosen.begin(), chosen.end());
  ASSERT_EQ(chosen, want);
}

TEST_P(IndexKernel, ScoresToTheBitAndExactSets) {
  c_ = GetParam();
  const test::LaunchedKernels launched;
  make_pages();
  make_step();
  make_queries();
  const int num_tokens = static_cast<int>(tokens_.size());
  const DeviceArray<std::uint8_t> pool(pool_), q_payload(q_payload_), q_scale(q_scale_);
  const DeviceArray<std::int32_t> table(table_);
  const DeviceArray<ops::StepRecord> tokens(tokens_);
  const DeviceArray<float> q_values(q_values_), weights(weights_);
  std::vector<std::uint16_t> q_bf16;
  for (const float v : q_values_) q_bf16.push_back(codec::bf16_bits(v));
  const DeviceArray<std::uint16_t> q_short(q_bf16);

  ops::IndexParams p;
  p.layer.num_kinds = 2;
  p.layer.kinds[1] = make_kind(pool.data());
  p.step.num_tokens = num_tokens;
  p.step.num_items = static_cast<int>(c_.counts.size()) + 1;  // the padding
  p.step.blocks_per_request = blocks_per_request_;
  p.step.tokens = tokens.data();
  p.step.block_table = table.data();
  p.num_heads = c_.heads;
  p.weights = {weights.data(), DType::f32, c_.heads};
  if (c_.q == DType::u8) {
    p.q = {q_payload.data(), DType::u8, c_.heads * payload_bytes()};
    p.q_scale = {q_scale.data(), DType::u8, c_.heads * scale_bytes()};
  } else {
    p.q = {c_.q == DType::bf16 ? static_cast<const void*>(q_short.data()) : q_values.data(), c_.q, c_.heads * c_.width};
  }
  const std::int64_t entries = std::int64_t{blocks_per_request_} * c_.rows_per_block;
  const std::int64_t stride = entries + 5;
  const std::int64_t part = ops::index_token_bytes(entries, c_.heads, c_.width);
  const DeviceArray<std::uint8_t> workspace(static_cast<std::size_t>(part * std::min(c_.tile_tokens, num_tokens)),
                                            0xFF);
  const DeviceArray<float> scores(static_cast<std::size_t>(num_tokens * stride), 1e30f);
  const DeviceArray<std::int32_t> indices(static_cast<std::size_t>(num_tokens * c_.top), -7);
  const DeviceArray<std::int32_t> slots(static_cast<std::size_t>(num_tokens * c_.top), -7);
  p.scores = scores.data();
  p.score_stride = stride;
  p.top = c_.top;
  p.indices = indices.data();
  p.slots = slots.data();
  p.workspace = workspace.data();
  p.workspace_bytes = part * std::min(c_.tile_tokens, num_tokens);

  ASSERT_EQ(cuda::index_scores(p, nullptr), cudaSuccess);
  const std::vector<float> got = scores.read();
  std::vector<std::vector<std::int32_t>> best;
  for (int t = 0; t < num_tokens; ++t) {
    std::vector<float> want(static_cast<std::size_t>(visible(tokens_[t])));
    for (std::size_t j = 0; j < want.size(); ++j) want[j] = score_of(t, static_cast<int>(j));
    for (std::int64_t j = 0; j < stride; ++j) {
      const float here = got[t * stride + j];
      const float expected =
          j < static_cast<std::int64_t>(want.size()) ? want[j] : -std::numeric_limits<float>::infinity();
      ASSERT_EQ(codec::float_bits(codec::canonical_nan(here)), codec::float_bits(codec::canonical_nan(expected)))
          << "token " << t << " key " << j << " of " << want.size() << ": " << here << " not " << expected;
    }
    best.push_back(best_of(want, c_.top));
  }

  // Fast scores, and a selection from them.
  const DeviceArray<float> fast_scores(static_cast<std::size_t>(num_tokens * stride), 1e30f);
  p.scores = fast_scores.data();
  p.mode = ScoreMode::fast;
  ASSERT_EQ(cuda::index_scores(p, nullptr), cudaSuccess);
  const std::vector<float> fast = fast_scores.read();
  ASSERT_EQ(cuda::select_topk(p, nullptr), cudaSuccess);
  const std::vector<std::int32_t> of_fast = indices.read();
  for (int t = 0; t < num_tokens; ++t) {
    const int seen = visible(tokens_[t]);
    for (std::int64_t j = 0; j < stride; ++j)
      ASSERT_TRUE(j < seen ? is_within_error_bound(fast[t * stride + j], got[t * stride + j], t, static_cast<int>(j))
                           : fast[t * stride + j] == -std::numeric_limits<float>::infinity())
          << "token " << t << " key " << j << " of " << seen << ": " << fast[t * stride + j] << " fast, exact "
          << got[t * stride + j];
    SCOPED_TRACE("of fast scores, token " + std::to_string(t));
    const auto row = fast.begin() + t * stride;
    expect_chosen(&of_fast[t * c_.top], c_.top, best_of(std::vector<float>(row, row + seen), c_.top));
  }
  // Fast scores and their selection in one call: the same scores, so the same sets.
  for (const bool keeps_scores : {false, true}) {
    SCOPED_TRACE(keeps_scores ? "fast, both with scores" : "fast, both");
    ASSERT_EQ(cudaMemset(indices.data(), 0xCC, 4 * num_tokens * c_.top), cudaSuccess);
    p.scores = keeps_scores ? fast_scores.data() : nullptr;
    ASSERT_EQ(cuda::index_topk(p, nullptr), cudaSuccess);
    const std::vector<std::int32_t> chosen = indices.read();
    for (int t = 0; t < num_tokens; ++t) {
      SCOPED_TRACE("token " + std::to_string(t));
      const auto row = fast.begin() + t * stride;
      expect_chosen(&chosen[t * c_.top], c_.top, best_of(std::vector<float>(row, row + visible(tokens_[t])), c_.top));
    }
  }
  // A fast score is the same whatever is scored beside it: tokens one by one, and in tiles of other sizes.
  for (const bool one_by_one : {true, false}) {
    SCOPED_TRACE(one_by_one ? "one by one" : "in small tiles");
    ASSERT_EQ(cudaMemset(fast_scores.data(), 0xCC, fast.size() * sizeof(float)), cudaSuccess);
    ops::IndexParams other = p;
    other.scores = fast_scores.data();
    if (one_by_one)
      other.step.num_items = num_tokens;
    else
      other.workspace_bytes = part * std::max(1, std::min(c_.tile_tokens, num_tokens) / 3);
    ASSERT_EQ(cuda::index_scores(other, nullptr), cudaSuccess);
    const std::vector<float> again = fast_scores.read();
    for (std::size_t i = 0; i < fast.size(); ++i)
      ASSERT_EQ(codec::float_bits(again[i]), codec::float_bits(fast[i])) << "fast score " << i;
  }
  p.mode = ScoreMode::exact;

  // Selection from exact scores, then scores and selection in one call: with scores in the workspace, then with scores
  // given.
  for (const char* way : {"select", "both", "both with scores"}) {
    SCOPED_TRACE(way);
    ASSERT_EQ(cudaMemset(indices.data(), 0xCC, 4 * num_tokens * c_.top), cudaSuccess);
    const bool select = way[0] == 's';
    p.scores = std::string(way) == "both" ? nullptr : scores.data();
    ASSERT_EQ(select ? cuda::select_topk(p, nullptr) : cuda::index_topk(p, nullptr), cudaSuccess);
    if (c_.fast_roundings > 0 && p.scores == nullptr) check_fast(workspace.read(), got, stride);
    const std::vector<std::int32_t> chosen = indices.read(), physical = slots.read();
    for (int t = 0; t < num_tokens; ++t) {
      SCOPED_TRACE("token " + std::to_string(t));
      expect_chosen(&chosen[t * c_.top], c_.top, best[t]);
      for (int i = 0; i < c_.top; ++i) {
        const int entry = chosen[t * c_.top + i], rows = c_.rows_per_block;
        const int slot =
            entry < 0 ? -1 : table_[tokens_[t].row * blocks_per_request_ + entry / rows] * rows + entry % rows;
        ASSERT_EQ(physical[t * c_.top + i], slot);
      }
    }
  }

  // The kernel just before writes the records and the table, so that the speculative ones are wrong.
  std::vector<ops::StepRecord> old_tokens(tokens_.rbegin(), tokens_.rend());
  std::vector<std::int32_t> old_table(table_.rbegin(), table_.rend());
  const DeviceArray<ops::StepRecord> new_tokens(tokens_);
  const DeviceArray<std::int32_t> new_table(table_);
  const auto piece = [](const auto& from, const auto& to, std::size_t bytes) {
    return ops::CopyPiece{reinterpret_cast<const std::uint8_t*>(from.data()),
                          reinterpret_cast<std::uint8_t*>(to.data()), static_cast<std::int64_t>(bytes)};
  };
  const std::size_t token_bytes = tokens_.size() * sizeof(ops::StepRecord), table_bytes = 4 * table_.size();
  const ops::CopyPiece pieces[] = {piece(new_tokens, tokens, token_bytes), piece(new_table, table, table_bytes)};
  for (const bool change_tokens : {true, false}) {
    SCOPED_TRACE(change_tokens ? "other records" : "another table");
    const auto put_old = [&] {
      return change_tokens ? cudaMemcpy(tokens.data(), old_tokens.data(), token_bytes, cudaMemcpyHostToDevice)
                           : cudaMemcpy(table.data(), old_table.data(), table_bytes, cudaMemcpyHostToDevice);
    };
    ASSERT_EQ(put_old(), cudaSuccess);
    ASSERT_EQ(cudaMemset(indices.data(), 0xCC, 4 * num_tokens * c_.top), cudaSuccess);
    p.scores = nullptr;
    p.mode = ScoreMode::exact;
    ASSERT_EQ(cuda::index_topk(p, nullptr), cudaSuccess);
    ASSERT_EQ(cuda::copy_few_pieces(pieces, nullptr), cudaSuccess);
    ASSERT_EQ(cuda::index_topk(p, nullptr), cudaSuccess);
    const std::vector<std::int32_t> chosen = indices.read();
    for (int t = 0; t < num_tokens; ++t) {
      SCOPED_TRACE("token " + std::to_string(t));
      expect_chosen(&chosen[t * c_.top], c_.top, best[t]);
    }
    ASSERT_EQ(put_old(), cudaSuccess);
    ASSERT_EQ(cudaMemset(fast_scores.data(), 0xCC, fast.size() * sizeof(float)), cudaSuccess);
    p.scores = fast_scores.data();
    p.mode = ScoreMode::fast;
    ASSERT_EQ(cuda::index_scores(p, nullptr), cudaSuccess);
    ASSERT_EQ(cuda::copy_few_pieces(pieces, nullptr), cudaSuccess);
    ASSERT_EQ(cuda::index_scores(p, nullptr), cudaSuccess);
    const std::vector<float> again = fast_scores.read();
    for (std::size_t i = 0; i < fast.size(); ++i)
      ASSERT_EQ(codec::float_bits(again[i]), codec::float_bits(fast[i])) << "fast score " << i;
  }
  if (!c_.kernels.empty()) expect_launched(launched, c_.kernels);
}

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const Data data : {Data::normal, Data::spread, Data::extreme, Data::repeated})
    for (const DType q : {DType::bf16, DType::f32, DType::u8}) {
      Case c;
      const char* names[] = {"normal", "spread", "extreme", "repeated"};
      c.name = std::string(names[static_cast<int>(data)]) + (q == DType::bf16  ? "_bf16"
                                                             : q == DType::f32 ? "_f32"
                                                                               : "_encoded");
      c.data = data;
      c.q = q;
      c.hadamard = q != DType::u8;
      c.top = 100;
      c.lengths = {4000, 399, 90};
      c.counts = {2, 1, 3};
      cases.push_back(c);
    }
  const auto add = [&](const std::string& name, auto&& change) {
    Case c;
    c.name = name;
    change(c);
    cases.push_back(c);
  };
  add("one_head", [](Case& c) { c.heads = 1, c.top = 64; });
  add("few_heads", [](Case& c) { c.heads = 37, c.top = 64; });
  add("large_blocks", [](Case& c) { c.rows_per_block = 96, c.top = 2048, c.lengths = {9000}; });
  add("tiny_blocks", [](Case& c) { c.rows_per_block = 2, c.top = 10, c.lengths = {333}; });
  add("prefill", [](Case& c) { c.lengths = {0, 517}, c.counts = {70, 30}, c.top = 16, c.tile_tokens = 33; });
  for (const DType q : {DType::bf16, DType::f32, DType::u8})  // one token of each request
    add(std::string("single_") + (q == DType::bf16  ? "bf16"
                                  : q == DType::f32 ? "f32"
                                                    : "encoded"),
        [&](Case& c) {
          c.q = q, c.hadamard = q != DType::u8, c.data = Data::spread, c.top = 100;
          c.lengths = {4000, 399, 90, 9000}, c.counts = {1, 1, 1, 1};
        });
  add("many_requests", [](Case& c) {
    c.top = 8, c.heads = 4;
    c.lengths.clear(), c.counts.clear();
    for (int i = 0; i < 300; ++i) c.lengths.push_back(i * 37 % 600), c.counts.push_back(1);
  });
  for (const int tokens : {3, 15, 31, 63, 127})  // and one of padding; an H200 takes 15 or more in one launch
    add("batch_" + std::to_string(tokens), [&](Case& c) {
      c.top = 100, c.heads = 3, c.data = Data::rare_edges;
      c.lengths.clear(), c.counts.clear();
      for (int i = 0; i < tokens; ++i) c.lengths.push_back((i + 1) * 5003 % 8192), c.counts.push_back(1);
    });
  add("long", [](Case& c) { c.lengths = {60000}, c.heads = 2; });
  add("longer", [](Case& c) { c.lengths = {140000, 50000, 20000}, c.counts = {1, 2, 1}, c.heads = 2; });
  add("edges", [](Case& c) {
    c.q = DType::u8, c.hadamard = false, c.data = Data::edges, c.top = 100;
    for (int i = 0; i < 20; ++i) c.lengths.push_back(500 + i), c.counts.push_back(1);
  });
  // A few keys that are out of range of the integer products of mxfp4, in some KV tiles only.
  for (const int length : {6000, 60000, 140000})
    add("rare_edges_" + std::to_string(length),
        [&](Case& c) { c.data = Data::rare_edges, c.heads = 3, c.lengths = {length}, c.counts = {1}; });
  add("long_extreme", [](Case& c) { c.data = Data::extreme, c.heads = 2, c.lengths = {60000}, c.counts = {1}; });
  // With blocks of 512 keys raw scores come from CTAs of four warpgroups (index/grid.cuh), as for long rows.
  for (const Data data : {Data::normal, Data::rare_edges})
    for (const DType q : {DType::bf16, DType::u8})
      add(std::string("four_warpgroups_") + (data == Data::normal ? "normal" : "edges") +
              (q == DType::bf16 ? "_bf16" : "_encoded"),
          [&](Case& c) {
            c.rows_per_block = 512, c.data = data, c.q = q, c.hadamard = q != DType::u8, c.top = 100;
            c.lengths = {4000, 399, 90}, c.counts = {2, 1, 3};
          });
  // Tokens that share keys are scored in groups of 4, 8 or 16.
  const auto add_groups = [&](const std::string& name, Format format, auto&& change) {
    add("groups_" + name + (format == Format::fp8 ? "_fp8" : ""), [&](Case& c) {
      c.format = format, c.top = 100, c.heads = 3, c.lengths = {4000, 399, 90}, c.counts = {37, 16, 5};
      c.kernels = {"prepare_groups", "score_groups"};
      change(c);
    });
  };
  for (const Format format : {Format::mxfp4, Format::fp8}) {
    add_groups("bf16", format, [](Case& c) { c.heads = 64; });
    add_groups("f32", format, [](Case& c) { c.q = DType::f32, c.heads = 37; });
    add_groups("encoded", format, [](Case& c) { c.q = DType::u8, c.hadamard = false, c.heads = 33; });
    add_groups("of_4", format, [](Case& c) { c.counts = {4, 4, 4}, c.heads = 64; });
    add_groups("of_8", format, [](Case& c) { c.counts = {9, 8, 10}, c.heads = 64; });
    add_groups("of_many_requests", format, [](Case& c) {
      c.heads = 5, c.top = 16;
      c.lengths.clear(), c.counts.clear();
      for (int i = 0; i < 60; ++i) c.lengths.push_back(i * 37 % 600), c.counts.push_back(1 + i % 9);
    });
    add_groups("from_nothing", format, [](Case& c) { c.lengths = {0}, c.counts = {333}, c.top = 16; });
    add_groups("in_tiles", format, [](Case& c) {
      c.lengths = {0, 517}, c.counts = {70, 30}, c.top = 16, c.tile_tokens = 33;
    });
    add_groups("of_large_blocks", format, [](Case& c) { c.rows_per_block = 256; });
    add_groups("at_8192_keys", format, [](Case& c) { c.lengths = {4 * 8192 - 11}, c.counts = {22}, c.top = 512; });
    add_groups("at_32768_keys", format, [](Case& c) { c.lengths = {4 * 32768 - 10}, c.counts = {18}, c.heads = 2; });
    add_groups("long", format, [](Case& c) {
      c.lengths = {170000, 50000}, c.counts = {7, 3}, c.heads = 2, c.top = 512;
    });
    add_groups("equal", format, [](Case& c) { c.data = Data::repeated; });
    add_groups("spread", format, [](Case& c) { c.data = Data::spread; });
    add_groups("extreme", format, [](Case& c) { c.data = Data::extreme, c.heads = 8; });
    add_groups("long_extreme", format, [](Case& c) { c.data = Data::extreme, c.lengths = {60000}, c.counts = {9}; });
  }
  add_groups("rare_edges", Format::mxfp4, [](Case& c) {
    c.data = Data::rare_edges, c.lengths = {60000}, c.counts = {20};
  });
  add_groups("edges", Format::mxfp4, [](Case& c) { c.data = Data::edges, c.q = DType::u8, c.hadamard = false; });
  add_groups("codes", Format::fp8, [](Case& c) { c.data = Data::codes, c.q = DType::u8; });
  add_groups("out_of_range", Format::fp8,
             [](Case& c) { c.data = Data::out_of_range, c.q = DType::u8, c.hadamard = false, c.heads = 33; });
  add_groups("long_out_of_range", Format::fp8, [](Case& c) {
    c.data = Data::out_of_range, c.q = DType::u8, c.hadamard = false, c.lengths = {60000}, c.counts = {9};
  });
  add("narrow", [](Case& c) { c.width = 32, c.heads = 3, c.top = 20, c.lengths = {500}; });
  add("wide", [](Case& c) { c.width = 512, c.heads = 20, c.top = 20, c.lengths = {700}; });
  for (const Format format : {Format::nvfp4, Format::fp8, Format::bf16})
    for (const Data data : {Data::normal, Data::spread, Data::repeated})
      for (const DType q : {DType::bf16, DType::f32, DType::u8})
        add(std::string(format == Format::nvfp4 ? "nvfp4"
                        : format == Format::fp8 ? "fp8"
                                                : "bf16") +
                "_data" + std::to_string(static_cast<int>(data)) + "_q" + std::to_string(static_cast<int>(q)),
            [&](Case& c) {
              c.format = format, c.data = data, c.q = q, c.top = 100, c.hadamard = q != DType::u8;
              c.lengths = {1500, 90}, c.counts = {1, 2}, c.heads = 21;
              if (data == Data::spread) c.width = 96, c.hadamard = false;
            });
  // fp8 keys that the tensor cores take: fast scores, rescored.
  const auto add_fast = [&](const std::string& name, auto&& change) {
    add("fp8_fast_" + name, [&](Case& c) {
      c.format = Format::fp8, c.top = 100, c.lengths = {4000, 399, 90}, c.counts = {2, 1, 3};
      change(c);
    });
  };
  add_fast("normal", [](Case& c) { c.fast_roundings = 32; });
  add_fast("given", [](Case& c) { c.q = DType::u8; });
  add_fast("nan", [](Case& c) { c.data = Data::spread; });
  add_fast("extreme", [](Case& c) { c.data = Data::extreme, c.heads = 8; });
  add_fast("codes", [](Case& c) { c.data = Data::codes, c.q = DType::u8, c.fast_roundings = 32; });
  // 7 k-steps lose 10.5 each, and the exact sum rounds up by 28. With one bit less the tensor cores would lose 112.
  add_fast("cutoff", [](Case& c) {
    c.data = Data::cutoff, c.q = DType::u8, c.hadamard = false, c.heads = 1, c.top = 10, c.fast_roundings = 101.5;
    c.lengths = {800}, c.counts = {1};
  });
  add_fast("out_of_range", [](Case& c) { c.data = Data::out_of_range, c.q = DType::u8, c.hadamard = false; });
  add_fast("out_of_range_heads", [](Case& c) {
    c.data = Data::out_of_range, c.q = DType::u8, c.hadamard = false, c.heads = 33, c.lengths = {9000, 90, 0, 4000};
    c.counts = {1, 2, 5, 1};
  });
  add_fast("one_head", [](Case& c) { c.heads = 1; });
  add_fast("few_heads", [](Case& c) { c.heads = 37, c.q = DType::f32; });
  add_fast("short_rows", [](Case& c) {  // more tokens than a warp has lanes
    c.heads = 5, c.top = 16;
    c.lengths.clear(), c.counts.clear();
    for (int i = 0; i < 40; ++i) c.lengths.push_back(9 * i), c.counts.push_back(1);
  });
  add_fast("large_blocks", [](Case& c) { c.rows_per_block = 128; });
  add_fast("four_warpgroups", [](Case& c) { c.rows_per_block = 512; });
  add_fast("four_warpgroups_given", [](Case& c) { c.rows_per_block = 512, c.q = DType::u8; });
  add_fast("four_warpgroups_out_of_range", [](Case& c) {
    c.rows_per_block = 512, c.data = Data::out_of_range, c.q = DType::u8, c.hadamard = false, c.heads = 33;
    c.lengths = {9000, 90, 0, 4000}, c.counts = {1, 2, 5, 1};
  });
  add_fast("four_warpgroups_many", [](Case& c) {
    c.rows_per_block = 512, c.heads = 5, c.top = 16;
    c.lengths.clear(), c.counts.clear();
    for (int i = 0; i < 150; ++i) c.lengths.push_back(9 * i), c.counts.push_back(1);
  });
  add_fast("equal", [](Case& c) { c.data = Data::repeated; });  // ambiguous candidates for more than one pass
  add_fast("all_equal", [](Case& c) { c.data = Data::repeated, c.lengths[0] = 16000, c.heads = 16; });  // too many
  add_fast("long", [](Case& c) { c.lengths = {140000, 60000, 34000}, c.counts = {1, 1, 1}, c.heads = 2, c.top = 512; });
  add_fast("long_equal", [](Case& c) { c.lengths = {40000}, c.counts = {1}, c.heads = 2, c.data = Data::repeated; });
  add_fast("tiles", [](Case& c) { c.lengths = {0, 517}, c.counts = {70, 30}, c.top = 16, c.tile_tokens = 33; });
  const auto add_fast_batch = [&](const std::string& name, int tokens, auto&& change) {  // in one launch, as above
    add_fast(name + "_batch_" + std::to_string(tokens), [&](Case& c) {
      c.heads = 3;
      c.lengths.clear(), c.counts.clear();
      const int by = tokens < 32 ? 3 : 1;
      for (int i = 0; i < tokens; ++i) c.lengths.push_back((i + 1) * 5003 % 8192 * by), c.counts.push_back(1);
      change(c);
    });
  };
  for (const int tokens : {15, 27, 31, 63, 127})
    add_fast_batch("normal", tokens, [&](Case& c) { c.fast_roundings = tokens == 15 ? 32 : 0; });
  for (const int tokens : {15, 63}) {
    add_fast_batch("given", tokens, [](Case& c) { c.q = DType::u8, c.heads = 16; });
    add_fast_batch("nan", tokens, [](Case& c) { c.data = Data::spread; });
    add_fast_batch("extreme", tokens, [](Case& c) { c.data = Data::extreme; });
    add_fast_batch("equal", tokens, [](Case& c) { c.data = Data::repeated, c.top = 512; });
    add_fast_batch("codes", tokens, [](Case& c) { c.data = Data::codes, c.q = DType::u8, c.top = 1; });
  }
  return cases;
}

/// Small shapes for racecheck (racecheck.h). 16 tokens, one of them padding, are the most that one launch takes with
/// six CTAs each; rows of more than 8,192 keys have another selection.
std::vector<Case> make_racecheck_cases() {
  constexpr int kBatch = 15, kLong = 40000;
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, Format format, std::vector<int> lengths,
                       std::vector<std::string> kernels) {
    Case c;
    c.name = name;
    c.format = format;
    c.heads = 3;
    c.top = 16;
    c.lengths = std::move(lengths);
    c.counts.assign(c.lengths.size(), 1);
    c.kernels = std::move(kernels);
    cases.push_back(c);
  };
  std::vector<int> batch;
  for (int i = 0; i < kBatch; ++i) batch.push_back((i + 1) * 503 % 800);
  add("mxfp4_few", Format::mxfp4, {500}, {"score_mxfp4_keys", "select_row"});
  add("mxfp4_batch", Format::mxfp4, batch, {"score_mxfp4_keys", "topk_of_mxfp4_keys", "select_row"});
  add("mxfp4_long", Format::mxfp4, {kLong}, {"score_mxfp4_keys", "select_row", "select_long"});
  add("mxfp4_four_warpgroups", Format::mxfp4, {2100, 399, 90}, {"score_mxfp4_keys", "select_row"});
  cases.back().rows_per_block = 512;
  add("fp8_few", Format::fp8, {500}, {"score_fp8_keys", "select_rescored_row<false>", "raw_scores_of_fp8_keys"});
  add("fp8_batch", Format::fp8, batch, {"topk_of_fp8_keys", "raw_scores_of_fp8_keys"});
  add("fp8_long", Format::fp8, {kLong}, {"score_fp8_keys", "select_rescored_row<true>", "select_long"});
  add("fp8_four_warpgroups", Format::fp8, {2100, 399, 90}, {"score_fp8_keys", "raw_scores_of_fp8_keys"});
  cases.back().rows_per_block = 512;
  for (const Format format : {Format::mxfp4, Format::fp8})
    for (const int tokens : {6, 20, 40}) {  // and one of padding
      add("groups_of_" + std::to_string(tokens) + (format == Format::fp8 ? "_fp8" : ""), format, {2100},
          {"prepare_groups", "score_groups", "select_row"});
      cases.back().counts = {tokens};
    }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Racecheck, IndexKernel, testing::ValuesIn(make_racecheck_cases()),
                         [](const auto& i) { return i.param.name; });

TEST(RacecheckList, HasAShapeOfEveryIndexKernel) {
  std::set<std::string> kernels;
  for (const Case& c : make_racecheck_cases())
    for (const std::string& kernel : c.kernels) kernels.insert(kernel.substr(0, kernel.find('<')));
  EXPECT_EQ(kernels, std::set<std::string>(std::begin(test::kRacecheckIndex), std::end(test::kRacecheckIndex)));
}

INSTANTIATE_TEST_SUITE_P(Keys, IndexKernel, testing::ValuesIn(make_cases()),
                         [](const auto& i) { return i.param.name; });

// --- selection alone

class TopkKernel : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
  }

  static ops::IndexParams make_params(int most, int num_tokens, int top) {
    ops::IndexParams p;
    p.layer.kinds[1].ratio = 1;
    p.layer.kinds[1].rows_per_block = 32;
    p.step.num_tokens = num_tokens;
    p.step.blocks_per_request = (most + 31) / 32;
    p.score_stride = most;
    p.top = top;
    return p;
  }

  void check(const std::vector<float>& row, int top, int num_tokens) {
    const int count = static_cast<int>(row.size());
    std::vector<float> all;
    for (int t = 0; t < num_tokens; ++t) all.insert(all.end(), row.begin(), row.end());
    std::vector<ops::StepRecord> records(num_tokens);
    for (ops::StepRecord& r : records) r.row = 0, r.position = count - 1;
    const DeviceArray<float> scores(all);
    const DeviceArray<ops::StepRecord> tokens(records);
    const DeviceArray<std::int32_t> indices(static_cast<std::size_t>(num_tokens) * top, -7);
    ops::IndexParams p = make_params(count, num_tokens, top);
    p.step.tokens = tokens.data();
    p.scores = scores.data();
    p.indices = indices.data();
    ASSERT_EQ(cuda::select_topk(p, nullptr), cudaSuccess);
    const std::vector<std::int32_t> got = indices.read();
    const std::vector<std::int32_t> want = best_of(row, top);
    for (const int t : {0, num_tokens - 1}) expect_chosen(&got[static_cast<std::size_t>(t) * top], top, want);
    if (HasFatalFailure()) return;
    ASSERT_EQ(cuda::select_topk(p, nullptr), cudaSuccess);  // also the same order
    ASSERT_EQ(indices.read(), got);
  }
};

TEST_F(TopkKernel, AnyRowAnyCount) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const int count : {1, 512, 513, 2049, 4096, 4097, 8192, 8193, 40001, 262144, 270000})
    for (const int top : {1, 512, 2048})
      for (const char* kind : {"normal", "few", "equal", "rising", "sparse", "special"}) {
        SCOPED_TRACE(std::to_string(top) + " of " + std::to_string(count) + " " + kind);
        std::vector<float> row(static_cast<std::size_t>(count));
        for (int i = 0; i < count; ++i) {
          const float x = normal(random);
          switch (kind[0]) {
            case 'n': row[i] = 10.0f + x; break;
            case 'f': row[i] = std::floor(2.0f * x); break;
            case 'e': row[i] = kind[1] == 'q' ? 1.5f : x; break;
            case 'r': row[i] = static_cast<float>(i); break;
            case 's': row[i] = i % 256 < 8 ? 10.0f + x : x; break;  // in long rows a sample may see nothing else
            default: {
              const float special[] = {0.0f, -0.0f, infinity, -infinity, NAN, 1e-40f, -1e-40f, x};
              row[i] = special[random() % 8];
            }
          }
        }
        for (const int num_tokens : {1, 40}) {
          if (num_tokens > 1 && count > 10000) continue;
          check(row, top, num_tokens);
          if (HasFatalFailure()) return;
        }
      }
}

// Rows of given scores, some of them short.
TEST_F(TopkKernel, RowsOfAllLengths) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  constexpr int kMost = 20000, kTop = 512;
  const std::vector<int> counts = {0, 1, 511, 512, 513, 3000, 8192, 8193, 12000, kMost};
  const int num_tokens = static_cast<int>(counts.size());
  std::vector<float> all(static_cast<std::size_t>(num_tokens) * kMost);
  for (float& x : all) x = normal(random);
  std::vector<ops::StepRecord> records(counts.size());
  for (int t = 0; t < num_tokens; ++t) records[t].row = 0, records[t].position = counts[t] - 1;
  const DeviceArray<float> scores(all);
  const DeviceArray<ops::StepRecord> tokens(records);
  const DeviceArray<std::int32_t> indices(counts.size() * kTop, -7);
  ops::IndexParams p = make_params(kMost, num_tokens, kTop);
  p.step.tokens = tokens.data();
  p.scores = scores.data();
  p.indices = indices.data();
  ASSERT_EQ(cuda::select_topk(p, nullptr), cudaSuccess);
  const std::vector<std::int32_t> got = indices.read();
  for (int t = 0; t < num_tokens; ++t) {
    SCOPED_TRACE(counts[t]);
    const auto row = all.begin() + static_cast<std::ptrdiff_t>(t) * kMost;
    expect_chosen(&got[static_cast<std::size_t>(t) * kTop], kTop, best_of({row, row + counts[t]}, kTop));
  }
}

TEST_F(TopkKernel, ManyRows) {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<float> row(20000);
  for (float& x : row) x = normal(random);
  check(row, 512, 140);
}

}  // namespace
