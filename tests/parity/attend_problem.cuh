// attend without a manager: pools built by the test, step records and slot lists, compared with sums in double over the
// decoded rows. Rows that a query must not read are NaN. For the tests of attend's kernels.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/staged.cuh"
#include "base/group.h"
#include "codec/codec.h"
#include "kv4/backend.h"
#include "kv4/cuda.h"
#include "schema/rope.h"

namespace {

using namespace kv4;

constexpr RowShape kRow{512, 64};
constexpr double kError = 2e-3, kCosine = 0.99999;

cuda::AttendSplit split_kv(int kv_splits, int channel_splits = 1, bool cta_pair = false) {
  return {cuda::AttendKernel::split_kv, kv_splits, channel_splits, cta_pair};
}
cuda::AttendSplit in_memory(int kv_splits, bool cta_pair = false) {
  return {cuda::AttendKernel::split_kv_in_memory, kv_splits, 1, cta_pair};
}
cuda::AttendSplit small_batch(int heads, int kv_splits, int stages) {
  return {cuda::AttendKernel::small_batch, kv_splits, 1, false, heads, stages};
}
/// The split of kernels that do not split rows.
cuda::AttendSplit unsplit_by(cuda::AttendKernel kernel, int channel_splits = 1) { return {kernel, 1, channel_splits}; }

/// A host array and its copy on the device.
template <class T>
class Twin {
 public:
  explicit Twin(std::vector<T> values) : host(std::move(values)) {
    EXPECT_EQ(cudaMalloc(&there_, std::max<std::size_t>(bytes(), 1)), cudaSuccess);
    send();
  }
  ~Twin() { cudaFree(there_); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  void send() { EXPECT_EQ(cudaMemcpy(there_, host.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess); }
  void fetch() { EXPECT_EQ(cudaMemcpy(host.data(), there_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess); }
  T* there() const { return there_; }

  std::vector<T> host;

 private:
  std::size_t bytes() const { return host.size() * sizeof(T); }
  T* there_ = nullptr;
};

int round_up(int x, int to) { return (x + to - 1) / to * to; }

/// Pages of `rows` rows: payloads, then scales, padded; all NaN.
class Pool {
 public:
  Pool(Format format, RowShape shape, int blocks, int rows, int align)
      : bytes_(std::vector<std::uint8_t>(block_bytes(format, shape, rows, align) * blocks, 0xFF)) {
    const auto info = sizes(format, shape);
    planes.format = format;
    planes.shape = shape;
    const std::int64_t stride = block_bytes(format, shape, rows, align);
    planes.payload = {bytes_.there(), stride, info[0]};
    planes.scale = {bytes_.there() + rows * info[0], stride, info[1]};
  }

  void put(int block, int row, const std::vector<float>& x) {
    codec::with_codec(planes.format, [&](auto codec) {
      codec.encode(OneLane{}, planes.shape, x.data(), host(planes.payload, block, row), host(planes.scale, block, row),
                   1.0f);
    });
  }
  std::vector<float> get(int block, int row) {
    std::vector<float> x(static_cast<std::size_t>(planes.shape.width));
    codec::with_codec(planes.format, [&](auto codec) {
      codec.decode(OneLane{}, planes.shape, host(planes.payload, block, row), host(planes.scale, block, row), 1.0f,
                   x.data());
    });
    return x;
  }
  void send() { bytes_.send(); }

  ops::RowPlanes planes;

 private:
  static std::array<std::int64_t, 2> sizes(Format format, RowShape shape) {
    return codec::with_codec(format, [&](auto codec) {
      return std::array<std::int64_t, 2>{codec.payload_bytes(shape), codec.scale_bytes(shape)};
    });
  }
  static std::int64_t block_bytes(Format format, RowShape shape, int rows, int align) {
    const auto info = sizes(format, shape);
    return round_up(static_cast<int>(rows * (info[0] + info[1])), align);
  }
  std::uint8_t* host(const ops::Plane& plane, int block, int row) {
    return bytes_.host.data() + (plane.at(block, row) - bytes_.there());
  }

  Twin<std::uint8_t> bytes_;
};

struct Request {
  int length, count;
  bool in_place = true;
  int begin = 0;  // positions below it have no window row
};

struct Case {
  Format format = Format::fp8_tile64;
  RowShape shape = kRow;
  int heads = 64;
  std::vector<Request> requests;  // of the step; count 0: a padded token
  int window = 128;
  int ratio = 0;       // 0: no entries
  int chosen = 0;      // 0: all visible ones
  int page_rows = 32;  // entries of a block
  int align = 64;
  bool sink = true, inverse_rope = false;
  DType q_type = DType::bf16, out_type = DType::f32;
  float q_size = 2.0f;
  int least_exponent = 0, most_exponent = 0;    // a row is multiplied by a power of two between these
  std::optional<cuda::AttendSplit> split = {};  // instead of the one that attend selects
  int workspace_ctas = 0;                       // CTAs with a place in the workspace
  bool late_records = false;                    // written while attend may already have started
  int slot_window = 0, slot_entries = 0;        // lists of this length replace the step's rows
  unsigned seed = 1;
};

/// Lets the next kernel start long before it writes the records.
__global__ void write_late(const ops::StepRecord* from, ops::StepRecord* to, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  for (int i = 0; i < 100; ++i) __nanosleep(500);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = from[i];
}

/// A row that a query sees: its place in a pool.
struct RowPlace {
  Pool* pool;
  int block, row;
};

class Problem {
 public:
  explicit Problem(const Case& c)
      : c_(c),
        random_(c.seed),
        slots_(static_cast<int>(c.requests.size()) + 1),
        ring_rows_(c.window + 4),
        blocks_per_request_(entries_of_all() / c.page_rows + 1),
        ring_(c.format, c.shape, slots_, ring_rows_, c.align),
        scratch_(c.format, c.shape, 1, num_tokens(), c.align),
        page_(c.format, c.shape, static_cast<int>(c.requests.size()) * blocks_per_request_ + 3, c.page_rows, c.align) {
    make_step();
    make_lists();
    ring_.send();
    scratch_.send();
    page_.send();
  }

  int num_tokens() const {
    int tokens = 0;
    for (const Request& r : c_.requests) tokens += std::max(r.count, 1);
    return tokens;
  }

  const std::vector<RowPlace>& places(int token) const { return places_[static_cast<std::size_t>(token)]; }
  bool sees(int token, const RowPlace& at) const {
    return std::any_of(places(token).begin(), places(token).end(),
                       [&](const RowPlace& x) { return x.pool == at.pool && x.block == at.block && x.row == at.row; });
  }
  static void spoil(const RowPlace& at, int width) {
    at.pool->put(at.block, at.row, std::vector<float>(static_cast<std::size_t>(width), NAN));
    at.pool->send();
  }

  struct Result {
    std::vector<float> out, lse;
  };

  Result run() {
    const std::int64_t count = std::int64_t{num_tokens()} * c_.heads, width = c_.shape.width, guard = 64;
    const std::int64_t element = static_cast<std::int64_t>(element_bytes(c_.out_type));
    Twin<std::uint8_t> out(
        std::vector<std::uint8_t>(static_cast<std::size_t>((count * width + guard) * element), 0xFF));
    Twin<float> lse(std::vector<float>(static_cast<std::size_t>(count + guard), NAN));
    const Twin<float> sink(sink_);
    const Twin<float> q32(q_);
    std::vector<std::uint16_t> half(q_.size());
    std::transform(q_.begin(), q_.end(), half.begin(), codec::bf16_bits);
    const Twin<std::uint16_t> q16(half);
    const Twin<ops::StepRecord> records(records_), late_records(other_records());
    const Twin<ops::StepRecord> items(items_);
    const Twin<std::int32_t> table(table_), begins(begins_), chosen(chosen_), window_slots(window_slots_),
        entry_slots(entry_slots_), entry_lens(entry_lens_);
    constexpr std::int64_t kPositions = 1 << 14;
    const Twin<double> angles(build_rope_angles(RopeSpec{}, c_.shape.tail, kPositions));

    ops::AttendParams p;
    p.layer.window.ring = ring_.planes;
    p.layer.window.rows = ring_rows_;
    p.layer.window.scratch = scratch_.planes;
    p.layer.window_tokens = c_.window;
    p.layer.num_kinds = c_.ratio > 0 ? 1 : 0;
    p.layer.kinds[0].page = page_.planes;
    p.layer.kinds[0].ratio = c_.ratio;
    p.layer.kinds[0].rows_per_block = c_.page_rows;
    p.step.num_tokens = num_tokens();
    p.step.blocks_per_request = blocks_per_request_;
    p.step.tokens = records.there();
    p.step.block_table = table.there();
    p.step.window_begins = begins.there();
    p.num_heads = c_.heads;
    p.softmax_scale = static_cast<float>(scale());
    p.q = {c_.q_type == DType::bf16 ? static_cast<const void*>(q16.there()) : q32.there(), c_.q_type, c_.heads * width};
    if (c_.sink) p.sink = sink.there();
    if (c_.chosen > 0) {
      p.chosen = {chosen.there(), DType::i32, c_.chosen};
      p.num_chosen = c_.chosen;
    }
    if (c_.slot_window > 0) p.window_slots = {window_slots.there(), c_.slot_window, nullptr};
    if (c_.slot_entries > 0) {
      p.entry_slots = {entry_slots.there(), c_.slot_entries, entry_lens.there()};
      p.step.block_table = nullptr;
      if (!c_.inverse_rope && c_.slot_window > 0) p.step.tokens = nullptr;
    }
    p.out = {out.there(), c_.out_type};
    p.lse = lse.there();
    if (c_.inverse_rope) {
      p.inverse_rope.angles = view_rope_angles(angles.there(), c_.shape.tail, kPositions);
      p.inverse_rope.rope_dim = c_.shape.tail;
    }
    const bool is_staged = c_.split && c_.split->kernel == cuda::AttendKernel::staged;
    std::int64_t workspace_bytes = ops::attend_workspace_bytes(c_.workspace_ctas);
    if (is_staged) {
      p.step.items = items.there();
      p.step.num_items = static_cast<std::int32_t>(items_.size());
      workspace_bytes = ops::attend_workspace_bytes() + cuda::staged_rows(p).bytes;
    }
    Twin<std::uint8_t> workspace(std::vector<std::uint8_t>(static_cast<std::size_t>(workspace_bytes), 0xFF));
    std::fill_n(workspace.host.begin(), ops::kAttendCounterBytes, std::uint8_t{0});
    workspace.send();
    if (c_.workspace_ctas > 0 || is_staged) {
      p.workspace = workspace.there();
      p.workspace_bytes = workspace_bytes;
    }
    // From here on the host does not wait for the GPU, because late records would then arrive in time.
    if (c_.late_records) {
      p.step.tokens = late_records.there();
      write_late<<<1, 32>>>(records.there(), late_records.there(), num_tokens());
    }
    EXPECT_EQ(c_.split ? cuda::attend_split(p, *c_.split, nullptr) : cuda::attend(p, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    out.fetch();
    lse.fetch();
    workspace.fetch();
    EXPECT_TRUE(std::all_of(workspace.host.begin(), workspace.host.begin() + ops::kAttendCounterBytes,
                            [](std::uint8_t x) { return x == 0; }))
        << "the next call finds an arrival counter in use";
    Result result;
    for (std::int64_t i = 0; i < count * width; ++i) {
      const std::uint8_t* at = out.host.data() + i * element;
      float x;
      if (c_.out_type == DType::f32)
        std::memcpy(&x, at, 4);
      else
        x = codec::load_bf16(at);
      result.out.push_back(x);
    }
    for (std::size_t i = static_cast<std::size_t>(count * width * element); i < out.host.size(); ++i)
      EXPECT_EQ(out.host[i], 0xFF) << "written past the end";
    for (std::size_t i = static_cast<std::size_t>(count); i < lse.host.size(); ++i)
      EXPECT_TRUE(std::isnan(lse.host[i])) << "written past the end";
    result.lse.assign(lse.host.begin(), lse.host.begin() + count);
    return result;
  }

  void check(const Result& got) {
    const int width = c_.shape.width;
    double most = 0, worst = 0, dot = 0, norm_got = 0, norm_want = 0;
    for (int token = 0; token < num_tokens(); ++token) {
      std::vector<std::vector<float>> rows;
      for (const RowPlace& at : places_[static_cast<std::size_t>(token)])
        rows.push_back(at.pool->get(at.block, at.row));
      for (int head = 0; head < c_.heads; ++head) {
        const std::size_t at = static_cast<std::size_t>(token * c_.heads + head);
        double log_sum = 0;
        const std::vector<double> want = reference(token, head, rows, &log_sum);
        if (std::isinf(log_sum))
          EXPECT_EQ(got.lse[at], -INFINITY) << "token " << token << " head " << head;
        else
          EXPECT_NEAR(got.lse[at], log_sum, 2e-4 * (1 + std::abs(log_sum))) << "token " << token << " head " << head;
        for (int c = 0; c < width; ++c) {
          const double x = got.out[at * static_cast<std::size_t>(width) + static_cast<std::size_t>(c)],
                       y = want[static_cast<std::size_t>(c)];
          const double rounding = c_.out_type == DType::bf16 ? std::abs(y) / 256 : 0.0;
          ASSERT_FALSE(std::isnan(x)) << "token " << token << " head " << head << " channel " << c;
          worst = std::max(worst, std::abs(x - y) - rounding);
          most = std::max(most, std::abs(y));
          dot += x * y;
          norm_got += x * x;
          norm_want += y * y;
        }
      }
    }
    EXPECT_LE(worst, kError * most);
    if (most > 0) EXPECT_GE(dot / std::sqrt(norm_got * norm_want), kCosine);
  }

 private:
  /// Records of the same pools, each of another token.
  std::vector<ops::StepRecord> other_records() const {
    std::vector<ops::StepRecord> others = records_;
    std::rotate(others.begin(), others.begin() + 1, others.end());
    return others;
  }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(c_.shape.width)); }
  int entries_of_all() const {
    int most = 0;
    for (const Request& r : c_.requests) most = std::max(most, c_.ratio > 0 ? (r.length + r.count) / c_.ratio : 0);
    return most;
  }
  std::vector<float> normal(std::size_t count, float size = 1.0f) {
    std::normal_distribution<float> d(0.0f, size);
    std::vector<float> x(count);
    for (float& v : x) v = codec::round_bf16(d(random_));
    return x;
  }
  std::vector<float> row() {
    const unsigned exponents = static_cast<unsigned>(c_.most_exponent - c_.least_exponent + 1);
    const int exponent =
        exponents == 1 ? c_.least_exponent : c_.least_exponent + static_cast<int>(random_() % exponents);
    return normal(static_cast<std::size_t>(c_.shape.width), std::ldexp(1.0f, exponent));
  }

  void make_step() {
    q_ = normal(static_cast<std::size_t>(num_tokens() * c_.heads * c_.shape.width), c_.q_size);
    sink_ = normal(static_cast<std::size_t>(c_.heads));
    places_.resize(static_cast<std::size_t>(num_tokens()));
    std::vector<std::int32_t> free_blocks(c_.requests.size() * static_cast<std::size_t>(blocks_per_request_) + 3);
    std::iota(free_blocks.begin(), free_blocks.end(), 0);
    std::shuffle(free_blocks.begin(), free_blocks.end(), random_);
    int token = 0;
    for (std::size_t i = 0; i < c_.requests.size(); ++i) {
      const Request& r = c_.requests[i];
      begins_.push_back(r.begin);
      ops::StepRecord record;
      if (r.count == 0) {
        records_.push_back(record);
        items_.push_back(record);
        for (int b = 0; b < blocks_per_request_; ++b) table_.push_back(-1);
        for (int k = 0; k < c_.chosen; ++k) chosen_.push_back(k);
        ++token;
        continue;
      }
      record.row = static_cast<std::int32_t>(i);
      record.length = r.length;
      record.count = r.count;
      record.first_token = token;
      record.read_slot = static_cast<std::int32_t>(i);
      record.write_slot = r.in_place ? record.read_slot : slots_ - 1;
      record.position = r.length;
      items_.push_back(record);
      const int end = r.length + r.count;
      const int entries = c_.ratio > 0 ? end / c_.ratio : 0;
      std::vector<std::int32_t> blocks;
      for (int b = 0; b < blocks_per_request_; ++b) {
        blocks.push_back(b * c_.page_rows < entries ? free_blocks.back() : -1);
        if (blocks.back() >= 0) free_blocks.pop_back();
      }
      table_.insert(table_.end(), blocks.begin(), blocks.end());
      for (int j = 0; j < entries; ++j)
        page_.put(blocks[static_cast<std::size_t>(j / c_.page_rows)], j % c_.page_rows, row());
      for (int at = std::max(r.begin, r.length - c_.window); at < end; ++at) {
        if (at >= r.length && !r.in_place)
          scratch_.put(0, token + at - r.length, row());
        else
          ring_.put(record.read_slot, at % ring_rows_, row());
      }
      for (int at = r.length; at < end; ++at, ++token) {
        record.position = at;
        records_.push_back(record);
        auto& places = places_[static_cast<std::size_t>(token)];
        for (int w = std::max(r.begin, at - c_.window + 1); w <= at; ++w) {
          if (w >= r.length && !r.in_place)
            places.push_back({&scratch_, 0, record.first_token + w - r.length});
          else
            places.push_back({&ring_, record.read_slot, w % ring_rows_});
        }
        const int visible = c_.ratio > 0 ? (at + 1) / c_.ratio : 0;
        std::vector<std::int32_t> entry(static_cast<std::size_t>(c_.chosen > 0 ? c_.chosen : visible));
        if (c_.chosen == 0)
          std::iota(entry.begin(), entry.end(), 0);
        else
          for (std::int32_t& e : entry) e = static_cast<std::int32_t>(random_() % unsigned(entries + 7)) - 3;
        if (c_.chosen > 0) chosen_.insert(chosen_.end(), entry.begin(), entry.end());
        for (const std::int32_t e : entry)
          if (e >= 0 && e < visible)
            places.push_back({&page_, blocks[static_cast<std::size_t>(e / c_.page_rows)], e % c_.page_rows});
      }
    }
  }

  // Lists of existing rows; they replace the rows that the step would give.
  void make_lists() {
    if (c_.slot_window == 0 && c_.slot_entries == 0) return;
    std::vector<RowPlace> ring, page;
    for (const auto& places : places_)
      for (const RowPlace& at : places) (at.pool == &page_ ? page : ring).push_back(at);
    for (std::size_t token = 0; token < places_.size(); ++token) {
      const bool padded = records_[token].padded() && c_.inverse_rope;
      std::vector<RowPlace> places;
      if (c_.slot_window == 0)
        for (const RowPlace& at : places_[token])
          if (at.pool != &page_) places.push_back(at);
      const auto draw = [&](const std::vector<RowPlace>& from, int count, int rows, std::vector<std::int32_t>& list) {
        for (int i = 0; i < count; ++i) {
          const bool there = random_() % 8 != 0;
          const RowPlace& at = from[random_() % from.size()];
          list.push_back(there ? at.block * rows + at.row : -1 - static_cast<int>(random_() % 3));
          if (there) places.push_back(at);
        }
      };
      draw(ring, c_.slot_window, ring_rows_, window_slots_);
      const std::size_t before = places.size();
      draw(page, c_.slot_entries, c_.page_rows, entry_slots_);
      const int count = c_.slot_entries == 0 ? 0 : static_cast<int>(random_() % unsigned(c_.slot_entries + 1));
      entry_lens_.push_back(count);
      int there = 0;
      for (int i = 0; i < count; ++i)
        there += entry_slots_[token * static_cast<std::size_t>(c_.slot_entries) + static_cast<std::size_t>(i)] >= 0;
      places.resize(before + static_cast<std::size_t>(there));
      if (padded) places.clear();
      places_[token] = places;
    }
    for (ops::StepRecord& r : records_)
      if (!c_.inverse_rope) r.row = 0;
  }

  std::vector<double> reference(int token, int head, const std::vector<std::vector<float>>& rows, double* lse) {
    const std::size_t width = static_cast<std::size_t>(c_.shape.width);
    std::vector<double> out(width, 0.0);
    const ops::StepRecord& record = records_[static_cast<std::size_t>(token)];
    if (record.padded()) {
      *lse = -INFINITY;
      return out;
    }
    const float* q = q_.data() + (static_cast<std::size_t>(token * c_.heads + head)) * width;
    std::vector<double> z;
    double most = c_.sink ? sink_[static_cast<std::size_t>(head)] : -INFINITY;
    for (const auto& r : rows) {
      double sum = 0;
      for (std::size_t c = 0; c < width; ++c) sum += static_cast<double>(q[c]) * r[c];
      z.push_back(sum * static_cast<float>(scale()));
      most = std::max(most, z.back());
    }
    double den = c_.sink ? std::exp(sink_[static_cast<std::size_t>(head)] - most) : 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double w = std::exp(z[i] - most);
      den += w;
      for (std::size_t c = 0; c < width; ++c) out[c] += w * rows[i][c];
    }
    *lse = den > 0 ? most + std::log(den) : -INFINITY;
    for (double& x : out) x = den > 0 ? x / den : 0.0;
    if (c_.inverse_rope) {
      const std::vector<double> frequencies = rope_frequencies(RopeSpec{}, c_.shape.tail);
      for (std::size_t i = 0; i < frequencies.size(); ++i) {
        double* pair = out.data() + width - static_cast<std::size_t>(c_.shape.tail) + 2 * i;
        const double angle = record.position * frequencies[i], a = pair[0], b = pair[1];
        pair[0] = a * std::cos(angle) + b * std::sin(angle);
        pair[1] = b * std::cos(angle) - a * std::sin(angle);
      }
    }
    return out;
  }

  Case c_;
  std::mt19937 random_;
  int slots_, ring_rows_, blocks_per_request_;
  Pool ring_, scratch_, page_;
  std::vector<float> q_, sink_;
  std::vector<ops::StepRecord> records_, items_;
  std::vector<std::int32_t> table_, begins_, chosen_, window_slots_, entry_slots_, entry_lens_;
  std::vector<std::vector<RowPlace>> places_;  // [token] visible rows
};

class AttendKernel : public testing::Test {
 protected:
  void SetUp() override {
    const std::string why = why_no_cuda();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static void run(const Case& c) {
    Problem problem(c);
    problem.check(problem.run());
  }
  /// Makes a row that a token sees NaN (-1: its last row). The output of all tokens that see the row must become NaN;
  /// no other output may change.
  static void spoil_row(const Case& c, int token, int row) {
    SCOPED_TRACE(testing::Message() << "row " << row << " of token " << token << " spoilt");
    Problem problem(c);
    const Problem::Result before = problem.run();
    const RowPlace at = row < 0 ? problem.places(token).back() : problem.places(token)[static_cast<std::size_t>(row)];
    Problem::spoil(at, c.shape.width);
    const Problem::Result after = problem.run();
    const std::size_t values = static_cast<std::size_t>(c.heads * c.shape.width);
    for (int t = 0; t < problem.num_tokens(); ++t) {
      const bool sees = problem.sees(t, at);
      for (std::size_t i = static_cast<std::size_t>(t) * values; i < static_cast<std::size_t>(t + 1) * values; ++i)
        ASSERT_TRUE(sees ? std::isnan(after.out[i]) : after.out[i] == before.out[i]) << "token " << t << ", " << i;
    }
  }
  static void spoil_first(const Case& c) { spoil_row(c, 0, 0); }
};

const std::vector<Request> kDecode = {{300, 1}, {0, 1}, {0, 0}, {77, 1}, {1200, 3}};

Case window_case() {
  Case c;
  c.requests = kDecode;
  return c;
}

Case entries_case(int ratio, int chosen) {
  Case c = window_case();
  c.ratio = ratio;
  c.chosen = chosen;
  c.page_rows = 128 / ratio;
  c.inverse_rope = true;
  return c;
}

bool is_hopper() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

}  // namespace
