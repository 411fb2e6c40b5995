// attend without a manager: pools made by hand, step records and slot lists, against sums in double over the decoded
// rows. Whatever a query must not read is NaN.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "backend/cuda/attend_split.h"
#include "base/group.h"
#include "codec/codec.h"
#include "kv4/backend.h"
#include "kv4/cuda.h"
#include "schema/rope.h"

namespace {

using namespace kv4;

constexpr RowShape kRow{512, 64};
constexpr double kError = 2e-3, kCosine = 0.99999;

/// A host array and its twin on the device.
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
};

struct Case {
  Format format = Format::fp8_tile64;
  RowShape shape = kRow;
  int heads = 64;
  std::vector<Request> requests;  // of the step; count 0: a padded token
  int window = 128;
  int ratio = 0;       // 0: no entries
  int chosen = 0;      // 0: all that are visible
  int page_rows = 32;  // entries of a block
  int align = 64;
  bool sink = true, turn_back = false;
  DType q_type = DType::bf16, out_type = DType::f32;
  float q_size = 2.0f;
  int least_exponent = 0, most_exponent = 0;    // a row is multiplied by a power of two between these
  std::optional<cuda::AttendSplit> split = {};  // of the tuned kernel
  std::optional<cuda::SmallSplit> small = {};   // of the one for few tokens
  int workspace_blocks = 0;                     // thread blocks that may leave something in a workspace
  bool late_records = false;                    // written while attend may have started already
  int slot_window = 0, slot_entries = 0;        // lists of that many instead of what the step says
  unsigned seed = 1;
};

/// Lets the next kernel start long before the records are there.
__global__ void write_late(const ops::StepRecord* from, ops::StepRecord* to, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  for (int i = 0; i < 100; ++i) __nanosleep(500);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = from[i];
}

/// One row a query sees, as its place in a pool.
struct Place {
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

