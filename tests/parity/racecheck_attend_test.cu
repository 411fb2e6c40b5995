// Small shapes of every attend kernel for compute-sanitizer's racecheck: see racecheck.h.
#include <set>

#include "backend/cuda/ptx/mbarrier.cuh"
#include "parity/attend_problem.cuh"
#include "parity/racecheck.h"
#include "support/launched_kernels.h"

namespace {

using Kernel = cuda::AttendKernel;
using test::LaunchedKernels;

// A barrier completes when its expected arrivals have come; both numbers depend on the build.
#ifdef KV4_RACECHECK
TEST(RacecheckBuild, EachThreadArrivesForItself) {
  EXPECT_EQ(cuda::Arrivals::of_warps(4).count(), 128);
  EXPECT_EQ(cuda::Arrivals::of_group(256).count(), 256);
#else
TEST(RacecheckBuild, OneThreadArrivesForItsWarp) {
  EXPECT_EQ(cuda::Arrivals::of_warps(4).count(), 4);
  EXPECT_EQ(cuda::Arrivals::of_group(256).count(), 1);
#endif
  EXPECT_EQ(cuda::Arrivals::of_each(64).count(), 64);
  EXPECT_EQ(cuda::Arrivals::of_copies().count(), 1);
}

struct Shape {
  std::string name;
  Case problem;
  std::string kernel;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

/// 303 rows, of both kinds: five tiles, the last one short.
Case few_tiles(int heads) {
  Case c = entries_case(4, 0);
  c.heads = heads;
  c.requests = {{700, 1}};
  return c;
}

/// One or two tiles per token, for more tokens than CTAs run at once.
Case short_tokens(int heads) {
  Case c = entries_case(4, 0);
  c.heads = heads;
  c.requests = {{250, 150, false}, {0, 0}, {0, 120, false}};
  return c;
}

/// Tokens of one tile each: enough that a CTA on an H200 must schedule further work tiles (Shared::work_tiles).
Case many_tokens() {
  Case c = window_case();
  c.heads = 1;
  c.window = 8;
  c.requests = {{5, 1900, false}};
  return c;
}

std::vector<Shape> make_shapes() {
  std::vector<Shape> shapes;
  const auto add_split_kv = [&](const std::string& name, const cuda::AttendSplit& split, const std::string& arguments) {
    Case c = few_tiles(split.cta_pair ? 128 : 64);
    c.split = split;
    if (split.kernel == Kernel::split_kv_in_memory) c.workspace_ctas = 2 * split.kv_splits;
    shapes.push_back({"split_kv_" + name, c, "attend_split_kv<" + arguments + ">"});
  };
  add_split_kv("unsplit", unsplit_by(Kernel::unsplit), "1, false, false, true");
  add_split_kv("one_split", split_kv(1), "1, false, false, false");
  add_split_kv("three_splits", split_kv(3), "1, false, false, false");
  add_split_kv("half_channels", split_kv(2, 2), "2, false, false, false");
  add_split_kv("quarter_channels", split_kv(2, 4), "4, false, false, false");
  add_split_kv("cta_pair", split_kv(1, 1, true), "1, true, false, false");
  add_split_kv("cta_pair_splits", split_kv(2, 1, true), "1, true, false, false");
  add_split_kv("in_memory", in_memory(3), "1, false, true, false");
  add_split_kv("cta_pair_in_memory", in_memory(3, true), "1, true, true, false");

  const auto add = [&](const std::string& name, Case c, const cuda::AttendSplit& split, const std::string& kernel) {
    c.split = split;
    shapes.push_back({name, c, kernel});
  };
  const cuda::AttendSplit persistent = unsplit_by(Kernel::persistent);
  add("persistent", short_tokens(5), persistent, "attend_persistent");
  add("persistent_many", many_tokens(), persistent, "attend_persistent");
  const cuda::AttendSplit token_pair = unsplit_by(Kernel::token_pair);
  add("token_pair_few", few_tiles(5), token_pair, "attend_token_pair");
  add("token_pair", short_tokens(5), token_pair, "attend_token_pair");
  add("token_pair_many", many_tokens(), token_pair, "attend_token_pair");

  Case windows = window_case();
  windows.heads = 5;
  windows.requests = {{250, 300, false}, {0, 0}, {9, 100, false}};
  const cuda::AttendSplit persistent_window = unsplit_by(Kernel::persistent_window);
  add("persistent_window", windows, persistent_window, "attend_persistent_window");
  windows.out_type = DType::bf16;
  add("persistent_window_bf16", windows, persistent_window, "attend_persistent_window");
  for (const int channels : {1, 2})
    add("single_pass_window_" + std::to_string(channels), window_case(),
        unsplit_by(Kernel::single_pass_window, channels),
        "attend_single_pass_window<" + std::to_string(channels) + ">");

  add("staged", short_tokens(5), unsplit_by(Kernel::staged), "attend_staged<true>");
  add("staged_many", many_tokens(), unsplit_by(Kernel::staged), "attend_staged<true>");

  const auto add_small_batch = [&](int tokens_before, const cuda::AttendSplit& split, int fixed) {
    Case c = few_tiles(16);
    c.requests = {{tokens_before, 1}, {0, 0}};
    c.split = split;
    const std::string arguments =
        std::to_string(split.heads) + ", " + std::to_string(split.stages) + ", " + std::to_string(fixed);
    shapes.push_back({"small_batch_" + std::to_string(split.heads) + "_heads_" + std::to_string(split.kv_splits) +
                          "_of_" + std::to_string(split.stages) + "_stages",
                      c, "attend_small_batch<" + arguments + ">"});
  };
  constexpr int kShort = 700, kLong = 2900;  // 303 and 853 rows
  add_small_batch(kShort, small_batch(8, 8, 1), 8);
  add_small_batch(kShort, small_batch(8, 4, 1), 0);
  add_small_batch(kShort, small_batch(8, 9, 2), 9);
  add_small_batch(kShort, small_batch(8, 4, 2), 0);
  add_small_batch(kLong, small_batch(8, 9, 3), 9);
  add_small_batch(kLong, small_batch(8, 2, 3), 0);
  add_small_batch(kShort, small_batch(8, 1, 3), 0);
  add_small_batch(kLong, small_batch(16, 9, 3), 9);
  add_small_batch(kLong, small_batch(16, 16, 3), 0);
  return shapes;
}

class RacecheckAttend : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
    if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  }
};

TEST_P(RacecheckAttend, RunsItsKernel) {
  const LaunchedKernels launched;
  Problem problem(GetParam().problem);
  problem.check(problem.run());
  expect_launched(launched, {GetParam().kernel});
}

INSTANTIATE_TEST_SUITE_P(, RacecheckAttend, testing::ValuesIn(make_shapes()),
                         [](const auto& i) { return i.param.name; });

TEST(RacecheckList, HasAShapeOfEveryAttendKernel) {
  std::set<std::string> kernels;
  for (const Shape& shape : make_shapes()) kernels.insert(shape.kernel.substr(0, shape.kernel.find('<')));
  EXPECT_EQ(kernels, std::set<std::string>(std::begin(test::kRacecheckAttend), std::end(test::kRacecheckAttend)));
}

}  // namespace
