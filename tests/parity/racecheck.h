// Kernels that compute-sanitizer's racecheck must have seen, and on which small shapes: the tests whose names begin
// with Racecheck, one list for each part (RacecheckAttend, Racecheck/IndexKernel, RacecheckCache). They run as all
// others do; `tools/gpu_check --racecheck` runs them under racecheck in a build with KV4_RACECHECK. RacecheckList
// compares the names with the sources.
#pragma once

namespace kv4::test {

constexpr const char* kRacecheckAttend[] = {"attend_tiles",       "attend_rounds", "attend_neighbours",
                                            "attend_runs_kernel", "attend_parts",  "attend_window_kernel"};
constexpr const char* kRacecheckIndex[] = {"score_mxfp4_keys", "topk_of_mxfp4_keys", "score_fp8_keys",
                                           "topk_of_fp8_keys", "select_near_row",    "raw_scores_of_fp8_keys",
                                           "select_row",       "select_long"};
constexpr const char* kRacecheckCache[] = {"decode_kernel",      "prefill_kernel", "gather_rows",
                                           "gather_chosen_rows", "expand",         "copy_bulk"};
/// Racecheck knows shared memory alone, and these have none.
constexpr const char* kWithoutSharedMemory[] = {"save", "copy_units", "fold_spans"};

}  // namespace kv4::test