  /// Spoils a row that only the first request sees.
  void spoil() {
    const Place at = places_[0].front();
    at.pool->put(at.block, at.row, std::vector<float>(static_cast<std::size_t>(c_.shape.width), NAN));
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
    const Twin<std::int32_t> table(table_), chosen(chosen_), window_slots(window_slots_), entry_slots(entry_slots_),
        entry_lens(entry_lens_);
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
      if (!c_.turn_back && c_.slot_window > 0) p.step.tokens = nullptr;
    }
    p.out = {out.there(), c_.out_type};
    p.lse = lse.there();
    if (c_.turn_back) {
      p.turn_back.angles = view_rope_angles(angles.there(), c_.shape.tail, kPositions);
      p.turn_back.rope_dim = c_.shape.tail;
    }
    const std::int64_t workspace_bytes = ops::attend_workspace_bytes(c_.workspace_blocks);
    Twin<std::uint8_t> workspace(std::vector<std::uint8_t>(static_cast<std::size_t>(workspace_bytes), 0xFF));
    std::fill_n(workspace.host.begin(), ops::kAttendMeetingBytes, std::uint8_t{0});
    workspace.send();
    if (c_.workspace_blocks > 0) {
      p.workspace = workspace.there();
      p.workspace_bytes = workspace_bytes;
    }
    // From here on nothing waits for the GPU: what is late would be there.
    if (c_.late_records) {
      p.step.tokens = late_records.there();
      write_late<<<1, 32>>>(records.there(), late_records.there(), num_tokens());
    }
    EXPECT_EQ(c_.split   ? cuda::attend_split(p, *c_.split, nullptr)
              : c_.small ? cuda::attend_small(p, *c_.small, nullptr)
                         : cuda::attend(p, nullptr),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    out.fetch();
    lse.fetch();
    workspace.fetch();
    EXPECT_TRUE(std::all_of(workspace.host.begin(), workspace.host.begin() + ops::kAttendMeetingBytes,
                            [](std::uint8_t x) { return x == 0; }))
        << "the next call finds a meeting under way";
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
      for (const Place& at : places_[static_cast<std::size_t>(token)]) rows.push_back(at.pool->get(at.block, at.row));
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
  /// Of the same pools, but each of another token.
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
      ops::StepRecord record;
      if (r.count == 0) {
        records_.push_back(record);
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
      for (int at = std::max(0, r.length - c_.window); at < end; ++at) {
        if (at >= r.length && !r.in_place)
          scratch_.put(0, token + at - r.length, row());
        else
          ring_.put(record.read_slot, at % ring_rows_, row());
      }
      for (int at = r.length; at < end; ++at, ++token) {
        record.position = at;
        records_.push_back(record);
        auto& places = places_[static_cast<std::size_t>(token)];
        for (int w = std::max(0, at - c_.window + 1); w <= at; ++w) {
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

  // Lists of any rows that are there; the ones the step would give do not count any more.
  void make_lists() {
    if (c_.slot_window == 0 && c_.slot_entries == 0) return;
    std::vector<Place> ring, page;
    for (const auto& places : places_)
      for (const Place& at : places) (at.pool == &page_ ? page : ring).push_back(at);
    for (std::size_t token = 0; token < places_.size(); ++token) {
      const bool padded = records_[token].padded() && c_.turn_back;
      std::vector<Place> places;
      if (c_.slot_window == 0)
        for (const Place& at : places_[token])
          if (at.pool != &page_) places.push_back(at);
      const auto draw = [&](const std::vector<Place>& from, int count, int rows, std::vector<std::int32_t>& list) {
        for (int i = 0; i < count; ++i) {
          const bool there = random_() % 8 != 0;
          const Place& at = from[random_() % from.size()];
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
      if (!c_.turn_back) r.row = 0;
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
    if (c_.turn_back) {
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
  std::vector<ops::StepRecord> records_;
  std::vector<std::int32_t> table_, chosen_, window_slots_, entry_slots_, entry_lens_;
  std::vector<std::vector<Place>> places_;  // [token] rows it sees
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
  /// NaN in a row of the first request makes all of its output NaN and changes no other.
  static void spoil_first(const Case& c) {
    Problem problem(c);
    const Problem::Result before = problem.run();
    problem.spoil();
    const Problem::Result after = problem.run();
    const std::size_t first = static_cast<std::size_t>(c.heads * c.shape.width);
    for (std::size_t i = 0; i < first; ++i) ASSERT_TRUE(std::isnan(after.out[i])) << i;
    for (std::size_t i = first; i < after.out.size(); ++i) ASSERT_EQ(after.out[i], before.out[i]) << i;
  }
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
  c.turn_back = true;
  return c;
}

TEST_F(AttendKernel, Window) { run(window_case()); }

TEST_F(AttendKernel, AllEntries) {
  run(entries_case(4, 0));
  run(entries_case(128, 0));
}

TEST_F(AttendKernel, ChosenEntries) {
  Case c = entries_case(4, 200);
  run(c);
  c.out_type = DType::bf16;
  c.q_size = 8.0f;
  run(c);
}

TEST_F(AttendKernel, ALongStepReadsTheScratch) {
  Case c = entries_case(4, 0);
  c.requests = {{250, 40, false}, {0, 33, false}, {0, 0}, {9, 2, true}};
  run(c);
  c.chosen = 64;
  c.out_type = DType::bf16;
  run(c);
}

// Queries such that no row has all the weight.
TEST_F(AttendKernel, RowsOfAnySize) {
  struct Sizes {
    int least, most, q;
  };
  for (const Sizes& sizes :
       {Sizes{-8, 8, -8}, {-20, 20, -20}, {14, 17, -15}, {60, 61, -60}, {-40, -39, 40}, {-90, 0, 0}}) {
    SCOPED_TRACE(testing::Message() << "2^" << sizes.least << " to 2^" << sizes.most);
    Case c = entries_case(4, 0);
    c.least_exponent = sizes.least;
    c.most_exponent = sizes.most;
    c.q_size = std::ldexp(1.0f, sizes.q);
    run(c);
    c.sink = false;
    c.split = cuda::AttendSplit{3, 2};
    run(c);
    c.heads = 128;
    c.split = cuda::AttendSplit{1, 1, true};
    run(c);
  }
}

TEST_F(AttendKernel, AnyNumberOfHeads) {
  for (const int heads : {1, 7, 64, 65, 128}) {
    SCOPED_TRACE(heads);
    Case c = entries_case(4, 100);
    c.heads = heads;
    run(c);
    c.out_type = DType::bf16;
    c.sink = false;
    run(c);
  }
}

TEST_F(AttendKernel, EverySplit) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major != 9) GTEST_SKIP() << "the tuned kernel is for Hopper";
  for (const bool paired : {false, true})
    for (const int channels : {1, 2, 4})
      for (int rows = 1; rows * channels * (paired ? 2 : 1) <= cuda::kMaxCluster; ++rows)
        for (const DType type : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(testing::Message() << rows << " x " << channels << (paired ? " paired" : "")
                                          << (type == DType::f32 ? " f32" : " bf16"));
          Case c = entries_case(4, 0);
          c.heads = 96;
          c.requests = {{300, 1}, {0, 0}, {1200, 1}};
          c.out_type = type;
          c.split = cuda::AttendSplit{rows, channels, paired};
          run(c);
        }
}

TEST_F(AttendKernel, EveryFormatWidthAndQueryType) {
  for (const Format format : {Format::fp8_tile64, Format::fp8_row, Format::bf16})
    for (const RowShape shape : {kRow, RowShape{128, 64}, RowShape{96, 32}})
      for (const DType type : {DType::bf16, DType::f32}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(format) << " width " << shape.width);
        Case c = entries_case(4, 40);
        c.format = format;
        c.shape = shape;
        c.heads = 10;
        c.q_type = c.out_type = type;
        run(c);
      }
}

TEST_F(AttendKernel, SlotLists) {
  for (const bool turn_back : {false, true}) {  // with and without the step's records
    Case c = entries_case(4, 0);
    c.align = 576;
    c.slot_window = 128;
    c.slot_entries = 300;
    c.turn_back = turn_back;
    run(c);
    c.slot_window = 0;  // the window comes from the records
    if (turn_back) run(c);
    c.heads = 128;
    c.format = Format::bf16;
    c.slot_window = 20;
    run(c);
  }
}

TEST_F(AttendKernel, NothingToSeeGivesZeros) {
  for (const bool sink : {false, true}) {
    Case c = window_case();
    c.ratio = 4;
    c.page_rows = 32;
    c.slot_window = 0;
    c.sink = sink;
    c.requests = {{300, 1}, {0, 0}, {0, 1}, {40, 1}};
    c.window = 0;
    c.chosen = 3;
    c.q_size = 1.0f;
    run(c);
  }
}

TEST_F(AttendKernel, NaNStaysWithItsRequest) {
  for (const int heads : {64, 3}) {
    Case c = entries_case(4, 0);
    c.heads = heads;
    spoil_first(c);
  }
}

bool is_hopper() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

constexpr cuda::SmallSplit kSmallSplits[] = {{8, 16, 1}, {8, 8, 2},  {8, 9, 2},  {8, 16, 2}, {8, 1, 3},
                                             {8, 2, 3},  {8, 9, 3},  {8, 16, 3}, {16, 1, 3}, {16, 4, 3},
                                             {16, 8, 3}, {16, 9, 3}, {16, 16, 3}};

TEST_F(AttendKernel, EverySmallSplit) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const cuda::SmallSplit& split : kSmallSplits)
    for (const DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(testing::Message() << split.heads << " heads, " << split.parts << " parts, "
                                      << (type == DType::f32 ? "f32" : "bf16"));
      Case c = entries_case(4, 0);
      c.heads = 28;
      c.requests = {{300, 1}, {0, 0}, {2900, 1}, {0, 1}};  // up to 853 rows
      c.out_type = type;
      c.small = split;
      run(c);
      c.chosen = 333;
      run(c);
    }
}

TEST_F(AttendKernel, OneTileOfEveryLength) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int rows : {1, 16, 17, 40, 64, 65, 80}) {  // of a part, at most
    SCOPED_TRACE(rows);
    Case c = entries_case(4, 0);
    c.heads = 20;
    c.requests = {{2900, 1}, {0, 0}, {300, 1}, {0, 1}};
    c.out_type = DType::bf16;
    for (const int parts : {1, 2, 8, 16}) {
      if (rows * parts <= c.window) continue;
      c.small = cuda::SmallSplit{8, parts, 1};
      c.chosen = rows * parts - c.window;
      run(c);
    }
    c = window_case();
    c.heads = 16;
    c.window = rows;
    c.small = cuda::SmallSplit{8, 1, 1};
    run(c);
  }
}

TEST_F(AttendKernel, FewTokensOfEveryKind) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const cuda::SmallSplit& split :
       {cuda::SmallSplit{8, 8, 1}, cuda::SmallSplit{8, 4, 2}, cuda::SmallSplit{16, 2, 3}}) {
    SCOPED_TRACE(testing::Message() << split.heads << " heads, " << split.stages << " stages");
    Case c = entries_case(4, 0);
    c.heads = 24;
    c.small = split;
    c.late_records = true;
    run(c);
    c.chosen = 200;
    run(c);
    c.chosen = 0;
    c.late_records = false;
    c.requests = {{250, 10, false}, {0, 3, false}, {0, 0}, {9, 2, true}};
    run(c);
    c.q_size = 3e-6f;  // logits of nothing, and queries below what fp16 has
    run(c);
    c.requests = kDecode;
    c.q_size = 8.0f;
    c.sink = false;
    run(c);
    c.slot_window = 128;
    c.slot_entries = 300;
    run(c);
    c.turn_back = false;
    run(c);
    c = window_case();
    c.small = split;
    c.heads = 16;
    spoil_first(c);
  }
}

