// attend over the caller's bf16 rows by list: the kernel for Hopper, the plain one and the CPU, compared with sums in
// double. Rows that no list names are NaN, and so are rows behind the limit.
#include "backend/backend.h"
#include "parity/attend_problem.cuh"

namespace {

constexpr int kWidth = 512;
constexpr int kBehindList = 3;  // words between the lists of two tokens

struct ListCase {
  int tokens, heads, rows, list;
  std::vector<int> lens = {};     // of the tokens, repeated; empty: all of the list
  std::vector<float> sinks = {};  // of the heads, repeated; empty: none
  bool all_out_of_range = false;
  int block_rows = 1;
  float q_size = 2.0f;
  ops::LseMode lse_mode = ops::LseMode::all;
};

class AttendBf16Rows : public testing::Test {
 protected:
  struct Result {
    std::vector<std::uint16_t> out;
    std::vector<float> lse, max_logits;
  };

  /// What all backends read.
  struct Input {
    std::vector<std::uint16_t> q, rows;
    std::vector<std::int32_t> list, lens;
    std::vector<float> sinks;
  };

  static Input draw(const ListCase& c) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    Input in;
    for (int i = 0; i < c.tokens * c.heads * kWidth; ++i) in.q.push_back(codec::bf16_bits(normal(random) * c.q_size));
    in.rows.assign(static_cast<std::size_t>((c.rows + 64) * kWidth), 0xFFFF);  // NaN
    for (int t = 0; t < c.tokens; ++t) {
      const int len = c.lens.empty() ? c.list : c.lens[static_cast<std::size_t>(t) % c.lens.size()];
      in.lens.push_back(len);
      for (int i = 0; i < c.list; ++i) {
        const bool there = !c.all_out_of_range && random() % 8 != 0;
        const int row = there ? static_cast<int>(random() % unsigned(c.rows)) / 2 * 2  // odd rows stay NaN
                              : random() % 2 == 0 ? -1 - static_cast<int>(random() % 1000)
                                                  : c.rows + static_cast<int>(random() % (1u << 30));
        in.list.push_back(i < len ? row : 1);  // NaN behind the length
      }
      in.list.insert(in.list.end(), kBehindList, 1);
    }
    for (int r = 0; r < c.rows; r += 2)
      for (int i = 0; i < kWidth; ++i)
        in.rows[static_cast<std::size_t>(r * kWidth + i)] = codec::bf16_bits(normal(random));
    for (int h = 0; h < c.heads && !c.sinks.empty(); ++h)
      in.sinks.push_back(c.sinks[static_cast<std::size_t>(h) % c.sinks.size()]);
    return in;
  }

  static ops::AttendParams params(const ListCase& c) {
    ops::AttendParams p;
    p.layer.num_kinds = 1;
    ops::KindDesc& kind = p.layer.kinds[0];
    kind.rows_per_block = c.block_rows;
    kind.page.format = Format::bf16;
    kind.page.shape = {kWidth, 0};
    kind.page.payload = {nullptr, std::int64_t{c.block_rows} * kWidth * 2, kWidth * 2};
    p.step.num_tokens = c.tokens;
    p.num_heads = c.heads;
    p.softmax_scale = 0.0441942f;
    p.q = {nullptr, DType::bf16, std::int64_t{c.heads} * kWidth};
    p.entry_slots = {nullptr, c.list + kBehindList, nullptr, c.rows, c.list};
    p.lse_mode = c.lse_mode;
    p.out.dtype = DType::bf16;
    return p;
  }

  static Result allocate(const ListCase& c) {
    const std::size_t heads = static_cast<std::size_t>(c.tokens * c.heads);
    return {std::vector<std::uint16_t>(heads * kWidth, 0xFFFF), std::vector<float>(heads, NAN),
            std::vector<float>(heads, NAN)};
  }

