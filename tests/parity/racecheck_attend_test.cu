// Small shapes of every attend kernel for compute-sanitizer's racecheck: see racecheck.h.
#include <set>

#include "backend/cuda/ptx/mbarrier.cuh"
#include "parity/attend_problem.cuh"
#include "parity/racecheck.h"
#include "support/launched_kernels.h"

namespace {

using test::LaunchedKernels;

// A barrier lets threads pass when as many have arrived as there are: both depend on the build.
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

/// A tile or two, of more tokens than CTAs run at once.
Case short_tokens(int heads) {
  Case c = entries_case(4, 0);
  c.heads = heads;
  c.requests = {{250, 150, false}, {0, 0}, {0, 120, false}};
  return c;
}

/// Tokens of one tile, so many that a CTA must learn of further ones (Shared::rounds) on an H200.
Case many_tokens() {
  Case c = window_case();
  c.heads = 1;
  c.window = 8;
  c.requests = {{5, 1900, false}};
  return c;
}

std::vector<Shape> make_shapes() {
  std::vector<Shape> shapes;
  const auto tiles = [&](const std::string& name, const cuda::AttendSplit& split, const std::string& arguments) {
    Case c = few_tiles(split.paired ? 128 : 64);
    c.split = split;
    if (split.through_memory) c.workspace_blocks = 2 * split.rows;
    shapes.push_back({"tiles_" + name, c, "attend_tiles<" + arguments + ">"});
  };
  tiles("alone", {.rows = 1, .channels = 1, .alone = true}, "1, false, false, true");
  tiles("one_part", {1, 1}, "1, false, false, false");
  tiles("three_parts", {3, 1}, "1, false, false, false");
  tiles("half_channels", {2, 2}, "2, false, false, false");
  tiles("quarter_channels", {2, 4}, "4, false, false, false");
  tiles("paired", {1, 1, true}, "1, true, false, false");
  tiles("paired_parts", {2, 1, true}, "1, true, false, false");
  tiles("paired_half_channels", {2, 2, true}, "2, true, false, false");
  tiles("paired_quarter_channels", {2, 4, true}, "4, true, false, false");
  tiles("through_memory", {3, 1, false, true}, "1, false, true, false");
  tiles("paired_through_memory", {3, 1, true, true}, "1, true, true, false");

  const auto add = [&](const std::string& name, Case c, const cuda::AttendSplit& split, const std::string& kernel) {
    c.split = split;
    shapes.push_back({name, c, kernel});
  };
  const cuda::AttendSplit rounds{.rows = 1, .channels = 1, .in_rounds = true};
  add("rounds", short_tokens(5), rounds, "attend_rounds");
  add("rounds_many", many_tokens(), rounds, "attend_rounds");
  cuda::AttendSplit neighbours{.rows = 1, .channels = 1, .neighbours = true};
  add("neighbours", few_tiles(5), neighbours, "attend_neighbours");
  neighbours.in_rounds = true;
  add("neighbours_in_rounds", short_tokens(5), neighbours, "attend_neighbours");
  add("neighbours_many", many_tokens(), neighbours, "attend_neighbours");

  Case windows = window_case();
  windows.heads = 5;
  windows.requests = {{250, 300, false}, {0, 0}, {9, 100, false}};
  add("runs", windows, {.rows = 1, .channels = 1, .in_runs = true}, "attend_runs_kernel");
  windows.out_type = DType::bf16;
  add("runs_bf16", windows, {.rows = 1, .channels = 1, .in_runs = true}, "attend_runs_kernel");
  for (const int channels : {1, 2})
    add("window_" + std::to_string(channels), window_case(), {.rows = 1, .channels = channels, .in_one_go = true},
        "attend_window_kernel<" + std::to_string(channels) + ">");

  const auto parts = [&](int tokens_before, const cuda::SmallSplit& split, int fixed) {
    Case c = few_tiles(16);
    c.requests = {{tokens_before, 1}, {0, 0}};
    c.small = split;
    const std::string arguments =
        std::to_string(split.heads) + ", " + std::to_string(split.stages) + ", " + std::to_string(fixed);
    shapes.push_back({"parts_" + std::to_string(split.heads) + "_heads_" + std::to_string(split.parts) + "_of_" +
                          std::to_string(split.stages) + "_stages",
                      c, "attend_parts<" + arguments + ">"});
  };
  constexpr int kShort = 700, kLong = 2900;  // 303 and 853 rows
  parts(kShort, {8, 8, 1}, 8);
  parts(kShort, {8, 4, 1}, 0);
  parts(kShort, {8, 9, 2}, 9);
  parts(kShort, {8, 4, 2}, 0);
  parts(kLong, {8, 9, 3}, 9);
  parts(kLong, {8, 2, 3}, 0);
  parts(kShort, {8, 1, 3}, 0);
  parts(kLong, {16, 9, 3}, 9);
  parts(kLong, {16, 16, 3}, 0);
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