TEST_F(AttendKernel, PartsMergeThroughMemory) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const bool paired : {false, true})
    for (const int parts : {2, 3, 7, 14, 24}) {  // more than there are tiles, too
      SCOPED_TRACE(testing::Message() << parts << (paired ? " paired" : ""));
      Case c = entries_case(4, 0);
      c.heads = 96;
      c.requests = {{300, 1}, {0, 0}, {2900, 1}};  // up to 853 rows
      c.workspace_blocks = 6 * parts;
      c.split = cuda::AttendSplit{parts, 1, paired, true};
      run(c);
      c.out_type = DType::bf16;
      c.chosen = 333;
      run(c);
    }
  Case c = entries_case(4, 0);
  c.heads = 128;
  c.requests = {{2900, 1}, {1200, 1}};
  c.workspace_blocks = 4 * 12;
  c.split = cuda::AttendSplit{12, 1, true, true};
  spoil_first(c);
}

TEST_F(AttendKernel, OneLongTokenOnTheWholeGpu) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.requests = {{33000, 1}};  // 8,378 rows
  c.turn_back = false;
  c.workspace_blocks = 144;
  Problem problem(c);
  const Problem::Result first = problem.run();
  problem.check(first);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(problem.run().out, first.out) << "run " << i;
}

/// Whatever the heads: a list that is too long for a cluster, where there is a workspace.
TEST_F(AttendKernel, ALongListIsMergedThroughMemory) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int heads : {64, 128}) {
    SCOPED_TRACE(testing::Message() << heads << " heads");
    ops::AttendParams p;
    p.num_heads = heads;
    p.layer.window_tokens = 128;
    p.layer.num_kinds = 1;
    p.layer.kinds[0].rows_per_block = 1;
    p.step.num_tokens = 1;
    p.step.blocks_per_request = 8192;
    EXPECT_FALSE(cuda::split_of(p).through_memory);
    alignas(16) std::uint8_t workspace[16];  // not looked into
    p.workspace = workspace;
    p.workspace_bytes = ops::attend_workspace_bytes();
    EXPECT_TRUE(cuda::split_of(p).through_memory);
    EXPECT_GT(cuda::split_of(p).rows, cuda::kMaxCluster);
  }
}

