// The kernels that compute-sanitizer's racecheck must have seen. Tests whose names begin with Racecheck launch them on
// small shapes; each part has a list (RacecheckAttend, Racecheck/IndexKernel, RacecheckCache). These tests run with all
// others; `tools/gpu_check --racecheck` runs them under racecheck in a build with KV4_RACECHECK. RacecheckList compares
// the names with the sources.
#pragma once

namespace kv4::test {

constexpr const char* kRacecheckAttend[] = {"attend_split_kv",    "attend_persistent",
                                            "attend_token_pair",  "attend_persistent_window",
                                            "attend_small_batch", "attend_single_pass_window",
                                            "attend_staged"};
constexpr const char* kRacecheckIndex[] = {"score_mxfp4_keys", "topk_of_mxfp4_keys",  "score_fp8_keys",
                                           "topk_of_fp8_keys", "select_rescored_row", "raw_scores_of_fp8_keys",
                                           "select_row",       "select_long",         "prepare_groups",
                                           "score_groups"};
constexpr const char* kRacecheckCache[] = {"decode_kernel",      "prefill_kernel", "gather_rows",
                                           "gather_chosen_rows", "expand",         "copy_bulk"};
/// Racecheck checks shared memory only, and these kernels have none.
constexpr const char* kWithoutSharedMemory[] = {"save",       "copy_tiles", "fold_spans",         "stage_rows",
                                                "copy_lists", "add_sinks",  "write_range_tables", "place_token_scores"};

}  // namespace kv4::test
