// attend's kernels for many tokens of one request, which share most of their rows.
#include "parity/attend_problem.cuh"

namespace {

/// Requests with odd numbers of tokens, so that some token pairs span two requests; chunks that begin inside the
/// window, after it and at position 0; rows in the ring and in the scratch; padded tokens; a shortened window.
const std::vector<Request> kChunks = {{250, 41, false}, {0, 33, false},   {0, 0}, {9, 2}, {100, 51, false, 70},
                                      {300, 1},         {400, 37, false}, {0, 0}, {0, 0}, {77, 1}};

class AttendKernelPrefill : public AttendKernel {
 protected:
  /// Runs all heads into fp32, few heads into bf16 after a wrong speculation, and then without a sink over other
  /// windows.
  void run_chunks(Case& c, std::initializer_list<int> windows) {
    c.requests = kChunks;
    run(c);
    c.heads = 5;
    c.out_type = DType::bf16;
    c.late_records = true;
    run(c);
    c.late_records = false;
    c.sink = false;
    const int window = c.window;
    for (const int other : windows) {
      if (other + c.ratio == 0) continue;
      c.window = other;
      run(c);
    }
    c.window = window;
  }
};

TEST_F(AttendKernelPrefill, TokenPairs) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int ratio : {4, 128, 0}) {
    SCOPED_TRACE(testing::Message() << "ratio " << ratio);
    Case c = ratio > 0 ? entries_case(ratio, 0) : window_case();
    c.split = unsplit_by(cuda::AttendKernel::token_pair);
    run_chunks(c, {0, 8, 100, 190});
    c.heads = 70;
    c.requests = {{1000, 11, false}, {0, 3}, {2040, 17, false}};  // entries that fill a tile, and one entry more
    run(c);
    c.heads = 1;
    c.requests = {
        {200, 2005, false}, {0, 0}, {70, 900, false}};  // many work tiles, of more tokens than a CTA stores at a time
    if (ratio != 4) run(c);
  }
}

TEST_F(AttendKernelPrefill, TokenPairsSeeOnlyTheirOwnRows) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.heads = 3;
  c.split = unsplit_by(cuda::AttendKernel::token_pair);
  c.requests = {{300, 7, false}, {0, 5}, {251, 3, false}};
  spoil_row(c, 0, 0);  // no later token sees it
  spoil_row(c, 2, 0);
  spoil_row(c, 3, 127);  // no earlier token sees it: it is the token's own row
  spoil_row(c, 3, -1);   // nor the entry that ends with it
  spoil_row(c, 7, 0);    // the pair's other token is of another request
  spoil_row(c, 14, -1);
}

TEST_F(AttendKernelPrefill, PersistentWindows) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = window_case();
  c.split = unsplit_by(cuda::AttendKernel::persistent_window);
  c.inverse_rope = true;
  run_chunks(c, {1, 8, 100});
  c.heads = 70;
  c.requests = {{1000, 300, false}, {0, 3}, {90, 200, false}};  // CTAs of eight tokens
  run(c);
  c.heads = 1;
  c.requests = {{60, 4000, false}, {0, 0}, {0, 131, false}};  // of 32 tokens
  run(c);
}

TEST_F(AttendKernelPrefill, PersistentWindowsSeeOnlyTheirOwnRows) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = window_case();
  c.heads = 3;
  c.split = unsplit_by(cuda::AttendKernel::persistent_window);
  c.requests = {{300, 500, false}, {0, 5}, {130, 301, false}};  // CTAs of seven tokens
  spoil_row(c, 0, 0);
  spoil_row(c, 3, 0);    // no later token sees it, not even one of the same CTA
  spoil_row(c, 4, 127);  // no earlier token sees it
  spoil_row(c, 499, -1);
  spoil_row(c, 504, 0);
  spoil_row(c, 505, 0);
}

