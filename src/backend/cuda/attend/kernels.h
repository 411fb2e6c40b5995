// The divisions of a token's work among CTAs, for dispatch.cu and for the benchmarks that measure it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kMaxCluster = 16, kMaxWindowRows = 128;

/// A cluster has at most kMaxCluster CTAs, except where the splits combine through memory. CTAs with the same rows and
/// different channels all compute the scores of those rows.
struct AttendSplit {
  int rows;               // KV splits
  int channels;           // splits of V's channels: 1, 2 or 4
  bool cta_pair = false;  // a 2-CTA pair with different heads converts each row once; for an even number of head tiles
  // The KV splits do not form a cluster: they combine through params.workspace, which limits their number. All
  // channels.
  bool combines_in_memory = false;
  // One KV split, all channels, no pair: persistent CTAs, as many as run at once.
  bool persistent = false;
  // One KV split, all channels: a 2-CTA pair takes two consecutive tokens, and each CTA converts rows for both;
  // persistent or not. Not for chosen entries or slot lists.
  bool token_pair = false;
  // persistent_window.cu: layers with a window only, of 1 to kMaxWindowRows tokens.
  bool persistent_window = false;
  // One KV split, all channels, no pair: a kernel without any other code, for few rows.
  bool unsplit = false;
  // single_pass_window.cu: layers with a window only, of 1 to kMaxWindowRows tokens, in a single pass; 1 or 2 channel
  // splits.
  bool single_pass_window = false;
};

AttendSplit split_of(const ops::AttendParams& params);
/// The wgmma kernels only.
cudaError_t attend_split(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);

cudaError_t launch_persistent_window(const ops::AttendParams& params, cudaStream_t stream);
/// channel_splits: 1 or 2.
cudaError_t launch_single_pass_window(const ops::AttendParams& params, int channel_splits, cudaStream_t stream);

/// The division of a token in small_batch.cu.
struct SmallBatchSplit {
  int heads;      // of a CTA: 8 or 16
  int kv_splits;  // a power of two up to kMaxCluster, or 9 (not with one stage)
  // KV tiles in shared memory: 1, for at most 80 rows in each KV split; 2, for at most 128; 3, for any number. 16 heads
  // need three. With one or two stages, two CTAs share an SM.
  int stages;
};
/// Null if the other kernel is faster; `other` is its time in hundredths of a microsecond. max_rows: of any token.
std::optional<SmallBatchSplit> small_batch_split_of(const ops::AttendParams& params, std::int64_t max_rows,
                                                    double other);
cudaError_t launch_small_batch(const ops::AttendParams& params, const SmallBatchSplit& split, cudaStream_t stream);

}  // namespace kv4::cuda