TEST_F(AttendKernel, BlocksThatDoNotRunAtOnceMergeThroughMemory) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.heads = 66;
  c.requests = {{15800, 1}, {15000, 1}};  // up to 4,078 rows: a tile each
  c.workspace_blocks = 256;               // twice as many as run at once: the first ones give up
  c.split = cuda::AttendSplit{64, 1, false, true};
  Problem problem(c);
  const Problem::Result first = problem.run();
  problem.check(first);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(problem.run().out, first.out) << "run " << i;
}

TEST_F(AttendKernel, TheSameTwice) {
  Problem problem(entries_case(4, 500));
  EXPECT_EQ(problem.run().out, problem.run().out);
}

// More tokens than thread blocks run at once, so that each takes several: long and short ones, padded ones, two lots of
// heads, more rounds than are known at a time.
TEST_F(AttendKernel, TokensInTurn) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.heads = 5;
  c.split = cuda::AttendSplit{1, 1, false, false, true};
  c.requests = {{250, 150, false}, {0, 0}, {0, 170, false}, {1900, 1}, {0, 0}, {9, 2, true}};
  run(c);
  c.chosen = 77;
  c.out_type = DType::bf16;
  run(c);
  c.heads = 70;
  c.requests = {{500, 90, false}, {0, 0}, {0, 1}, {3, 20, false}};
  run(c);
  c = window_case();
  c.heads = 1;
  c.split = cuda::AttendSplit{1, 1, false, false, true};
  c.window = 8;
  c.requests = {{5, 6000, false}, {0, 0}};  // 46 rounds of a tile
  run(c);
}

TEST_F(AttendKernel, FewTokensByTheKernelForMany) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const cuda::AttendSplit& split :
       {cuda::AttendSplit{1, 1}, cuda::AttendSplit{4, 2}, cuda::AttendSplit{2, 1, true}}) {
    SCOPED_TRACE(testing::Message() << split.rows << " x " << split.channels << (split.paired ? " paired" : ""));
    Case c = entries_case(4, 0);
    c.heads = split.paired ? 128 : 64;
    c.split = split;
    spoil_first(c);
    c.slot_window = 128;
    c.slot_entries = 300;
    run(c);
  }
}

}  // namespace