TEST_F(AttendKernelPrefill, SinglePassWindows) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int channels : {1, 2}) {
    SCOPED_TRACE(testing::Message() << channels << " channel splits");
    Case c = window_case();
    c.split = unsplit_by(cuda::AttendKernel::single_pass_window, channels);
    c.inverse_rope = true;
    run_chunks(c, {1, 8, 64, 65, 100});
    c.heads = 70;
    c.requests = kDecode;
    c.late_records = true;
    run(c);
    c.heads = 3;
    c.late_records = false;
    c.requests = {{300, 7, false}, {0, 5}, {130, 3}};
    spoil_row(c, 3, 0);    // no later token sees it
    spoil_row(c, 4, 127);  // no earlier token sees it
    spoil_row(c, 9, -1);
  }
}

TEST_F(AttendKernelPrefill, Staged) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int ratio : {4, 128, 0}) {
    SCOPED_TRACE(testing::Message() << "ratio " << ratio);
    Case c = ratio > 0 ? entries_case(ratio, 0) : window_case();
    c.split = unsplit_by(cuda::AttendKernel::staged);
    run_chunks(c, {0, 8, 100, 190});
    c.heads = 70;
    c.requests = {{1000, 11, false}, {0, 3}, {2040, 17, false}};  // entries that fill a tile, and one entry more
    run(c);
    c.heads = 1;
    c.requests = {
        {200, 2005, false}, {0, 0}, {70, 900, false}};  // many work tiles, of more tokens than a CTA knows at a time
    if (ratio != 4) run(c);
  }
}

TEST_F(AttendKernelPrefill, StagedChosenEntries) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  for (const int chosen : {1, 64, 200}) {
    SCOPED_TRACE(testing::Message() << chosen << " chosen entries");
    Case c = entries_case(4, chosen);
    c.split = unsplit_by(cuda::AttendKernel::staged);
    run_chunks(c, {0, 100});
    c.heads = 128;
    c.requests = {{1000, 5, false}, {0, 3}, {2040, 7, false}, {5000, 3, false}};
    c.q_size = 8.0f;
    run(c);
  }
}

TEST_F(AttendKernelPrefill, StagedTokensSeeOnlyTheirOwnRows) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  Case c = entries_case(4, 0);
  c.heads = 3;
  c.split = unsplit_by(cuda::AttendKernel::staged);
  c.requests = {{300, 7, false}, {0, 5}, {251, 3, false}};
  spoil_row(c, 0, 0);    // no later token sees it
  spoil_row(c, 3, 127);  // no earlier token sees it: it is the token's own row
  spoil_row(c, 3, -1);   // nor the entry that ends with it
  spoil_row(c, 7, 0);    // of another request
  spoil_row(c, 14, -1);
}

// The queries are such that no row has all of P.
TEST_F(AttendKernelPrefill, WindowRowsOfAnySize) {
  if (!is_hopper()) GTEST_SKIP() << "the tuned kernels are for Hopper";
  struct Sizes {
    int least, most, q;
  };
  for (const Sizes& sizes :
       {Sizes{-8, 8, -8}, {-20, 20, -20}, {60, 61, -60}, {-40, -39, 40}, {-90, 0, 0}, {0, 0, -6}}) {
    SCOPED_TRACE(testing::Message() << "2^" << sizes.least << " to 2^" << sizes.most);
    const cuda::AttendSplit kWindowSplits[] = {unsplit_by(cuda::AttendKernel::token_pair),
                                               unsplit_by(cuda::AttendKernel::persistent_window),
                                               unsplit_by(cuda::AttendKernel::single_pass_window, 2)};
    for (const cuda::AttendSplit& split : kWindowSplits) {
      Case c = window_case();
      c.requests = {{300, 9, false}, {0, 4}};
      c.least_exponent = sizes.least;
      c.most_exponent = sizes.most;
      c.q_size = std::ldexp(1.0f, sizes.q);
      c.split = split;
      run(c);
    }
    Case c = entries_case(4, 0);
    c.requests = {{300, 9, false}, {0, 4}};
    c.least_exponent = sizes.least;
    c.most_exponent = sizes.most;
    c.q_size = std::ldexp(1.0f, sizes.q);
    c.split = unsplit_by(cuda::AttendKernel::staged);
    run(c);
  }
}

}  // namespace