  static Result on_gpu(const ListCase& c, const Input& in, const cuda::AttendSplit& split) {
    const Result empty = allocate(c);
    const Twin<std::uint16_t> q(in.q), rows(in.rows);
    const Twin<std::int32_t> list(in.list), lens(in.lens);
    const Twin<float> sinks(in.sinks);
    Twin<std::uint16_t> out(empty.out);
    Twin<float> lse(empty.lse), max_logits(empty.max_logits);
    ops::AttendParams p = params(c);
    p.q.data = q.there();
    p.layer.kinds[0].page.payload.data = reinterpret_cast<std::uint8_t*>(rows.there());
    p.entry_slots.slots = list.there();
    p.entry_slots.lens = lens.there();
    if (!in.sinks.empty()) p.sink = sinks.there();
    p.out.data = out.there();
    p.lse = lse.there();
    p.max_logits = max_logits.there();
    EXPECT_EQ(cuda::attend_split(p, split, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    out.fetch();
    lse.fetch();
    max_logits.fetch();
    return {out.host, lse.host, max_logits.host};
  }

  static Result on_cpu(const ListCase& c, Input in) {
    Result result = allocate(c);
    ops::AttendParams p = params(c);
    p.q.data = in.q.data();
    p.layer.kinds[0].page.payload.data = reinterpret_cast<std::uint8_t*>(in.rows.data());
    p.entry_slots.slots = in.list.data();
    p.entry_slots.lens = in.lens.data();
    if (!in.sinks.empty()) p.sink = in.sinks.data();
    p.out.data = result.out.data();
    p.lse = result.lse.data();
    p.max_logits = result.max_logits.data();
    make_cpu_backend(2)->attend(p);
    return result;
  }

  static void expect_close(float got, double want, const std::string& what) {
    if (std::isinf(want))
      EXPECT_EQ(got, want) << what;
    else
      EXPECT_NEAR(got, want, 2e-4 * (1 + std::abs(want))) << what;
  }

  static void check(const ListCase& c, const Input& in, const Result& got) {
    double most = 0, worst = 0, dot = 0, norm_got = 0, norm_want = 0;
    for (int t = 0; t < c.tokens; ++t)
      for (int h = 0; h < c.heads; ++h) {
        const std::size_t at = static_cast<std::size_t>(t * c.heads + h);
        const std::uint16_t* q = in.q.data() + at * kWidth;
        std::vector<double> z;
        std::vector<const std::uint16_t*> rows;
        const double sink = in.sinks.empty() ? -INFINITY : in.sinks[static_cast<std::size_t>(h)];
        double largest = -INFINITY;
        for (int i = 0; i < std::clamp(in.lens[static_cast<std::size_t>(t)], 0, c.list); ++i) {
          const int row = in.list[static_cast<std::size_t>(t * (c.list + kBehindList) + i)];
          if (row < 0 || row >= c.rows) continue;
          rows.push_back(in.rows.data() + static_cast<std::size_t>(row) * kWidth);
          double sum = 0;
          for (int i = 0; i < kWidth; ++i) sum += double{value(q[i])} * value(rows.back()[i]);
          z.push_back(sum * 0.0441942f);
          largest = std::max(largest, z.back());
        }
        const double base = std::max(largest, sink);
        std::vector<double> want(kWidth, 0.0);
        double total = sink == -INFINITY ? 0.0 : sink == INFINITY ? 1.0 : std::exp(sink - base);
        double of_rows = 0.0;  // relative to the largest logit
        for (std::size_t i = 0; i < rows.size(); ++i) {
          of_rows += std::exp(z[i] - largest);
          const double weight = base == INFINITY ? 0.0 : std::exp(z[i] - base);
          total += weight;
          for (int j = 0; j < kWidth; ++j) want[static_cast<std::size_t>(j)] += weight * value(rows[i][j]);
        }
        const std::string what = "token " + std::to_string(t) + " head " + std::to_string(h);
        const double lse = c.lse_mode == ops::LseMode::rows
                               ? (z.empty() ? INFINITY : largest + std::log(of_rows))
                               : (total > 0 ? base + std::log(total) : -INFINITY);
        expect_close(got.lse[at], lse, "lse, " + what);
        expect_close(got.max_logits[at], largest, "largest logit, " + what);
        for (int i = 0; i < kWidth; ++i) {
          const double x = value(got.out[at * kWidth + static_cast<std::size_t>(i)]);
          const double y = total > 0 ? want[static_cast<std::size_t>(i)] / total : 0.0;
          ASSERT_FALSE(std::isnan(x)) << what << " channel " << i;
          worst = std::max(worst, std::abs(x - y) - std::abs(y) / 256);
          most = std::max(most, std::abs(y));
          dot += x * y;
          norm_got += x * x;
          norm_want += y * y;
        }
      }
    EXPECT_LE(worst, kError * most);
    if (most > 0) EXPECT_GE(dot / std::sqrt(norm_got * norm_want), kCosine);
  }

  static void run_lists(const ListCase& c) {
    SCOPED_TRACE(testing::Message() << c.tokens << " tokens, " << c.heads << " heads, lists of " << c.list);
    const Input in = draw(c);
    {
      SCOPED_TRACE("CPU");
      check(c, in, on_cpu(c, in));
    }
    if (!why_no_cuda().empty()) return;
    {
      SCOPED_TRACE("generic");
      check(c, in, on_gpu(c, in, {}));
    }
    if (!is_hopper()) return;
    SCOPED_TRACE("tuned");
    check(c, in, on_gpu(c, in, {.kernel = cuda::AttendKernel::bf16_rows}));
  }

 private:
  static float value(std::uint16_t bits) { return codec::bits_float(std::uint32_t{bits} << 16); }
};

TEST_F(AttendBf16Rows, AnySizes) {
  for (const int heads : {8, 16, 64, 72, 128})
    for (const int list : {1, 63, 64, 200}) run_lists({.tokens = 5, .heads = heads, .rows = 300, .list = list});
  run_lists({.tokens = 3, .heads = 64, .rows = 4000, .list = 1152, .block_rows = 32});
  run_lists({.tokens = 3, .heads = 64, .rows = 100, .list = 130, .q_size = 16.0f});
  run_lists({.tokens = 1500, .heads = 2, .rows = 100, .list = 40});  // many work tiles of a CTA
}

TEST_F(AttendBf16Rows, LengthsAndSinks) {
  for (const ops::LseMode mode : {ops::LseMode::all, ops::LseMode::rows}) {
    SCOPED_TRACE(mode == ops::LseMode::all ? "LseMode::all" : "LseMode::rows");
    ListCase c{.tokens = 9, .heads = 64, .rows = 300, .list = 190, .lens = {0, 1, 64, 65, 190, -5, 128, 1000}};
    c.lse_mode = mode;
    run_lists(c);
    c.sinks = {0.5f, -INFINITY, INFINITY, 12.0f, -30.0f};
    run_lists(c);
    c.all_out_of_range = true;
    run_lists(c);
    c.sinks = {};
    run_lists(c);
  }
}

}  // namespace
