// attend's kernels, each on its own.
#include "parity/attend_problem.cuh"

namespace {

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

// The queries are such that no row has all of P.
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
    c.split = split_kv(3, 2);
    run(c);
    c.heads = 128;
    c.split = split_kv(1, 1, true);
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
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  std::vector<cuda::AttendSplit> splits = {unsplit_by(cuda::AttendKernel::unsplit)};
  for (const bool cta_pair : {false, true})
    for (const int channels : {1, 2, 4})
      for (int rows = 1; rows * channels * (cta_pair ? 2 : 1) <= cuda::kMaxCluster; ++rows)
        if (channels == 1 || !cta_pair) splits.push_back(split_kv(rows, channels, cta_pair));
  for (const cuda::AttendSplit& split : splits)
    for (const DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(describe(split) + (type == DType::f32 ? ", f32" : ", bf16"));
      Case c = entries_case(4, 0);
      c.heads = 96;
      c.requests = {{300, 1}, {0, 0}, {1200, 1}};
      c.out_type = type;
      c.split = split;
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
  for (const bool inverse_rope : {false, true}) {  // with and without the step's records
    Case c = entries_case(4, 0);
    c.align = 576;
    c.slot_window = 128;
    c.slot_entries = 300;
    c.inverse_rope = inverse_rope;
    run(c);
    c.slot_window = 0;  // the window comes from the records
    if (inverse_rope) run(c);
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

const cuda::AttendSplit kSmallBatchSplits[] = {
    small_batch(8, 16, 1), small_batch(8, 8, 2),  small_batch(8, 9, 2),  small_batch(8, 16, 2), small_batch(8, 1, 3),
    small_batch(8, 2, 3),  small_batch(8, 9, 3),  small_batch(8, 16, 3), small_batch(16, 1, 3), small_batch(16, 4, 3),
    small_batch(16, 8, 3), small_batch(16, 9, 3), small_batch(16, 16, 3)};

TEST_F(AttendKernel, EverySmallBatchSplit) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const cuda::AttendSplit& split : kSmallBatchSplits)
    for (const DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(describe(split) + (type == DType::f32 ? ", f32" : ", bf16"));
      Case c = entries_case(4, 0);
      c.heads = 28;
      c.requests = {{300, 1}, {0, 0}, {2900, 1}, {0, 1}};  // up to 853 rows
      c.out_type = type;
      c.split = split;
      run(c);
      c.chosen = 333;
      run(c);
    }
}

TEST_F(AttendKernel, OneTileOfEveryLength) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int rows : {1, 16, 17, 40, 64, 65, 80}) {  // of a KV split, at most
    SCOPED_TRACE(rows);
    Case c = entries_case(4, 0);
    c.heads = 20;
    c.requests = {{2900, 1}, {0, 0}, {300, 1}, {0, 1}};
    c.out_type = DType::bf16;
    for (const int kv_splits : {1, 2, 8, 16}) {
      if (rows * kv_splits <= c.window) continue;
      c.split = small_batch(8, kv_splits, 1);
      c.chosen = rows * kv_splits - c.window;
      run(c);
    }
    c = window_case();
    c.heads = 16;
    c.window = rows;
    c.split = small_batch(8, 1, 1);
    run(c);
  }
}

TEST_F(AttendKernel, SmallBatchesOfEveryKind) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const cuda::AttendSplit& split : {small_batch(8, 8, 1), small_batch(8, 4, 2), small_batch(16, 2, 3)}) {
    SCOPED_TRACE(describe(split));
    Case c = entries_case(4, 0);
    c.heads = 24;
    c.split = split;
    c.late_records = true;
    run(c);
    c.chosen = 200;
    run(c);
    c.chosen = 0;
    c.late_records = false;
    c.requests = {{250, 10, false}, {0, 3, false}, {0, 0}, {9, 2, true}};
    run(c);
    c.q_size = 3e-6f;  // tiny logits, and queries below fp16's range
    run(c);
    c.requests = kDecode;
    c.q_size = 8.0f;
    c.sink = false;
    run(c);
    c.slot_window = 128;
    c.slot_entries = 300;
    run(c);
    c.inverse_rope = false;
    run(c);
    c = window_case();
    c.split = split;
    c.heads = 16;
    spoil_first(c);
  }
}

TEST_F(AttendKernel, SplitsCombineInMemory) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const bool cta_pair : {false, true})
    for (const int kv_splits : {2, 3, 7, 14, 24}) {  // also more splits than tiles
      SCOPED_TRACE(testing::Message() << kv_splits << (cta_pair ? " 2-CTA pair" : ""));
      Case c = entries_case(4, 0);
      c.heads = 96;
      c.requests = {{300, 1}, {0, 0}, {2900, 1}};  // up to 853 rows
      c.workspace_ctas = 6 * kv_splits;
      c.split = in_memory(kv_splits, cta_pair);
      run(c);
      c.out_type = DType::bf16;
      c.chosen = 333;
      run(c);
    }
  Case c = entries_case(4, 0);
  c.heads = 128;
  c.requests = {{2900, 1}, {1200, 1}};
  c.workspace_ctas = 4 * 12;
  c.split = in_memory(12, true);
  spoil_first(c);
}

TEST_F(AttendKernel, OneLongTokenOnTheWholeGpu) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.requests = {{33000, 1}};  // 8,378 rows
  c.inverse_rope = false;
  c.workspace_ctas = 144;
  Problem problem(c);
  const Problem::Result first = problem.run();
  problem.check(first);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(problem.run().out, first.out) << "run " << i;
}

TEST_F(AttendKernel, CtasThatAreNotCoResidentCombineInMemory) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.heads = 66;
  c.requests = {{15800, 1}, {15000, 1}};  // up to 4,078 rows: one tile each
  c.workspace_ctas = 256;                 // twice as many as run at once: the first CTAs time out
  c.split = in_memory(64);
  Problem problem(c);
  const Problem::Result first = problem.run();
  problem.check(first);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(problem.run().out, first.out) << "run " << i;
}

TEST_F(AttendKernel, TheSameTwice) {
  Problem problem(entries_case(4, 500));
  EXPECT_EQ(problem.run().out, problem.run().out);
}

// More tokens than CTAs run at once, so that each CTA takes several work tiles: long, short and padded tokens, two head
// tiles, and more work tiles than a CTA stores at a time.
TEST_F(AttendKernel, PersistentCtas) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.heads = 5;
  c.split = unsplit_by(cuda::AttendKernel::persistent);
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
  c.split = unsplit_by(cuda::AttendKernel::persistent);
  c.window = 8;
  c.requests = {{5, 6000, false}, {0, 0}};  // 46 work tiles of one KV tile each
  run(c);
}

TEST_F(AttendKernel, FewTokensBySplitKv) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const cuda::AttendSplit& split : {split_kv(1), split_kv(4, 2), split_kv(2, 1, true)}) {
    SCOPED_TRACE(describe(split));
    Case c = entries_case(4, 0);
    c.heads = split.cta_pair ? 128 : 64;
    c.split = split;
    spoil_first(c);
    c.slot_window = 128;
    c.slot_entries = 300;
    run(c);
  }
}

}  // namespace
